"""What the numbers mean: which direction is better, how ours stand to the peer's, and the sentences drawn from them.

Pure: rows in, words out. Measures nothing and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Number:
    better: Literal["higher", "lower", "neither"]
    meaning: str
    plotted: bool = False
    """Whether its ratio is drawn: one number for each thing that a user feels."""


NUMBERS = {
    "tokens_per_s": Number("higher", "tokens of all answers per second", plotted=True),
    "requests_per_s": Number("higher", "answers per second"),
    "ttft_p50_ms": Number("lower", "time to first text, half of the requests", plotted=True),
    "ttft_p95_ms": Number("lower", "time to first text, 95 of 100 requests"),
    "gap_p50_ms": Number("lower", "wait between two pieces of an answer, half of them"),
    "gap_p95_ms": Number("lower", "wait between two pieces, 95 of 100"),
    "gap_p99_ms": Number("lower", "wait between two pieces, 99 of 100"),
    "gap_max_ms": Number("lower", "longest wait between two pieces", plotted=True),
    "together": Number("higher", "answers that were being written at one moment, at most"),
    "short_ttft_ms": Number("lower", "first text of a short request right behind a long one", plotted=True),
    "long_ttft_ms": Number("lower", "first text of a long request among running streams", plotted=True),
    "cold_ttft_ms": Number("lower", "first text of a conversation's first turn"),
    "turn_ttft_ms": Number("lower", "first text of its second turn", plotted=True),
    "next_ttft_ms": Number("lower", "first text after eight clients hung up", plotted=True),
    "last_ttft_ms": Number("lower", "first text for the last of ten keystrokes", plotted=True),
    "finished": Number("higher", "requests that ended without an error", plotted=True),
    "truncated": Number("lower", "answers shorter than asked for"),
    "total_s": Number("lower", "until all requests had ended", plotted=True),
    "overhead_us_per_step": Number("lower", "time of a step outside the model's computation"),
    "overhead_percent": Number("lower", "share of the steps' time outside the model's computation"),
    "tokens_per_call": Number("neither", "tokens computed in one batch, prompts included"),
    "drafted_tokens": Number("neither", "tokens guessed ahead"),
    "accepted_tokens": Number("neither", "guessed tokens that the model chose itself"),
    "peak_rss_mib": Number("lower", "most memory of the server and its children"),
    "peak_vram_mib": Number("lower", "most GPU memory of the server and its children"),
    "cards_vram_mib": Number("neither", "most memory in use on all GPUs, by whomever"),
    "gpu_percent": Number("neither", "mean use of the busiest GPU"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One number of one work: the median over the rounds for us and, if there is one, the peer; `ratio` is ours / peer."""

    work: str
    number: str
    ours: float
    peer: float | None

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.peer else None

    @property
    def better(self) -> bool | None:
        """Whether we are at least as good; None without a peer, and for numbers that are neither good nor bad."""
        direction = NUMBERS[self.number].better
        if self.peer is None or direction == "neither":
            return None
        return self.ours >= self.peer if direction == "higher" else self.ours <= self.peer

    @property
    def advantage(self) -> float | None:
        """How many times better we are: above 1 is ahead, whatever the direction."""
        direction = NUMBERS[self.number].better
        if direction == "neither" or not self.ours or not self.peer:
            return None
        return self.ours / self.peer if direction == "higher" else self.peer / self.ours

    @property
    def standing(self) -> str:
        return {True: "", False: "behind", None: ""}[self.better]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run with all that is needed to judge it, or to repeat it."""

    rows: Sequence[Row]
    rounds: int
    ours: str
    """Address and model."""
    peer: str | None
    machine: str
    command: str
    when: str


def verdict(rows: Sequence[Row]) -> str | None:
    """What eight streams against one say of this server, in a sentence; None if they were not both measured."""
    ours = {(row.work, row.number): row.ours for row in rows}
    speeds = [ours.get((f"streams-{count}", "tokens_per_s")) for count in (8, 1)]
    waits_ms = [ours.get((f"streams-{count}", "ttft_p95_ms")) for count in (8, 1)]
    if None in speeds or None in waits_ms:
        return None
    eight, one = (speed or 0.0 for speed in speeds)
    waited_ms, alone_ms = (wait or 0.0 for wait in waits_ms)
    gain = eight / one if one else 0.0
    at_once = ours.get(("streams-8", "together"), 8)
    # One whole answer takes this long alone. Who waits for longer than that, while few are being written, stands in a queue.
    answer_ms = 1000 / (ours.get(("streams-1", "requests_per_s")) or float("inf"))
    if at_once <= 4 and waited_ms - alone_ms >= 0.8 * answer_ms:
        meaning = (
            f"queueing: at most {at_once:.0f} of the 8 answers were being written at once, the others waited; look at the slots"
        )
    elif gain >= 2:
        meaning = "batching works: one stream is memory-bound, and more streams share the work of reading the weights"
    elif gain >= 0.8:
        meaning = "compute-bound: the machine is busy with one stream already, and more streams share the same speed"
    else:
        meaning = "requests get into each other's way: look at threads, memory and other programs"
    return (
        f"8 streams give {gain:.2f} times the tokens/s of one ({shown(eight)} against {shown(one)}), and the last of them waits "
        f"{_time(waited_ms)} instead of {_time(alone_ms)} for its first text. {meaning[0].upper()}{meaning[1:]}."
    )


def standing(rows: Sequence[Row]) -> str | None:
    """How we stand to the peer, in a sentence; None without one."""
    judged = [row for row in rows if row.better is not None]
    if not judged:
        return None
    behind = sorted((row for row in judged if not row.better), key=lambda row: row.advantage or 0.0)
    text = f"At least as good as the peer in {len(judged) - len(behind)} of {len(judged)} numbers"
    if not behind:
        return f"{text}."
    worst = ", ".join(f"{row.work} {row.number} ({shown(row.ours)} against {shown(row.peer or 0)})" for row in behind[:3])
    return f"{text}; furthest behind: {worst}."


def shown(value: float) -> str:
    """Three digits or so: "1,234", "56.7", "0.89"."""
    if value == round(value):
        return f"{value:,.0f}"
    places = next((places for least, places in ((100, 0), (10, 1), (0.1, 2), (0.01, 3)) if abs(value) >= least), 4)
    return f"{value:,.{places}f}"


def _time(value_ms: float) -> str:
    return f"{shown(value_ms / 1000)} s" if value_ms >= 1000 else f"{shown(value_ms)} ms"
