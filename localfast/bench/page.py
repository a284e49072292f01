"""The report as one HTML file that needs nothing else: no script, no font, no address. Pure.

What colours say is said in words, too. Everything that came from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from localfast.bench import plots
from localfast.bench.report import NUMBERS, Report, Row, shown, standing, verdict

_CSS = """
:root { color-scheme: light dark; --ink: #1b1d21; --soft: #585e68; --ground: #fff; --panel: #f5f6f8;
  --rule: #d5d8de; --s0: #0b5cad; --s1: #b34700; --bad: #a1121f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e9eaee; --soft: #a8aeb9; --ground: #14161a; --panel: #1d2026;
  --rule: #3a3f49; --s0: #6cb6ff; --s1: #ffa657; --bad: #ff9a94; } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.25rem; max-width: 68rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, "Segoe UI", sans-serif }
h1 { font-size: 1rem; font-weight: 600; color: var(--soft); margin: 0 }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
.verdict { font-size: 1.35rem; line-height: 1.35; margin: .25rem 0 1rem; max-width: 45rem; text-wrap: pretty }
.standing { margin: 0 0 1rem; max-width: 45rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; align-items: start }
figure { margin: 0; padding: .9rem; background: var(--panel); border-radius: .6rem }
figcaption { font-weight: 600; margin-bottom: .5rem }
figcaption span { display: block; font-weight: 400; color: var(--soft); font-size: .875rem }
svg { display: block; width: 100%; height: auto; max-width: 40rem }
svg text { fill: var(--ink); font-size: 13px }
.rule { stroke: var(--rule) } .one { stroke: var(--ink); stroke-width: 1.5 }
.line { fill: none; stroke-width: 2 } .line.s1 { stroke-dasharray: 6 4 }
.line.s0, .span.s0 { stroke: var(--s0) } .line.s1, .span.s1 { stroke: var(--s1) } .span { stroke-width: 2 }
.mark.s0 { fill: var(--s0); stroke: var(--s0) } .mark.s1 { fill: var(--s1); stroke: var(--s1) }
.mark.hollow { fill: var(--panel); stroke-width: 2 }
.ahead { fill: var(--s0) } .behind { fill: none; stroke: var(--bad); stroke-width: 1.5 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; width: 100%; max-width: 46rem }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--rule); vertical-align: top; white-space: nowrap }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums }
tr.lost td.w { color: var(--bad); font-weight: 600 }
tbody th { font-weight: 400 }
th[scope=rowgroup] { font-weight: 600; font-size: 1rem; padding-top: 1.1rem }
@media (max-width: 30rem) { body { padding: .9rem } figure { padding: .6rem }
  table { font-size: .8rem } th, td { padding: .3rem .3rem } }
"""


def html_page(report: Report) -> str:
    sentences = {"verdict": verdict(report.rows), "standing": standing(report.rows)}
    top = "".join(f'<p class="{kind}">{escape(text)}</p>' for kind, text in sentences.items() if text)
    figures = "".join(_figures(report))
    figures = figures and f'<h2>Plots</h2><div class="plots">{figures}</div>'
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>localfast bench, {escape(report.when)}</title><style>{_CSS}</style></head><body>
<header><h1>localfast bench</h1>{top}{_circumstances(report)}</header>
<main>{figures}
<h2 id="numbers">All numbers</h2>{_table(report)}
<h2>What they mean</h2>{_meanings(report.rows)}</main></body></html>
"""


def _circumstances(report: Report) -> str:
    rounds = "one round" if report.rounds == 1 else f"medians of {report.rounds} rounds, the servers taking turns"
    facts = {
        "When": report.when,
        "Machine": report.machine,
        "Ours": report.ours,
        "Peer": report.peer or "none",
        "Command": report.command,
        "Numbers": rounds if report.peer else rounds.partition(",")[0],
    }
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{escape(fact)}</dd>' for name, fact in facts.items())}</dl>"


def _table(report: Report) -> str:
    """One body of rows for each work."""
    compared = report.peer is not None
    heads = ["Number", ">Ours", *((">Peer", ">Ratio", "") if compared else ())]
    cells = "".join(f'<th scope="col"{_number(head)}>{head.removeprefix(">")}</th>' for head in heads)
    bodies = []
    for work in dict.fromkeys(row.work for row in report.rows):
        rows = "".join(_row(row, compared) for row in report.rows if row.work == work)
        title = f'<tr><th scope="rowgroup" colspan="{len(heads)}">{escape(work)}</th></tr>'
        bodies.append(f"<tbody>{title}{rows}</tbody>")
    return (
        '<div class="scroll" role="region" aria-labelledby="numbers" tabindex="0">'
        f"<table><thead><tr>{cells}</tr></thead>{''.join(bodies)}</table></div>"
    )


