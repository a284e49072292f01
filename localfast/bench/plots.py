"""Three kinds of plots as SVG text: lines over counts, ranges on a logarithmic axis, bars around 1.0.

Pure, and without a library: colours and fonts come from the page's CSS, so that a plot follows light and dark. Ours and the
peer's differ in shape as well as colour. Drawn 400 units wide, so that letters stay readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from localfast.bench.report import shown

WIDTH = 400
Points = Sequence[tuple[float, float]]


def lines(title: str, about: str, series: Mapping[str, Points]) -> str:
    """Each series a line through its (count, value); counts are spaced by their logarithm, values begin at zero."""
    left, right, top, bottom = 52, WIDTH - 20, 34, 230
    counts = sorted({x for points in series.values() for x, _ in points})
    step = _round_step(max(y for points in series.values() for _, y in points) / 4)
    highest = step * max(1, math.ceil(max(y for points in series.values() for _, y in points) / step))
    span = math.log2(counts[-1] / counts[0]) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * math.log2(x / counts[0]) / span, bottom - (bottom - top) * y / highest

    parts = _legend(list(series))
    for tick in range(round(highest / step) + 1):
        y = place(counts[0], tick * step)[1]
        parts += [_rule(left, y, right, y), _text(left - 6, y + 4, shown(tick * step), "end")]
    parts += [_text(place(x, 0)[0], bottom + 18, shown(x), "middle") for x in counts]
    parts.append(_text((left + right) / 2, bottom + 38, "streams at once", "middle"))
    for index, (name, points) in enumerate(series.items()):
        places = [place(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line s{index}" points="{path}"/>')
        for (x, y), (at, value) in zip(places, points, strict=True):
            parts.append(_mark(index, x, y, f"{name}: {shown(value)} at {shown(at)}"))
    return _svg(title, about, bottom + 48, parts)


def ranges(title: str, about: str, groups: Mapping[str, Mapping[str, Sequence[tuple[str, float]]]]) -> str:
    """group -> side -> (name, value), from the smallest to the largest: a line with a mark at each."""
    values = [max(value, 0.1) for sides in groups.values() for points in sides.values() for _, value in points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values) * 1.01))
    left, right, top = 104, WIDTH - 24, 34

    def place(value: float) -> float:
        return left + (right - left) * (math.log10(max(value, 10**low)) - low) / (high - low)

    names = list(dict.fromkeys(side for sides in groups.values() for side in sides))
    row, gap = 17, 11
    bottom = top + sum(row * len(sides) + gap for sides in groups.values())
    parts = _legend(names)
    for power in range(low, high + 1):
        x = place(10**power)
        parts += [_rule(x, top, x, bottom), _text(x, bottom + 16, _tick(power), "middle")]
    y = top + gap / 2
    for group, sides in groups.items():
        parts.append(_text(left - 8, y + row * len(sides) / 2 + 4, group, "end"))
        for side, points in sides.items():
            index, middle = names.index(side), y + row / 2
            xs = [place(value) for _, value in points]
            parts.append(f'<line class="span s{index}" x1="{xs[0]:.1f}" y1="{middle:.1f}" x2="{xs[-1]:.1f}" y2="{middle:.1f}"/>')
            for position, (x, (name, value)) in enumerate(zip(xs, points, strict=True)):
                said = f"{side}, {group}, {name}: {shown(value)}"
                parts.append(_mark(index, x, middle, said, hollow=position > 0, small=0 < position < len(xs) - 1))
            y += row
        y += gap
    return _svg(title, about, bottom + 26, parts)


def bars(title: str, about: str, entries: Sequence[tuple[str, float]]) -> str:
    """(label, times better): to the right of the line at 1.0 is ahead, to the left behind; the axis is logarithmic."""
    span = min(4.0, max(1.0, math.ceil(max(abs(math.log2(value)) for _, value in entries))))
    left, right, top, row = 182, WIDTH - 92, 14, 20
    middle, half = (left + right) / 2, (right - left) / 2
    bottom = top + row * len(entries)

    def place(value: float) -> float:
        return middle + half * min(1.0, max(-1.0, math.log2(value) / span))

    parts = []
    for tick, text in ((2**-span, f"1/{2**span:.0f}"), (1.0, "1"), (2**span, f"{2**span:.0f}")):
        parts += [_rule(place(tick), top, place(tick), bottom), _text(place(tick), bottom + 18, text, "middle")]
    for number, (label, value) in enumerate(entries):
        y = top + row * number
        x = place(value)
        side = "ahead" if value >= 1 else "behind"
        parts.append(_text(left - 8, y + 14, label, "end"))
        box = f'x="{min(x, middle):.1f}" y="{y + 3}" width="{max(1.0, abs(x - middle)):.1f}" height="{row - 6}"'
        parts.append(f'<rect class="{side}" {box}/>')
        parts.append(_text(right + 8, y + 14, f"{shown(value)}{'' if value >= 1 else ' behind'}", "start"))
    parts.append(f'<line class="one" x1="{middle}" y1="{top - 4}" x2="{middle}" y2="{bottom + 4}"/>')
    return _svg(title, about, bottom + 26, parts)


def _svg(title: str, about: str, height: float, parts: Sequence[str]) -> str:
    key = title.lower().replace(" ", "-")
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-labelledby="{key} {key}-told">'
        f'<title id="{key}">{escape(title)}</title><desc id="{key}-told">{escape(about)}</desc>{"".join(parts)}</svg>'
    )


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        parts += [_mark(index, 12 + 90 * index, 12, name), _text(22 + 90 * index, 16, name, "start")]
    return parts


def _mark(series: int, x: float, y: float, said: str, *, hollow: bool = False, small: bool = False) -> str:
    """A disc for the first series, a square for the second."""
    size = 2.5 if small else 4.5
    kind = f'class="mark s{series}{" hollow" if hollow and not small else ""}"'
    shape = f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="{size}">'
    if series:
        shape = f'<rect {kind} x="{x - size + 0.5:.1f}" y="{y - size + 0.5:.1f}" width="{2 * size - 1}" height="{2 * size - 1}">'
    return f"{shape}<title>{escape(said)}</title></{'rect' if series else 'circle'}>"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _tick(power: int) -> str:
    """Of milliseconds: "10 ms", "1 s"."""
    return f"{10 ** (power - 3):g} s" if power >= 3 else f"{10**power:g} ms"


def _round_step(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(value))
    return float(next(power * digit for digit in (1, 2, 5, 10) if power * digit >= value))
