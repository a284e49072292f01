"""Child process that asks the engine how much memory models of some shapes would take: `python -m localfast.engine.dryrun`.

The real engine places layers, plans the cache and the graphs, but allocates nothing and reads no weights. JSON lines in: what to
open, then one shape each; JSON lines out: one answer each. A process of its own, because drivers hang and native code aborts.
It reports what the engine said (devices by name); what that means in bytes per device is computed in `localfast.measure`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

from localfast.engine.home import use
from localfast.engine.messages import SPARE_OUTPUT_ROWS, EngineConfig

HEADER_LIMIT_BYTES = 64 * 2**20
_MIB = 2**20
_WINDOWS_SET_SPARSE = 0x900C4
_LAYER_PLACE = re.compile(r"load_tensors: layer +\d+ assigned to device (\S+), is_swa")
_GPU = re.compile(r": using device (\S+) \(")
_CACHE_LAYER = re.compile(r"layer +(\d+): dev = (\S+)")
_CACHE_SIZE = re.compile(r"(?<!buffer )size = +([\d.]+) MiB")
_STATE = re.compile(r"recurrent|state")
_BUFFER = re.compile(r"(\S+)\s+(compute|output) buffer size = +([\d.]+) MiB")
_UNUSED = re.compile(r"model has unused tensor (\S+) \(size = (\d+) bytes\)")
_ERROR_LEVEL, _CONTINUED = 4, 5


class PlacementLog:
    """What the library logs about places and sizes, debug lines included: in a dry run it says them nowhere else."""

    def __init__(self, bindings: Any) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._level = 0
        self._callback = bindings.llama_log_callback(self._take)
        bindings.llama_log_set(self._callback, ctypes.c_void_p(0))

    def clear(self) -> None:
        self.lines, self.errors = [], []

    def _take(self, level: int, text: bytes, _user: ctypes.c_void_p) -> None:
        self._level = level if level != _CONTINUED else self._level
        line = text.decode("utf-8", "replace").strip()
        if self._level == _ERROR_LEVEL and line:
            self.errors.append(line)
            print(line, file=sys.stderr, flush=True)  # evidence, should the process die now
        elif " MiB" in line or " device " in line or "dev = " in line or "unused" in line:
            self.lines.append(line)

    def reason(self, otherwise: str) -> str:
        """The first error: those after it only say that something failed."""
        line = self.errors[0] if self.errors else otherwise
        return (
            line.removeprefix("llama_model_load: ").removeprefix("llama_init_from_model: ").removeprefix("error loading model: ")
        )


class DryRun:
    """One model file, loaded without its weights once per way to place its layers."""

    def __init__(self, path: str) -> None:
        from localfast.engine import llama  # only now: `home.use` chose which build this is

        self._llama = llama
        self._log = PlacementLog(llama.bindings)
        self._path = path
        self._placed: tuple[Any, ...] = ()
        self._model: Any = None
        self._refusal = ""
        self._model_answer: dict[str, Any] = {}
        llama.bindings.llama_backend_init()

    def answer(self, shape: dict[str, Any]) -> dict[str, Any]:
        """What this shape takes, or `refused` (the file, whatever the shape) or `error` (this shape), in the engine's words."""
        config = self._config(shape)
        if refusal := self._load(config):
            return {"refused": refusal}
        bindings = self._llama.bindings
        self._log.clear()
        params = self._llama.context_params(config, config.slots + SPARE_OUTPUT_ROWS)
        context = bindings.llama_init_from_model(self._model, params)
        if not context:
            return {"error": self._log.reason("the engine makes no context of this shape")}
        bindings.llama_free(context)
        caches = _caches(self._log.lines)
        buffers = [(device, use, _bytes(size)) for line in self._log.lines for device, use, size in _BUFFER.findall(line)]
        return {**self._model_answer, "caches": caches, "buffers": buffers}

    def _config(self, shape: dict[str, Any]) -> EngineConfig:
        return EngineConfig(
            model=Path(self._path).name,
            path=self._path,
            gpu_layers=shape["gpu_layers"],
            context_tokens=shape["cells"],
            cells=shape["cells"],
            slots=shape["slots"],
            batch_tokens=shape["ubatch_tokens"],
            ubatch_tokens=shape["ubatch_tokens"],
            threads=1,
            kv_type=shape["kv_type"],
            use_mmap=False,
            cpu_experts=shape["cpu_experts"],
            split=tuple(shape["split"]),
        )

    def _load(self, config: EngineConfig) -> str:
        """Empty, or why the engine refuses the file."""
        placed = (config.gpu_layers, config.cpu_experts, config.split)
        if placed == self._placed:
            return self._refusal
        bindings = self._llama.bindings
        if self._model:
            bindings.llama_model_free(self._model)
        self._log.clear()
        self._placed, self._params = placed, self._llama.model_params(config, no_alloc=True)
        self._model = bindings.llama_model_load_from_file(self._path.encode(), self._params)
        self._refusal = "" if self._model else self._log.reason("llama.cpp could not read the file")
        self._model_answer = {
            "gpus": [name for line in self._log.lines for name in _GPU.findall(line)],
            "layers": [name for line in self._log.lines for name in _LAYER_PLACE.findall(line)],
            "unused": [(name, int(size)) for line in self._log.lines for name, size in _UNUSED.findall(line)],
        }
        return self._refusal


