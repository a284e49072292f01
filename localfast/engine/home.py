"""Where the native engine is found: makes the build in a folder the one that `import llama_cpp` finds. Child processes only.

CUDA's libraries are opened before, from NVIDIA's packages in the same folder: a wheel holds none of them, and it is too late to
tell the loader of a running process where to look.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Each needs the ones before it.
_CUDA_LIBRARIES = ("nvrtc", "cudart", "cublasLt", "cublas")


def use(engine_path: str) -> None:
    """Call before the first import of `llama_cpp`. An empty path means the build in this Python environment."""
    if not engine_path:
        return
    folder = Path(engine_path).absolute()
    sys.path.insert(0, str(folder))
    for path in _libraries(folder):
        # One that does not open is left to the engine, whose own message names what it misses.
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            sys.stderr.write(f"{path.name} does not open: {error}\n")


def _libraries(folder: Path) -> Iterator[Path]:
    """CUDA's libraries in the order in which they need each other."""
    if sys.platform == "win32":
        for place in sorted({path.parent for path in folder.glob("nvidia/**/*.dll")}):
            os.add_dll_directory(str(place))
        pattern = "nvidia/**/{name}64_*.dll"
    else:
        pattern = "nvidia/*/lib/lib{name}.so.*"
    for name in _CUDA_LIBRARIES:
        yield from sorted(folder.glob(pattern.format(name=name)))
