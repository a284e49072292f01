"""The one table of settings: flags, LOCALFAST_* variables, config.toml, docs/settings.md, `config show` all derive from it.

A value comes from, strongest first: a command line flag, an environment variable, `config.toml`, the default. The result is one
frozen object that is passed on explicitly; it remembers where each value came from. Nothing else reads the environment.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from localfast.errors import InvalidSetting

KV_TYPES = ("auto", "f16", "bf16", "q8_0", "q4_0")
LIMIT = re.compile(r"|0?\.\d+|1(\.0+)?|\d+(\.\d+)? ?[KMGT]i?B", re.IGNORECASE)
"""A share of the device such as 0.9, or a size such as 6GB or 512MiB; empty: no limit."""


def option(default: Any, help: str, group: str, **checks: Any) -> Any:
    """A row of the table: its type is the field's annotation; `choices`, `minimum` and `pattern` hold whatever the source."""
    nothing = {"choices": (), "minimum": None, "pattern": None}
    return field(default=default, metadata={"help": help, "group": group, **nothing, **checks})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one process. Groups: server, engine, storage."""

    host: str = option("127.0.0.1", "address to listen on", "server")
    port: int = option(8000, "port to listen on; 0 takes any free one", "server", minimum=0)
    api_key: str = option("", "key that clients must send; needed to listen on anything but this machine", "server")
    allowed_hosts: tuple[str, ...] = option((), "more names this server is reached by (Host header)", "server")
    allowed_origins: tuple[str, ...] = option((), "web pages that may call this server, as scheme://host:port", "server")
    max_body_bytes: int = option(4 * 2**20, "largest request body", "server", minimum=1)
    max_queue: int = option(64, "requests of one model and class that may wait for a slot", "server", minimum=0)
    drain_s: float = option(5.0, "on Ctrl-C, seconds that running requests get to finish", "server", minimum=0)
    heartbeat_s: float = option(10.0, "a silent stream sends a sign of life after this many seconds", "server", minimum=0.1)

    quant: str = option("", "quantization to use, such as Q4_K_M; empty: the installed or recommended one", "engine")
    gpu_layers: int = option(-1, "layers on the GPU; -1: as many as fit", "engine", minimum=-1)
    cpu_experts: int = option(-1, "layers whose experts stay in RAM; -1: the plan decides", "engine", minimum=-1)
    split: tuple[str, ...] = option((), "shares of the layers for several GPUs, such as 3,1; empty: the plan decides", "engine")
    vram_limit: str = option("", "most memory of each GPU, as 0.9 or 6GB; empty: what is free", "engine", pattern=LIMIT)
    ram_limit: str = option("", "most RAM for models, as 0.5 or 12GB; empty: what is free", "engine", pattern=LIMIT)
    model_limit: str = option("", "most memory of one model, all devices together, as 8GB", "engine", pattern=LIMIT)
    ctx: int = option(0, "longest context of one request in tokens; 0: the plan decides", "engine", minimum=0)
    cells: int = option(0, "size of the KV cache in tokens, all requests together; 0: the plan decides", "engine", minimum=0)
    slots: int = option(0, "requests that generate at the same time; 0: the plan decides", "engine", minimum=0)
    threads: int = option(0, "CPU threads; 0: one per physical core this process may use", "engine", minimum=0)
    batch: int = option(0, "most tokens in one step; 0: 512 on a GPU, 128 on a CPU", "engine", minimum=0)
    kv_type: str = option(
        "auto",
        "type of the KV cache; auto: f16, or q8_0 where that saves context or quality",
        "engine",
        choices=KV_TYPES,
    )
    max_stall_ms: int = option(250, "longest that a running stream waits for other requests' prompts", "engine", minimum=1)
    speculation: bool = option(True, "guess ahead where a text repeats itself; the answer stays the same", "engine")
    draft: str = option("", "installed smaller model with the same tokenizer that guesses ahead; auto: the catalog's", "engine")
    alias: str = option("", "name that clients use for the served model", "engine")
    engine: str = option("auto", "engine build to use, as 'localfast engine list' names it; auto: the best that works", "engine")
    hardware: str = option("", "JSON file that stands in for this machine ('localfast doctor --export')", "engine")
    max_loaded_models: int = option(4, "models kept loaded; the idle one unused for longest goes", "engine", minimum=1)
    keep_alive_s: float = option(1800.0, "seconds an idle model stays loaded; -1: for ever", "engine", minimum=-1)
    load_timeout_s: float = option(300.0, "seconds a model may take to load", "engine", minimum=1)

    cache_ram_mib: int = option(
        1024, "RAM for conversations that had to leave the KV cache, per model; 0: none", "storage", minimum=0
    )
    cache_disk_mib: int = option(
        4096, "disk for conversations that outlive the engine, readable by you only; 0: none is written", "storage", minimum=0
    )
    models_dir: tuple[str, ...] = option((), "more folders with GGUF files, used where they lie", "storage")
    reuse: bool = option(True, "use models that other programs have on this disk (Hugging Face, LM Studio, Ollama)", "storage")
    home: str = option("", "folder for models, config and logs; empty: the platform's own folders", "storage")
    offline: bool = option(False, "never touch the network", "storage")
    hf_endpoint: str = option("https://huggingface.co", "Hugging Face hub, or a mirror of it", "storage")

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each value that is not the default came from."""

    def explain(self, name: str) -> str:
        """Where the value of `name` came from, in words."""
        return self.sources.get(name, "default")

    @property
    def config_path(self) -> Path:
        return self._folder("config") / "config.toml"

    @property
    def store_dir(self) -> Path:
        """Where models are kept that localfast fetched."""
        return self._folder("cache") / "models"

    @property
    def engines_dir(self) -> Path:
        """Where engine builds are installed, and what was learned about them."""
        return self._folder("data") / "engines"

    @property
    def facts_dir(self) -> Path:
        """Small files that save work: measured memory, headers, what a load really took. May be deleted."""
        return self._folder("cache") / "facts"

    @property
    def states_dir(self) -> Path:
        return self._folder("cache") / "states"

    @property
    def logs_dir(self) -> Path:
        return self._folder("log") / "logs" if self.home else self._folder("log")

    def _folder(self, kind: str) -> Path:
        if self.home:
            return Path(self.home).expanduser()
        folders = platformdirs.PlatformDirs("localfast", appauthor=False)
        return Path(getattr(folders, f"user_{kind}_dir"))


