"""The real engine process on the real starter model, through the client the server uses."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from real_engine import (
    GREEDY,
    LONG_PROMPT,
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

from localfast.core import Accepted, Failed, Finished, GenerateRequest, Sampling, SequenceFinished, TextDelta
from localfast.engine.client import ProcessEngine
from localfast.engine.messages import EngineConfig
from localfast.errors import (
    ContextLengthExceeded,
    EngineDied,
    InvalidRequest,
    LoadFailed,
    LocalfastError,
    QueueFull,
    ShuttingDown,
)

pytestmark = pytest.mark.model


@pytest.fixture
def config(starter_path: Path, tmp_path: Path) -> EngineConfig:
    return starter_config(starter_path, tmp_path)


def test_engine_answers_sensibly(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        events = await events_of(engine, ask("The capital of France is"))
        assert "Paris" in joined(events)
        usage = finished(events).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, 16)
        assert [event.reason for event in events if isinstance(event, SequenceFinished)] == ["length"]
        facts = engine.facts
        assert (facts.layers, facts.vocabulary, facts.context_tokens, facts.slots) == (31, 49152, 2048, 4)
        assert {use for _, use, _ in facts.buffers} >= {"model", "KV", "compute"}

    with_engine(config, test)


def test_engine_requests_at_once_share_batches_and_stay_apart(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        prompts = ["The capital of France is", "The capital of Germany is", "One, two, three,", "def add(a, b):"]
        alone = [await text_of(engine, ask(prompt)) for prompt in prompts]
        before = engine.stats
        together = await asyncio.gather(*(text_of(engine, ask(prompt)) for prompt in prompts))
        calls = engine.stats.decode_calls - before.decode_calls
        tokens = engine.stats.generated_tokens - before.generated_tokens
        assert tokens == 64
        assert calls < tokens / 2, f"{calls} decode calls for {tokens} tokens: they did not share batches"
        assert [text[:8] for text in together] == [text[:8] for text in alone]

    with_engine(config, test)


def test_engine_more_requests_than_slots_all_finish(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        answers = await asyncio.gather(*(events_of(engine, ask(f"Number {n} is", 8, ignore_eos=True)) for n in range(12)))
        assert all(finished(events).usage.completion_tokens == 8 for events in answers)

    with_engine(config, test)


def test_engine_prefix_of_an_earlier_request_is_not_computed_again(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        prompt = "A long story about a small fox who went to sea in a very small boat"
        cold = await events_of(engine, ask(prompt))
        warm = await events_of(engine, ask(prompt + joined(cold) + " and"))
        assert finished(cold).usage.cached_tokens == 0
        assert finished(warm).usage.cached_tokens >= finished(cold).usage.prompt_tokens
        again = await events_of(engine, ask(prompt))
        assert finished(again).usage.cached_tokens == finished(again).usage.prompt_tokens - 1
        assert joined(again) == joined(cold), "a reused prefix must not change the answer"

    with_engine(config, test)


def test_engine_requests_at_once_compute_a_common_beginning_once(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        common = "The quick brown fox jumps over the lazy dog. " * 30
        prompts = [common + question for question in ("The capital of France is", "1, 2, 3, 4,", "The capital of Italy is")]
        answers = await asyncio.gather(*(events_of(engine, ask(prompt, 8, ignore_eos=True)) for prompt in prompts))
        usages = [finished(events).usage for events in answers]
        assert [usage.cached_tokens > 290 for usage in usages] == [False, True, True]
        assert engine.stats.batched_tokens < usages[0].prompt_tokens + 100
        alone = [await text_of(engine, ask(prompt, 8, ignore_eos=True)) for prompt in prompts]
        assert [joined(events)[:8] for events in answers] == [text[:8] for text in alone]

    with_engine(config, test)


@pytest.mark.parametrize("text", ["🦊🚀 emoji 👩‍👩‍👧 stay whole", "中文字符不会被切开", "naïve façade — “quotes”"])
def test_engine_characters_split_over_tokens_arrive_whole(config: EngineConfig, text: str) -> None:
    async def test(engine: ProcessEngine) -> None:
        line = f"{text}\n"
        events = await events_of(engine, ask(line * 6, 60, stop=("\n\n",)))
        pieces = [event.text for event in events if isinstance(event, TextDelta)]
        assert text in "".join(pieces), "the model repeats what it was shown six times"
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        assert len(pieces) < finished(events).usage.completion_tokens, "some characters took several tokens"

    with_engine(config, test)


def test_engine_stop_string_over_token_borders_is_cut_out(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        counting = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"
        plain = await text_of(engine, ask(counting, 40))
        assert "15, 16" in plain
        events = await events_of(engine, ask(counting, 40, stop=("5, 16", "nowhere")))
        assert joined(events) == plain[: plain.index("5, 16")]
        assert SequenceFinished(0, "stop") in events

    with_engine(config, test)


def test_engine_seed_makes_sampling_repeatable(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        def seeded(seed: int | None) -> GenerateRequest:
            return ask("My favourite animal is", 24, sampling=Sampling(temperature=1.5, seed=seed))

        texts = [await text_of(engine, seeded(seed)) for seed in (7, 7, 8)]
        assert texts[0] == texts[1] != texts[2]
        assert await text_of(engine, seeded(None)) != await text_of(engine, seeded(None))

    with_engine(config, test)


def test_engine_choices_share_the_prompt_and_differ(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        request = ask("Once upon a time there was", 12, n=3, sampling=Sampling(temperature=1.5, seed=1))
        events = await events_of(engine, request)
        assert len({joined(events, index) for index in range(3)}) == 3
        usage = finished(events).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (6, 36)
        assert engine.stats.batched_tokens < 3 * 6 + 36

    with_engine(config, test)


def test_engine_several_prompts_are_answered_in_their_order(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        request = replace(ask("x", 6), prompts=("The capital of France is", "The capital of Italy is"))
        events = await events_of(engine, request)
        assert "Paris" in joined(events, 0) and "Rome" in joined(events, 1)

    with_engine(config, test)


def test_engine_logprobs_and_echo_fit_the_text(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        prompt = "The capital of France is Paris and the capital of Italy is"
        events = await events_of(engine, ask(prompt, 4, logprobs=3, echo=True))
        entries = [entry for event in events if isinstance(event, TextDelta) for entry in event.logprobs]
        assert joined(events).startswith(prompt)
        assert "".join(entry.text for entry in entries) == joined(events)
        assert entries[0].logprob is None and all(entry.logprob is not None and entry.logprob <= 0 for entry in entries[1:])
        paris = next(entry for entry in entries if entry.text == " Paris")
        assert paris.logprob is not None and paris.logprob > -1.5, "the model knows its capitals"
        for entry in entries[-4:]:
            assert entry.top[0][0] == entry.text, "greedy takes the most likely token"
            assert [value for *_, value in entry.top] == sorted((value for *_, value in entry.top), reverse=True)

    with_engine(config, test)


def test_engine_logit_bias_forbids_and_forces(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        comma, counting = 28, "1, 2, 3, 4, 5, 6,"
        forced = await text_of(engine, ask(counting, 3, sampling=replace(GREEDY, logit_bias=((comma, 100.0),))))
        forbidden = await text_of(engine, ask(counting, 9, sampling=replace(GREEDY, logit_bias=((comma, -100.0),))))
        assert forced == ",,,"
        assert "," not in forbidden and "," in await text_of(engine, ask(counting, 9))

    with_engine(config, test)


def test_engine_penalties_break_repetition(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        prompt = "ha ha ha ha ha ha ha ha ha ha ha ha"
        plain = await text_of(engine, ask(prompt, 24))
        assert plain.count(" ha") > 15
        for penalty in ({"repeat_penalty": 1.8}, {"frequency_penalty": 2.0}):
            text = await text_of(engine, ask(prompt, 24, sampling=replace(GREEDY, **penalty)))
            assert text.count(" ha") < plain.count(" ha")

    with_engine(config, test)


def test_engine_context_that_is_full_ends_with_length(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        events = await events_of(engine, ask("ha ha ha ha ha ha ha", None, ignore_eos=True))
        usage = finished(events).usage
        assert usage.prompt_tokens + usage.completion_tokens == 256
        assert SequenceFinished(0, "length") in events

    with_engine(replace(config, context_tokens=256), test)


def test_engine_cells_that_run_out_park_the_youngest_and_lose_nothing(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        prompts = [f"{word} {word} {word} {word} {word}" for word in ("ha", "no", "so", "go")]
        alone = [await text_of(engine, ask(prompt, 150, ignore_eos=True)) for prompt in prompts]
        together = await asyncio.gather(*(events_of(engine, ask(prompt, 150, ignore_eos=True)) for prompt in prompts))
        assert engine.stats.parked > 0, "four times 155 tokens do not fit into 256 cells"
        assert all(finished(events).usage.completion_tokens == 150 for events in together)
        assert [joined(events)[:30] for events in together] == [text[:30] for text in alone]

    with_engine(replace(config, context_tokens=256, cells=256), test)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [(LONG_PROMPT * 2, ContextLengthExceeded), ((1, 2, 49152), InvalidRequest), ((-1,), InvalidRequest)],
)
def test_engine_impossible_prompt_fails_at_once(config: EngineConfig, prompt: str, kind: type[LocalfastError]) -> None:
    async def test(engine: ProcessEngine) -> None:
        error = failure(await events_of(engine, ask(prompt)))
        assert type(error) is kind
        if isinstance(error, ContextLengthExceeded):
            assert error.prompt_tokens > error.context_tokens == 2048
        assert engine.stats.decode_calls == 0

    with_engine(config, test)


def test_engine_closing_a_stream_frees_its_slot_within_one_step(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        for slots_taken in range(3):  # while it generates
            stream = engine.generate(ask("Once upon a time", None, ignore_eos=True))
            await first_text(stream)
            await stream.aclose()
            seen = engine.stats.decode_calls
            await settled(engine)
            assert engine.stats.running == 0, slots_taken
            assert engine.stats.decode_calls - seen <= 3, "steps that were already on their way, and no more"
        stream = engine.generate(ask(LONG_PROMPT))  # in the middle of its prompt
        assert isinstance(await anext(stream), Accepted)
        before = engine.stats.batched_tokens
        await stream.aclose()
        await settled(engine)
        assert engine.stats.batched_tokens - before < 1000, "the prompt was not computed to its end"
        assert await text_of(engine, ask("The capital of France is", 4))

    with_engine(config, test)


def test_engine_closing_a_queued_stream_takes_it_out_of_the_queue(config: EngineConfig) -> None:
    async def test(engine: ProcessEngine) -> None:
        busy = engine.generate(ask("Once upon a time", None, ignore_eos=True))
        await first_text(busy)
        queued = engine.generate(ask("Never to be answered"))
        assert isinstance(await anext(queued), Accepted)
        await queued.aclose()
        while engine.open_requests > 1:
            await anext(busy)
        assert (engine.stats.running, engine.stats.waiting) == (1, 0)
        await busy.aclose()
        await settled(engine)

    with_engine(replace(config, slots=1), test)


def test_engine_queue_is_bounded(config: EngineConfig) -> None:
    async def run() -> None:
        async with running(replace(config, slots=1), max_queue=1) as engine:
            streams = [engine.generate(ask("a", 4)) for _ in range(2)]
            with pytest.raises(QueueFull) as caught:
                engine.generate(ask("b"))
            assert caught.value.waiting == 1 and caught.value.retry_after_s
            for stream in streams:
                assert isinstance([event async for event in stream][-1], Finished)
            assert await text_of(engine, ask("The capital of France is", 4))

    asyncio.run(run())


def test_engine_killed_ends_every_stream_with_one_error(config: EngineConfig) -> None:
    async def run() -> None:
        engine = ProcessEngine(config, 64)
        await engine.start(60)
        streams = [engine.generate(ask("Once upon a time", None, ignore_eos=True)) for _ in range(6)]
        await first_text(streams[0])
        os.kill(engine.facts.pid, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        for stream in streams:
            last = [event async for event in stream][-1]
            assert isinstance(last, Failed) and isinstance(last.error, EngineDied)
        assert not engine.alive and engine.open_requests == 0
        with pytest.raises(EngineDied):
            engine.generate(ask("x"))
        assert not psutil.pid_exists(engine.facts.pid)

    asyncio.run(run())


def test_engine_stop_ends_every_stream_and_the_process(config: EngineConfig) -> None:
    async def run() -> None:
        engine = ProcessEngine(config, 64)
        await engine.start(60)
        streams = [engine.generate(ask("Once upon a time", None, ignore_eos=True)) for _ in range(5)]
        await first_text(streams[0])
        await engine.stop(10)
        for stream in streams:
            last = [event async for event in stream][-1]
            assert isinstance(last, Failed) and isinstance(last.error, ShuttingDown)
        assert not psutil.pid_exists(engine.facts.pid)

    asyncio.run(run())


def test_engine_file_that_is_no_model_says_so(config: EngineConfig, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")

    async def run() -> None:
        with pytest.raises(LoadFailed) as caught:
            await ProcessEngine(replace(config, path=str(broken)), 64).start(60)
        assert caught.value.model == "starter" and caught.value.reason

    asyncio.run(run())


def test_engine_that_is_not_ready_in_time_is_ended(config: EngineConfig) -> None:
    async def run() -> None:
        before = set(psutil.Process().children(recursive=True))
        with pytest.raises(LoadFailed, match="load_timeout_s"):
            await ProcessEngine(config, 64).start(0)
        left = set(psutil.Process().children(recursive=True)) - before
        assert not [child for child in left if "resource_tracker" not in " ".join(child.cmdline())]

    asyncio.run(run())


EDIT = """def total(items):
    result = 0
    for item in items:
        result = result + item.price * item.count
    return result
"""


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7, seed=7)])
def test_engine_guesses_change_nothing_but_the_number_of_steps(config: EngineConfig, sampling: Sampling) -> None:
    """With a cache type whose sums hardly depend on the shape of the batch: f16 is added up in f16 on a CPU, and near ties may
    flip, as they do beside any other request."""
    requests = [ask(f"{EDIT}\n{EDIT}\n{EDIT[:number]}", 90, sampling=sampling, ignore_eos=True) for number in (30, 60, 90)]
    texts: dict[bool, list[str]] = {}
    steps: dict[bool, int] = {}

    def test_with(speculation: bool) -> None:
        async def test(engine: ProcessEngine) -> None:
            texts[speculation] = [await text_of(engine, request) for request in requests]
            steps[speculation] = engine.stats.decode_calls
            assert (engine.stats.accepted_tokens > 60) is speculation

        with_engine(replace(config, speculation=speculation, kv_type="bf16"), test)

    test_with(True)
    test_with(False)
    assert texts[True] == texts[False]
    assert steps[True] < steps[False]
