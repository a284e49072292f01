"""Saved states of sequences in RAM: which one helps a prompt most, and which one has to go. Step loop's thread only.

Owns the order of use and the limit. A state's bytes are opaque here: others make them and put them back. Pure.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Generic, TypeVar

from localfast.engine.prefixes import common_prefix

T = TypeVar("T")

TOKEN_BYTES = 40
"""What a token costs beside the state: its int, its place in the tuple, and its place in the index."""


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """`state` restores exactly these tokens."""

    tokens: tuple[int, ...]
    state: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.state) + TOKEN_BYTES * len(self.tokens)


def token_bytes(tokens: Tokens[int]) -> bytes:
    """int32, little endian: small, written to files as it is, and compared by the interpreter as fast as memory is read."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


class Beginnings(Generic[T]):
    """Values by the `token_bytes` they stand for (at least one token). Kept in order: what begins alike stands side by side."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._values: list[T] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes, value: T) -> None:
        position = bisect_left(self._keys, key)
        if position < len(self._keys) and self._keys[position] == key:
            self._values[position] = value
        else:
            self._keys.insert(position, key)
            self._values.insert(position, value)

    def remove(self, key: bytes) -> None:
        position = bisect_left(self._keys, key)
        if position < len(self._keys) and self._keys[position] == key:
            del self._keys[position], self._values[position]

    def longest(self, key: bytes) -> tuple[T | None, int]:
        """The value that has most tokens in common with the beginning of `key`, and how many; of several, the shortest."""
        position = bisect_left(self._keys, key)
        length = max((common_prefix(other, key) // 4 for other in self._keys[max(0, position - 1) : position + 1]), default=0)
        return (self._shortest(key[: 4 * length]), length) if length else (None, 0)

    def within(self, key: bytes) -> Iterator[tuple[T, int]]:
        """All that are wholly a beginning of `key` or equal to it, with their token counts; the longest first."""
        while key:
            position = bisect_right(self._keys, key) - 1
            if position < 0:
                return
            other = self._keys[position]
            length = common_prefix(other, key) // 4 * 4
            if length == len(other):
                yield self._values[position], length // 4
                length -= 4
            # The next one down differs from `length` on, so one that is wholly a beginning of `key` cannot be longer.
            key = key[:length]

    def longest_within(self, key: bytes) -> tuple[T | None, int]:
        return next(self.within(key), (None, 0))

    def beyond(self, key: bytes) -> T | None:
        """The shortest of those that begin with `key`, or are equal to it."""
        position = bisect_left(self._keys, key)
        found = position < len(self._keys) and self._keys[position].startswith(key)
        return self._shortest(key) if found else None

    def at(self, key: bytes) -> T | None:
        position = bisect_left(self._keys, key)
        return self._values[position] if position < len(self._keys) and self._keys[position] == key else None

    def _shortest(self, beginning: bytes) -> T:
        low = bisect_left(self._keys, beginning)
        high = bisect_right(self._keys, beginning, key=lambda other: other[: len(beginning)])
        return self._values[min(range(low, high), key=lambda position: len(self._keys[position]))]


class RamStates:
    """At most `limit_bytes` of saved states, least recently used first out.

    `cuttable`: a state may be restored and then shortened (full attention). If not, only one that is wholly a beginning of the
    prompt is of use. Parked states belong to sequences that will go on: they count, but only their owner takes them out.
    """

    def __init__(self, limit_bytes: int, cuttable: bool) -> None:
        self.limit_bytes = limit_bytes
        self._cuttable = cuttable
        self._index: Beginnings[Saved] = Beginnings()
        self._order: dict[Saved, bytes] = {}
        """Each with its key in the index, the most recently used last."""
        self._parked: dict[object, Saved] = {}
        self._parked_bytes = 0
        self.used_bytes = 0

    def best(self, tokens: Tokens[int]) -> tuple[Saved | None, int]:
        """The state that gives the longest usable beginning of `tokens`, and that length."""
        if not self._order:
            return None, 0
        key = token_bytes(tokens)
        return self._index.longest(key) if self._cuttable else self._index.longest_within(key)

    def nearest(self, tokens: Tokens[int]) -> Saved | None:
        """The state with most tokens in common with the beginning of `tokens`, usable or not."""
        return self._index.longest(token_bytes(tokens))[0] if self._order else None

    def use(self, saved: Saved) -> None:
        """It was restored."""
        if saved in self._order:
            self._order[saved] = self._order.pop(saved)

    def put(self, saved: Saved) -> list[Saved]:
        """Returns what found no room (the new one itself if it is too large), but not what is useless beside the new one."""
        key = token_bytes(saved.tokens)
        there = self._index.beyond(key) if self._cuttable else self._index.at(key)
        if there is not None:
            self.use(there)
            return []
        if not saved.tokens or saved.size_bytes > self.limit_bytes - self._parked_bytes:
            return [saved]
        if self._cuttable:
            for shorter, _ in list(self._index.within(key)):
                self._drop(shorter)
        pushed_out = self._make_room(saved.size_bytes)
        self._index.add(key, saved)
        self._order[saved] = key
        self.used_bytes += saved.size_bytes
        return pushed_out

    def _make_room(self, size_bytes: int) -> list[Saved]:
        """Push out states, the least recently used first, until so much is free or only parked ones are left."""
        pushed_out = []
        while self._order and self.used_bytes + size_bytes > self.limit_bytes:
            oldest = next(iter(self._order))
            self._drop(oldest)
            pushed_out.append(oldest)
        return pushed_out

    def saved(self) -> list[Saved]:
        """All but the parked ones, the least recently used first."""
        return list(self._order)

    # --- parked ---------------------------------------------------------------------------------------------------------------

    @property
    def parked_count(self) -> int:
        return len(self._parked)

    def park(self, key: object, saved: Saved) -> list[Saved]:
        """Keep the state of a sequence that will go on, at the cost of others. Returns what found no room, as `put` does."""
        self.unpark(key)
        if saved.size_bytes > self.limit_bytes - self._parked_bytes:
            return [saved]
        pushed_out = self._make_room(saved.size_bytes)
        self._parked[key] = saved
        self._parked_bytes += saved.size_bytes
        self.used_bytes += saved.size_bytes
        return pushed_out

    def parked(self, key: object) -> Saved | None:
        return self._parked.get(key)

    def unpark(self, key: object) -> Saved | None:
        """Hand it out and forget it."""
        saved = self._parked.pop(key, None)
        if saved is not None:
            self._parked_bytes -= saved.size_bytes
            self.used_bytes -= saved.size_bytes
        return saved

    def _drop(self, saved: Saved) -> None:
        self._index.remove(self._order.pop(saved))
        self.used_bytes -= saved.size_bytes
