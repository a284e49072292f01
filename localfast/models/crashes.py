"""Notices that a model's engine dies again and again, so that it is not loaded for ever. Pure: it is told the time."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
MAX_DEATHS = 3


class CrashLoop:
    """Deaths of one model's engine. After `MAX_DEATHS` within `WINDOW_S` nothing is started until the oldest is past."""

    def __init__(self) -> None:
        self.total = 0
        self._recent: deque[float] = deque(maxlen=MAX_DEATHS)

    def died(self, now_s: float) -> None:
        self.total += 1
        self._recent.append(now_s)

    def wait_s(self, now_s: float) -> float:
        """How long to wait before the next start; 0 when it may be now."""
        if len(self._recent) < MAX_DEATHS:
            return 0.0
        return max(0.0, self._recent[0] + WINDOW_S - now_s)
