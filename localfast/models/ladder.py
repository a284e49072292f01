"""What to try when a model did not load: the steps down, one at a time, in words. Pure.

Order of hardware-aware loaders: smaller batches cost speed of prompts only, a quantized cache hardly any quality, a shorter
context some users, fewer layers on the GPU everybody's speed. What the user pinned is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from localfast.footprint import KV_TYPE_BYTES, Shape, padded_cells
from localfast.models.gguf import ModelFacts
from localfast.plan.policy import WANTED_CONTEXTS

MIN_CONTEXT_TOKENS = WANTED_CONTEXTS[-1]
MIN_UBATCH_TOKENS = 64
EXPERT_STEP = 4
# Reasons that no smaller shape can cure; anything else may be a lack of memory, whatever it is called.
_OTHER_CAUSES = re.compile(
    r"unknown model architecture|missing tensor|wrong number of tensors|wrong shape|corrupted or incomplete|file bounds|"
    r"failed to open|unknown (pre-)?tokenizer|key not found|invalid magic|lacks an instruction|was not ready after|"
    r"exit code 1\b(?!.*MemoryError)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to load a model."""

    shape: Shape
    context_tokens: int

    def at_least(self, other: Attempt) -> bool:
        """It needs as much memory as `other`, or more, in every respect."""
        mine, theirs = self.shape, other.shape
        return (
            mine.gpu_layers >= theirs.gpu_layers
            and mine.cells >= theirs.cells
            and mine.slots >= theirs.slots
            and mine.ubatch_tokens >= theirs.ubatch_tokens
            and KV_TYPE_BYTES[mine.kv_type] >= KV_TYPE_BYTES[theirs.kv_type]
            and mine.cpu_experts <= theirs.cpu_experts
        )


@dataclass(frozen=True, slots=True)
class Step:
    attempt: Attempt
    words: str


_Rung = Callable[[Attempt, ModelFacts, Collection[str]], Step | None]


def may_be_memory(reason: str) -> bool:
    """Whether a smaller shape may load where this one failed for `reason`."""
    return not _OTHER_CAUSES.search(reason)


def steps_down(start: Attempt, facts: ModelFacts, pins: Collection[str]) -> Iterator[Step]:
    """Every smaller attempt, each one step below the one before. `pins` are names of settings that the user fixed."""
    attempt = start
    while True:
        before = attempt
        for rung in _RUNGS:
            if step := rung(attempt, facts, pins):
                attempt = step.attempt
                yield step
        if attempt == before:
            break
    if attempt.shape.gpu_layers and "gpu_layers" not in pins:
        yield Step(_shaped(attempt, gpu_layers=0, cpu_experts=0), "all layers on the CPU")


def _smaller_batches(attempt: Attempt, facts: ModelFacts, pins: Collection[str]) -> Step | None:
    ubatch = attempt.shape.ubatch_tokens
    # A text that is read both ways must be in one batch.
    if "batch" in pins or not facts.causal or ubatch // 2 < MIN_UBATCH_TOKENS:
        return None
    return Step(_shaped(attempt, ubatch_tokens=ubatch // 2), f"prompts in batches of {ubatch // 2} instead of {ubatch} tokens")


def _quantized_cache(attempt: Attempt, facts: ModelFacts, pins: Collection[str]) -> Step | None:
    kv_type = attempt.shape.kv_type
    odd = any(
        layer.key_width // layer.kv_heads % 32 or layer.value_width // layer.kv_heads % 32
        for layer in facts.per_layer
        if layer.kv_heads
    )
    if "kv_type" in pins or odd or KV_TYPE_BYTES[kv_type] <= KV_TYPE_BYTES["q8_0"]:
        return None
    return Step(_shaped(attempt, kv_type="q8_0"), f"chat memory in q8_0 instead of {kv_type}")


def _less_context(attempt: Attempt, facts: ModelFacts, pins: Collection[str]) -> Step | None:
    """Half the cells, and with them the context of one request as far as it may shrink."""
    cells, context = attempt.shape.cells, attempt.context_tokens
    if "cells" in pins or not facts.causal:
        return None
    if "ctx" not in pins and context > MIN_CONTEXT_TOKENS:
        context = max(MIN_CONTEXT_TOKENS, context // 2)
    smaller = max(padded_cells(cells // 2), padded_cells(context))
    if smaller >= cells:
        return None
    words = f"chat memory for {smaller} instead of {cells} tokens"
    if context < attempt.context_tokens:
        words += f", {context} for one request"
    return Step(replace(_shaped(attempt, cells=smaller), context_tokens=context), words)


def _less_on_gpu(attempt: Attempt, facts: ModelFacts, pins: Collection[str]) -> Step | None:
    shape, everything = attempt.shape, facts.layers + 1
    if not shape.gpu_layers:
        return None
    if facts.experts_used and "cpu_experts" not in pins and shape.cpu_experts < facts.layers:
        experts = min(facts.layers, shape.cpu_experts + EXPERT_STEP)
        return Step(_shaped(attempt, cpu_experts=experts), f"experts of {experts} layers in RAM")
    left = shape.gpu_layers - max(1, round(everything / 10))
    if "gpu_layers" in pins or left <= 0:
        return None
    return Step(_shaped(attempt, gpu_layers=left), f"{left} instead of {shape.gpu_layers} of {everything} layers on the GPU")


def _shaped(attempt: Attempt, **changes: object) -> Attempt:
    return replace(attempt, shape=replace(attempt.shape, **changes))  # type: ignore[arg-type]


_RUNGS: tuple[_Rung, ...] = (_smaller_batches, _quantized_cache, _less_context, _less_on_gpu)
