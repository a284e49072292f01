"""What is said about measured numbers: directions, verdicts, and the page with its plots."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localfast.bench import NUMBERS, Report, Row, html_page, shown, standing, verdict

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("row", "better"),
    [
        (Row("w", "tokens_per_s", 10, 5), True),
        (Row("w", "tokens_per_s", 4, 5), False),
        (Row("w", "ttft_p50_ms", 4, 5), True),
        (Row("w", "gap_max_ms", 6, 5), False),
        (Row("w", "gap_max_ms", 6, None), None),
        (Row("w", "truncated", 0, 0), True),
        (Row("w", "truncated", 2, 0), False),
        (Row("w", "finished", 15, 16), False),
        (Row("w", "peak_rss_mib", 900, 800), False),
        (Row("w", "tokens_per_call", 9, 3), None),
    ],
)
def test_row_knows_which_direction_is_better(row: Row, better: bool | None) -> None:
    assert row.better is better
    assert row.standing == ("behind" if better is False else "")
    assert row.advantage is None or (row.advantage >= 1) is better


def measured(eight: float, wait_ms: float, together: float = 8) -> list[Row]:
    """One stream: 100 tokens/s, first text after 100 ms, all of it after 640 ms."""
    alone = {"tokens_per_s": 100.0, "requests_per_s": 1 / 0.64, "ttft_p95_ms": 100.0}
    crowd = {"tokens_per_s": eight, "ttft_p95_ms": wait_ms, "together": together}
    return [
        Row(work, number, value, None)
        for work, numbers in (("streams-1", alone), ("streams-8", crowd))
        for number, value in numbers.items()
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (measured(300, 400), ["3.00 times", "300 against 100", "400 ms instead of 100 ms", "Batching works", "memory-bound"]),
        (measured(120, 800), ["1.20 times", "Compute-bound"]),
        (measured(50, 900), ["0.50 times", "each other's way"]),
        (measured(100, 4600, together=1), ["1.00 times", "Queueing", "at most 1 of the 8", "waits 4.60 s instead of 100 ms"]),
        (measured(250, 1500, together=4), ["2.50 times", "Queueing", "at most 4 of the 8"]),
        (measured(300, 300, together=3), ["Batching works"]),  # short answers need not meet; nobody waited
    ],
)
def test_verdict_names_what_eight_against_one_means(rows: list[Row], words: list[str]) -> None:
    sentence = verdict(rows) or ""
    assert [word for word in words if word not in sentence] == []


def test_verdict_needs_both_measurements() -> None:
    rows = measured(300, 400)
    assert verdict(rows[:3]) is None and verdict(rows[3:]) is None and verdict([]) is None


def test_standing_counts_what_can_be_judged_and_names_the_worst() -> None:
    rows = [
        Row("edit", "tokens_per_s", 50, 100),
        Row("edit", "peak_rss_mib", 220, 200),
        Row("edit", "ttft_p50_ms", 50, 100),
        Row("edit", "drafted_tokens", 1, 100),
        Row("edit", "overhead_percent", 2, None),
    ]
    sentence = standing(rows) or ""
    assert sentence.startswith("At least as good as the peer in 1 of 3 numbers; furthest behind: edit tokens_per_s (50")
    assert standing(rows[2:3]) == "At least as good as the peer in 1 of 1 numbers."
    assert standing(rows[4:]) is None


@pytest.mark.parametrize(
    ("value", "text"), [(1234.4, "1,234"), (56.74, "56.7"), (0.891, "0.89"), (0.0123, "0.012"), (0, "0"), (16, "16")]
)
def test_shown_keeps_three_digits_or_so(value: float, text: str) -> None:
    assert shown(value) == text


# --- the page -----------------------------------------------------------------------------------------------------------------


def page(rows: list[Row], peer: str | None = "m at http://127.0.0.1:2", **facts: str) -> str:
    told = {"ours": "m at http://127.0.0.1:1", "machine": "Linux, 2 cores", "command": "localfast bench", "when": "2026-01-02"}
    return html_page(Report(rows=rows, rounds=3, peer=peer, **{**told, **facts}))


def rows_of(works: list[str], ours: float, peer: float | None) -> list[Row]:
    return [Row(work, number, ours, peer) for work in works for number in NUMBERS]


def plots_of(text: str) -> list[ElementTree.Element]:
    return [
        ElementTree.fromstring(found.replace("<svg", f'<svg xmlns="{SVG[1:-1]}"')) for found in re.findall(r"<svg.*?</svg>", text)
    ]


class Outside(HTMLParser):
    """Finds whatever a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "action", "data") or name[:2] == "on"
        ]
        self.found += [tag] if tag in ("script", "link", "iframe", "object", "embed", "base") else []


def test_page_needs_nothing_from_outside_and_escapes_what_came_from_there() -> None:
    hostile = "<script src=http://x/></script><img src=x onerror=y>"
    text = page(rows_of(["streams-1", "streams-8"], 10, 20), ours=hostile, peer=hostile, machine=hostile, command=hostile)
    outside = Outside()
    outside.feed(text)
    assert outside.found == [] and not re.search(r"url\(|@import", text)
    assert text.count("&lt;script") == 4


def test_page_has_every_number_and_says_behind_in_words() -> None:
    rows = rows_of(["streams-1", "streams-2", "edit"], 10, 20)
    text = page(rows)
    assert text.count('<th scope="row">') == len(rows)
    assert text.count('<td class="w">behind</td>') == sum(row.standing == "behind" for row in rows) > 0
    assert verdict(rows) is None and "At least as good" in text


def test_page_plots_are_titled_and_told_in_words() -> None:
    plots = plots_of(page(rows_of(["streams-1", "streams-8", "long-prompt"], 10, 20)))
    titles = [plot.findtext(f"{SVG}title") for plot in plots]
    assert titles == ["Tokens per second", "Time to first text", "Gaps between pieces of an answer", "Against the peer"]
    for plot in plots:
        named = {part.get("id") for part in plot if part.get("id")}
        assert set((plot.get("aria-labelledby") or "").split()) == named and len(named) == 2
        assert "streams-8" in (plot.findtext(f"{SVG}desc") or "")


def test_page_without_a_peer_compares_nothing() -> None:
    text = page(rows_of(["streams-1"], 10, None), peer=None)
    assert [plot.findtext(f"{SVG}title") for plot in plots_of(text)][-1] == "Gaps between pieces of an answer"
    assert "Against the peer" not in text and "Ratio" not in text


numbers = st.floats(1e-6, 1e7) | st.just(0.0)


@given(st.lists(st.sampled_from(["streams-1", "streams-2", "streams-16", "edit"]), min_size=1, unique=True), numbers, numbers)
def test_page_plots_stay_inside_their_frame(works: list[str], ours: float, peer: float) -> None:
    for plot in plots_of(page(rows_of(works, ours, peer))):
        width, height = (float(size) for size in (plot.get("viewBox") or "").split()[2:])
        for part in plot.iter():
            for name, limit in (("x", width), ("cx", width), ("x1", width), ("y", height), ("cy", height), ("y2", height)):
                assert 0 <= float(part.get(name, 0)) <= limit, ElementTree.tostring(part)
