"""Which cells of the unified KV cache are held by which slots: counted exactly, shared ones once.

A run is a stretch of cells that have the same holders. Slots that share a beginning hold the same run objects; a cut in the
middle splits a run for all of its holders. Pure bookkeeping: the engine's memory follows the scheduler's edits, and so does this.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Run:
    length: int
    holders: set[int]


class Cells:
    """Cells of `slots` slots; `used` is the number that anybody holds."""

    def __init__(self, slots: int) -> None:
        self._runs: list[list[Run]] = [[] for _ in range(slots)]
        self.used = 0

    def grow(self, slot: int, count: int) -> None:
        """`count` new cells at the slot's end."""
        runs = self._runs[slot]
        if runs and len(runs[-1].holders) == 1:
            runs[-1].length += count
        else:
            runs.append(Run(count, {slot}))
        self.used += count

    def truncate(self, slot: int, length: int) -> None:
        """The slot lets go of all cells from position `length` on; those that nobody else holds are free."""
        runs = self._runs[slot]
        border = self._border(slot, length)
        for run in runs[border:]:
            run.holders.discard(slot)
            if not run.holders:
                self.used -= run.length
        del runs[border:]

    def share(self, source: int, target: int, length: int) -> None:
        """The empty slot `target` holds the first `length` cells of `source` too."""
        assert not self._runs[target]
        shared = self._runs[source][: self._border(source, length)]
        for run in shared:
            run.holders.add(target)
        self._runs[target] = shared

    def held_only_by(self, slots: Set[int]) -> int:
        """Cells that are free once all of `slots` let go."""
        runs = {id(run): run for slot in slots for run in self._runs[slot]}
        return sum(run.length for run in runs.values() if run.holders <= slots)

    def beginning_held_only_by(self, slots: Set[int], slot: int, length: int) -> int:
        """The same, of the first `length` cells of `slot`."""
        count = 0
        for run in self._runs[slot]:
            part = min(run.length, length)
            count += part if run.holders <= slots else 0
            length -= part
        return count

    def _border(self, slot: int, length: int) -> int:
        """How many runs make up the first `length` cells, after splitting the one that crosses that border."""
        for index, run in enumerate(self._runs[slot]):
            if length <= 0:
                return index
            if run.length > length:
                tail = Run(run.length - length, set(run.holders))
                run.length = length
                for holder in run.holders:
                    runs = self._runs[holder]
                    runs.insert(next(i for i, other in enumerate(runs) if other is run) + 1, tail)
                return index + 1
            length -= run.length
        return len(self._runs[slot])
