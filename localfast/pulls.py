"""Downloads that clients ask the server for: `/v1/localfast/pull`. One per model, however many ask; it goes on when they leave.

Owns which downloads run and what they have told so far. How a file is fetched is `models/hub.py`'s business.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from localfast.bodies import read_json
from localfast.choosing import chooser
from localfast.errors import DownloadStopped, InternalError, InvalidRequest, LocalfastError
from localfast.fit import Fitter, wishes
from localfast.models.catalog import InstalledModel, parse_name
from localfast.models.hub import pull
from localfast.settings import Settings

log = logging.getLogger("localfast")

Progress = Callable[[int, int | None], None]
Fetch = Callable[[str, Progress], InstalledModel]
"""Fetches a model in a thread, telling how far it is; an exception out of the progress call ends it."""
TOLD_PER_S = 10
"""Reports of one download that a client gets in a second, at most."""


@dataclass(eq=False)
class Pull:
    """One download. `ended` is set once `model` or `error` says how."""

    name: str
    status: str = "looking"
    done_bytes: int = 0
    total_bytes: int | None = None
    model: InstalledModel | None = None
    error: LocalfastError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stop: threading.Event = field(default_factory=threading.Event)

    def report(self, done_bytes: int, total_bytes: int | None) -> None:
        """Called in the thread that fetches. Raises DownloadStopped when nobody wants it any more."""
        if self.stop.is_set():
            raise DownloadStopped(name=self.name)
        self.status, self.done_bytes, self.total_bytes = "downloading", done_bytes, total_bytes

    def entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "model": self.name,
            "status": self.status,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
        }
        if self.model is not None:
            entry |= {"installed": str(self.model), "size_bytes": self.model.size_bytes}
        if self.error is not None:
            entry["error"] = {"code": self.error.code, "message": str(self.error), "hint": self.error.hint}
        return entry


class Pulls:
    """All downloads of this server, and their routes."""

    def __init__(self, fetch: Fetch, max_body_bytes: int) -> None:
        self._fetch = fetch
        self._max_body_bytes = max_body_bytes
        self._running: dict[str, Pull] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def list(self, request: Request) -> Response:
        """GET: what is being fetched now."""
        return JSONResponse({"pulls": [running.entry() for running in self._running.values()]})

    async def start(self, request: Request) -> Response:
        """POST {"model": NAME, "stream": true}: lines of JSON until it is there; with "stream": false one answer at the end.

        Raises what `models.hub.pull` raises, as long as nothing was sent.
        """
        name, stream = _wanted(await read_json(request, self._max_body_bytes))
        pull = self._running.get(name) or self._begin(name)
        if stream:
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(self._lines(pull), media_type="application/x-ndjson", headers=headers)
        await pull.ended.wait()
        if pull.error is not None:
            raise pull.error
        return JSONResponse(pull.entry())

    async def cancel(self, request: Request) -> Response:
        """DELETE ?model=NAME: stop fetching; what has arrived is kept for the next time."""
        name = request.query_params.get("model", "")
        pull = self._running.get(name)
        if pull is None:
            raise InvalidRequest(reason=f"'{name[:200]}' is not being fetched", param="model")
        pull.stop.set()
        await pull.ended.wait()
        return JSONResponse(pull.entry())

    async def close(self) -> None:
        """Stop all; they can be gone on with after the next start."""
        for running in self._running.values():
            running.stop.set()
        await asyncio.gather(*self._tasks)

    def _begin(self, name: str) -> Pull:
        pull = self._running[name] = Pull(name)
        task = asyncio.create_task(self._run(pull))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return pull

    async def _run(self, pull: Pull) -> None:
        try:
            pull.model = await asyncio.to_thread(self._fetch, pull.name, pull.report)
            pull.status = "done"
        except LocalfastError as error:
            pull.status, pull.error = "failed", error
        except Exception:  # whatever it was, those who wait must learn that it has ended
            log.exception("the download of %s failed", pull.name)
            pull.status, pull.error = "failed", InternalError()
        finally:
            del self._running[pull.name]
            pull.ended.set()

    async def _lines(self, pull: Pull) -> AsyncIterator[bytes]:
        told: dict[str, Any] = {}
        while not pull.ended.is_set():
            if (entry := pull.entry()) != told:
                told = entry
                yield msgspec.json.encode(entry) + b"\n"
            try:
                async with asyncio.timeout(1 / TOLD_PER_S):
                    await pull.ended.wait()
            except TimeoutError:
                continue
        yield msgspec.json.encode(pull.entry()) + b"\n"


def _wanted(body: Any) -> tuple[str, bool]:
    name = body.get("model") if isinstance(body, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise InvalidRequest(reason="'model' must name what to fetch", param="model")
    stream = body.get("stream", True)
    if not isinstance(stream, bool):
        raise InvalidRequest(reason="'stream' must be true or false", param="stream")
    wanted = parse_name(name.strip())
    if wanted.kind == "path":  # for the owner at the keyboard: a request must not look around on this disk
        raise InvalidRequest(reason="'model' must be a name of the catalog or a repository, not a path", param="model")
    return str(wanted), stream


def fetcher(settings: Settings) -> Fetch:
    """The real thing: from the hub, in the quant that suits this machine unless the name says one."""

    def fetch(name: str, progress: Progress) -> InstalledModel:
        def tell(sentences: Sequence[str]) -> None:
            for sentence in sentences:
                log.info("%s: %s", name, sentence)

        return pull(name, settings, progress, chooser(Fitter(settings), wishes(settings), tell))

    return fetch
