"""Brings a build of the engine onto this disk: fetched from an index or built from source, tried in a child, moved into place.

All of it happens in a folder that goes away unless everything worked; the Python environment is never changed. Blocking.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import filelock
import msgspec

from localfast.engines import builds
from localfast.engines.installed import (
    Installed,
    Probe,
    Record,
    engine_requirements,
    find,
    installed,
    pinned_version,
    size_of,
    write_json,
)
from localfast.engines.pip import Pip, PipFailed, progress_option
from localfast.errors import EngineInstallFailed
from localfast.hardware import Hardware, ask_engine_devices
from localfast.settings import Settings

PROBE_TIMEOUT_S = 90.0
_CXX = ("c++", "g++", "clang++", "cl")
# Where compilers are that are found without PATH: by CMake, through these.
_PLACES = {"nvcc": "/usr/local/cuda/bin/nvcc", "hipcc": "/opt/rocm/bin/hipcc"}
_CRASHES = dict.fromkeys(("status -4", "status 3221225501"), "this CPU lacks an instruction that it was built with")
_VISUAL_STUDIO = r"C:\Program Files (x86)\Microsoft Visual Studio\Installer\vswhere.exe"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to install, and from where. `index_url` is followed by the variant; with `find_links` the wheel comes from there."""

    variant: str = ""
    index_url: str = builds.INDEX_URL
    find_links: str = ""
    cmake_args: str = ""
    again: bool = False

    @property
    def name(self) -> str:
        return f"{pinned_version()}-{self.variant}"

    @property
    def from_source(self) -> bool:
        return self.variant.startswith(builds.SOURCE)


class _DoesNotStart(Exception):
    """The build is fine for some machine, not for this one."""


def install(settings: Settings, order: Order, say: Say) -> Installed:
    """Install one build, or find it installed. Raises EngineInstallFailed; nothing is left then, but the log."""
    try:
        return _install(settings, order, say, wants_gpu=False)
    except (_DoesNotStart, PipFailed) as error:
        raise EngineInstallFailed(name=order.name, reason=str(error)) from None


def install_best(settings: Settings, hardware: Hardware, machine: str, order: Order, say: Say) -> Installed:
    """The best prebuilt one that works here; says why a better one does not. Raises EngineInstallFailed when none does."""
    failures: list[str] = []
    useless: set[str] = set()
    for suggestion in builds.suitable(hardware, machine):
        if suggestion.backend in useless:
            continue
        say(f"{suggestion.variant}: {suggestion.reason}")
        wants_gpu = suggestion.backend != "CPU"
        try:
            return _install(settings, replace(order, variant=suggestion.variant), say, wants_gpu)
        except _DoesNotStart as error:
            useless.add(suggestion.backend)  # other versions of it would cost a download each to fail alike
            failures.append(f"{suggestion.variant}: {error}")
        except PipFailed as error:
            failures.append(f"{suggestion.variant}: {error}")
            if error.unreachable:
                break
        say(f"not installed: {failures[-1]}")
    reason = "; ".join(failures) + "; with a compiler: localfast engine install --from-source"
    raise EngineInstallFailed(name="for this machine", reason=reason)


def check_again(build: Installed) -> Installed:
    """Probe an installed build once more, and remember the result."""
    if build.record is None:
        return build
    record = _with_probe(build.record, build.path, wants_gpu=False)
    write_json(build.path / "engine.json", record)
    problem = f"did not start: {record.probe.error}" if record.probe.error else ""
    return Installed(name=build.name, path=build.path, record=record, problem=problem)


def _install(settings: Settings, order: Order, say: Say, wants_gpu: bool) -> Installed:
    _refuse(settings, order)
    try:
        with _alone(settings, order.name), _workplace(settings) as work:
            present = find(settings, order.name)
            if present and not present.problem and not order.again:
                return present
            log_path = settings.logs_dir / f"engine-{order.name}.log"
            log_path.unlink(missing_ok=True)
            pip = Pip(work, log_path, say)
            folder = work / "engine"
            try:
                wheel = _wheel(settings, order, work, pip)
                record = _fill(settings, order, wheel, folder, pip)
                say("trying it")
                record = _with_probe(record, folder, wants_gpu)
            except PipFailed as error:
                raise PipFailed(f"{error} (log: {log_path})", error.unreachable) from None
            if not record.probe.works:
                raise _DoesNotStart(f"it does not work here: {record.probe.error}")
            write_json(folder / "engine.json", record)
            _move(folder, settings.engines_dir / order.name, work)
            log_path.unlink(missing_ok=True)
    except OSError as error:
        reason = f"{error.filename or settings.engines_dir}: {error.strerror or error}"
        raise EngineInstallFailed(name=order.name, reason=reason) from None
    return next(build for build in installed(settings) if build.name == order.name)


