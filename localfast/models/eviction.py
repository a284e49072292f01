"""Which loaded models must go so that another may come. Pure: it is asked about possible states too, and must not log or act.

Memory is a vector: bytes on each device in the order of a plan's `memory`, the RAM first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest

Vector = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded model; `last_used_s` by any one clock, `held` what leaves memory with it."""

    name: str
    busy: bool
    last_used_s: float
    held: Vector = ()


@dataclass(frozen=True, slots=True, order=True)
class Worth:
    """How good a plan is; the larger, the better. `context_tokens` counts up to what was wanted: more of it ends nobody."""

    fits: bool
    spared_bytes: int
    """What is missing, negative; 0 where it fits."""
    gpu_layers: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """`evict`: unload these, then load. `wait_for`: busy and in the way; while there are any, nobody is unloaded."""

    evict: tuple[str, ...] = ()
    wait_for: tuple[str, ...] = ()
    hope_for: tuple[str, ...] = ()
    """Busy too: it would fit beside them, but without them more of its layers would be on a GPU."""


def decide(residents: Iterable[Resident], worth: Callable[[Vector], Worth], max_others: int) -> Decision:
    """As few idle models as make the newcomer's plan as good as all of them would, those unused for longest first.

    `worth` is that of the newcomer's plan once so many bytes are freed on each device; `max_others` may stay beside it. A busy
    model never goes. It is waited for only if without it the newcomer does not fit.
    """
    by_age = sorted(residents, key=lambda resident: resident.last_used_s)
    idle = [resident for resident in by_age if not resident.busy]
    busy = tuple(resident.name for resident in by_age if resident.busy)
    surplus = max(0, len(by_age) - max_others)
    if surplus > len(idle):
        return Decision(wait_for=busy)
    best = worth(freed(idle))
    alone = worth(freed(by_age)) if busy else best
    if alone.fits and not best.fits:
        return Decision(wait_for=busy)
    chosen = next(idle[:count] for count in range(surplus, len(idle) + 1) if worth(freed(idle[:count])) >= best)
    for resident in reversed(chosen):  # an older one may hold memory where none is needed
        without = [other for other in chosen if other is not resident]
        if len(without) >= surplus and worth(freed(without)) >= best:
            chosen = without
    return Decision(evict=tuple(one.name for one in chosen), hope_for=busy if alone.gpu_layers > best.gpu_layers else ())


def freed(residents: Iterable[Resident]) -> Vector:
    """What is free in addition once they are gone."""
    return tuple(map(sum, zip_longest(*(resident.held for resident in residents), fillvalue=0)))
