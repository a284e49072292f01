"""`make_plan`: one file on one machine. Puts the question together, lets the policy choose, and fills in the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from localfast.footprint import footprint
from localfast.hardware import Hardware
from localfast.models.gguf import ModelFacts
from localfast.plan.budgets import is_pool
from localfast.plan.case import Case, Measure, total_bytes
from localfast.plan.outcome import Plan
from localfast.plan.policy import choose
from localfast.plan.speed import predicted_tokens_per_s
from localfast.plan.wishes import Wishes
from localfast.plan.words import reasons, summary, warnings

_NOTHING: Mapping[str, int] = MappingProxyType({})


def make_plan(
    hardware: Hardware,
    facts: ModelFacts,
    wishes: Wishes | None = None,
    measure: Measure = footprint,
    *,
    overheads: Mapping[str, int] = _NOTHING,
    residents_bytes: Sequence[int] = (),
) -> Plan:
    """The best plan that fits; when none does, the smallest one, with a warning. Never raises.

    `overheads`: what a driver was seen to take, by device name. `residents_bytes`: what our
    own loaded models take, in the order of a plan's memory; it counts against the user's limits.
    """
    wishes = wishes or Wishes()
    case = Case(hardware, facts, wishes, measure, overheads=overheads, residents_bytes=residents_bytes)
    choice = choose(case)
    shape, memory = choice.shape, case.memory(choice)
    on_gpu = bool(case.gpus) and shape.gpu_layers > 0
    return Plan(
        gpu_layers=shape.gpu_layers,
        layers=case.everything,
        context_tokens=choice.context_tokens,
        cells=shape.cells,
        slots=shape.slots,
        batch_tokens=choice.batch_tokens,
        ubatch_tokens=shape.ubatch_tokens,
        threads=wishes.threads or hardware.physical_cores,
        kv_type=shape.kv_type,
        # Mapped pages of a GPU whose memory is RAM would exist twice.
        use_mmap=not (on_gpu and any(map(is_pool, case.gpus))),
        cpu_experts=shape.cpu_experts,
        shares=choice.shares,
        projector_on_gpu=choice.projector_on_gpu,
        drafts=choice.drafts,
        memory=memory,
        total_bytes=total_bytes(memory),
        model_limit_bytes=case.model_limit_bytes,
        tokens_per_s=predicted_tokens_per_s(hardware, facts, shape, choice.shares),
        summary=summary(case, choice),
        reasons=reasons(case, choice),
        warnings=warnings(case, choice),
    )
