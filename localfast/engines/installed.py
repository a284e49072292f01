"""Which engine builds are installed, and which one a load uses: folders of `engines_dir` with a record, and the user's choice.

Cheap, because every load asks: small files are read, nothing is probed. A record that cannot be read is a build that does not
work, never an error.
"""

from __future__ import annotations

import importlib.util
import tempfile
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

import msgspec

from localfast.engines import builds
from localfast.errors import EngineMissing, InvalidRequest, InvalidSetting
from localfast.settings import Settings

ENVIRONMENT = "environment"
"""The engine in this Python environment, which the extra `engine` brings."""
_PACKAGE = "llama-cpp-python"
_EXTRA = 'extra == "engine"'
_RANK = ("Vulkan", "MTL", "ROCm", "CUDA")


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process found out when it loaded the build."""

    works: bool
    error: str = ""
    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    """GPUs, in words."""
    checked_at: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`engine.json` of an installed build."""

    name: str
    version: str
    variant: str
    backend: str
    source: str
    """Where the wheel came from."""
    wheel: str
    sha256: str
    installed_at: str
    size_bytes: int
    packages: tuple[str, ...] = ()
    """What was installed beside it."""
    probe: Probe


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """A build on this disk. `problem` says why no model can be loaded with it; empty: it can be used."""

    name: str
    path: Path
    record: Record | None = None
    problem: str = ""


class ActiveEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What a load uses: `path` goes to the engine process, empty for the environment's own."""

    name: str
    path: str
    reason: str


class _Choice(msgspec.Struct):
    name: str


def active(settings: Settings) -> ActiveEngine:
    """The build for the next load. Raises InvalidSetting for one that is not there, EngineMissing for one that cannot be used."""
    if settings.engine not in ("auto", ENVIRONMENT):
        build = find(settings, settings.engine)
        if build is None:
            reason = f"is not installed; there are: {', '.join((ENVIRONMENT, *(one.name for one in installed(settings))))}"
            raise InvalidSetting(name="engine", value=settings.engine, source=settings.explain("engine"), reason=reason)
        if build.problem:
            raise EngineMissing(reason=f"{build.name} {build.problem}")
        return ActiveEngine(name=build.name, path=str(build.path), reason=f"named by the {settings.explain('engine')}")
    if settings.engine == ENVIRONMENT:
        return ActiveEngine(name=ENVIRONMENT, path="", reason=f"named by the {settings.explain('engine')}")
    return _automatic(settings)


def _automatic(settings: Settings) -> ActiveEngine:
    chosen, found = choice(settings), installed(settings)
    if chosen == ENVIRONMENT:
        return ActiveEngine(name=ENVIRONMENT, path="", reason="chosen with 'localfast engine use'")
    lost = ""
    if chosen:
        build = next((build for build in found if build.name == chosen), None)
        if build and not build.problem:
            return ActiveEngine(name=build.name, path=str(build.path), reason="chosen with 'localfast engine use'")
        lost = f"; {chosen}, which was chosen, {build.problem if build else 'is not installed any more'}"
    usable = [build for build in found if not build.problem]
    if usable:
        best = max(usable, key=_merit)
        return ActiveEngine(name=best.name, path=str(best.path), reason=f"the best of {len(usable)} installed{lost}")
    where = "in this Python environment" if in_environment() else "none is installed"
    return ActiveEngine(name=ENVIRONMENT, path="", reason=where + lost)


def _merit(build: Installed) -> tuple[bool, int, bool, str]:
    """Sees a GPU, drives it well, was built for this very CPU, is new."""
    assert build.record is not None
    record = build.record
    rank = _RANK.index(record.backend) if record.backend in _RANK else -1
    return bool(record.probe.devices), rank, record.variant.startswith(builds.SOURCE), record.installed_at


def installed(settings: Settings) -> tuple[Installed, ...]:
    """All builds in the engines folder, by name."""
    try:
        folders = sorted(path for path in settings.engines_dir.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return ()
    return tuple(_read(folder) for folder in folders)


def _read(folder: Path) -> Installed:
    try:
        record = msgspec.json.decode((folder / "engine.json").read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return Installed(name=folder.name, path=folder, problem="has no readable record; install it again")
    problem = ""
    if not (folder / "llama_cpp").is_dir():
        problem = "has lost its files; install it again"
    elif record.version != (pinned := pinned_version()):
        problem = f"is version {record.version}, and this localfast works with {pinned} only"
    elif not record.probe.works:
        problem = f"did not start when it was tried: {record.probe.error}"
    return Installed(name=folder.name, path=folder, record=record, problem=problem)


def find(settings: Settings, name: str) -> Installed | None:
    """By its whole name, or without the version."""
    found = {build.name: build for build in installed(settings)}
    return found.get(name) or found.get(f"{pinned_version()}-{name}")


def require(settings: Settings, name: str) -> Installed:
    """Raises InvalidRequest for a name that is not there."""
    build = find(settings, name)
    if build is None:
        there = ", ".join(one.name for one in installed(settings)) or "none"
        raise InvalidRequest(reason=f"no engine '{name}' is installed; there are: {there}", param="name")
    return build


# --- the user's choice --------------------------------------------------------------------------------------------------------


def choice(settings: Settings) -> str:
    """What `use` wrote; empty when the choice is left to localfast."""
    try:
        return msgspec.json.decode(_choice_path(settings).read_bytes(), type=_Choice).name
    except (OSError, msgspec.MsgspecError):
        return ""


def choose(settings: Settings, name: str) -> None:
    """Use this build from the next load on; an empty name leaves the choice to localfast again."""
    path = _choice_path(settings)
    if name:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, _Choice(name))
    else:
        path.unlink(missing_ok=True)


def remove(settings: Settings, build: Installed) -> None:
    """Delete a build, and the choice of it. Raises InvalidRequest while a process holds its files (Windows)."""
    with tempfile.TemporaryDirectory(dir=settings.engines_dir, prefix=".removed-", ignore_cleanup_errors=True) as folder:
        try:
            build.path.rename(Path(folder) / "engine")
        except OSError as error:
            reason = f"{build.path} cannot be moved ({error.strerror}); stop the server that uses it"
            raise InvalidRequest(reason=reason, param="name") from None
    if choice(settings) == build.name:
        choose(settings, "")


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Whole or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".write-") as folder:
        new = Path(folder) / path.name
        new.write_bytes(msgspec.json.format(msgspec.json.encode(value)))
        new.replace(path)


def size_of(folder: Path) -> int:
    """Bytes on the disk; several names of one file count once."""
    found = {}
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                about = path.stat()
                found[(about.st_dev, about.st_ino) if about.st_ino else path] = about.st_size
    return sum(found.values())


def _choice_path(settings: Settings) -> Path:
    return settings.engines_dir / "active.json"


# --- this Python environment --------------------------------------------------------------------------------------------------


@cache
def engine_requirements() -> tuple[str, ...]:
    """The packages of the extra `engine`, the bindings first: the pin has its one home in the package's metadata."""
    extra = [row.partition(";")[0].strip() for row in metadata.requires("localfast") or () if _is_engine(row)]
    return tuple(sorted(extra, key=lambda row: not row.startswith(f"{_PACKAGE}==")))


def _is_engine(requirement: str) -> bool:
    return requirement.partition(";")[2].strip().replace("'", '"') == _EXTRA


@cache
def pinned_version() -> str:
    """Of llama-cpp-python: its C structs belong to one version."""
    return engine_requirements()[0].partition("==")[2]


def in_environment() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None
