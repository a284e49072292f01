"""What the choice among quants says of each, and why it is the right one: rows of the table and sentences.

Judges finished plans; makes none.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from localfast.plan.budgets import gib_of
from localfast.plan.outcome import Plan
from localfast.plan.quality import LOSS, slow_on_cpu, unquantized
from localfast.plan.words import speed_words

SLOW_TOKENS_PER_S, LEAST_TOKENS_PER_S, FAST_TOKENS_PER_S = 8.0, 5.0, 15.0
_FILE_PART_OF_ROOM = 0.8
"""The rest is for chat memory and work space."""


class Stage(enum.Enum):
    """Where the weights are, best first."""

    GPU = "gpu"
    EXPERTS = "experts in RAM"
    LAYERS = "layers in RAM"
    CPU = "cpu"
    NONE = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantRow:
    """A quant with its plan. `loss` is the KL divergence from the unquantized model."""

    label: str
    size_bytes: int
    installed: bool
    loss: float
    loss_words: str
    plan: Plan
    stage: Stage
    train_context: int
    verdict: str = ""

    @property
    def layers(self) -> str:
        return f"{self.plan.gpu_layers}/{self.plan.layers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantTable:
    """All quants, best quality first. `chosen` is empty when a smaller model is the better answer."""

    rows: tuple[QuantRow, ...]
    chosen: str
    sentences: tuple[str, ...]

    @property
    def row(self) -> QuantRow | None:
        return next((row for row in self.rows if row.label == self.chosen), None)


def stage_of(plan: Plan) -> Stage:
    if not plan.fits:
        return Stage.NONE
    if plan.on_gpu:
        return Stage.GPU
    if plan.gpu_layers == plan.layers:
        return Stage.EXPERTS
    return Stage.LAYERS if any(plan.parts_on_gpus) else Stage.CPU


def too_slow(row: QuantRow) -> bool:
    """Bits above those of Q4_K_M must not cost the feeling of speed."""
    return row.loss < LOSS["Q4_K_M"] and 0 < row.plan.tokens_per_s < FAST_TOKENS_PER_S


def useful(row: QuantRow) -> bool:
    """Whether a stream of it can be read as it comes; an unknown speed gets the benefit of the doubt."""
    return not row.plan.tokens_per_s or row.plan.tokens_per_s >= LEAST_TOKENS_PER_S


def verdict(row: QuantRow, chosen: bool, allowed: bool) -> str:
    """One row's judgement, short enough for a table."""
    words = ["chosen"] if chosen else []
    words.append(_place(row))
    if 0 < row.plan.tokens_per_s < SLOW_TOKENS_PER_S and row.stage is not Stage.NONE:
        words.append("slow" if row.plan.tokens_per_s >= LEAST_TOKENS_PER_S else "too slow")
    if not allowed:
        words.append("larger than it is worth" if row.loss <= LOSS["Q8_0"] else "loses too much")
    return ", ".join(words)


def explanation(table: QuantTable, allowed: Collection[str], roomy: Collection[str], *, pinned: bool) -> tuple[str, ...]:
    """Why this one, why not the next better, why not the next smaller; or why none."""
    row = table.row
    if row is None:
        return tuple(_refusal(table, allowed))
    sentences = [f"{row.label}{' was asked for' if pinned else ''}: {_terms(row)}"]
    if pinned:
        if row.stage is Stage.NONE:
            sentences.append(f"warning: it does not fit: {_excess(row.plan)}")
        if row.label not in allowed and row.loss > LOSS["Q8_0"]:
            sentences.append(f"warning: {row.label} loses more than a model of this size should (its loss: {row.loss_words})")
        return tuple(sentences)
    position = table.rows.index(row)
    if position:
        better = table.rows[position - 1]
        sentences.append(f"not {better.label}: {_why_not_better(better, row, allowed, roomy)}")
    smaller = next((other for other in table.rows[position + 1 :] if other.size_bytes < row.size_bytes), None)
    if smaller:
        sentences.append(f"not {smaller.label}: {_why_not_smaller(smaller, row, allowed)}")
    if row.stage is Stage.LAYERS or 0 < row.plan.tokens_per_s < SLOW_TOKENS_PER_S:
        sentences.append(f"this will be slow; {_advice(row.plan)}")
    return tuple(sentences)


