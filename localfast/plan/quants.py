"""Chooses among the quants of one model: a plan for each, and the one whose loss is worth its price. Pure.

Order: all on the GPU with the wanted context, then with a shorter one, then with experts in RAM, then with layers in RAM, then
without a GPU; below a useful speed the honest answer is a smaller model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from localfast.footprint import footprint
from localfast.hardware import Hardware
from localfast.models.gguf import LayerFacts, ModelFacts
from localfast.plan.case import Measure
from localfast.plan.outcome import Plan
from localfast.plan.planner import make_plan
from localfast.plan.policy import GROWN_CONTEXT, WANTED_CONTEXTS
from localfast.plan.quality import LOSS, acceptable, loss_words, quant_loss, slow_on_cpu
from localfast.plan.verdicts import QuantRow, QuantTable, Stage, explanation, stage_of, too_slow, useful, verdict
from localfast.plan.wishes import Wishes

_OUTPUT_BITS = {"Q8_0": 8.5, "F16": 16.0, "BF16": 16.0, "F32": 32.0}
_USUAL_OUTPUT_BITS = 6.5625
"""llama.cpp's quantizer keeps the output matrix in Q6_K for all smaller types."""


@dataclass(frozen=True, slots=True)
class Quant:
    """One quantization that is on offer, or here."""

    label: str
    size_bytes: int
    facts: ModelFacts
    installed: bool = False


def plan_quants(
    hardware: Hardware,
    quants: Sequence[Quant],
    wishes: Wishes | None = None,
    measure: Measure = footprint,
    *,
    pinned: str = "",
    overheads: Mapping[str, int] = MappingProxyType({}),
    residents_bytes: Sequence[int] = (),
) -> QuantTable:
    """A plan for every quant, and the choice. `pinned`: the label that the user asked for; it is chosen whatever it costs.

    The others are those of `make_plan`.
    """
    wishes = wishes or Wishes()

    def plan(facts: ModelFacts, wishes: Wishes) -> Plan:
        return make_plan(hardware, facts, wishes, measure, overheads=overheads, residents_bytes=residents_bytes)

    rows = [_row(quant, plan(quant.facts, wishes)) for quant in quants]
    rows.sort(key=lambda row: (row.loss, -row.size_bytes))
    allowed = acceptable([(quant.label, quant.facts) for quant in quants])
    roomy = {quant.label for quant in quants if quant.label in allowed and _roomy(quant, wishes, plan)}
    choice = next((row for row in rows if pinned and row.label.upper() == pinned.upper()), None)
    choice = choice or _choose([row for row in rows if row.label in allowed], wishes, roomy)
    judged = tuple(replace(row, verdict=verdict(row, row is choice, row.label in allowed)) for row in rows)
    table = QuantTable(rows=judged, chosen=choice.label if choice else "", sentences=())
    return replace(table, sentences=explanation(table, allowed, roomy, pinned=choice is not None and bool(pinned)))


def scaled_facts(facts: ModelFacts, size_bytes: int, label: str) -> ModelFacts:
    """What another quant of the same model will be like, from one header and the other file's size: layers, widths and tokens are
    the same, bytes are shared out alike, but the output matrix keeps its own type."""
    header_bytes = max(0, facts.size_bytes - facts.weight_bytes)
    target = max(1, size_bytes - header_bytes)
    matrix = facts.vocabulary * facts.embedding
    output = int(matrix * _OUTPUT_BITS.get(label.upper(), _USUAL_OUTPUT_BITS) / 8)
    movable = facts.weight_bytes - facts.output_bytes
    if facts.output_bytes and output < target and movable > 0:
        factor = (target - output) / movable
    else:
        factor = target / max(1, facts.weight_bytes)
        output = int(facts.output_bytes * factor)
    copied = output if facts.tied_embeddings else 0
    inputs = copied + int((facts.input_bytes - facts.copied_bytes) * factor)
    return replace(
        facts,
        quant=label,
        size_bytes=size_bytes,
        per_layer=tuple(_scaled(layer, factor) for layer in facts.per_layer),
        input_bytes=inputs,
        output_bytes=output,
    )


def _scaled(layer: LayerFacts, factor: float) -> LayerFacts:
    return replace(
        layer,
        weight_bytes=int(layer.weight_bytes * factor),
        expert_bytes=int(layer.expert_bytes * factor),
        largest_tensor_bytes=int(layer.largest_tensor_bytes * factor),
    )


# --- the choice ---------------------------------------------------------------------------------------------------------------


def _row(quant: Quant, plan: Plan) -> QuantRow:
    loss = quant_loss(quant.label, quant.facts)
    return QuantRow(
        label=quant.label,
        size_bytes=quant.size_bytes,
        installed=quant.installed,
        loss=loss,
        loss_words=loss_words(loss, quant.facts.parameters),
        plan=plan,
        stage=stage_of(plan),
        train_context=quant.facts.train_context,
    )


def _roomy(quant: Quant, wishes: Wishes, plan: Callable[[ModelFacts, Wishes], Plan]) -> bool:
    """Whether twice the wanted context fits as well: the largest quants must not be paid for with context."""
    if wishes.ctx or wishes.cells or quant_loss(quant.label, quant.facts) > LOSS["Q8_0"]:
        return True
    wanted = min(GROWN_CONTEXT, quant.facts.train_context or WANTED_CONTEXTS[-1])
    return stage_of(plan(quant.facts, replace(wishes, ctx=wanted))) is Stage.GPU


def _choose(rows: Sequence[QuantRow], wishes: Wishes, roomy: set[str]) -> QuantRow | None:
    """`rows` are those allowed, best quality first."""
    full = [row for row in rows if row.stage is Stage.GPU and useful(row)]
    for kept in ([row for row in full if row.label in roomy and not too_slow(row)], full):
        for least in (wishes.ctx,) if wishes.ctx else WANTED_CONTEXTS:
            for row in kept:
                if row.plan.context_tokens >= min(least, row.train_context or least):
                    return row
    for stage in (Stage.EXPERTS, Stage.LAYERS, Stage.CPU):
        rest = [row for row in rows if row.stage is stage]
        usable = [row for row in rest if not slow_on_cpu(row.label) and row.loss <= LOSS["IQ4_XS"]]
        usable = usable or [row for row in rest if row is rows[0] or row.loss <= LOSS["IQ4_XS"]]
        usable.sort(key=lambda row: (row.loss < LOSS["Q4_K_M"], abs(row.loss - LOSS["Q4_K_M"])))
        if found := next(filter(useful, usable), None):
            return found
    return None
