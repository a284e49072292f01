"""Every kind of memory (full, sliding window, recurrent, hybrid) through the real engine: whatever is shared, kept, restored or
guessed, the text is the one of a request that nobody helped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from real_engine import ask, events_of, finished, joined, running, text_of
from tiny_models import EXACT_KV_TYPE, KINDS, Kind, tiny_model

from localfast.core import GenerateRequest
from localfast.engine.client import ProcessEngine
from localfast.engine.messages import EngineConfig

pytestmark = pytest.mark.model
COMMON = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 6
PROMPTS = [COMMON + ending for ending in ("Then it rains.", "Nobody saw it.", "A bell rings twice.", "The end is near.")]


def config(kind: Kind, folder: Path) -> EngineConfig:
    path = tiny_model(kind, folder)
    return EngineConfig(
        model=path.stem,
        path=str(path),
        gpu_layers=0,
        context_tokens=1024,
        cells=2048,
        slots=4,
        batch_tokens=64,
        ubatch_tokens=64,
        threads=1,
        kv_type=EXACT_KV_TYPE,
        cache_ram_bytes=64 * 2**20,
        log_path=str(folder / f"{kind}.log"),
    )


def question(prompt: str, **options: object) -> GenerateRequest:
    return ask(prompt, 24, ignore_eos=True, **options)


def with_kind(config: EngineConfig, test: Callable[[ProcessEngine, list[str]], Awaitable[None]]) -> None:
    """`test` also gets what each of PROMPTS is answered by an engine that keeps and guesses nothing."""

    async def run() -> None:
        alone = []
        for prompt in PROMPTS:
            async with running(replace(config, cache_ram_bytes=0, speculation=False)) as engine:
                alone.append(await text_of(engine, question(prompt)))
        async with running(config) as engine:
            await test(engine, alone)

    asyncio.run(run())


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_shared_kept_and_restored_prompts_say_the_same(kind: Kind, tmp_path: Path) -> None:
    async def test(engine: ProcessEngine, alone: list[str]) -> None:
        together = await asyncio.gather(*(events_of(engine, question(prompt)) for prompt in PROMPTS))
        assert [joined(events) for events in together] == alone
        assert sum(finished(events).usage.cached_tokens > 100 for events in together) == 3, "three of four shared the first one's"
        again = [await events_of(engine, question(prompt)) for prompt in PROMPTS]
        assert [joined(events) for events in again] == alone
        assert all(finished(events).usage.cached_tokens > 100 for events in again)

    with_kind(config(kind, tmp_path), test)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_conversation_goes_on_where_it_was(kind: Kind, tmp_path: Path) -> None:
    async def test(engine: ProcessEngine, alone: list[str]) -> None:
        first = await text_of(engine, question(PROMPTS[0]))
        assert first == alone[0]
        for prompt in PROMPTS[1:]:
            await text_of(engine, question(prompt + "x" * 100))
        events = await events_of(engine, question(PROMPTS[0] + first + " And then?"))
        assert finished(events).usage.cached_tokens > 100

    with_kind(replace(config(kind, tmp_path), slots=1), test)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_too_few_cells_park_and_say_the_same(kind: Kind, tmp_path: Path) -> None:
    async def test(engine: ProcessEngine, alone: list[str]) -> None:
        job = engine.generate(question(PROMPTS[0], request_class="batch"))
        others = [engine.generate(question(prompt, request_class="interactive")) for prompt in PROMPTS[1:]]
        texts = [joined([event async for event in stream]) for stream in (job, *others)]
        assert texts == alone

    few = replace(config(kind, tmp_path), cells=512, context_tokens=512)
    with_kind(few, test)