def _place(row: QuantRow) -> str:
    plan = row.plan
    match row.stage:
        case Stage.NONE:
            return f"does not fit: {_excess(plan)}"
        case Stage.GPU:
            return "all on the GPU"
        case Stage.EXPERTS:
            return f"experts of {plan.cpu_experts} layers in RAM"
        case Stage.LAYERS:
            return f"{plan.layers - plan.gpu_layers} layers on the CPU" + (", experts in RAM" if plan.cpu_experts else "")
    return "on the CPU"


def _terms(row: QuantRow) -> str:
    plan = row.plan
    speed = f", about {speed_words(plan.tokens_per_s)} tokens/s" if plan.tokens_per_s else ""
    context = f"{plan.context_tokens} tokens of context ({plan.kv_type})"
    return f"{_place(row)}, {context}{speed}, loss of quality: {row.loss_words}"


def _excess(plan: Plan) -> str:
    short = [f"{gib_of(memory.needed_bytes - memory.usable_bytes)} too much on {memory.device}"
             for memory in plan.memory if not memory.fits]  # fmt: skip
    if plan.model_limit_bytes is not None and plan.total_bytes > plan.model_limit_bytes:
        short.append(f"{gib_of(plan.total_bytes - plan.model_limit_bytes)} more than one model may take")
    return " and ".join(short)


def _why_not_better(better: QuantRow, row: QuantRow, allowed: Collection[str], roomy: Collection[str]) -> str:
    if better.label not in allowed and unquantized(better.label):
        return f"{better.size_bytes / 1e9:.1f} GB for a difference that nobody notices"
    if better.stage is not row.stage:
        return _place(better)
    if better.stage is not Stage.GPU:
        return f"{speed_words(better.plan.tokens_per_s)} tokens/s, and more of it outside the GPU"
    if better.plan.context_tokens < min(row.plan.context_tokens, 16_384):
        return f"it leaves room for {better.plan.context_tokens} tokens of context only"
    if too_slow(better):
        return f"about {speed_words(better.plan.tokens_per_s)} tokens/s"
    if better.label not in roomy:
        return "it would leave no room for longer contexts"
    return f"it is {better.size_bytes / 1e9:.1f} GB"


def _why_not_smaller(smaller: QuantRow, row: QuantRow, allowed: Collection[str]) -> str:
    if smaller.label not in allowed:
        return f"it loses more than a model of this size should (its loss: {smaller.loss_words})"
    if smaller.stage is not row.stage:
        return _place(smaller)
    if row.stage in (Stage.LAYERS, Stage.CPU) and slow_on_cpu(smaller.label):
        return "its kind of quantization is slow on a CPU"
    saved = (row.size_bytes - smaller.size_bytes) / 1e9
    return (
        f"{row.label} keeps more of the quality ({row.loss:.3f} instead of {smaller.loss:.3f}), and its {saved:.1f} GB more fit"
    )


def _refusal(table: QuantTable, allowed: Collection[str]) -> Iterator[str]:
    if not table.rows:
        yield "there is no quant to choose from"
        return
    known = [row for row in table.rows if row.label in allowed]
    row = min(known, key=lambda row: (row.loss > LOSS["IQ4_XS"], slow_on_cpu(row.label), abs(row.loss - LOSS["Q4_K_M"])))
    speed = f", about {speed_words(row.plan.tokens_per_s)} tokens/s" if row.plan.tokens_per_s else ""
    size = f"{row.size_bytes / 1e9:.1f} GB"
    yield f"no quant of this model is a good choice here; the likeliest, {row.label} ({size}): {_place(row)}{speed}"
    yield _advice(row.plan)


def _advice(plan: Plan) -> str:
    room_bytes = sum(memory.usable_bytes for memory in plan.memory[1:])
    if not room_bytes or plan.on_gpu:
        return "use a smaller model"
    return f"a smaller model, with a file of up to {room_bytes * _FILE_PART_OF_ROOM / 1e9:.1f} GB, would be all on the GPU"
