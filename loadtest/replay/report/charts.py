"""Charts as SVG text. Colours come from the style sheet, by the class of a series (`s0`, `s1`, …). Values appear as tooltips."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 40
CLASSES: Final = 8  # colours in the style sheet; further series use them again
TICKS: Final = 5

Points = Sequence[tuple[float, float]]


class Axis(NamedTuple):
    """What an axis shows. `log`: whether the axis is logarithmic; then values are above 0."""

    label: str
    log: bool = False


class _Scale:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool) -> None:
        self.low, self.high = (low, high) if high > low else (low, low + 1.0)
        self._log = log and self.low > 0
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        share = math.log(max(value, low) / low) / math.log(high / low) if self._log else (value - low) / (high - low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        if self._log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            marks = [base * 10.0**power for power in range(first, last + 1) for base in (1, 2, 5)]
            return [mark for mark in marks if self.low <= mark <= self.high]
        step = nice((self.high - self.low) / TICKS)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, int(self.high / step + 1e-9) + 1)]


def nice(value: float) -> float:
    """Returns the next of 1, 2, 5, 10, … that is at least `value`."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * 0.999)


def number(value: float) -> str:
    """Returns a short text of a number."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def line_chart(series: Mapping[str, Points], x: Axis, y: Axis) -> str:
    """Returns a chart with a line per series, and its legend."""
    points = [point for each in series.values() for point in each]
    if not points:
        return '<p class="none">nothing to show</p>'
    xs, ys = [px for px, _ in points], [py for _, py in points if py > 0 or not y.log]
    across = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=x.log)
    lowest = min(ys, default=1.0) if y.log else 0.0
    up = _Scale(lowest, max(ys, default=1.0) or 1.0, HEIGHT - BOTTOM, TOP, log=y.log)
    parts = [_axes(across, up, x, y)]
    for order, (name, each) in enumerate(series.items()):
        path = " ".join(f"{across(px)},{up(py)}" for px, py in each)
        parts.append(f'<polyline class="line s{order % CLASSES}" points="{path}"><title>{html.escape(name)}</title></polyline>')
        if len(each) <= 40:
            parts += [
                f'<circle class="dot s{order % CLASSES}" cx="{across(px)}" cy="{up(py)}" r="3">'
                f"<title>{html.escape(name)}: {number(px)} → {number(py)}</title></circle>"
                for px, py in each
            ]
    return _svg(parts, f"{y.label} over {x.label}") + legend(list(series))


def bar_chart(bars: Mapping[str, Mapping[str, float]], y: Axis) -> str:
    """Returns a chart with a group of bars per name, one bar per part, and its legend."""
    parts_of = list(next(iter(bars.values()), {}))
    if not parts_of:
        return '<p class="none">nothing to show</p>'
    most = max(value for group in bars.values() for value in group.values()) or 1.0
    up = _Scale(0.0, most, HEIGHT - BOTTOM, TOP, log=False)
    group_width = (WIDTH - LEFT - RIGHT) / len(bars)
    bar_width = group_width * 0.8 / len(parts_of)
    drawn = [_axes(None, up, Axis(""), y)]
    for place, (name, group) in enumerate(bars.items()):
        start = LEFT + place * group_width + group_width * 0.1
        for order, (part, value) in enumerate(group.items()):
            top = up(value)
            drawn.append(
                f'<rect class="bar s{order % CLASSES}" x="{start + order * bar_width:.1f}" y="{top}" width="{bar_width:.1f}" '
                f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{html.escape(name)}, {html.escape(part)}: {number(value)}</title></rect>'
            )
        if len(bars) <= 24:
            drawn.append(
                f'<text class="tick" text-anchor="middle" x="{start + group_width * 0.4:.1f}" y="{HEIGHT - BOTTOM + 16}">'
                f"{html.escape(name[-12:])}</text>"
            )
    return _svg(drawn, y.label) + legend(parts_of)


def legend(names: Sequence[str]) -> str:
    """Returns the names with their colours."""
    items = "".join(f'<li><span class="key s{order % CLASSES}"></span>{html.escape(name)}</li>' for order, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def _axes(across: _Scale | None, up: _Scale, x: Axis, y: Axis) -> str:
    bottom = HEIGHT - BOTTOM
    parts = []
    for mark in up.ticks():
        at = up(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{at + 4:.1f}">{number(mark)}</text>')
    for mark in across.ticks() if across is not None else ():
        at = across(mark)  # type: ignore[misc]
        parts.append(f'<text class="tick" text-anchor="middle" x="{at}" y="{bottom + 16}">{number(mark)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="label" text-anchor="middle" transform="translate(12 {middle}) rotate(-90)">{html.escape(y.label)}</text>')
    parts.append(
        f'<text class="label" text-anchor="middle" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}">{html.escape(x.label)}</text>'
    )
    return "".join(parts)


def _svg(parts: Sequence[str], label: str) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{body}</svg>'
