"""Where the native engine is found: makes the build in a folder the one that `import llama_cpp` finds. Child processes only."""

from __future__ import annotations

import sys


def use(engine_path: str) -> None:
    """Call before the first import of `llama_cpp`. An empty path means the build in this Python environment."""
    if engine_path:
        sys.path.insert(0, engine_path)
