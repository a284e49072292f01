"""A guess is something that occurred; guessing pays where a text repeats itself and costs next to nothing elsewhere."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from localfast.engine.speculation import Confidence, Speculator

CPU_COST, GPU_COST = 0.55, 0.05
texts = st.one_of(
    st.lists(st.integers(0, 3), max_size=80),
    st.lists(st.integers(0, 30), max_size=20).map(lambda block: block * 4),
)
costs = st.floats(0, 1.5)
ceilings = st.integers(1, 32)


def drafts(tokens: list[int], cost: float = GPU_COST, ceiling: int = 32) -> list[int]:
    return Speculator().draft(tokens, cost, ceiling)


def speedup(prompt: list[int], answer: list[int], cost: float = CPU_COST) -> float:
    """How many times faster than by plain steps the answer comes."""
    speculator, tokens, spent = Speculator(), list(prompt), 0.0
    rest = list(answer)
    while rest:
        draft = speculator.draft(tokens, cost, 32)
        accepted = 0
        while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
            accepted += 1
        tokens += rest[: accepted + 1]
        del rest[: accepted + 1]
        spent += 1 + cost * len(draft)
    return len(answer) / spent


def prose(count: int, seed: int) -> list[int]:
    """Tokens as frequent as words are (the n-th most common one 1/n as often as the first), in no order that repeats."""
    return Random(seed).choices(range(5000), [1 / rank for rank in range(1, 5001)], k=count)


def edited(text: list[int], every: int) -> list[int]:
    """The text with a small change in each piece of some `every` tokens: tokens exchanged, left out or put in."""
    random, result, start = Random(text[0]), [], 0
    while start < len(text):
        piece = text[start : start + random.randint(every // 2, every * 3 // 2)]
        start += len(piece)
        new = prose(random.randint(1, 3), start)
        result += piece + random.choice([new, []])
        start += random.choice([0, len(new)])
    return result


# --- what is guessed ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(texts, costs, ceilings)
def test_speculation_a_draft_is_a_part_of_the_sequence_and_within_its_ceiling(
    tokens: list[int], cost: float, ceiling: int
) -> None:
    draft = drafts(tokens, cost, ceiling)
    assert len(draft) <= ceiling
    assert any(tokens[start : start + len(draft)] == draft for start in range(len(tokens) + 1))


@settings(max_examples=60, deadline=None)
@given(texts, costs, ceilings, st.sets(st.integers(0, 80)))
def test_speculation_guesses_the_same_however_often_it_is_asked(
    tokens: list[int], cost: float, ceiling: int, asked: set[int]
) -> None:
    speculator = Speculator()
    growing: list[int] = []
    for position, token in enumerate(tokens):
        growing.append(token)
        if position in asked:
            speculator.draft(growing, 0.3, 5)
    assert speculator.draft(growing, cost, ceiling) == drafts(tokens, cost, ceiling)


@settings(max_examples=60, deadline=None)
@given(texts, st.floats(1, 10), ceilings)
def test_speculation_drafts_nothing_where_a_guess_costs_a_whole_step(tokens: list[int], cost: float, ceiling: int) -> None:
    assert drafts(tokens, cost, ceiling) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.floats(0, 0.9), st.floats(0, 0.9))
def test_speculation_dearer_guesses_are_fewer(block: list[int], one: float, other: float) -> None:
    tokens = block * 3
    assert len(drafts(tokens, min(one, other))) >= len(drafts(tokens, max(one, other)))


def test_speculation_follows_the_longest_match_and_of_equal_ones_the_newest() -> None:
    assert drafts([1, 2, 3, 4, 70, 9, 3, 4, 80, 1, 2, 3, 4], ceiling=1) == [70]
    assert drafts([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 4, 1, 2, 3], ceiling=1) == [70]
    assert drafts([1, 2, 3, 4, 70, 9, 1, 2, 3, 4, 80, 9, 8, 1, 2, 3, 4], ceiling=1) == [80]


def test_speculation_a_short_match_is_worth_a_cheap_guess_only() -> None:
    tokens = [5, 1, 2, 70, 71, 72, 6, 1, 2]
    assert drafts(tokens, GPU_COST)[:2] == [70, 71]
    assert drafts(tokens, CPU_COST) == []


def test_speculation_goes_on_behind_an_exchanged_token() -> None:
    text = list(range(100, 140))
    assert drafts([*text, 1, *text[:20], 2])[:2] == text[21:23]


# --- how much is guessed --------------------------------------------------------------------------------------------------------


def test_speculation_editing_is_faster() -> None:
    for seed in range(4):
        text = prose(400, seed)
        answer = edited(text, every=40)
        assert speedup(text, answer) >= 1.3
        assert speedup(text, answer, GPU_COST) >= 3


def test_speculation_text_without_repetition_loses_next_to_nothing() -> None:
    for seed in range(4):
        assert speedup(prose(400, seed), prose(1000, 10 + seed)) > 0.98


def test_speculation_learns_where_a_repetition_always_breaks_off_and_finds_a_lasting_one_again() -> None:
    opening = list(range(6000, 6016))
    teasing = [token for number in range(80) for token in (*opening, *prose(10, number))]
    assert speedup([], teasing) > 1, "drafting on and on behind the opening would cost 5 %"
    text = prose(400, 1)
    assert speedup([*text, *teasing], edited(text, every=40)) >= 1.3


# --- how far a draft model is believed ----------------------------------------------------------------------------------------


def asked(confidence: Confidence, cost: float, chance: float, tokens: int, seed: int = 1) -> list[int]:
    """How many guesses were asked for at each of so many steps, when each is right with this chance."""
    random, counts = Random(seed), []
    for _ in range(tokens):
        count = confidence.worth(cost, 16)
        counts.append(count)
        accepted = 0
        while accepted < count and random.random() < chance:
            accepted += 1
        if count:
            confidence.learn(count, accepted)
    return counts


def test_confidence_asks_for_more_where_guesses_are_right_and_cheap() -> None:
    good, fair = (asked(Confidence(), 0.1, chance, 300)[-100:] for chance in (0.95, 0.6))
    assert sum(good) > 2 * sum(fair) > 0
    assert sum(asked(Confidence(), 0.02, 0.95, 300)[-100:]) > sum(good)


def test_confidence_rests_where_guesses_do_not_pay_and_comes_back() -> None:
    confidence = Confidence()
    assert sum(asked(confidence, 0.3, 0.02, 3000)) < 120  # a few at first, then hardly any
    assert asked(confidence, 0.3, 0.95, 6000)[-1] > 1


def test_confidence_never_asks_where_a_guess_costs_more_than_a_token() -> None:
    assert sum(asked(Confidence(), 1.2, 1.0, 4000)) == 0
    assert Confidence().worth(0.1, 0) == 0
