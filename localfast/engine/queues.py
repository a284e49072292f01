"""Whose turn it is: one queue per class of request, served in turns by weight, so that no class starves another.

Stride scheduling: each class has a clock that goes forward by 1 / weight with every sequence it brings in; the one that is
furthest behind is next. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from localfast.core import RequestClass
from localfast.engine.sequence import Sequence

WEIGHTS: dict[RequestClass, int] = {"interactive": 8, "fim": 4, "chat": 2, "batch": 1}
RANKS = {name: rank for rank, name in enumerate(WEIGHTS)}
"""0 is the highest class."""
PATIENCE = 4.0
"""How far others may get ahead of a sequence that does not fit yet: 8 chats, 32 interactive ones. Then all wait until it fits."""


class Queues:
    """Waiting sequences. Within a class first come, first served."""

    def __init__(self) -> None:
        self._queues: dict[RequestClass, deque[Sequence]] = {name: deque() for name in WEIGHTS}
        self._clocks = dict.fromkeys(WEIGHTS, 0.0)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def put(self, sequence: Sequence, *, first: bool = False) -> None:
        name = sequence.request_class
        queue = self._queues[name]
        busy = [self._clocks[other] for other, waiting in self._queues.items() if waiting]
        if not queue and busy:  # a class that was away has not saved up turns
            self._clocks[name] = max(self._clocks[name], min(busy))
        if first:
            queue.appendleft(sequence)
        else:
            queue.append(sequence)

    def remove(self, unwanted: Callable[[Sequence], bool]) -> None:
        for name, queue in self._queues.items():
            self._queues[name] = deque(sequence for sequence in queue if not unwanted(sequence))

    def take(self, admit: Callable[[Sequence], bool | None]) -> bool:
        """Offer heads to `admit` in the order of turns until it takes one (True). False: it has no room for this one, which then
        holds up its class, and the others once they are too far ahead. None: it is not this one's time, the next may pass."""
        bound = float("inf")
        waiting = [name for name, queue in self._queues.items() if queue]
        for name in sorted(waiting, key=lambda name: (self._clocks[name], RANKS[name])):
            if self._clocks[name] > bound:
                return False
            for position, sequence in enumerate(self._queues[name]):
                answer = admit(sequence)
                if answer:
                    del self._queues[name][position]
                    self._clocks[name] += 1 / WEIGHTS[name]
                    return True
                if answer is False:
                    bound = min(bound, self._clocks[name] + PATIENCE)
                    break
        return False
