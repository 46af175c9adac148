"""The figures of a replay as text."""

from collections.abc import Sequence

from loadtest.replay.figures import Figures
from loadtest.replay.scenario import Outcome
from loadtest.replay.servers import UNBOUNDED, Speed
from loadtest.replay.verdict import change, verdict

BASE = "recorded configuration"
NAME_CHARS = 36
COLUMNS = (
    ("requests", "requests", "{:.0f}", 1), ("errors", "errors", "{:.0f}", 1), ("first token ms: mean", "ttft_mean", "{:.0f}", 1e3),
    ("p50", "ttft_p50", "{:.0f}", 1e3), ("p95", "ttft_p95", "{:.0f}", 1e3), ("p99", "ttft_p99", "{:.0f}", 1e3),
    ("end ms: p50", "latency_p50", "{:.0f}", 1e3), ("queue ms: p95", "wait_p95", "{:.0f}", 1e3), ("hit rate", "hit_rate", "{:.1f}%", 100),
    ("load", "load", "{:.2f}", 1), ("moved", "moved", "{:.1f}%", 100),
)  # fmt: skip


def lines(outcome: Outcome) -> list[str]:
    """Returns the tables, how far the model is from the measured times, and a verdict on each configuration."""
    rows = figure_rows(outcome)
    names = [each.member.name for each in outcome.changed.world.endpoints]
    refused = [
        f"{name}: refused by the picker: {', '.join(f'{count} {cause}' for cause, count in each.run.refused.items())}"
        for name, each in {BASE: outcome.base, **outcome.others}.items()
        if each.run.refused
    ]
    return [
        *server_lines(names, outcome.changed.world.speeds),
        "",
        *figure_lines(rows),
        *refused,
        trust_text(outcome),
        *(verdict(name, change(outcome.base.runs, each.runs)) for name, each in outcome.others.items()),
    ]


def figure_rows(outcome: Outcome) -> dict[str, Figures]:
    """Returns the figures of each row of the table by its name."""
    rows = {
        "measured": outcome.scenario.measured_figures,
        "replayed as recorded": outcome.fit_figures,
        BASE: outcome.base.figures,
        **{name: each.figures for name, each in outcome.others.items()},
    }
    return {name: each for name, each in rows.items() if each is not None}


def figure_lines(rows: dict[str, Figures]) -> list[str]:
    """Returns a table with a row per run."""
    cells = [[text.format(getattr(each, field) * by) for _, field, text, by in COLUMNS] for each in rows.values()]
    widths = [max(len(COLUMNS[at][0]), *(len(row[at]) for row in cells)) for at in range(len(COLUMNS))]
    head = " ".join(column[0].rjust(width) for column, width in zip(COLUMNS, widths, strict=True))
    lines = [f"{'':{NAME_CHARS}} {head}"]
    for name, row in zip(rows, cells, strict=True):
        lines.append(f"{name[-NAME_CHARS:]:{NAME_CHARS}} {' '.join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))}")
    return lines


def server_lines(names: Sequence[str], speeds: Sequence[Speed]) -> list[str]:
    """Returns a table with a row per server."""
    lines = ["server                   form    overhead ms  prefill us/token  decode ms/token     slots  cache tokens  off by"]
    for name, speed in zip(names, speeds, strict=True):
        slots, cache = (str(n) if n < UNBOUNDED else "unbounded" for n in (speed.slots, speed.cache_tokens))
        off = f"{speed.error:.0%}" if speed.samples else "–"
        lines.append(
            f"{name[-24:]:24} {speed.form:7} {1e3 * speed.overhead_s:11.1f} {1e6 * speed.prefill_s:17.1f} {1e3 * speed.decode_s:16.1f} "
            f"{slots:>9} {cache:>13} {off:>7}"
        )
    return lines


def trust_text(outcome: Outcome) -> str:
    """Says how far the replay of the recorded configuration is from what was measured."""
    fit, measured = outcome.fit_figures, outcome.scenario.measured_figures
    if fit is None or measured is None:
        return "the servers are assumed: compare configurations, and do not rely on the times"
    off = {name: 100 * (getattr(fit, f"ttft_{name}") / getattr(measured, f"ttft_{name}") - 1) for name in ("p50", "p95")}
    text = ", ".join(f"{name} {percent:+.0f} %" for name, percent in off.items())
    return f"the model's error under the recorded configuration: {text}; it may be larger under others"
