"""Brings files to this disk and goes on where it stopped, also after a kill: hashed while they are written.

Owns the partial file and the rule that a whole file has the promised size and hash or is not there. Knows no hub and no store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from localfast.errors import DownloadFailed, DownloadStopped, HashMismatch, NoSpace
from localfast.models import web
from localfast.models.web import TICK_S, Answer, Broken, Patience, Retries, Source, web_client

if TYPE_CHECKING:
    import httpx2

Progress = Callable[[int, int | None], None]
"""Told (bytes done, bytes in total or None) by the thread that called, several times a second also when nothing moves. The first
call has what is here already. Done may step back when a file starts again. What it raises ends the download."""

MAX_PARALLEL = 4
PROGRESS_BYTES = 2**20
"""An attempt that brought this much counts as progress: the count of failures begins anew."""
MAX_RESTARTS = 4
_BLOCK_BYTES = 2**20
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A file to fetch to `target`; `record` is where its identity is kept meanwhile.

    A kept part is taken up when its sha256 and size are the wanted ones; without a hash, when `origin` (repository, revision,
    path) and the ETag are.
    """

    source: Source
    target: Path
    record: Path
    origin: str
    size_bytes: int | None = None
    sha256: str = ""

    @property
    def identity(self) -> dict[str, object]:
        return {"origin": "" if self.sha256 else self.origin, "size_bytes": self.size_bytes, "sha256": self.sha256}

    def kept(self) -> tuple[int, str]:
        """(bytes of it that are here and may be taken up, the ETag they came with)."""
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
            etag = str(record.pop("etag"))
            size_bytes = self.target.stat().st_size
        except (OSError, ValueError, AttributeError, TypeError, KeyError):
            return 0, ""
        fits = record == self.identity and (self.sha256 or etag) and size_bytes <= (self.size_bytes or size_bytes)
        return (size_bytes, etag) if fits else (0, "")


@dataclass(slots=True)
class Tally:
    """What one thread has done, for the one that reports; `halt` tells it to stop."""

    halt: threading.Event
    done_bytes: int = 0


Job = Callable[[Tally], Result]


def together(
    model: str,
    jobs: Sequence[tuple[int, Job[Result]]],
    progress: Progress,
    total_bytes: int | None,
    stop: threading.Event | None = None,
) -> list[Result]:
    """Do all jobs for a model, each told with the bytes it begins with, a few at a time; results in order.

    Ends all of them, within a second, when one fails, `stop` is set (DownloadStopped) or `progress` raises.
    """
    halt = threading.Event()
    tallies = [Tally(halt, done_bytes) for done_bytes, _ in jobs]

    def report() -> None:
        progress(sum(tally.done_bytes for tally in tallies), total_bytes)

    report()
    with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="transfer") as pool:
        futures = [pool.submit(job, tally) for (_, job), tally in zip(jobs, tallies, strict=True)]
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, TICK_S, FIRST_COMPLETED)
                for future in done:
                    future.result()
                if stop is not None and stop.is_set():
                    raise DownloadStopped(name=model)
                report()
        except BaseException:
            halt.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def fetch_files(
    wanted: Sequence[Wanted], progress: Progress, total_bytes: int | None, stop: threading.Event | None = None
) -> list[tuple[int, str]]:
    """Fetch all files; (size in bytes, sha256) of each. What arrived stays for the next call, unless it is wrong.

    Raises HashMismatch, NoSpace, HubBusy, GatedModel, DownloadStopped, and DownloadFailed for the rest.
    """
    patience = web.PATIENCE
    with web_client(patience) as client:

        def job_for(file: Wanted) -> Job[tuple[int, str]]:
            return lambda tally: _Transfer(file, client, patience, tally).run()

        jobs = [(file.kept()[0], job_for(file)) for file in wanted]
        return together(wanted[0].source.model, jobs, progress, total_bytes, stop)


