from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.engine.states import Beginnings, RamStates, Saved, token_bytes

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
# Tokens whose bytes have beginnings in common although the tokens differ.
ODD_TOKENS = st.lists(st.sampled_from([1, 257, 65537, 2**24 + 1, 255, 65535]), min_size=1, max_size=4).map(tuple)


def saved(*tokens: int, state_bytes: int = 1000) -> Saved:
    return Saved(tokens, bytes(state_bytes))


def room_for(count: int) -> int:
    """Bytes for so many states of at most three tokens."""
    return count * saved(1, 2, 3).size_bytes


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@given(st.one_of(st.tuples(st.sets(TOKENS), TOKENS), st.tuples(st.sets(ODD_TOKENS), ODD_TOKENS)))
def test_states_beginnings_equal_a_search_through_all(case: tuple[set[tuple[int, ...]], tuple[int, ...]]) -> None:
    known, wanted = case
    index: Beginnings[tuple[int, ...]] = Beginnings()
    for tokens in known:
        index.add(token_bytes(tokens), tokens)
    key = token_bytes(wanted)

    most = max((common(tokens, wanted) for tokens in known), default=0)
    found, length = index.longest(key)
    assert length == most
    if most:
        assert found is not None and common(found, wanted) == most
        assert len(found) == min(len(tokens) for tokens in known if common(tokens, wanted) == most)
    whole = sorted((tokens for tokens in known if wanted[: len(tokens)] == tokens), key=len, reverse=True)
    assert list(index.within(key)) == [(tokens, len(tokens)) for tokens in whole]
    longer = [tokens for tokens in known if tokens[: len(wanted)] == wanted]
    beyond = index.beyond(key)
    assert (beyond is None) == (not longer) and (beyond is None or (beyond in longer and len(beyond) == min(map(len, longer))))
    assert index.at(key) == (wanted if wanted in known else None)


@given(st.lists(st.tuples(st.booleans(), TOKENS)))
def test_states_beginnings_add_and_remove_like_a_dict(steps: list[tuple[bool, tuple[int, ...]]]) -> None:
    index: Beginnings[int] = Beginnings()
    expected: dict[tuple[int, ...], int] = {}
    for number, (adds, tokens) in enumerate(steps):
        if adds:
            index.add(token_bytes(tokens), number)
            expected[tokens] = number
        else:
            index.remove(token_bytes(tokens))
            expected.pop(tokens, None)
    assert len(index) == len(expected)
    for tokens in {tokens for _, tokens in steps}:
        assert index.at(token_bytes(tokens)) == expected.get(tokens)


def test_states_best_is_the_longest_beginning_even_of_a_state_that_goes_on_otherwise() -> None:
    states = RamStates(10_000, cuttable=True)
    other, near = saved(1, 2, 9, 9), saved(1, 2, 3, 7)
    states.put(other)
    states.put(near)
    assert states.best([1, 2, 3, 4, 5]) == (near, 3)
    assert states.best([8]) == (None, 0)


def test_states_that_cannot_be_cut_help_only_as_a_whole_but_explain_a_miss() -> None:
    states = RamStates(10_000, cuttable=False)
    whole, near = saved(1, 2), saved(1, 2, 3, 7)
    states.put(near)
    assert states.best([1, 2, 3, 4]) == (None, 0)
    states.put(whole)
    assert states.best([1, 2, 3, 4]) == (whole, 2)
    assert states.nearest([1, 2, 3, 4]) is near


def test_states_least_recently_used_goes_first() -> None:
    states = RamStates(room_for(2), cuttable=True)
    first, second, third = saved(1, 1, 1), saved(2, 2, 2), saved(3, 3, 3)
    assert states.put(first) == [] and states.put(second) == []
    states.use(first)
    assert states.put(third) == [second]
    assert states.saved() == [first, third]
    assert states.used_bytes == room_for(2)


def test_states_looking_one_up_does_not_count_as_use() -> None:
    states = RamStates(room_for(2), cuttable=True)
    first, second = saved(1, 1, 1), saved(2, 2, 2)
    states.put(first)
    states.put(second)
    states.best([1, 1, 1])
    states.nearest([1, 1, 1])
    assert states.put(saved(3, 3, 3)) == [first]


