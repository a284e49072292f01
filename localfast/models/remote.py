"""Headers of GGUF files that are not here: read by HTTP range as far as they go, kept on this disk as they are.

The bytes are what a dry run needs, and what `models.gguf.facts_of` reads. A remote header is bounded like a local one
(`models.gguf_header`); of the weights hardly a byte is fetched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from localfast.errors import BadModelFile, DownloadFailed, Offline
from localfast.models import web
from localfast.models.gguf_header import GgufHeader, check_shards, parse_header, read_headers
from localfast.models.hub import source_of
from localfast.models.offers import PullPreview, RemoteFile
from localfast.models.transfer import disk_in_words
from localfast.models.web import Answer, Broken, Retries, Source, web_client
from localfast.settings import Settings

if TYPE_CHECKING:
    import httpx2

FIRST_RANGE_BYTES = 8 * 2**20
CACHE_LIMIT_BYTES = 256 * 2**20


def read_remote_headers(preview: PullPreview, settings: Settings) -> list[GgufHeader]:
    """Headers of all files of a model at its source, first shard first; `file_bytes` is each file's true size.

    Raises BadModelFile, Offline, GatedModel, HubBusy, and DownloadFailed, also for packages, which hide their files.
    """
    if preview.source.startswith("file:"):
        return list(read_headers(preview.source.removeprefix("file:")))
    headers = [_parse(remote_header_bytes(preview, file, settings), _label(preview, file)) for file in preview.files]
    check_shards(_label(preview, preview.files[0]), headers)
    return headers


def remote_header_bytes(preview: PullPreview, file: RemoteFile, settings: Settings) -> Path:
    """A file with the header of one remote file, byte for byte up to its weights; the name ends in -SIZE.gguf.

    It is fetched once and kept under `facts_dir`. Raises what `read_remote_headers` raises.
    """
    folder = settings.facts_dir / "headers"
    identity = json.dumps([preview.repo, preview.revision, file.path, file.size_bytes])
    key = hashlib.sha256(identity.encode()).hexdigest()[:40]
    for path in folder.glob(f"{key}-*.gguf"):
        try:
            _parse(path, str(path))
        except BadModelFile:  # cut short by a full disk or a crash
            path.unlink(missing_ok=True)
        else:
            return path
    if not preview.repo:
        raise DownloadFailed(name=str(preview), reason="what comes in a package cannot be looked into before it is fetched")
    if settings.offline:
        raise Offline(name=str(preview))
    raw, file_bytes = _fetch(_label(preview, file), file, source_of(preview, file, settings))
    with disk_in_words(str(preview)):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{key}-{file_bytes}.gguf"
        fresh = path.with_suffix(f".{threading.get_ident()}")
        fresh.write_bytes(raw)
        fresh.replace(path)
        _drop_oldest(folder, path)
    return path


def true_size(path: Path) -> int:
    """The size in bytes of the whole file that a path of `remote_header_bytes` is the beginning of."""
    return int(path.stem.rpartition("-")[2])


def _label(preview: PullPreview, file: RemoteFile) -> str:
    return f"{preview.repo or preview.source}/{file.path}"


def _parse(path: Path, label: str) -> GgufHeader:
    try:
        with path.open("rb") as source:
            return parse_header(source, label, true_size(path))
    except (OSError, ValueError) as error:
        raise BadModelFile(label, f"its kept header cannot be read ({type(error).__name__})") from None


def _fetch(label: str, file: RemoteFile, source: Source) -> tuple[bytes, int]:
    """(the header's bytes, the size of the whole file)."""
    with web_client(web.PATIENCE) as client, contextlib.closing(_Beginning(client, source)) as beginning:
        file_bytes = beginning.open(file.size_bytes)
        if file.size_bytes not in (None, file_bytes):
            raise BadModelFile(label, f"it has {file_bytes} bytes at its source, where {file.size_bytes} are promised")
        header = parse_header(cast(BinaryIO, beginning), label, file_bytes)
        return bytes(beginning.bytes[: header.data_offset]).ljust(header.data_offset, b"\0"), file_bytes


def _drop_oldest(folder: Path, newest: Path) -> None:
    kept = sorted((path for path in folder.iterdir() if path != newest), key=lambda path: path.stat().st_mtime, reverse=True)
    size_bytes = newest.stat().st_size
    for path in kept:
        size_bytes += path.stat().st_size
        if size_bytes > CACHE_LIMIT_BYTES:
            path.unlink(missing_ok=True)


class _Beginning:
    """The beginning of a remote file, as far as it was read: one range after the other, each as long as all before."""

    def __init__(self, client: httpx2.Client, source: Source) -> None:
        self._client, self._source = client, source
        self._halt = threading.Event()
        self._retries = Retries(source.model, web.PATIENCE, self._halt)
        self._answer: Answer | None = None
        self._chunks: Iterator[bytes] = iter(())
        self._at = self._skip_bytes = 0
        self._total_bytes: int | None = None
        self.bytes = bytearray()

    def open(self, promised_bytes: int | None) -> int:
        """Begin, and say how large the file is. Raises DownloadFailed when neither the server nor the listing knows."""
        self._more()
        if self._total_bytes is None:
            self._total_bytes = promised_bytes
        if self._total_bytes is None:
            raise DownloadFailed(name=self._source.model, reason="the server does not say how large the file is")
        return self._total_bytes

    def read(self, count: int) -> bytes:
        while len(self.bytes) < self._at + count and self._more():
            pass
        piece = bytes(self.bytes[self._at : self._at + count])
        self._at += len(piece)
        return piece

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()
        self._answer = None

    def _more(self) -> bool:
        """Get the next chunk; False at the end of the file."""
        while self._total_bytes is None or len(self.bytes) < self._total_bytes:
            try:
                if self._answer is None:
                    self._ask()
                chunk = next(self._chunks, None)
            except Broken as broken:
                self.close()
                self._retries.failed(broken)
                continue
            if chunk is None:
                ended_early = self._answer is not None and self._answer.status == 200
                self.close()
                if ended_early or not self.bytes:
                    return False
                continue
            dropped = min(self._skip_bytes, len(chunk))
            self._skip_bytes -= dropped
            self.bytes += chunk[dropped:]
            if len(chunk) > dropped:
                return True
        return False

    def _ask(self) -> None:
        start = len(self.bytes)
        end = max(FIRST_RANGE_BYTES, 2 * start)
        headers = {"Range": f"bytes={start}-{end - 1}"}
        answer = Answer(self._client, self._source, headers, patience=web.PATIENCE, halt=self._halt)
        self._answer = answer.__enter__()
        if answer.status == 416 and answer.total_bytes != start:  # at its very end: there is no more
            raise Broken("the server has fewer bytes than it said")
        if answer.status == 206 and answer.start_byte != start:
            raise Broken("the server gives other bytes than it was asked for")
        self._skip_bytes = start if answer.status == 200 else 0
        self._total_bytes = answer.total_bytes if answer.total_bytes is not None else self._total_bytes
        self._chunks = answer.chunks() if answer.status != 416 else iter(())