@contextlib.contextmanager
def disk_in_words(model: str) -> Iterator[None]:
    """What a disk may answer, as errors of ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            raise NoSpace(name=model, reason="the disk is full; what arrived is kept") from None
        if error.errno == errno.EFBIG:
            raise NoSpace(name=model, reason="this disk's file system holds no file that large") from None
        raise DownloadFailed(name=model, reason=f"the disk refuses: {error.strerror or type(error).__name__}") from None


@dataclass(slots=True)
class _Transfer:
    """One file on its way. `have_bytes` of it are on the disk, and `digest` has seen exactly those."""

    wanted: Wanted
    client: httpx2.Client
    patience: Patience
    tally: Tally
    have_bytes: int = 0
    size_bytes: int | None = None
    etag: str = ""
    answers: int = 0
    """How many answers the bytes here came from: those of an earlier process count as one."""
    ended: bool = False
    retaken: bool = False
    restarts: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def run(self) -> tuple[int, str]:
        model = self.wanted.source.model
        retries = Retries(model, self.patience, self.tally.halt)
        with disk_in_words(model):
            self._take_up()
            try:
                with self.wanted.target.open("r+b" if self.have_bytes else "wb", buffering=0) as file:
                    while not self._is_right():
                        before = self.have_bytes
                        try:
                            self._attempt(file)
                        except Broken as broken:
                            retries.failed(broken, self.have_bytes - before >= PROGRESS_BYTES)
                    os.fsync(file.fileno())
                if not self.have_bytes:
                    raise DownloadFailed(name=model, reason=f"{self.wanted.target.name} is empty at its source")
            finally:
                if not self.have_bytes:
                    self._drop()
        return self.have_bytes, self.digest.hexdigest()

    def _take_up(self) -> None:
        """Hash what an earlier try left, or forget it."""
        self.size_bytes = self.wanted.size_bytes
        kept_bytes, self.etag = self.wanted.kept()
        if not kept_bytes:
            return self._drop()
        with self.wanted.target.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                if self.tally.halt.is_set():
                    raise DownloadStopped(name=self.wanted.source.model)
                self.digest.update(block)
                self.have_bytes += len(block)
        self.answers = 1
        return None

    def _is_right(self) -> bool:
        """Whether all of it is here. Wrong bytes that came in several pieces are fetched once more in one, then refused."""
        if self.have_bytes != self.size_bytes and not (self.ended and self.size_bytes is None):
            return False
        if self.wanted.sha256 in ("", self.digest.hexdigest()):
            return True
        if self.answers > 1 and not self.retaken:
            self.retaken = True
            self._begin_again()
            return False
        raise self._mismatch(f"sha256 {self.digest.hexdigest()[:12]}… instead of {self.wanted.sha256[:12]}…")

    def _attempt(self, file: io.FileIO) -> None:
        if self.have_bytes and not (self.wanted.sha256 or self.etag):
            self._begin_again()  # nothing would tell whether the rest belongs to the beginning
        headers = {"Range": f"bytes={self.have_bytes}-"} if self.have_bytes else {}
        if self.have_bytes and not self.wanted.sha256:
            headers["If-Range"] = self.etag
        with Answer(self.client, self.wanted.source, headers, patience=self.patience, halt=self.tally.halt) as answer:
            self._agree(answer)
            self.answers += 1
            file.seek(self.have_bytes)
            file.truncate()
            for chunk in answer.chunks():
                if self.size_bytes is not None and self.have_bytes + len(chunk) > self.size_bytes:
                    raise self._mismatch(f"more than the promised {self.size_bytes} bytes")
                self._write(file, chunk)
        self.ended = True
        if self.size_bytes is not None and self.have_bytes < self.size_bytes:
            raise Broken(f"it ended after {self.have_bytes} of {self.size_bytes} bytes")

    def _agree(self, answer: Answer) -> None:
        """Whether the answer goes on with what is here; if it begins the file anew, so do we."""
        linked = answer.linked_etag.lower()  # of a large file: its sha256
        if len(linked) == 64 and self.wanted.sha256 not in ("", linked):
            raise self._changed(f"sha256 {linked[:12]}… instead of {self.wanted.sha256[:12]}…")
        if answer.status == 416 and self.ended:
            raise self._mismatch(f"{self.have_bytes} bytes instead of {self.size_bytes}")
        if answer.status == 416:
            self._begin_again()
            raise Broken("it has fewer bytes now than it had")
        if None not in (answer.total_bytes, self.size_bytes) and answer.total_bytes != self.size_bytes:
            raise self._changed(f"{answer.total_bytes} bytes instead of {self.size_bytes}")
        other = bool(self.etag and not self.wanted.sha256 and answer.etag != self.etag)
        if answer.status == 206 and self.have_bytes and (answer.start_byte != self.have_bytes or other):
            self._begin_again()
            raise Broken("it changed at its source, or the server gives other bytes than it was asked for")
        if answer.status == 206 and answer.start_byte != self.have_bytes:
            raise Broken("the server gives other bytes than it was asked for")
        if answer.status == 200 and self.have_bytes:
            self._begin_again()
        if not self.have_bytes:
            self.etag = answer.etag
            self.wanted.record.write_text(json.dumps({**self.wanted.identity, "etag": self.etag}), encoding="utf-8")
        self.size_bytes = self.size_bytes if self.size_bytes is not None else answer.total_bytes

    def _write(self, file: io.FileIO, chunk: bytes) -> None:
        """Unbuffered, so that a kill loses nothing that was counted; a disk may take less than it is given."""
        rest = memoryview(chunk)
        while rest:
            count: int = file.write(rest)
            self.digest.update(rest[:count])
            self.have_bytes += count
            rest = rest[count:]
        self.tally.done_bytes = self.have_bytes

    def _begin_again(self) -> None:
        """Raises DownloadFailed when that happened too often to be worth the bytes."""
        self.restarts += 1
        if self.restarts > MAX_RESTARTS:
            self.have_bytes = 0  # `run` throws it away
            reason = f"{self.wanted.target.name} had to begin again {MAX_RESTARTS} times: its source cannot go on"
            raise DownloadFailed(name=self.wanted.source.model, reason=reason)
        self.have_bytes, self.answers, self.etag, self.ended = 0, 0, "", False
        self.size_bytes = self.wanted.size_bytes
        self.digest = hashlib.sha256()
        self.tally.done_bytes = 0

    def _changed(self, what: str) -> HashMismatch:
        """What is here stays: it may be a proxy's page that has the wrong size."""
        return HashMismatch(name=self.wanted.source.model, reason=f"{self.wanted.target.name} has {what} at its source now")

    def _mismatch(self, what: str) -> HashMismatch:
        self.have_bytes = 0  # `run` throws it away
        return HashMismatch(name=self.wanted.source.model, reason=f"{self.wanted.target.name} has {what}")

    def _drop(self) -> None:
        for path in (self.wanted.target, self.wanted.record):
            path.unlink(missing_ok=True)