# `hf_endpoint` also answers to the name that Hugging Face's own tools use.
FOREIGN_VARIABLES = {"hf_endpoint": "HF_ENDPOINT"}
OPTIONS = tuple(f for f in dataclasses.fields(Settings) if f.metadata)


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"LOCALFAST_{name.upper()}"


def flag(name: str) -> str:
    """The command line flag of a setting."""
    return "--" + name.replace("_", "-")


def load_settings(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Merge all sources. `flags` holds only what was given on the command line (None counts as not given).

    Raises InvalidSetting for a value of the wrong type or range, and for an unknown key in config.toml.
    """
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def put(name: str, value: Any, source: str) -> None:
        values[name] = _convert(name, value, source)
        sources[name] = source

    for row in OPTIONS:
        for key in (FOREIGN_VARIABLES.get(row.name), variable(row.name)):
            if key and environ.get(key):
                put(row.name, environ[key], f"environment variable {key}")
        if row.name in given:
            put(row.name, given[row.name], f"flag {flag(row.name)}")
    config_path = Settings(home=values.get("home", "")).config_path
    for name, value in _read_config(config_path).items():
        if name not in values:
            put(name, value, str(config_path))
    return Settings(**values, sources=sources)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidSetting(name="config.toml", value=str(path), source="this file", reason=f"cannot be read: {error}") from None
    known = {row.name for row in OPTIONS} - {"home"}
    for name, value in content.items():
        if name not in known:
            raise InvalidSetting(name=name, value=str(value), source=str(path), reason="is not a setting that this file can hold")
    return content


def _convert(name: str, value: Any, source: str) -> Any:
    """A value of the row's type, from a flag, a string of the environment or a TOML value."""
    row = next(row for row in OPTIONS if row.name == name)

    def refuse(reason: str) -> InvalidSetting:
        return InvalidSetting(name=name, value=str(value), source=source, reason=reason)

    try:
        converted = _CONVERTERS[str(row.type)](value)
    except (TypeError, ValueError):
        raise refuse(f"is not {_TYPE_WORDS[str(row.type)]}") from None
    choices, minimum, pattern = (row.metadata[check] for check in ("choices", "minimum", "pattern"))
    if choices and converted not in choices:
        raise refuse(f"is none of {', '.join(choices)}")
    if minimum is not None and converted < minimum:
        raise refuse(f"is less than {minimum}")
    if pattern and not pattern.fullmatch(converted):
        raise refuse("is neither a share such as 0.9 nor a size such as 6GB")
    return converted


def _to_bool(value: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError
    return words[str(value).lower()]


def _to_int(value: Any) -> int:
    if isinstance(value, bool | float):
        raise ValueError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def _to_str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _to_strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list | tuple):
        raise ValueError
    return tuple(_to_str(part) for part in value if part)


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "str": _to_str,
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "tuple[str, ...]": _to_strings,
}
_TYPE_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple[str, ...]": "a list of texts",
}
