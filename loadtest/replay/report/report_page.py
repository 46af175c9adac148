"""Makes the page of a report."""

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Final

from loadtest.replay.figures import Figures
from loadtest.replay.report.charts import Axis, bar_chart, line_chart
from loadtest.replay.report.curves import edges_of, hit_rates, loads, moves, percentiles, waiting
from loadtest.replay.run import Floats, Run
from loadtest.replay.scenario import Outcome, Replayed
from loadtest.replay.servers import UNBOUNDED
from loadtest.replay.tables import BASE, COLUMNS, figure_rows, trust_text

SECONDS: Final = Axis("seconds")
SERVERS_SHOWN: Final = 16  # lines in the charts of load
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def page(outcome: Outcome) -> str:
    """Returns the report as HTML."""
    runs = {BASE: outcome.base, **outcome.others}
    edges = edges_of([each.run for each in runs.values()])
    style = files("loadtest.replay.report").joinpath("style.css").read_text(encoding="utf-8")
    recording = outcome.scenario.recording
    intro = (
        f"{len(recording.asked):,} requests in {edges[-1]:,.0f} s, {len(outcome.changed.world.endpoints)} endpoints. "
        f"{trust_text(outcome).capitalize()}."
    )
    charts = [
        _figure("Time to the first token", line_chart(_percentiles(outcome, runs), Axis("percentile"), Axis("ms", log=True))),
        _figure("Hit rate", line_chart({n: hit_rates(r.run, edges) for n, r in runs.items()}, SECONDS, Axis("cached tokens, %"))),
    ]
    body = [
        "<h1>Replay of recorded traffic</h1>",
        f"<p>{html.escape(intro)}</p>",
        _table(figure_rows(outcome)),
        f'<div class="charts">{"".join(charts)}</div>',
        *(_of_run(outcome, name, each, edges) for name, each in runs.items()),
        "<h2>Fitted servers</h2>",
        _servers(outcome),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Replay of recorded traffic</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{style}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _percentiles(outcome: Outcome, runs: Mapping[str, Replayed]) -> dict[str, Sequence[tuple[float, float]]]:
    measured = outcome.scenario.measured
    first = {} if measured is None else {"measured": percentiles([measured])}
    return {**first, **{name: percentiles(each.runs) for name, each in runs.items()}}


def _of_run(outcome: Outcome, name: str, replayed: Replayed, edges: Floats) -> str:
    """Returns the part of one configuration."""
    names = [each.member.name for each in outcome.changed.world.endpoints]
    run, base = replayed.run, outcome.base.run
    charts = [
        _figure("Requests in flight per endpoint", line_chart(_busiest(run, names, edges), SECONDS, Axis("requests"))),
        _figure("Requests that wait in the picker, by band", _waiting(outcome, run, edges)),
    ]
    if run is not base:
        title = f"{replayed.figures.moved:.1%} of the requests would go elsewhere"
        charts.append(_figure(title, bar_chart(moves(run, base, names), Axis("requests"))))
    refused = ", ".join(f"{count} {cause}" for cause, count in run.refused.items())
    return (
        f"<h2>{html.escape(name)}</h2>"
        + (f"<p>Refused by the picker: {html.escape(refused)}.</p>" if refused else "")
        + f'<div class="charts">{"".join(charts)}</div>'
    )


def _busiest(run: Run, names: Sequence[str], edges: Floats) -> dict[str, Sequence[tuple[float, float]]]:
    """Returns the load of the busiest endpoints."""
    found = loads(run, names, edges)
    ranked = sorted(found, key=lambda name: -sum(load for _, load in found[name]))[:SERVERS_SHOWN]
    return {name: found[name] for name in names if name in ranked}


def _waiting(outcome: Outcome, run: Run, edges: Floats) -> str:
    bands = waiting(run, [asked.priority for asked in outcome.scenario.recording.asked], edges)
    return line_chart(bands, SECONDS, Axis("requests")) if bands else '<p class="none">No request waits.</p>'


def _figure(title: str, chart: str) -> str:
    return f"<figure><h3>{html.escape(title)}</h3>{chart}</figure>"


def _table(rows: Mapping[str, Figures]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title, *_ in COLUMNS)
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td>{text.format(getattr(each, field) * by)}</td>" for _, field, text, by in COLUMNS)
        + "</tr>"
        for name, each in rows.items()
    )
    return f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _servers(outcome: Outcome) -> str:
    titles = ("form", "overhead ms", "prefill µs/token", "decode ms/token", "slots", "cache tokens", "samples", "off by")
    rows = []
    for each, speed in zip(outcome.changed.world.endpoints, outcome.changed.world.speeds, strict=True):
        cells = (
            speed.form, f"{1e3 * speed.overhead_s:.1f}", f"{1e6 * speed.prefill_s:.1f}", f"{1e3 * speed.decode_s:.1f}",
            *(f"{n:,}" if n < UNBOUNDED else "unbounded" for n in (speed.slots, speed.cache_tokens)),
            f"{speed.samples:,}", f"{speed.error:.0%}" if speed.samples else "–",
        )  # fmt: skip
        rows.append(f"<tr><td>{html.escape(each.member.name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
