"""The steps down after a model did not load: their order, their words, and what they leave alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import pytest
from gguf_writer import llama_tensors, llama_values, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from localfast.footprint import Shape, footprint
from localfast.models.gguf import LayerFacts, ModelFacts, read_facts
from localfast.models.ladder import MIN_CONTEXT_TOKENS, Attempt, may_be_memory, steps_down

SHAPE = Shape(gpu_layers=33, cells=65_536, slots=4, ubatch_tokens=512)
START = Attempt(SHAPE, 16_384)
LAYER = LayerFacts(weight_bytes=1000, expert_bytes=900, kv_heads=2, key_width=128, value_width=128)
PINNABLE = ("batch", "kv_type", "ctx", "cells", "gpu_layers", "cpu_experts")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    path = tmp_path_factory.mktemp("ladder") / "model.gguf"
    return replace(read_facts(write_gguf(path, llama_values(32), llama_tensors(32))), per_layer=(LAYER,) * 32)


def words(start: Attempt, facts: ModelFacts, pins: Iterable[str] = (), count: int = 99) -> list[str]:
    return [step.words for step in islice(steps_down(start, facts, frozenset(pins)), count)]


def test_steps_down_in_order_and_in_words(facts: ModelFacts) -> None:
    assert words(START, facts, count=5) == [
        "prompts in batches of 256 instead of 512 tokens",
        "chat memory in q8_0 instead of f16",
        "chat memory for 32768 instead of 65536 tokens, 8192 for one request",
        "30 instead of 33 of 33 layers on the GPU",
        "prompts in batches of 128 instead of 256 tokens",
    ]
    assert words(START, facts)[-1] == "all layers on the CPU"


def test_steps_down_experts_leave_the_gpu_before_layers(facts: ModelFacts) -> None:
    steps = words(START, replace(facts, experts=8, experts_used=2))
    assert steps[3] == "experts of 4 layers in RAM"
    assert next(step for step in steps if "on the GPU" in step) not in steps[: steps.index("experts of 32 layers in RAM")]


def test_steps_down_without_a_gpu_end_at_the_smallest_context(facts: ModelFacts) -> None:
    steps = list(steps_down(Attempt(replace(SHAPE, gpu_layers=0, ubatch_tokens=128), 16_384), facts, frozenset()))
    assert steps[-1].attempt.context_tokens == MIN_CONTEXT_TOKENS == steps[-1].attempt.shape.cells
    assert not any("GPU" in step.words or "CPU" in step.words for step in steps)


@pytest.mark.parametrize(
    ("pins", "forbidden"),
    [
        (["batch"], "batches"),
        (["kv_type"], "q8_0"),
        (["ctx"], "for one request"),
        (["cells"], "chat memory for"),
        (["gpu_layers"], "CPU"),
        (PINNABLE, ""),
    ],
)
def test_steps_down_leave_alone_what_the_user_pinned(facts: ModelFacts, pins: list[str], forbidden: str) -> None:
    assert not [step for step in words(START, facts, pins) if forbidden in step]


def test_steps_down_a_text_read_both_ways_stays_in_one_batch(facts: ModelFacts) -> None:
    assert not [step for step in words(START, replace(facts, causal=False)) if "batches" in step or "chat memory for" in step]


def test_steps_down_heads_of_odd_width_keep_their_cache_type(facts: ModelFacts) -> None:
    odd = replace(facts, per_layer=(replace(LAYER, key_width=160, value_width=160),) * 32)
    assert not [step for step in words(START, odd) if "q8_0" in step]


@given(
    gpu_layers=st.integers(0, 33),
    cells=st.integers(1, 400),
    ubatch=st.sampled_from([64, 128, 512]),
    kv_type=st.sampled_from(["f16", "q8_0", "q4_0"]),
    experts=st.booleans(),
    pins=st.sets(st.sampled_from(PINNABLE)),
)
def test_steps_down_each_needs_less_and_there_is_an_end(
    facts: ModelFacts, gpu_layers: int, cells: int, ubatch: int, kv_type: str, experts: bool, pins: set[str]
) -> None:
    facts = replace(facts, experts=8, experts_used=2) if experts else facts
    shape = Shape(gpu_layers=gpu_layers, cells=cells * 256, slots=4, ubatch_tokens=ubatch, kv_type=kv_type)
    attempt = Attempt(shape, min(16_384, shape.cells))
    for step in islice(steps_down(attempt, facts, pins), 1000):
        assert attempt.at_least(step.attempt) or step.attempt.shape.gpu_layers == 0
        assert not step.attempt.at_least(attempt), "nothing became smaller"
        assert step.attempt.context_tokens <= step.attempt.shape.cells
        on_gpu = [sum(p.size_bytes for p in footprint(facts, one.shape) if p.device == 0) for one in (attempt, step.attempt)]
        assert on_gpu[1] <= on_gpu[0] or step.attempt.shape.kv_type != attempt.shape.kv_type or step.attempt.shape.cpu_experts
        attempt = step.attempt
    assert not list(steps_down(attempt, facts, pins | {"gpu_layers"})) or attempt.shape.gpu_layers == 0


@pytest.mark.parametrize(
    ("reason", "possible"),
    [
        ("SIGKILL: killed, perhaps by the system for lack of memory", True),
        ("SIGABRT: a native library gave up, often for lack of GPU memory", True),
        ("fused Gated Delta Net (autoregressive) not supported, set to disabled", True),
        ("failed to allocate buffer for kv cache", True),
        ("exit code 3221225477", True),
        ("exit code 1: Traceback | MemoryError", True),
        ("exit code 1: Traceback | ImportError: libcudart.so.12", False),
        ("error loading model: error loading model architecture: unknown model architecture: 'new'", False),
        ("error loading model: missing tensor 'blk.0.attn_q.weight'", False),
        ("it was not ready after 300 s; raise the load_timeout_s setting if the disk is slow", False),
        ("SIGILL: this CPU lacks an instruction the engine was built with", False),
    ],
)
def test_may_be_memory_only_a_clear_other_cause_ends_the_ladder(reason: str, possible: bool) -> None:
    assert may_be_memory(reason) is possible


def test_attempt_at_least_compares_every_part() -> None:
    assert START.at_least(Attempt(replace(SHAPE, ubatch_tokens=256), 16_384))
    assert not Attempt(replace(SHAPE, ubatch_tokens=256), 16_384).at_least(START)
    assert not Attempt(replace(SHAPE, kv_type="q8_0", cells=99_999), 1).at_least(START)
