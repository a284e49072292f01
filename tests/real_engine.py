"""The real engine process on the real starter model, through the client the server uses: what tests of it share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from localfast.core import Accepted, Event, Failed, Finished, GenerateRequest, Sampling, TextDelta
from localfast.engine.client import EventStream, ProcessEngine
from localfast.engine.messages import EngineConfig
from localfast.errors import LocalfastError

GREEDY = Sampling(temperature=0)
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 150  # about 1,500 tokens


def starter_config(starter_path: Path, tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        model="starter",
        path=str(starter_path),
        gpu_layers=0,
        context_tokens=2048,
        cells=4096,
        slots=4,
        batch_tokens=128,
        ubatch_tokens=128,
        threads=2,
        kv_type="f16",
        log_path=str(tmp_path / "engine.log"),
    )


@contextlib.asynccontextmanager
async def running(config: EngineConfig, max_queue: int = 64) -> AsyncIterator[ProcessEngine]:
    engine = ProcessEngine(config, max_queue)
    await engine.start(60)
    try:
        yield engine
    finally:
        await engine.stop(10)


def with_engine(config: EngineConfig, test: Callable[[ProcessEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        async with running(config) as engine:
            await test(engine)

    asyncio.run(run())


def ask(prompt: str | tuple[int, ...], max_tokens: int | None = 16, **options: object) -> GenerateRequest:
    request = GenerateRequest(model="starter", prompts=(prompt,), max_tokens=max_tokens, sampling=GREEDY)
    return replace(request, **options)  # type: ignore[arg-type]


async def events_of(engine: ProcessEngine, request: GenerateRequest) -> list[Event]:
    events = [event async for event in engine.generate(request)]
    assert isinstance(events[0], Accepted | Failed)
    assert sum(isinstance(event, Finished | Failed) for event in events) == 1
    return events


async def text_of(engine: ProcessEngine, request: GenerateRequest, index: int = 0) -> str:
    return joined(await events_of(engine, request), index)


def joined(events: list[Event], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.index == index)


def failure(events: list[Event]) -> LocalfastError:
    assert isinstance(events[-1], Failed)
    return events[-1].error


def finished(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished), events[-1]
    return events[-1]


async def first_text(stream: EventStream) -> None:
    while not isinstance(await anext(stream), TextDelta):
        pass


async def settled(engine: ProcessEngine) -> None:
    """Until the engine has confirmed the end of everything."""
    while engine.open_requests:
        await asyncio.sleep(0)