def _caches(lines: list[str]) -> list[dict[str, Any]]:
    """Each cache with the layers it holds; the engine names the layers first and the size of all of them after."""
    caches: list[dict[str, Any]] = []
    layers: list[tuple[int, str]] = []
    for line in lines:
        if found := _CACHE_LAYER.search(line):
            layers.append((int(found[1]), found[2]))
        elif found := _CACHE_SIZE.search(line):
            caches.append({"state": bool(_STATE.search(line)), "size_bytes": _bytes(found[1]), "layers": layers})
            layers = []
    return caches


def _bytes(mebibytes: str) -> int:
    return round(float(mebibytes) * _MIB)


def whole_files(shards: list[dict[str, Any]], folder: Path) -> Path:
    """The first file of the model, complete or as good as: where only headers are here, files of the true size with a hole."""
    paths = [Path(shard["path"]) for shard in shards]
    if all(path.stat().st_size == shard["size_bytes"] for path, shard in zip(paths, shards, strict=True)):
        return paths[0]
    for path, shard in zip(paths, shards, strict=True):
        with path.open("rb") as source, (folder / Path(shard["name"]).name).open("wb") as target:
            _allow_holes(target.fileno())
            target.write(source.read(min(HEADER_LIMIT_BYTES, shard["size_bytes"])))
            target.truncate(shard["size_bytes"])
    return folder / Path(shards[0]["name"]).name


def _allow_holes(descriptor: int) -> None:
    """NTFS keeps holes only in files that are marked; where that fails, the file is merely larger on disk for a moment."""
    if sys.platform == "win32":
        import msvcrt
        from ctypes import wintypes

        handle, returned = wintypes.HANDLE(msvcrt.get_osfhandle(descriptor)), wintypes.DWORD()
        nothing = (None, 0, None, 0)
        ctypes.windll.kernel32.DeviceIoControl(handle, _WINDOWS_SET_SPARSE, *nothing, ctypes.byref(returned), None)


def _own_output() -> TextIO:
    """The channel of answers; whatever native code prints goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    return channel


def main() -> None:
    answers = _own_output()

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    order = json.loads(sys.stdin.readline())
    try:
        use(order["engine_path"])
        run = DryRun(str(whole_files(order["shards"], Path(order["folder"]))))
    except OSError as error:
        say({"failed": f"its header could not be opened: {error.strerror or error}"})
        return
    except (ImportError, RuntimeError) as error:  # not installed, or one of its shared libraries is missing
        say({"failed": f"the engine does not start: {error}"})
        return
    for line in sys.stdin:
        say(run.answer(json.loads(line)))


if __name__ == "__main__":
    main()
