"""A GPU without a GPU: ggml's RPC backend on loopback counts as one, and layers and cache really move there.

Needs an engine built with `-DGGML_RPC=ON`, such as that of `localfast engine install --from-source --cmake-args=-DGGML_RPC=ON`:
RPC_ENGINE names its folder; without it the one of this environment is used if it has the backend.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from live_server import wait_for

from localfast.settings import Settings

NAME = "rpc"
# Tells the engine process of the device. A device that is gone is none: the registration then gives nothing.
_HOOK = """

def _register_device():
    import ctypes, os, pathlib
    library = pathlib.Path(__file__).parent / "lib"
    ggml, rpc = ctypes.CDLL(str(library / "libggml.so.0")), ctypes.CDLL(str(library / "libggml-rpc.so.0"))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    registry = rpc.ggml_backend_rpc_add_server(os.environ["RPC_DEVICE"].encode())
    if registry:
        ggml.ggml_backend_register(registry)


def _is_there(endpoint):
    import socket
    with socket.socket() as probe:  # closed before the device is used: it serves one connection at a time
        return probe.connect_ex(("127.0.0.1", int(endpoint.partition(":")[2]))) == 0

import os
if "RPC_DEVICE" in os.environ and _is_there(os.environ["RPC_DEVICE"]):
    _register_device()
"""
_SERVER = """
import ctypes, sys
library = sys.argv[1]
ggml, rpc = ctypes.CDLL(library + "/libggml.so.0"), ctypes.CDLL(library + "/libggml-rpc.so.0")
ggml.ggml_backend_load_all()
ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
rpc.ggml_backend_rpc_start_server.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
cpu = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(0))
rpc.ggml_backend_rpc_start_server(sys.argv[2].encode(), None, 1, 1, cpu)
"""


def built_engine() -> Path | None:
    """The folder in which an engine with the RPC backend lies."""
    found = importlib.util.find_spec("llama_cpp")
    here = Path(found.origin).parents[1] if found and found.origin else None
    folder = Path(os.environ["RPC_ENGINE"]) if "RPC_ENGINE" in os.environ else here
    return folder if folder and (folder / "llama_cpp/lib/libggml-rpc.so.0").exists() else None


def install(engine: Path, settings: Settings) -> None:
    """Make it one of the engines of these settings, with the hook; the libraries are the same files."""
    folder = settings.engines_dir / NAME
    folder.mkdir(parents=True)
    package = folder / "llama_cpp"
    shutil.copytree(engine / "llama_cpp", package, copy_function=os.symlink)
    start = package / "__init__.py"
    text = start.read_text()
    start.unlink()
    start.write_text(text + _HOOK)
    record = {"name": NAME, "version": "0.3.36", "variant": "cpu", "backend": "CPU", "source": "", "wheel": "", "sha256": ""}
    probe = {"works": True, "error": "", "backends": ["RPC"], "devices": ["RPC"], "checked_at": ""}
    rest = {"installed_at": "2026-01-01", "size_bytes": 1, "packages": [], "probe": probe}
    (folder / "engine.json").write_text(json.dumps(record | rest))


class Device:
    """A device that runs. `kill` is what a driver's crash looks like."""

    def __init__(self, engine: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.endpoint = f"127.0.0.1:{port}"
        command = [sys.executable, "-c", _SERVER, str(engine / "llama_cpp/lib"), self.endpoint]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def answers() -> bool:
            assert self._process.poll() is None, "the device did not start"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_for(answers, "the device")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
