"""Draws the figures of the routing benchmark as SVG: a panel per model, in it a column per traffic and a mark per policy."""

import math
from collections.abc import Mapping
from html import escape

from tests.bench.routing_table import Table

COLUMN, PANEL_HEIGHT, LEFT, TOP, LEGEND = 96, 260, 48, 36, 190
LEAST, MOST = 0.5, 32.0  # of the logarithmic scale; greater values are drawn at its end
TICKS = (0.5, 1, 2, 4, 8, 16, 32)
COLOURS = (
    "#000000", "#d62728", "#ff7f0e", "#1f77b4", "#7fb2dd", "#7f7f7f", "#c7c7c7", "#2ca02c",
    "#9467bd", "#8c564b", "#c49c94", "#e377c2", "#bcbd22", "#17becf", "#98df8a", "#aec7e8", "#ffbb78", "#ff9896",
)  # fmt: skip


def chart(tables: Mapping[str, Mapping[str, Table]]) -> str:
    """Returns an SVG document. A mark is the mean TTFT divided by the oracle's, on a logarithmic scale."""
    names = list(dict.fromkeys(name for panel in tables.values() for table in panel.values() for name in table))
    columns = max(len(panel) for panel in tables.values())
    width, height = LEFT + columns * COLUMN + LEGEND, len(tables) * (PANEL_HEIGHT + TOP + 30)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for at, (kind, panel) in enumerate(tables.items()):
        parts += _panel(kind, panel, names, at * (PANEL_HEIGHT + TOP + 30) + TOP)
    for at, name in enumerate(names):
        x, y = LEFT + columns * COLUMN + 24, TOP + 16 * at
        parts += [_mark(x, y, at), f'<text x="{x + 12}" y="{y + 4}">{escape(name)}</text>']
    return "\n".join([*parts, "</svg>\n"])


def _panel(kind: str, panel: Mapping[str, Table], names: list[str], top: int) -> list[str]:
    right = LEFT + len(panel) * COLUMN
    parts = [f'<text x="{LEFT}" y="{top - 14}" font-size="13">{escape(kind)}: mean time to first token ÷ oracle</text>']
    for tick in TICKS:
        y = _y(tick, top)
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{"#555" if tick == 1 else "#ddd"}"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>',
        ]
    for column, (workload, table) in enumerate(panel.items()):
        left = LEFT + column * COLUMN
        parts.append(f'<text x="{left + COLUMN / 2}" y="{top + PANEL_HEIGHT + 16}" text-anchor="middle">{escape(workload)}</text>')
        step = (COLUMN - 16) / max(1, len(names) - 1)
        parts += [_mark(left + 8 + names.index(name) * step, _y(row.mean, top), names.index(name)) for name, row in table.items()]
    return parts


def _y(ratio: float, top: int) -> float:
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return top + PANEL_HEIGHT * (1 - share)


def _mark(x: float, y: float, at: int) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[at % len(COLOURS)]}"/>'