def _row(row: Row, compared: bool) -> str:
    cells = [f'<td class="n">{shown(row.ours)}</td>']
    if compared:
        peer = "" if row.peer is None else shown(row.peer)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        cells += [f'<td class="n">{peer}</td>', f'<td class="n">{ratio}</td>', f'<td class="w">{row.standing}</td>']
    return f'<tr class="{"lost" if row.standing else ""}"><th scope="row">{row.number}</th>{"".join(cells)}</tr>'


def _number(head: str) -> str:
    return ' class="n"' if head.startswith(">") else ""


def _meanings(rows: Sequence[Row]) -> str:
    """Each number that occurs, and its direction."""
    used = {row.number for row in rows}
    texts = []
    for name, number in NUMBERS.items():
        direction = "" if number.better == "neither" else f"; {number.better} is better"
        texts.append(f"<dt>{name}</dt><dd>{escape(number.meaning)}{direction}</dd>" if name in used else "")
    return f"<dl><dt>ratio</dt><dd>ours / peer</dd>{''.join(texts)}</dl>"


# --- plots --------------------------------------------------------------------------------------------------------------------

_TTFT = "filled: half of the requests; hollow: 95 of 100; shorter is better"
_GAPS = "filled: half of them; small: 95 and 99 of 100; hollow: the longest; shorter is better"
_BARS = "how many times better than the peer, whichever direction is better; the line is 1.0, where both are equal"
_RANGES = {
    "Time to first text": (_TTFT, ("ttft_p50_ms", "ttft_p95_ms")),
    "Gaps between pieces of an answer": (_GAPS, ("gap_p50_ms", "gap_p95_ms", "gap_p99_ms", "gap_max_ms")),
}


def _figures(report: Report) -> Iterator[str]:
    """Only those for which there are numbers."""
    if speeds := _by_streams(report.rows):
        title = "Tokens per second"
        about = _told({"tokens/s": {side: [(f"streams-{x:.0f}", y) for x, y in points] for side, points in speeds.items()}})
        yield _figure(title, "by the number of streams at once; higher is better", plots.lines(title, about, speeds))
    for title, (note, numbers) in _RANGES.items():
        if groups := _groups(report.rows, numbers):
            yield _figure(title, note, plots.ranges(title, _told(groups), groups))
    bars = [(f"{row.work} {row.number}", row.advantage) for row in report.rows if NUMBERS[row.number].plotted and row.advantage]
    if bars:
        title = "Against the peer"
        about = "; ".join(f"{label}: {shown(value)}" for label, value in bars)
        yield _figure(title, _BARS, plots.bars(title, about, bars))


def _figure(title: str, note: str, plot: str) -> str:
    return f"<figure><figcaption>{title}<span>{note}</span></figcaption>{plot}</figure>"


def _by_streams(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
    for row in rows:
        if row.work.startswith("streams-") and row.number == "tokens_per_s":
            streams = float(row.work.removeprefix("streams-"))
            lines["ours"].append((streams, row.ours))
            lines["peer"] += [] if row.peer is None else [(streams, row.peer)]
    return {side: sorted(points) for side, points in lines.items() if points}


Groups = dict[str, dict[str, list[tuple[str, float]]]]


def _groups(rows: Sequence[Row], numbers: Sequence[str]) -> Groups:
    """Works that have all these numbers, ours and the peer's."""
    groups: Groups = {}
    for work in dict.fromkeys(row.work for row in rows):
        known = [row for row in rows if row.work == work and row.number in numbers]
        if len(known) == len(numbers):
            groups[work] = {"ours": [(row.number, row.ours) for row in known]}
            if peer := [(row.number, row.peer) for row in known if row.peer is not None]:
                groups[work]["peer"] = peer
    return groups


def _told(groups: Groups) -> str:
    return "; ".join(
        f"{work}, {side}: " + ", ".join(f"{name} {shown(value)}" for name, value in points)
        for work, sides in groups.items()
        for side, points in sides.items()
    )
