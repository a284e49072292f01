"""Guesses how a sequence goes on from what it already holds, and how many guesses are worth what they cost.

Prompt-lookup decoding: what followed the newest tokens when they last occurred will follow them again. Nobody has to report how
a guess fared: the sequence's own tokens tell, also for guesses too doubtful to be drafted, so trust comes back by itself.
Pure: it must not know the engine, a clock or other sequences. The constants come from `scripts/trace_speculation`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, islice, repeat

TRUST = (0.15, 0.6, 0.42, 0.72, 0.92, 0.98, 0.98)
"""Chance that the next token is what the earlier place has, by the bit length of how many tokens before it match. Below two, the
place is one token behind where a longer match broke off: an exchanged word. A sequence starts with these and learns its own."""
RATE = 0.02
"""Weight of one more token in a sequence's own chances."""
MAX_CANDIDATES = 8
LONGEST = 32
"""More matching tokens than that tell nothing new."""


CONFIDENCE_RATE = 0.05
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 512
"""Steps without a draft model's guesses, once they do not pay."""


class Speculator:
    """The guesses of one sequence."""

    def __init__(self) -> None:
        self._trust = list(TRUST)
        self._read = 0
        self._newest: dict[tuple[int, int], int] = {}
        """By pair of tokens: the position behind its newest occurrence."""
        self._earlier: list[int] = [0]
        """By position: the one behind the occurrence before, of the pair that ends there; 0: none."""
        self._source = 0
        """Position of the token that is expected next; 0: nothing is expected."""
        self._matched = 0
        """So many tokens before `_source` are the sequence's newest."""

    def draft(self, tokens: list[int], cost: float, ceiling: int) -> list[int]:
        """Likely next tokens, at most `ceiling`; none when they would not pay. `tokens` is the whole sequence, which only grows.

        `cost` is that of one drafted token in units of the sequence's share of a plain step, which is what an accepted one saves.
        """
        self._catch_up(tokens)
        if not self._source:
            return []
        chances = (self._trust[_level(matched)] for matched in count(self._matched))
        most = _worth(chances, cost, min(ceiling, len(tokens) - self._source))
        return tokens[self._source : self._source + most]

    def _catch_up(self, tokens: list[int]) -> None:
        for end in range(self._read + 1, len(tokens) + 1):
            if self._source:
                self._compare(tokens[self._source] == tokens[end - 1], end)
            before = 0
            if end > 1:
                pair = (tokens[end - 2], tokens[end - 1])
                before = self._newest.get(pair, 0)
                self._newest[pair] = end
            self._earlier.append(before)
            if before and not self._matched:
                self._find(tokens, end, before)
        self._read = len(tokens)

    def _compare(self, hit: bool, end: int) -> None:
        """Follow the place that is expected to repeat by one token. The longest match stays the longest while it is right."""
        level = _level(self._matched)
        self._trust[level] += (hit - self._trust[level]) * RATE
        broken = self._matched > 1 and self._source + 1 < end
        self._source = self._source + 1 if hit or broken else 0
        self._matched = self._matched + 1 if hit else 0

    def _find(self, tokens: list[int], end: int, candidate: int) -> None:
        """Expect what followed the longest match among the newest occurrences of the last pair; of equal ones the newest."""
        source = longest = 0
        for _ in range(MAX_CANDIDATES):
            # Most candidates are out by one look: they differ where they would have to be longer than the best one.
            if candidate > longest and tokens[candidate - 1 - longest] == tokens[end - 1 - longest]:
                length = 2
                most = min(LONGEST, candidate)
                while length < most and tokens[candidate - 1 - length] == tokens[end - 1 - length]:
                    length += 1
                if length > longest:
                    source, longest = candidate, length
            candidate = self._earlier[candidate]
            if not candidate:
                break
        if not self._source or self._trust[_level(longest)] >= self._trust[0]:
            self._source, self._matched = source, longest


class Confidence:
    """How far an engine believes its draft model, whose every guess costs time, and which must first read a sequence to guess at
    all. Where guesses do not pay it rests, and tries one sequence again after twice as many steps each time."""

    def __init__(self) -> None:
        self._chance = 0.7
        self._pause = self._resting = 0
        self.trying = False
        """Whether the guess asked for is to find out only: one sequence is enough for that."""

    def worth(self, cost: float, ceiling: int) -> int:
        """How many guesses to ask for in this step; `cost` is that of making and verifying one, as `Speculator.draft` has it."""
        if self._resting or ceiling < 1:
            self._resting = max(0, self._resting - 1)
            return 0
        most = _worth(repeat(self._chance), cost, ceiling)
        self.trying = not most
        if most:
            self._pause = 0
        elif cost > 1:  # not even right guesses would pay; exactly 1 stands for a cost that nobody has measured yet
            self._resting = LONGEST_PAUSE
            return 0
        return most or 1

    def learn(self, drafted: int, accepted: int) -> None:
        """Of so many guesses so many were right; those after the first wrong one tell nothing."""
        for hit in [True] * accepted + [False] * (accepted < drafted):
            self._chance += (hit - self._chance) * CONFIDENCE_RATE
        if self.trying:
            self._pause = self._resting = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, 2 * self._pause))
            self.trying = False


def _worth(chances: Iterable[float], cost: float, most: int) -> int:
    """How many guesses give the most tokens per time, when each has such a chance if those before it are right.

    A step with k guesses yields 1 + p1 + p1 p2 + ... tokens and costs 1 + k cost. One more guess pays as long as its chance per
    cost is better than what the step has reached without it.
    """
    chance = tokens = spent = 1.0
    for guesses, next_chance in enumerate(islice(chances, most)):
        chance *= next_chance
        if chance * spent <= cost * tokens:
            return guesses
        tokens += chance
        spent += cost
    return max(0, most)


def _level(matched: int) -> int:
    return min(matched.bit_length(), len(TRUST) - 1)
