"""From events to an HTTP answer, streamed or whole, and the one place that closes an event stream.

Starlette cancels a response on disconnect but does not close its generator, so `Answer` owns the close: whatever ends it (the
last event, a client that hangs up, a cancelled task), the engine is told, and the slot is free within one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localfast.core import FINAL_EVENTS, Event, Failed, GenerateRequest
from localfast.dialects import Call, Encoder, Head, json_bytes
from localfast.engine.client import EventStream
from localfast.errors import Cancelled, InternalError, LocalfastError
from localfast.metrics import RequestObserver

log = logging.getLogger("localfast")

STREAM_HEADERS = {"cache-control": "no-cache, no-store", "x-accel-buffering": "no"}


class OpenModel(Protocol):
    """A loaded model for as long as somebody uses it."""

    name: str

    async def generate(self, request: GenerateRequest) -> EventStream: ...


class Lease(Protocol):
    """Where an Answer gets its model from: loads it if it must, and keeps it loaded meanwhile."""

    def __call__(self, name: str) -> contextlib.AbstractAsyncContextManager[OpenModel]: ...


class Answer(Response):
    """The answer to one parsed call. Raises the request's error as long as nothing was sent, so that it gets its real status."""

    def __init__(self, call: Call, lease: Lease, observer: RequestObserver, heartbeat_s: float) -> None:
        self._call = call
        self._lease = lease
        self._observer = observer
        self._heartbeat_s = heartbeat_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_disconnect(receive, self._run(send))
        except LocalfastError as error:
            self._observer.close(error.code)
            raise
        finally:
            self._observer.close(Cancelled.code)  # unless its end is known already

    async def _run(self, send: Send) -> None:
        async with self._lease(self._call.request.model) as model:
            self._observer.model = model.name
            head = Head(id=uuid.uuid4().hex, created=int(time.time()), model=model.name)
            async with contextlib.aclosing(await model.generate(self._call.request)) as events:
                # The first event says whether the prompt fits; only then is a stream's 200 a promise we can keep.
                first = await anext(events)
                self._observer.feed(first)
                if isinstance(first, Failed):
                    raise first.error
                if self._call.stream:
                    await self._send_stream(send, head, first, events)
                else:
                    await self._send_whole(send, head, first, events)

    async def _send_whole(self, send: Send, head: Head, first: Event, stream: EventStream) -> None:
        events = [first]
        async for event in stream:
            self._observer.feed(event)
            events.append(event)
        if isinstance(events[-1], Failed):
            raise events[-1].error
        body = json_bytes(self._call.fold(head, events))
        await self._start(send, "application/json", {"content-length": str(len(body)), "cache-control": "no-store"})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send, head: Head, first: Event, stream: EventStream) -> None:
        encoder = self._call.encoder(head)
        await self._start(send, encoder.content_type, STREAM_HEADERS)
        await send({"type": "http.response.body", "body": encoder.feed(first), "more_body": True})
        async for frame in self._frames(encoder, stream):
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _frames(self, encoder: Encoder, stream: EventStream) -> AsyncIterator[bytes]:
        """What to write next: all that one step sent in one piece, or a heartbeat when nothing came."""
        ended = False
        while not ended:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    event = await anext(stream)
            except TimeoutError:
                yield encoder.heartbeat
                continue
            events = [event, *stream.ready()]
            for event in events:
                self._observer.feed(event)
            ended = isinstance(events[-1], FINAL_EVENTS)
            if frame := self._encode(encoder, events):
                yield frame

    def _encode(self, encoder: Encoder, events: list[Event]) -> bytes:
        try:
            return b"".join(encoder.feed(event) for event in events)
        except Exception:
            # The status line is long gone: the stream itself must say that it failed.
            log.exception("a stream could not be encoded")
            return encoder.feed(Failed(InternalError()))

    async def _start(self, send: Send, content_type: str, headers: dict[str, str]) -> None:
        headers = {"content-type": content_type, **headers}
        if ignored := self._call.request.ignored:
            headers["x-localfast-ignored"] = ", ".join(name for name in ignored if name.isascii() and name.isprintable())
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or until the client goes away: then it is cancelled, and nobody is left to be told."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.wait({task, watcher})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
