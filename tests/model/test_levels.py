"""What the engine keeps of prompts beyond its slots: in RAM, on disk, across a restart, and what a miss says."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from real_engine import (
    ask,
    events_of,
    failure,
    finished,
    first_text,
    joined,
    running,
    settled,
    starter_config,
    text_of,
    with_engine,
)

from localfast.engine.client import ProcessEngine
from localfast.engine.messages import EngineConfig
from localfast.errors import Superseded

pytestmark = pytest.mark.model
STORY = "A fox went out to see the river, and the river told it a story of stones and rain. " * 12
OTHER = "Seven old clocks stood in the tower, and none of them agreed with any other about noon. " * 12


@pytest.fixture
def config(starter_path: Path, tmp_path: Path) -> EngineConfig:
    return replace(
        starter_config(starter_path, tmp_path),
        cache_ram_bytes=200 * 2**20,
        cache_disk_bytes=200 * 2**20,
        cache_folder=str(tmp_path / "states"),
        cache_key="starter",
    )


async def cached_tokens(engine: ProcessEngine, prompt: str) -> int:
    return finished(await events_of(engine, ask(prompt, 4))).usage.cached_tokens


def test_levels_conversation_that_lost_its_slot_comes_back_from_ram_with_the_same_text(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        before = await text_of(engine, ask(STORY, 24))
        await text_of(engine, ask(OTHER, 4))
        events = await events_of(engine, ask(STORY, 24))
        assert finished(events).usage.cached_tokens == finished(events).usage.prompt_tokens - 1
        assert engine.stats.restored == 1
        assert joined(events) == before

    with_engine(replace(config, slots=1, cache_disk_bytes=0), test)


def test_levels_conversation_survives_the_end_of_the_engine(config: EngineConfig) -> None:
    async def run() -> None:
        async with running(config) as engine:
            before = await text_of(engine, ask(STORY, 24))
        async with running(config) as engine:
            events = await events_of(engine, ask(STORY, 24))
            assert finished(events).usage.cached_tokens == finished(events).usage.prompt_tokens - 1
            assert joined(events) == before
        async with running(replace(config, kv_type="q8_0")) as engine:
            assert await cached_tokens(engine, STORY) == 0, "the state of another kind of cache is of no use"

    asyncio.run(run())


def test_levels_conversation_survives_a_crash_once_the_engine_was_idle(config: EngineConfig) -> None:
    async def run() -> None:
        async with running(config) as engine:
            await text_of(engine, ask(STORY, 4))
            while (await engine.describe_cache()).disk.entries == 0:
                pass
            os.kill(engine.facts.pid, getattr(signal, "SIGKILL", signal.SIGTERM))
            while engine.alive:
                await asyncio.sleep(0)
        async with running(config) as engine:
            assert await cached_tokens(engine, STORY) > 200

    asyncio.run(run())


def test_levels_damaged_file_is_a_miss_and_no_error(config: EngineConfig) -> None:
    async def run() -> None:
        async with running(config) as engine:
            before = await text_of(engine, ask(STORY, 8))
        (file,) = Path(config.cache_folder).rglob("*.state")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)
        async with running(config) as engine:
            events = await events_of(engine, ask(STORY, 8))
            assert finished(events).usage.cached_tokens == 0
            assert joined(events) == before

    asyncio.run(run())


def test_levels_miss_names_the_first_token_that_differs(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        await text_of(engine, ask("The red fox jumps over the lazy dog", 4))
        miss = finished(await events_of(engine, ask("The red fox sleep beside the lazy dog", 4))).cache_miss
        assert miss is not None
        assert (miss.reason, miss.cached_text, miss.prompt_text) == ("differs", " jumps", " sleep")
        assert finished(await events_of(engine, ask("The red fox sleep beside the lazy dog", 4))).cache_miss is None

    with_engine(config, test)


def test_levels_report_counts_what_is_kept(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        tokens = finished(await events_of(engine, ask(STORY, 4))).usage.prompt_tokens
        report = await engine.describe_cache()
        assert report.used_cells == sum(slot.tokens for slot in report.slots) >= tokens
        assert report.ram.entries == 0 and report.parked == 0
        await text_of(engine, ask(OTHER, 4))
        report = await engine.describe_cache()
        assert report.ram.entries == 1 and report.ram.used_bytes > 10_000 * tokens

    with_engine(replace(config, slots=1), test)


def test_levels_parked_sequence_says_what_it_would_have_said(config: EngineConfig) -> None:
    """Both run alone in every batch, so the numbers are the same to the last bit."""

    async def test(engine: ProcessEngine) -> None:
        job = ask("Once upon a time", 120, ignore_eos=True, request_class="batch")
        undisturbed = await text_of(engine, job)
        stream = engine.generate(job)
        for _ in range(30):
            await first_text(stream)
        await text_of(engine, ask("Two and two is", 8, request_class="interactive"))
        rest = [event async for event in stream]
        assert engine.stats.parked >= 1
        assert undisturbed.endswith(joined(rest)) and joined(rest)

    with_engine(replace(config, slots=1, speculation=False), test)


def test_levels_newer_completion_of_a_file_ends_the_older_one(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        older = engine.generate(ask(STORY, 500, request_class="fim", replaces="editor a.py", ignore_eos=True))
        other = engine.generate(ask("x = ", 60, request_class="fim", replaces="editor b.py", ignore_eos=True))
        queued = [engine.generate(ask(OTHER, 9, request_class="fim", replaces="editor a.py")) for _ in range(3)]
        endings = [[event async for event in stream] for stream in (older, *queued)]
        assert [isinstance(failure(events), Superseded) for events in endings[:-1]] == [True] * 3
        assert finished(endings[-1]).usage.completion_tokens == 9
        assert finished([event async for event in other]).usage.completion_tokens == 60, "another file is another matter"

    with_engine(replace(config, slots=2), test)


def test_levels_prompt_that_takes_too_long_ends_empty_and_serves_the_next_attempt(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        events = await events_of(engine, ask(STORY, 50, prompt_time_s=0.05))
        assert joined(events) == "" and finished(events).usage.completion_tokens == 0
        await settled(engine)
        assert await cached_tokens(engine, STORY) > 0

    with_engine(replace(config, max_stall_s=0.02), test)


def test_levels_answer_that_takes_too_long_ends_at_a_line(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        events = await events_of(engine, ask("1\n2\n3\n4\n5\n6\n", 400, generate_time_s=0.05, ignore_eos=True))
        assert finished(events).usage.completion_tokens < 400 and "\n" in joined(events)

    with_engine(config, test)
