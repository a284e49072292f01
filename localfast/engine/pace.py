"""What a step costs here, learned from the steps that ran, and so how much prompt a step may hold. Pure: it is told the times.

A step takes the time of its decoders (a table by their number) plus a cost per further token. Both are moving averages: they
follow the depth of the prompts and whatever else the machine is doing.
"""

from __future__ import annotations

FALL = 0.2
RISE = 0.5
"""Weight of a new measurement that is lower or higher than the average: a stall is worse than a small chunk."""
ALONE = 4
"""Without running streams a step may take so many times as long: larger chunks are faster, and only who comes next waits."""


class Pace:
    """`max_stall_s`: how long a running stream may wait for other people's prompts. `floor` and `ceiling` bound a step's prompt
    tokens: below the one, prompts would hardly advance; above the other, nothing gets faster."""

    def __init__(self, max_stall_s: float, floor: int, ceiling: int) -> None:
        self._max_stall_s = max_stall_s
        self._floor = min(floor, ceiling)
        self._ceiling = ceiling
        self._plain_s: dict[int, float] = {}
        self.token_s = 0.0
        """Seconds per token beyond the decoders' own; 0 while nothing is known."""

    def observe(self, decoders: int, further: int, seconds: float) -> None:
        """A step of `decoders` sequences with one token each and `further` tokens (prompts, drafts) took so long."""
        if further == 0:
            self._plain_s[decoders] = _average(self._plain_s.get(decoders), seconds)
        else:
            self.token_s = _average(self.token_s or None, max(0.0, seconds - self.plain_s(decoders)) / further)

    def plain_s(self, decoders: int) -> float:
        """Seconds of a step of decoders only; from the nearest number that was seen, never less than in proportion."""
        if decoders in self._plain_s or not self._plain_s:
            return self._plain_s.get(decoders, 0.0)
        nearest = min(self._plain_s, key=lambda seen: abs(seen - decoders))
        return self._plain_s[nearest] * (max(1.0, decoders / nearest) if decoders else 0.0)

    def prompt_tokens(self, decoders: int) -> int:
        """Most prompt tokens for the next step."""
        if not self.token_s:
            return min(self._ceiling, 4 * self._floor)
        patience_s = self._max_stall_s if decoders else ALONE * self._max_stall_s
        tokens = (patience_s - self.plain_s(decoders)) / self.token_s
        return max(self._floor, min(self._ceiling, int(tokens)))

    def draft_cost(self, decoders: int) -> float:
        """Cost of one drafted token, in units of what a decoder's token costs in a plain step; 1 while that is not known."""
        plain_s = self.plain_s(decoders)
        return self.token_s * decoders / plain_s if plain_s and self.token_s else 1.0


def _average(known: float | None, seconds: float) -> float:
    if known is None:
        return seconds
    return known + (seconds - known) * (RISE if seconds > known else FALL)
