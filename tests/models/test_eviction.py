"""Who goes so that another may come: the decision alone, against all that could have been decided."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.models.eviction import Decision, Resident, Vector, Worth, decide, freed

GIB = 2**30
FREE = 2


def room(needed: int, free: Vector = (FREE,)) -> object:
    """A newcomer that needs so much on each device, where so much is free: its worth once more is freed."""

    def worth(gone: Vector) -> Worth:
        missing = max(0, needed - free[0] - sum(gone[:1]))
        return Worth(missing == 0, -missing, 0, 0)

    return worth


def resident(name: str, used_s: float, held: int = 2, busy: bool = False) -> Resident:
    return Resident(name, busy, used_s, (held,))


OLD, MIDDLE, NEW = resident("old", 1), resident("middle", 2), resident("new", 3)
BUSY = resident("busy", 0, busy=True)


@pytest.mark.parametrize(
    ("residents", "needed", "max_others", "expected"),
    [
        ([OLD, NEW], 2, 9, Decision()),
        ([NEW, OLD], 4, 9, Decision(evict=("old",))),
        ([NEW, MIDDLE, OLD], 6, 9, Decision(evict=("old", "middle"))),
        ([OLD, NEW], 1, 1, Decision(evict=("old",))),
        ([BUSY, NEW], 4, 9, Decision(evict=("new",))),
        ([BUSY, NEW], 6, 9, Decision(wait_for=("busy",))),
        ([BUSY], 1, 0, Decision(wait_for=("busy",))),
        ([BUSY, OLD], 99, 9, Decision(evict=("old",))),  # it never fits: then as little as possible is missing
        ([resident("small", 1, held=1), resident("large", 2, held=4)], 6, 9, Decision(evict=("large",))),
        ([], 99, 9, Decision()),
    ],
)
def test_decide_who_goes(residents: list[Resident], needed: int, max_others: int, expected: Decision) -> None:
    assert decide(residents, room(needed), max_others) == expected  # type: ignore[arg-type]


def test_decide_more_layers_on_the_gpu_are_worth_an_idle_model_and_a_luxury_is_not() -> None:
    better = decide([OLD], lambda gone: Worth(True, 0, 20 + 10 * bool(gone), 0), 9)
    same = decide([OLD], lambda gone: Worth(True, 0, 20, 16_384), 9)
    assert (better.evict, same.evict) == (("old",), ())


def test_decide_model_on_another_card_is_spared() -> None:
    here, elsewhere = Resident("here", False, 2, (0, 0, 4)), Resident("elsewhere", False, 1, (0, 4, 0))
    decision = decide([here, elsewhere], lambda gone: Worth(bool(gone) and gone[2] >= 4, 0, 0, 0), 9)
    assert decision == Decision(evict=("here",))


RESIDENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 4)), max_size=5).map(
    lambda rows: [Resident(str(number), busy, float(used), (held,)) for number, (busy, used, held) in enumerate(rows)]
)


@given(RESIDENTS, st.integers(0, 20), st.integers(0, 5))
def test_decide_never_a_busy_one_never_in_vain_never_too_few(residents: list[Resident], needed: int, max_others: int) -> None:
    worth = room(needed)
    decision = decide(residents, worth, max_others)  # type: ignore[arg-type]
    by_name = {one.name: one for one in residents}
    gone = [by_name[name] for name in decision.evict]
    idle = [one for one in residents if not one.busy]
    assert not any(one.busy for one in gone)
    assert not (decision.evict and decision.wait_for)
    if decision.wait_for:
        assert len(residents) - len(idle) > max_others or not worth(freed(idle)).fits  # type: ignore[operator]
        return
    assert len(residents) - len(gone) <= max_others
    assert worth(freed(gone)) == worth(freed(idle))  # type: ignore[operator]
    for fewer in combinations(gone, max(0, len(gone) - 1)):
        enough = worth(freed(fewer)) == worth(freed(idle))  # type: ignore[operator]
        assert not gone or not (enough and len(residents) - len(fewer) <= max_others), "one of them could have stayed"
