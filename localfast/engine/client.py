"""What the rest of the server sees of an engine: submit a request, read its events, close the stream to abort it.

Server process, event loop's thread. Every request ends in exactly one Finished or Failed, whatever happens to the process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Protocol

from localfast import errors
from localfast.core import FINAL_EVENTS, Event, Failed, GenerateRequest, RequestClass
from localfast.engine import messages
from localfast.engine.messages import CacheReport, EngineConfig, EngineFacts, EngineStats
from localfast.engine.supervisor import EngineProcess


class EventStream:
    """The events of one request, as an asynchronous iterator that ends after the last word.

    Whoever stops reading calls `aclose()`: it aborts the request if it has not ended. Closing twice
    or after the end does nothing.
    """

    def __init__(self, request_id: int, engine: ProcessEngine) -> None:
        self._request_id = request_id
        self._engine = engine
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._ended = False
        self._closed = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        """The next event; safe to cancel while it waits, nothing is lost."""
        if self._ended or self._closed:
            raise StopAsyncIteration
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._ended = isinstance(event, FINAL_EVENTS)
        return event

    def ready(self) -> list[Event]:
        """Events that have already arrived, without waiting: what one step sent can be written in one piece."""
        events = list(self._events)
        self._events.clear()
        self._ended = self._ended or any(isinstance(event, FINAL_EVENTS) for event in events)
        return events

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.abandon(self._request_id)

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()


class Engine(Protocol):
    """One loaded model."""

    facts: EngineFacts
    stats: EngineStats

    def generate(self, request: GenerateRequest) -> EventStream:
        """Submit a request with rendered prompts. Raises QueueFull, EngineDied or ShuttingDown before anything is sent."""
        ...

    async def stop(self, grace_s: float) -> None: ...

    async def describe_cache(self) -> CacheReport:
        """What the engine keeps of prompts. Raises EngineDied."""
        ...

    @property
    def alive(self) -> bool: ...

    @property
    def open_requests(self) -> int: ...


class ProcessEngine:
    """An Engine in a process of its own."""

    facts: EngineFacts

    def __init__(self, config: EngineConfig, max_queue: int) -> None:
        self.config = config
        self.stats = EngineStats()
        self._max_open = config.slots + max_queue
        self._process = EngineProcess(config, self._on_frame, self._on_death)
        self._streams: dict[int, EventStream] = {}
        self._abandoned: set[int] = set()
        self._open: dict[int, RequestClass] = {}
        self._reports: dict[int, asyncio.Future[CacheReport]] = {}
        self._numbers = itertools.count(1)
        self._refuse: errors.EngineError | None = None

    async def start(self, timeout_s: float) -> None:
        """Load the model. Raises LoadFailed or EngineMissing."""
        self.facts = await self._process.start(timeout_s)

    def generate(self, request: GenerateRequest) -> EventStream:
        if self._refuse is not None:
            raise self._refuse
        same_class = sum(open_class == request.request_class for open_class in self._open.values())
        if same_class >= self._max_open:
            raise errors.QueueFull(waiting=same_class - self.config.slots, request_class=request.request_class)
        request_id = next(self._numbers)
        self._process.send(messages.Submit(request_id, request))  # first: a request that cannot be sent is not open
        self._open[request_id] = request.request_class
        stream = self._streams[request_id] = EventStream(request_id, self)
        return stream

    def abandon(self, request_id: int) -> None:
        """The reader of a request is gone; it stays counted until the engine confirms that its slot is free."""
        if self._streams.pop(request_id, None) is not None:
            self._abandoned.add(request_id)
            self._process.send(messages.Cancel(request_id))

    async def stop(self, grace_s: float) -> None:
        self._refuse = self._refuse or errors.ShuttingDown()
        await self._process.stop(grace_s)

    @property
    def alive(self) -> bool:
        return self._refuse is None

    @property
    def open_requests(self) -> int:
        return len(self._open)

    async def describe_cache(self) -> CacheReport:
        if self._refuse is not None:
            raise self._refuse
        number = next(self._numbers)
        report: asyncio.Future[CacheReport] = asyncio.get_running_loop().create_future()
        self._reports[number] = report
        self._process.send(messages.Describe(number))
        return await report

    def _on_frame(self, frame: messages.Step | CacheReport) -> None:
        if isinstance(frame, CacheReport):
            report = self._reports.pop(frame.number, None)
            if report is not None and not report.done():
                report.set_result(frame)
        else:
            self._on_step(frame)

    def _on_step(self, step: messages.Step) -> None:
        if step.stats is not None:
            self.stats = step.stats
        for request_id, event in step.events():
            self._deliver(request_id, event)

    def _deliver(self, request_id: int, event: Event) -> None:
        final = isinstance(event, FINAL_EVENTS)
        if final:
            self._abandoned.discard(request_id)
            self._open.pop(request_id, None)
        stream = self._streams.pop(request_id, None) if final else self._streams.get(request_id)
        if stream is not None:
            stream.put(event)

    def _on_death(self, reason: str) -> None:
        died = errors.EngineDied(model=self.config.model, reason=reason)
        error = self._refuse = self._refuse or died
        self.stats = EngineStats()
        self._abandoned.clear()
        for report in self._reports.values():
            if not report.done():
                report.set_exception(error)
        self._reports.clear()
        for request_id in list(self._streams):
            self._deliver(request_id, Failed(error))
        self._open.clear()
