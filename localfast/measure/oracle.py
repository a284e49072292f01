"""The plan's oracle: exact where the engine measured, elsewhere the formula put right by the nearest measurement.

Pure. Decides nothing: `settle` asks its caller to decide again as long as the decision stands on a shape nobody measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from localfast.footprint import Part, Shape, footprint
from localfast.models.gguf import ModelFacts

Measure = Callable[[ModelFacts, Shape, Sequence[float]], tuple[Part, ...]]
"""`footprint`, or what stands in for it."""
Key = tuple[Shape, tuple[float, ...]]
"""A shape and the GPUs' shares, as `key_of` writes them."""
MAX_ROUNDS = 5
_SHARE_DIGITS = 6
# Their error grows with what they hold; that of the others is of a fixed size.
_PROPORTIONAL = frozenset({"chat memory", "recurrent state"})


def key_of(shape: Shape, shares: Sequence[float]) -> Key:
    """Shares that mean the same are written the same: as parts of one, and none where nothing is offloaded."""
    total = sum(shares)
    if shape.gpu_layers <= 0 or total <= 0:
        return shape, ()
    return shape, tuple(round(share / total, _SHARE_DIGITS) for share in shares)


def corrected(facts: ModelFacts, measured: Mapping[Key, tuple[Part, ...]]) -> Measure:
    """An oracle for this model and quant; for any other one it is the formula."""
    if not measured:
        return footprint
    formulas = {key: _sizes(footprint(facts, *key)) for key in measured}

    def measure(asked: ModelFacts, shape: Shape, shares: Sequence[float] = (1.0,)) -> tuple[Part, ...]:
        if asked is not facts and asked != facts:
            return footprint(asked, shape, shares)
        key = key_of(shape, shares)
        if key in measured:
            return measured[key]
        sizes = _sizes(footprint(facts, shape, shares))
        nearest = min(measured, key=lambda other: _distance(key, other, facts.layers))
        same_offload = _offload(key[0], facts.layers) == _offload(nearest[0], facts.layers)
        real, formula = _sizes(measured[nearest]), formulas[nearest]
        devices = {device for device, _ in sizes}
        for place in real.keys() | formula.keys():
            if place in sizes or same_offload or place[0] in devices:
                sizes[place] = _put_right(place[1], sizes.get(place, 0), real.get(place, 0), formula.get(place, 0))
        return tuple(Part(device, label, size_bytes) for (device, label), size_bytes in sizes.items() if size_bytes > 0)

    return measure


def _put_right(label: str, size_bytes: int, real_bytes: int, formula_bytes: int) -> int:
    if label in _PROPORTIONAL and formula_bytes and size_bytes:
        return size_bytes * real_bytes // formula_bytes
    return max(0, size_bytes + real_bytes - formula_bytes)


def _sizes(parts: Sequence[Part]) -> dict[tuple[int, str], int]:
    sizes: dict[tuple[int, str], int] = {}
    for part in parts:
        place = part.device, part.label
        sizes[place] = sizes.get(place, 0) + part.size_bytes
    return sizes


def _offload(shape: Shape, layers: int) -> str:
    return "none" if shape.gpu_layers <= 0 else "all" if shape.gpu_layers > layers else "some"


def _distance(one: Key, other: Key, layers: int) -> tuple[float, ...]:
    """What changes the way of computing first, mere sizes last."""
    (shape, shares), (known, known_shares) = one, other
    return (
        len(shares) != len(known_shares),
        _offload(shape, layers) != _offload(known, layers),
        shape.kv_type != known.kv_type,
        abs(math.log2(max(1, shape.ubatch_tokens)) - math.log2(max(1, known.ubatch_tokens))),
        abs(shape.gpu_layers - known.gpu_layers) + abs(shape.cpu_experts - known.cpu_experts),
        abs(math.log2(max(1, shape.cells)) - math.log2(max(1, known.cells))),
        abs(shape.slots - known.slots),
    )


class Decided(Protocol):
    """A decision that stands on the memory of one shape, such as a plan."""

    @property
    def shape(self) -> Shape: ...
    @property
    def shares(self) -> tuple[float, ...]: ...


_Decision = TypeVar("_Decision", bound=Decided)


@dataclass(frozen=True, slots=True)
class Settled(Generic[_Decision]):
    """`exact`: the decision's shape was measured. Otherwise `reason` says why not."""

    decision: _Decision
    exact: bool
    reason: str
    measured: Mapping[Key, tuple[Part, ...]]


def settle(
    decide: Callable[[Measure], _Decision],
    ask: Callable[[Shape, tuple[float, ...]], tuple[Mapping[Key, tuple[Part, ...]], str]],
    facts: ModelFacts,
    rounds: int = MAX_ROUNDS,
) -> Settled[_Decision]:
    """Decide, measure what was decided, and decide again, until the decision stands on a measurement.

    `ask` answers with measured parts and, without any, the reason; errors of both callers' functions pass through.
    """
    measured: dict[Key, tuple[Part, ...]] = {}
    reason = f"it changed in each of {rounds} rounds"
    for _ in range(rounds):
        decision = decide(corrected(facts, measured))
        key = key_of(decision.shape, decision.shares)
        if key in measured:
            return Settled(decision, True, "", measured)
        found, why = ask(*key)
        if key not in found:
            reason = why or "the engine did not measure it"
            return Settled(decision, False, reason, measured)
        measured |= found
    decision = decide(corrected(facts, measured))
    exact = key_of(decision.shape, decision.shares) in measured
    return Settled(decision, exact, "" if exact else reason, measured)
