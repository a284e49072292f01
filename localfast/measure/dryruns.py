"""Asks the engine in a child process what shapes of a model take, and remembers the answers on disk.

Works before a download: a file's header is enough. Ends in time whatever the child does, and never raises for what it says.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from localfast.engine.supervisor import exit_words
from localfast.errors import BadModelFile
from localfast.footprint import Part, Shape
from localfast.measure import files
from localfast.measure.answers import Answer, parts_of
from localfast.measure.oracle import Key, key_of
from localfast.models.gguf import GgufHeader, ModelFacts, read_headers

MAX_MODELS, MAX_SHAPES = 256, 128
"""Of the answers on disk: files, and answers in one of them."""
FORMAT = 1
_STDERR_TAIL_LINES = 3


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of a model: where its first bytes are, how many of them are header, and how long the whole file is."""

    name: str
    path: Path
    header_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HeaderSource:
    """All files of a model, the first shard first, on disk as a whole or with their headers only."""

    shards: tuple[Shard, ...]

    @classmethod
    def on_disk(cls, path: str | Path) -> HeaderSource:
        """Raises BadModelFile."""
        return cls.of(read_headers(path))

    @classmethod
    def of(cls, headers: Sequence[GgufHeader], paths: Sequence[Path] = (), names: Sequence[str] = ()) -> HeaderSource:
        """`paths`: files that begin with the headers' bytes; `names`: of the shards. Both default to the headers' own."""
        where = tuple(paths) or tuple(Path(header.path) for header in headers)
        called = tuple(names) or tuple(Path(header.path).name for header in headers)
        rows = zip(called, where, headers, strict=True)
        return cls(tuple(Shard(name, path, header.data_offset, header.file_bytes) for name, path, header in rows))

    def digest(self) -> str:
        """Of the headers: the same before and after the download. Raises OSError."""
        digest = hashlib.sha256()
        for shard in self.shards:
            with shard.path.open("rb") as file:
                digest.update(file.read(shard.header_bytes))
            digest.update(f"{shard.header_bytes} {shard.size_bytes}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Measurement:
    """Parts of each shape that the engine measured. Where some are missing, `reason` says why."""

    parts: Mapping[Key, tuple[Part, ...]] = field(default_factory=dict)
    reason: str = ""
    refused: BadModelFile | None = None
    """The engine does not read this file, whatever the shape: an unknown architecture, a truncated header."""


class _Remembered(msgspec.Struct):
    """Of one header. Answers of another engine build, or on another machine, are of no use."""

    engine: str
    answers: dict[str, Answer]


class DryRuns:
    """`machine`: anything that changes when devices come or go, such as `Machine.text`: answers count for the same only."""

    def __init__(self, folder: Path, engine_path: str = "", timeout_s: float = 30.0, *, machine: str = "") -> None:
        self._folder = folder
        self._engine_path = engine_path
        self._timeout_s = timeout_s
        self._machine = machine

    def measure(
        self, source: HeaderSource, facts: ModelFacts, shapes: Iterable[Shape], shares: Sequence[float] = (1.0,)
    ) -> Measurement:
        """The memory of these shapes, from the answers on disk or from the engine. `shares`: of the GPUs, as for `footprint`.

        Takes at most a little more than `timeout_s`; what the engine answered before it hung or died is kept.
        """
        keys = list(dict.fromkeys(key_of(shape, shares) for shape in shapes))
        if not (build := engine_build(self._engine_path)):
            return Measurement(reason="the engine is not installed")
        try:
            path = self._folder / f"{source.digest()}.json"
        except OSError as error:
            return Measurement(reason=f"the header cannot be read: {error.strerror or error}")
        stamp = f"{FORMAT} {build} {self._machine}"
        found = files.read(path, _Remembered)
        known = found.answers if found and found.engine == stamp else {}
        missing = [key for key in keys if _text(key) not in known]
        reason = ""
        if missing:
            answers, reason = self._ask(source, missing)
            lasting = {_text(key): answer for key, answer in answers.items() if not answer.failed}
            known = known | lasting
            if lasting:
                files.write(path, _Remembered(stamp, dict(list(known.items())[-MAX_SHAPES:])))
                files.keep_newest(self._folder, MAX_MODELS)
        return _measurement({key: known[_text(key)] for key in keys if _text(key) in known}, facts, reason)

    def _ask(self, source: HeaderSource, keys: Sequence[Key]) -> tuple[dict[Key, Answer], str]:
        """Answers of the child, and why some are missing."""
        # The model is loaded anew for another placement of its layers, so those that share one go together.
        keys = sorted(keys, key=lambda key: (key[0].gpu_layers, key[0].cpu_experts, key[1]))
        shards = [{"name": shard.name, "path": str(shard.path), "size_bytes": shard.size_bytes} for shard in source.shards]
        with tempfile.TemporaryDirectory(prefix="localfast-dryrun-", ignore_cleanup_errors=True) as folder:
            order = {"engine_path": self._engine_path, "shards": shards, "folder": folder}
            lines = [order, *({**asdict(shape), "split": shares} for shape, shares in keys)]
            output, reason = _run_child("".join(json.dumps(line) + "\n" for line in lines), self._timeout_s)
        answers: list[Answer] = []
        with contextlib.suppress(msgspec.MsgspecError):  # a process that dies may leave half a line
            for line in output.splitlines():
                answers.append(msgspec.json.decode(line, type=Answer))
        failed = next((answer.failed for answer in answers if answer.failed), "")
        found = {} if failed else dict(zip(keys, answers, strict=False))
        return found, failed or ("" if len(found) == len(keys) else reason)


def _run_child(order: str, timeout_s: float) -> tuple[bytes, str]:
    """What the child printed, and in words how it ended."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "localfast.engine.dryrun"],
            # The folder that holds the package: a file of the user's folder must not stand in for a module of ours.
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError as error:
        return b"", f"the engine's dry run did not start: {error}"
    with process:
        try:
            output, errors = process.communicate(order.encode(), timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            return output, f"the engine's dry run took longer than {timeout_s:g} s"
    tail = [line.strip() for line in errors.decode("utf-8", "replace").splitlines() if line.strip()][-_STDERR_TAIL_LINES:]
    return output, f"the engine's dry run ended early ({exit_words(process.returncode)}){': ' if tail else ''}{' | '.join(tail)}"


def _measurement(answers: Mapping[Key, Answer], facts: ModelFacts, reason: str) -> Measurement:
    parts: dict[Key, tuple[Part, ...]] = {}
    refused = None
    for key, answer in answers.items():
        if answer.refused:
            refused = BadModelFile(facts.path, answer.refused)
            reason = reason or answer.refused
        elif answer.error:
            reason = reason or answer.error
        else:
            try:
                parts[key] = parts_of(answer, facts, key[0])
            except ValueError as error:
                reason = reason or str(error)
    return Measurement(parts, reason, refused)


def engine_build(engine_path: str) -> str:
    """A hash that changes with the native libraries of an engine; empty when there are none. Imports and runs nothing."""
    try:
        if engine_path:
            package = Path(engine_path) / "llama_cpp"
        else:
            spec = importlib.util.find_spec("llama_cpp")
            package = Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent")
        stats = [(path.name, path.stat()) for path in sorted((package / "lib").iterdir())]
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]).encode()).hexdigest()[:32]


def _text(key: Key) -> str:
    shape, shares = key
    return json.dumps({**asdict(shape), "split": shares}, sort_keys=True)
