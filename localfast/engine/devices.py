"""Child process that asks the engine's own device registry: `python -m localfast.engine.devices [ENGINE_PATH]`, one line of JSON.

A process of its own: asking a CUDA device for its memory creates a context that stays, and drivers hang and abort.
Reaches ggml only through the library that `llama_cpp` loaded: another copy of the file would have another registry.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import sys
from typing import Any

from localfast.engine import home

_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accelerator"}


class _Capabilities(ctypes.Structure):
    _fields_ = [(name, ctypes.c_bool) for name in ("parallel", "host_buffer", "buffer_from_host_ptr", "events", "mmap_support")]


class _Properties(ctypes.Structure):
    """`struct ggml_backend_dev_props` of ggml-backend.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", _Capabilities),
        ("reserve", ctypes.c_byte * 64),  # room for fields that a later library may add
    ]


class _Registry:
    """ggml's functions, found in the libraries that the bindings have already loaded."""

    def __init__(self, bindings: Any) -> None:
        self._libraries = [bindings._lib]
        if sys.platform == "win32":
            # GetProcAddress does not look into a library's own imports; loading the same path again gives the same module.
            for name in ("ggml.dll", "ggml-base.dll"):
                path = bindings._base_path / name
                if path.exists():
                    self._libraries.append(ctypes.CDLL(str(path), winmode=0))

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        for library in self._libraries:
            if hasattr(library, name):
                function = getattr(library, name)
                function.restype = result
                return function(*arguments)
        raise OSError(f"the engine does not export {name}")

    def backends(self) -> list[str]:
        found = []
        for index in range(self.call("ggml_backend_reg_count", ctypes.c_size_t)):
            backend = self.call("ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t(index))
            found.append(_text(self.call("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p(backend))))
        return found

    def devices(self) -> list[dict[str, Any]]:
        return [self._device(index) for index in range(self.call("ggml_backend_dev_count", ctypes.c_size_t))]

    def _device(self, index: int) -> dict[str, Any]:
        device = ctypes.c_void_p(self.call("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t(index)))
        properties = _Properties()
        self.call("ggml_backend_dev_get_props", None, device, ctypes.byref(properties))
        backend = ctypes.c_void_p(self.call("ggml_backend_dev_backend_reg", ctypes.c_void_p, device))
        return {
            "backend": _text(self.call("ggml_backend_reg_name", ctypes.c_char_p, backend)),
            "name": _text(properties.name),
            "description": _text(properties.description),
            "kind": _KINDS.get(properties.type, "other"),
            "pci_id": _text(properties.device_id),
            "total_bytes": properties.memory_total,
            "free_bytes": properties.memory_free,
        }


def describe_engine(engine_path: str = "") -> dict[str, Any]:
    """The build in `engine_path` (empty: in this Python environment); never raises for a missing or broken engine."""
    home.use(engine_path)
    report: dict[str, Any] = {"installed": False, "version": "", "error": "", "backends": [], "devices": []}
    report |= {"supports_gpu_offload": False, "cpu_features": [], "path": engine_path}
    if importlib.util.find_spec("llama_cpp") is None:
        return report
    report["installed"] = True
    try:
        report["version"] = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        report["version"] = "unknown"
    try:
        from localfast.engine.llama import bindings

        registry = _Registry(bindings)
        report["supports_gpu_offload"] = bool(bindings.llama_supports_gpu_offload())
        report["cpu_features"] = _features(_text(bindings.llama_print_system_info()))
        report["backends"] = registry.backends()
        report["devices"] = registry.devices()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # what a library that does not load raises
        report["error"] = f"{type(error).__name__}: {error}"
    return report


def _features(system: str) -> list[str]:
    """Names out of `CUDA : ARCHS = 890 | CPU : AVX2 = 1 | FMA = 1 | `: those of the CPU that are on."""
    _, _, cpu = system.rpartition("CPU : ")
    pairs = (part.partition("=") for part in cpu.split("|"))
    return [name.strip() for name, _, value in pairs if value.strip() == "1"]


def _text(value: bytes | None) -> str:
    return value.decode("utf-8", "replace") if value else ""


def main() -> None:
    report = describe_engine(*sys.argv[1:2])
    sys.stdout.write("\n" + json.dumps(report) + "\n")  # a line of its own, whatever a driver printed before


if __name__ == "__main__":
    main()
