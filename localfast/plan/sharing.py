"""Which GPUs take which share of the layers. Pure arithmetic over per-layer costs and per-device room.

llama.cpp gives consecutive layers to the GPUs in the engine's order, by cumulative share; the output is the last layer. Layers
are not alike, so the shares are counts of layers that were filled in one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localfast.footprint import RAM, Shape, footprint, layer_costs
from localfast.plan.case import Case
from localfast.plan.wishes import pinned_shares

_STEPS = 64


def placements(case: Case, shape: Shape) -> Iterator[tuple[float, ...]]:
    """Shares worth trying, best first: one GPU for everything (the fastest first), then all of them."""
    count = len(case.gpus)
    pinned = pinned_shares(case.wishes.split, count)
    if pinned or count < 2 or not shape.gpu_layers:
        yield pinned or (1.0,) * count
        return
    if not case.spills(shape):
        order = sorted(range(count), key=lambda number: (-case.gpus[number].bandwidth_bytes_s, -case.gpus[number].free_bytes))
        yield from (tuple(float(number == chosen) for number in range(count)) for chosen in order)
    yield shared(case, shape)


def shared(case: Case, shape: Shape) -> tuple[float, ...]:
    """Layers per GPU. Faster GPUs are filled; the slowest ones keep the same part of their room free."""
    budgets = case.budgets(shape)[1:]
    even = (1.0,) * len(budgets)
    work = dict.fromkeys(range(len(budgets)), 0)
    for part in footprint(case.facts, shape, even):
        if part.device != RAM and part.label == "work space":
            work[part.device] += part.size_bytes
    room = [budget.usable_bytes - max(work.values()) for budget in budgets]
    costs = layer_costs(case.facts, shape)[-shape.gpu_layers :]
    speeds = [gpu.bandwidth_bytes_s for gpu in case.gpus]
    faster = [all(speeds) and speed > 1.05 * min(speeds) for speed in speeds]
    for step in range(1, _STEPS + 1):
        caps = [free if fast else free * step // _STEPS for free, fast in zip(room, faster, strict=True)]
        if counts := _filled(costs, caps):
            return counts
    return tuple(max(1.0, float(free)) for free in room)  # does not fit: the warning shows by how much


def _filled(costs: Sequence[int], caps: Sequence[int]) -> tuple[float, ...]:
    """Layers per GPU when each is filled up to its cap in turn; empty when some are left over."""
    counts, device, left = [0.0] * len(caps), 0, caps[0]
    for cost in costs:
        while cost > left:
            device += 1
            if device == len(caps):
                return ()
            left = caps[device]
        left -= cost
        counts[device] += 1
    return tuple(counts)
