"""Wheels of a made-up engine that the device probe can load, an index that serves them, and a source package that builds one."""

from __future__ import annotations

import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VERSION = "0.3.36"
_PREFIX = f"llama_cpp_python-{VERSION}"

# The few functions of ggml that the probe calls; everything else of the bindings is a stand-in.
_BINDINGS = """
import os, signal
from unittest.mock import MagicMock

BACKENDS = {backends!r}
GPUS = {gpus!r}
{crash}

class _Library:
    def __init__(self):
        def props(device, reference):
            properties, (name, backend) = reference._obj, GPUS[device.value - 1]
            properties.name, properties.description = b"GPU0", name.encode()
            properties.type, properties.device_id = 1, b"0000:01:00.0"
            properties.memory_free, properties.memory_total = 7 * 2**30, 8 * 2**30
        self.ggml_backend_reg_count = lambda: len(BACKENDS)
        self.ggml_backend_reg_get = lambda index: index.value + 1
        self.ggml_backend_reg_name = lambda number: BACKENDS[number.value - 1].encode()
        self.ggml_backend_dev_count = lambda: len(GPUS)
        self.ggml_backend_dev_get = lambda index: index.value + 1
        self.ggml_backend_dev_get_props = props
        self.ggml_backend_dev_backend_reg = lambda device: BACKENDS.index(GPUS[device.value - 1][1]) + 1

_lib = _Library()
llama_supports_gpu_offload = lambda: bool(GPUS)
llama_print_system_info = lambda: b"CPU : AVX2 = 1 | "

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""


def engine_files(backends: Sequence[str] = ("CPU",), gpus: Sequence[tuple[str, str]] = (), crash: str = "") -> dict[str, str]:
    """Members of a wheel; `crash` is a statement that runs when the bindings are imported."""
    return {
        "llama_cpp/__init__.py": f'__version__ = "{VERSION}"\n',
        "llama_cpp/llama_cpp.py": _BINDINGS.format(backends=tuple(backends), gpus=tuple(gpus), crash=crash),
    }


def write_wheel(
    folder: Path,
    files: Mapping[str, str | bytes],
    requires: Sequence[str] = (),
    name: str = "llama_cpp_python",
    version: str = VERSION,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires), ""]
    members: dict[str, str | bytes] = {
        **files,
        f"{about}/METADATA": "\n".join(lines),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    members[f"{about}/RECORD"] = "".join(f"{member},,\n" for member in (*members, f"{about}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return path


class Index:
    """Folders of wheels by variant, served on 127.0.0.1 as llama-cpp-python's own index is."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url

    def add(self, variant: str, requires: Sequence[str] = (), **engine: object) -> Path:
        return write_wheel(self.folder / variant / "llama-cpp-python", engine_files(**engine), requires)  # type: ignore[arg-type]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serve_index(folder: Path) -> Iterator[Index]:
    folder.mkdir(exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Index(folder, f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# A build backend of its own, in the package: it needs nothing from an index, and writes down what it was told.
_BACKEND = """
import pathlib, sys
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from fake_wheels import engine_files, write_wheel

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    arguments = (config_settings or {}).get("cmake.args", "")
    print("[1/2] Building CXX object ggml.o")
    if "BREAK" in arguments:
        print("ggml.cpp:7: error: no such thing as a quux")
        raise SystemExit(1)
    files = engine_files() | {"llama_cpp/cmake_args.txt": arguments}
    return write_wheel(pathlib.Path(wheel_directory), files).name
"""


def write_source_package(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_PREFIX}.tar.gz"
    members = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {VERSION}\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": _BACKEND,
        "fake_wheels.py": Path(__file__).read_text(encoding="utf-8"),
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in members.items():
            member = tarfile.TarInfo(f"{_PREFIX}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path