def _refuse(settings: Settings, order: Order) -> None:
    """What cannot work is said before anything is fetched."""
    reason = ""
    if not builds.backend_of(order.variant):
        known = (*builds.VARIANTS, *(builds.SOURCE + backend for backend in builds.SOURCE_BACKENDS))
        raise EngineInstallFailed(name=order.variant, reason=f"there is no such build; there are {', '.join(known)}")
    if settings.offline and not order.find_links:
        reason = "the offline setting forbids downloads; turn it off, or name a folder with the wheel: --find-links FOLDER"
    elif order.find_links and not Path(order.find_links).is_dir():
        reason = f"there is no folder {order.find_links}"
    elif order.from_source and (missing := missing_compiler(order.variant)):
        reason = f"to build it here, {missing} is needed; a prebuilt one needs no compiler: localfast engine install"
    elif order.cmake_args and not order.from_source:
        reason = "arguments for cmake are for --from-source only: a wheel is built already"
    if reason:
        raise EngineInstallFailed(name=order.name, reason=reason)


def missing_compiler(variant: str) -> str:
    """What a source build lacks on this machine; empty when it can begin. cmake and ninja come with the build."""
    if not any(shutil.which(name) for name in _CXX) and not Path(_VISUAL_STUDIO).exists():
        return (
            "a C++ compiler (Visual Studio Build Tools)" if sys.platform == "win32" else "a C++ compiler (package g++ or clang)"
        )
    tool = builds.COMPILERS.get(variant.removeprefix(builds.SOURCE), "")
    if tool and not shutil.which(tool) and not Path(_PLACES.get(tool, tool)).exists():
        return {"nvcc": "nvcc (NVIDIA's CUDA toolkit)", "glslc": "glslc (the Vulkan SDK)"}.get(tool, f"{tool} (AMD's ROCm)")
    return ""


# --- steps --------------------------------------------------------------------------------------------------------------------


@contextmanager
def _alone(settings: Settings, name: str) -> Iterator[None]:
    settings.engines_dir.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(settings.engines_dir / ".lock", timeout=0):
            yield
    except filelock.Timeout:
        raise EngineInstallFailed(name=name, reason="another installation is running; wait until it has ended") from None


