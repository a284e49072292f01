"""A run: two servers take turns at every work, each watched from outside, and the medians of the rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

from localfast.bench.client import Target, ask
from localfast.bench.report import NUMBERS, Row
from localfast.bench.watch import Watch
from localfast.bench.works import WORKS, Numbers


async def run(
    ours: Target, peer: Target | None, works: Sequence[str], rounds: int, tell: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Both servers take turns at every work, `rounds` times, with the same prompts; each round has prompts of its own."""
    targets = [target for target in (ours, peer) if target is not None]
    for target in targets:
        await ask(target, "Hello", 1)  # a model that is loaded by the first request must not be measured loading
    rows = []
    for name in works:
        measured: list[list[Numbers]] = [[] for _ in targets]
        for number in range(rounds):
            # A fresh salt per run and round: nothing that was computed before may help, unless the work says so.
            salt = f"{name} {number} {time.time_ns()}"
            turns = list(zip(targets, measured, strict=True))
            # Whoever comes first in a round is a little faster: a processor that rested runs quicker for a while.
            for target, so_far in turns if number % 2 == 0 else reversed(turns):
                tell(f"{name}, round {number + 1} of {rounds}: {target.url}")
                async with Watch(target) as watch:
                    numbers = await WORKS[name](target, random.Random(salt))
                so_far.append(numbers | watch.numbers)
        rows += _rows(name, measured)
    return rows


def _rows(work: str, measured: Sequence[Sequence[Numbers]]) -> list[Row]:
    """In the order of the table; what only the peer tells of itself compares with nothing."""
    ours, *others = [_medians(side) for side in measured]
    peer = others[0] if others else {}
    return [Row(work, key, ours[key], peer.get(key)) for key in NUMBERS if key in ours]


def _medians(rounds: Sequence[Numbers]) -> Numbers:
    """Of each number, over the rounds that had it."""
    keys = {key for numbers in rounds for key in numbers}
    return {key: statistics.median([numbers[key] for numbers in rounds if key in numbers]) for key in keys}
