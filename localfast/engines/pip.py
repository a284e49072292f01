"""Runs pip as a child process, with its output in a log file, its progress in words and its failure in one sentence.

Knows no index and no package. The child and what it started end when we are interrupted.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

_GRACE_S = 15.0
_BYTES = re.compile(r"Progress (\d+) of (\d+)")
_STEPS = re.compile(r"^\s*\[(\d+)/(\d+)\] ")
_ORIGIN = re.compile(r"^\s*(?:Downloading|Using cached|Processing) (\S+\.(?:whl|tar\.gz))")
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ProxyError|Max retries exceeded|CERTIFICATE_VERIFY"
)
_EMPTY_TALK = re.compile(
    r"Failed (building|to build)|Could not build wheels|No matching distribution|finished with status|^note: |"
    r"subprocess-exited|metadata-generation|exit code|Encountered error|did not run successfully"
)


class PipFailed(Exception):
    """`str()` is the reason in words."""

    def __init__(self, reason: str, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.unreachable = unreachable


class Pip:
    """One series of calls with one log; `origin` is the file that pip named last as what it took."""

    def __init__(self, folder: Path, log_path: Path, on_progress: Callable[[str], None]) -> None:
        self._folder = folder  # as its working folder: a file of the user's folder must not stand in for a module
        self._log_path = log_path
        self._on_progress = on_progress
        self._command = [*pip_command(), "--no-input", "--disable-pip-version-check"]
        self.origin = ""

    def run(self, what: str, *arguments: str) -> None:
        """Raises PipFailed; the log stays then."""
        self._on_progress(what)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("a+b") as log:
            start = log.tell()
            log.write(f"$ pip {' '.join(arguments)}\n".encode())
            with subprocess.Popen(
                [*self._command, *arguments], cwd=self._folder, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            ) as child:  # fmt: skip
                try:
                    for line in child.stdout or ():
                        log.write(line)
                        self._follow(what, line.decode("utf-8", "replace"))
                except BaseException:
                    _end(child)
                    raise
            if child.returncode:
                log.flush()
                log.seek(start)
                raise _failure(log.read().decode("utf-8", "replace"))

    def _follow(self, what: str, line: str) -> None:
        if found := _BYTES.search(line):
            done, total = int(found[1]), int(found[2])
            self._on_progress(f"{what}: {done / 1e6:.0f}" + (f" of {total / 1e6:.0f} MB" if total else " MB"))
        elif found := _STEPS.search(line):
            self._on_progress(f"{what}: step {found[1]} of {found[2]}")
        elif found := _ORIGIN.search(line):
            self.origin = found[1]


def pip_command() -> list[str]:
    """This Python's pip, or the one that comes with Python for new environments: uv's and pipx's have none. Raises PipFailed."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    bundle = importlib.util.find_spec("ensurepip")
    for folder in (bundle.submodule_search_locations or ()) if bundle else ():
        for wheel in sorted(Path(folder).glob("_bundled/pip-*.whl")):
            return [sys.executable, str(wheel / "pip")]
    raise PipFailed("this Python has no pip; install it with your system's packages, or with 'python -m ensurepip'")


def progress_option() -> tuple[str, ...]:
    """Numbers instead of a bar, where this pip knows them."""
    try:
        major, minor = (int(part) for part in metadata.version("pip").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return ("--progress-bar", "off")
    return ("--progress-bar", "raw" if (major, minor) >= (24, 1) else "off")


def _failure(output: str) -> PipFailed:
    """The first lines that name an error: what follows is its consequence, and pip's own summary says the least."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if _UNREACHABLE.search(output):
        return PipFailed(f"the package index could not be reached: {_newest(lines, _UNREACHABLE.search)}", unreachable=True)
    telling = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE) and not _EMPTY_TALK.search(line)]
    words = telling[:3] or lines[-3:] or ["pip ended without a word"]
    return PipFailed(" | ".join(line.removeprefix("ERROR: ")[:300] for line in dict.fromkeys(words)))


def _newest(lines: list[str], matches: Callable[[str], object]) -> str:
    line = next(line for line in reversed(lines) if matches(line))
    inner = re.search(r"object at 0x\w+>: (.+?)'\)", line)  # of urllib3: the part that a person would say
    return inner[1] if inner else line.rpartition("WARNING: ")[2][:300]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the compilers under pip, then pip: it saw the same Ctrl-C, and clears up its folders if it gets the time."""
    compilers: list[psutil.Process] = []
    with suppress(psutil.Error):
        compilers = psutil.Process(child.pid).children(recursive=True)
    for process in compilers:
        with suppress(psutil.Error):
            process.kill()
    with suppress(subprocess.TimeoutExpired):
        child.communicate(timeout=_GRACE_S)  # reading on: it would wait for ever to say its last words
    child.kill()
