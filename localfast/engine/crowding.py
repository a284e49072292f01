"""How many threads to compute with while other programs want the cores too. Pure: it is told wall and CPU times.

Threads of one step wait for each other at every operation. If one of them has no core, all others spin until it gets one, and
a step takes many times as long as with one thread less. Threads that have their cores use as much CPU time as passes; what is
missing of that, somebody else has.
"""

from __future__ import annotations

WINDOW_S = 0.5
"""Times are summed for so long before anything is concluded."""
ENOUGH = 0.7
"""Share of the wall time that each thread must get. A competitor for one of two cores leaves 0.67; a short one, or a virtual
machine that is held up for a moment, is no reason to compute with less."""
RETRY_S = 2.0
MAX_RETRY_S = 30.0
"""After so long with fewer threads all are tried again; twice as long after each try that fails."""


class ThreadCount:
    """`wanted` threads on a free machine. Read `now` before a step. `patient`: it never gives any up."""

    def __init__(self, wanted: int, *, patient: bool = False) -> None:
        self._wanted = wanted
        self._patient = patient
        self.now = wanted
        self._wall_s = 0.0
        self._cpu_s = 0.0
        self._fewer_s = 0.0
        self._retry_s = RETRY_S

    def observe(self, wall_s: float, cpu_s: float) -> None:
        """A step took so long, and all threads together so much CPU time."""
        if self.now < self._wanted:
            self._fewer_s += wall_s
            if self._fewer_s >= self._retry_s:
                self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)
                self._change(self._wanted)
            return
        self._wall_s += wall_s
        self._cpu_s += cpu_s
        if self._wall_s < WINDOW_S or self._patient:
            return
        cores = self._cpu_s / self._wall_s
        if cores < ENOUGH * self.now:
            self._change(max(1, min(self.now - 1, int(cores + 0.5))))
        else:
            self._change(self._wanted)
            self._retry_s = RETRY_S

    def _change(self, threads: int) -> None:
        self.now = threads
        self._wall_s = self._cpu_s = self._fewer_s = 0.0