@contextmanager
def _workplace(settings: Settings) -> Iterator[Path]:
    """On the disk where the build will be, so that it can be moved. What a killed installation left goes too: we are alone."""
    for rest in settings.engines_dir.glob(".install-*"):
        shutil.rmtree(rest, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=settings.engines_dir, prefix=".install-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _wheel(settings: Settings, order: Order, work: Path, pip: Pip) -> Path:
    """Fetch or build the one wheel."""
    wheels, requirement = work / "wheels", engine_requirements()[0]
    package = requirement.partition("==")[0]
    options = ["--no-deps", "--no-cache-dir"]
    if order.find_links:
        options += ["--find-links", str(Path(order.find_links).absolute())]
    if order.from_source:
        if arguments := builds.cmake_args(order.variant, order.cmake_args):
            options.append(f"--config-settings=cmake.args={';'.join(arguments)}")
        if settings.offline:
            options.append("--no-index")
        options += ["--verbose", "--no-binary", package, "--wheel-dir", str(wheels)]
        pip.run("building, which takes minutes", "wheel", *options, requirement)
    else:
        index = f"{order.index_url.rstrip('/')}/{order.variant}"
        options += ["--no-index"] if order.find_links else ["--index-url", index]
        options += ["--only-binary=:all:", *progress_option(), "--dest", str(wheels)]
        pip.run(f"fetching {package} {pinned_version()} from {order.find_links or index}", "download", *options, requirement)
    found = [path for path in wheels.glob("*.whl") if path.name.startswith(f"{package.replace('-', '_')}-{pinned_version()}-")]
    if len(found) != 1:
        raise PipFailed(f"the index gave {', '.join(path.name for path in wheels.iterdir()) or 'nothing'} for {requirement}")
    return found[0]


def _fill(settings: Settings, order: Order, wheel: Path, folder: Path, pip: Pip) -> Record:
    """Unpack it, and add what it needs and this environment lacks."""
    # Some versions of pip name the address of what they take, some the bare file.
    source = pip.origin if "/" in pip.origin else f"{order.index_url.rstrip('/')}/{order.variant}/{pip.origin or wheel.name}"
    pip.run("unpacking", "install", "--no-deps", "--no-index", "--no-compile", "--target", str(folder), str(wheel))
    more = (*_missing(folder), *builds.libraries_of(order.variant))
    if more:
        links = ("--find-links", str(Path(order.find_links).absolute())) if order.find_links else ()
        index = ("--no-index",) if settings.offline else ()
        pip.run(f"fetching {', '.join(more)}", "install", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-compile",
                *progress_option(), *index, *links, "--target", str(folder), *more)  # fmt: skip
    _share_equal_files(folder)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Record(
        name=order.name,
        version=pinned_version(),
        variant=order.variant,
        backend=builds.backend_of(order.variant),
        source=f"built here from {source} {order.cmake_args}".rstrip() if order.from_source else source,
        wheel=wheel.name,
        sha256=digest,
        installed_at=_now(),
        size_bytes=size_of(folder),
        packages=more,
        probe=Probe(works=False),
    )


def _missing(folder: Path) -> tuple[str, ...]:
    """Requirements of what lies in the folder, and the engine's other packages, that this environment does not have."""
    asked = [row for found in metadata.distributions(path=[str(folder)]) for row in found.requires or () if "extra ==" not in row]
    missing = []
    for requirement in (*asked, *engine_requirements()[1:]):
        plain = requirement.partition(";")[0].strip()
        try:
            metadata.version(re.split(r"[^\w.-]", plain, maxsplit=1)[0])
        except metadata.PackageNotFoundError:
            missing.append(plain)
    return tuple(missing)


def _share_equal_files(folder: Path) -> None:
    """Wheels hold each library under several names, which costs gigabytes with CUDA: keep one, under all of its names."""
    by_size: dict[int, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size > 100_000:
            by_size.setdefault(path.stat().st_size, []).append(path)
    for paths in by_size.values():
        first: dict[bytes, Path] = {}
        for path in paths if len(paths) > 1 else ():
            with path.open("rb") as file:
                kept = first.setdefault(hashlib.file_digest(file, "sha256").digest(), path)
            if kept is not path:
                with suppress(OSError):  # a disk without hard links keeps all of them
                    twin = path.with_name(path.name + ".twin")
                    os.link(kept, twin)
                    twin.replace(path)


def _with_probe(record: Record, folder: Path, wants_gpu: bool) -> Record:
    """The record with what a child says that loads the build: does it start, has it its backend, does it see a GPU."""
    build, devices, notes = ask_engine_devices(PROBE_TIMEOUT_S, str(folder))
    if not (folder / "llama_cpp").is_dir():  # then the child found the environment's
        build, notes = None, ["it holds no llama_cpp"]
    error, backends = "", build.backends if build else ()
    if build is None:
        error = "; ".join((*notes, *(words for status, words in _CRASHES.items() if any(status in note for note in notes))))
    elif build.error:
        error = build.error
    elif build.version != record.version:
        error = f"version {build.version} was loaded instead of {record.version}"
    elif record.backend not in backends:
        error = f"it is built for {', '.join(backends)} and not for {record.backend} ({record.source})"
    elif wants_gpu and not devices:
        error = " | ".join(("it starts, but finds no GPU", *build.log))
    names = tuple(f"{device.name} ({device.backend})" for device in devices)
    probe = Probe(works=not error, error=error, backends=backends, devices=names, checked_at=_now())
    return msgspec.structs.replace(record, probe=probe)


def _move(folder: Path, target: Path, work: Path) -> None:
    """In place of an older one, which stays if that fails."""
    old = work / "old"
    if target.exists():
        target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