def test_states_a_longer_one_takes_the_place_of_its_beginnings_without_pushing_out() -> None:
    states = RamStates(room_for(3), cuttable=True)
    other = saved(7, 7, 7)
    for state in (saved(1), saved(1, 2), other):
        states.put(state)
    longest = saved(1, 2, 3)
    assert states.put(longest) == []
    assert states.saved() == [other, longest]


def test_states_put_of_what_a_longer_one_covers_only_uses_that() -> None:
    states = RamStates(room_for(2), cuttable=True)
    long, other = saved(1, 2, 3), saved(7, 7, 7)
    states.put(long)
    states.put(other)
    assert states.put(saved(1, 2)) == []
    assert states.saved() == [other, long]


def test_states_that_cannot_be_cut_keep_every_checkpoint() -> None:
    states = RamStates(room_for(3), cuttable=False)
    short, long = saved(1), saved(1, 2)
    states.put(long)
    states.put(short)
    states.put(saved(1))
    assert states.saved() == [long, short]
    assert states.best([1, 9]) == (short, 1)


def test_states_one_larger_than_the_limit_comes_back_and_costs_nobody_else() -> None:
    states = RamStates(room_for(1), cuttable=True)
    small, large = saved(1), saved(1, 2, 3, state_bytes=room_for(1))
    states.put(small)
    assert states.put(large) == [large]
    assert states.saved() == [small]


def test_states_without_room_keep_nothing() -> None:
    states = RamStates(0, cuttable=True)
    state = saved(1)
    assert states.put(state) == [state]
    assert states.park("sequence", state) == [state]
    assert states.best([1]) == (None, 0) and states.nearest([1]) is None and states.used_bytes == 0


def test_states_parked_ones_are_not_pushed_out_and_push_out_others() -> None:
    states = RamStates(room_for(2), cuttable=True)
    first, second, parked = saved(1, 1, 1), saved(2, 2, 2), saved(3, 3, 3)
    states.put(first)
    states.put(second)
    assert states.park("a", parked) == [first]
    assert states.saved() == [second]
    last = saved(4, 4, 4)
    assert states.put(last) == [second]
    assert states.park("b", saved(5, 5, 5)) == [last]
    refused = saved(6, 6, 6)
    assert states.put(refused) == [refused]
    assert states.park("c", refused) == [refused]
    assert states.parked("a") is parked and states.parked_count == 2
    assert states.unpark("a") is parked and states.unpark("a") is None and states.parked("a") is None
    assert states.put(refused) == []


def test_states_parked_again_under_the_same_key_count_once() -> None:
    states = RamStates(room_for(1), cuttable=True)
    again = saved(1, 2, 3)
    assert states.park("a", saved(1, 2)) == states.park("a", again) == []
    assert states.unpark("a") is again and states.used_bytes == 0


@pytest.mark.parametrize("cuttable", [True, False])
@given(steps=st.lists(st.tuples(st.sampled_from(["put", "park", "unpark", "use", "best"]), TOKENS, st.integers(0, 400))))
def test_states_any_sequence_of_calls_stays_within_the_limit(
    cuttable: bool, steps: list[tuple[str, tuple[int, ...], int]]
) -> None:
    states = RamStates(1500, cuttable)
    parked: dict[object, Saved] = {}
    for call, tokens, state_bytes in steps:
        state = saved(*tokens, state_bytes=state_bytes)
        before = set(states.saved())
        if call == "put":
            pushed_out = states.put(state)
            assert set(pushed_out) <= before | {state} and not set(pushed_out) & set(states.saved())
        elif call == "park":
            parked.pop(len(tokens), None)
            if state not in states.park(len(tokens), state):
                parked[len(tokens)] = state
        elif call == "unpark":
            assert states.unpark(len(tokens)) is parked.pop(len(tokens), None)
        elif call == "use":
            for other in before:
                states.use(other)
        else:
            found, length = states.best(list(tokens))
            assert found is None or (found in before and found.tokens[:length] == tokens[:length])
            assert found is None or cuttable or length == len(found.tokens)
        kept = states.saved()
        assert states.used_bytes == sum(state.size_bytes for state in [*kept, *parked.values()]) <= states.limit_bytes
        if cuttable:
            assert not any(a is not b and a.tokens == b.tokens[: len(a.tokens)] for a in kept for b in kept)
