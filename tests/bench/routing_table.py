"""The tables of the routing benchmark: figures of several runs, relative to the oracle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import geometric_mean

from tests.bench.routing_run import Outcome

NEAR_MEAN, NEAR_P95 = 1.05, 1.2  # of the oracle's
NOISE = 0.05
COLD_MEAN, COLD_NOISE = 1.10, 0.03
TRACE_MEAN, TRACE_P95, TRACE_CACHED = 1.05, 1.15, 0.98  # of the oracle's
BASELINES = ("field's weights", "round-robin")


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one traffic: means over the runs. `mean`, `p95`: TTFT divided by the oracle's; `*_range`: half of their range.

    `astray`, `work`, `scale`: as in `Outcome`.
    """

    mean: float
    mean_range: float
    p95: float
    p95_range: float
    ttft_s: float
    cached: float
    duplicates: float
    errors: float
    astray: float = 0.0
    work: float = 0.0
    scale: float = 1.0


Table = dict[str, Row]


def summary(runs: Sequence[dict[str, Outcome]], oracle: str) -> Table:
    """Makes the table of one model and traffic from the outcomes of each run."""
    return {name: _row([run[name] for run in runs], [run[oracle] for run in runs]) for name in runs[0]}


def _row(outcomes: Sequence[Outcome], oracle: Sequence[Outcome]) -> Row:
    pairs = list(zip(outcomes, oracle, strict=True))
    mean = [own.ttft_mean / best.ttft_mean for own, best in pairs]
    p95 = [own.ttft_p95 / best.ttft_p95 for own, best in pairs]
    count = len(outcomes)
    return Row(
        mean=sum(mean) / count,
        mean_range=(max(mean) - min(mean)) / 2,
        p95=sum(p95) / count,
        p95_range=(max(p95) - min(p95)) / 2,
        ttft_s=sum(outcome.ttft_mean for outcome in outcomes) / count,
        cached=sum(outcome.cached for outcome in outcomes) / count,
        duplicates=sum(outcome.duplicates for outcome in outcomes) / count,
        errors=sum(outcome.errors for outcome in outcomes) / count,
        astray=sum(outcome.astray for outcome in outcomes) / count,
        work=sum(outcome.work for outcome in outcomes) / count,
        scale=sum(outcome.scale for outcome in outcomes) / count,
    )


def text(title: str, table: Table) -> str:
    """Renders a table."""
    lines = [f"{title:30} mean            p95            TTFT ms cached %  dup % errors astray % work %  scale"]
    for name, row in table.items():
        lines.append(
            f"  {name:24} {row.mean:7.2f} ±{row.mean_range:5.2f} {row.p95:7.2f} ±{row.p95_range:5.2f} "
            f"{1000 * row.ttft_s:8.0f} {100 * row.cached:8.1f} {100 * row.duplicates:6.1f} {row.errors:6.1f} "
            f"{100 * row.astray:8.1f} {100 * row.work:6.0f} {row.scale:6.2f}"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Digest:
    """One policy over all tables. `mean`, `p95`: geometric means of the rows. `worst`: the highest `mean`, and `where`.

    `near`: cells within NEAR_MEAN and NEAR_P95. `behind`: cells in which the mean is more than NOISE above the lower one of BASELINES.
    """

    mean: float
    p95: float
    worst: float
    where: str
    near: int
    behind: int


def digest(tables: Mapping[str, Mapping[str, Table]]) -> dict[str, Digest]:
    """Sums up each policy over all models and traffic."""
    cells = _cells(tables)
    return {name: _digest(name, cells) for name in next(iter(cells.values()))}


def _cells(tables: Mapping[str, Mapping[str, Table]]) -> dict[str, Table]:
    return {f"{kind}, {traffic}": table for kind, panel in tables.items() for traffic, table in panel.items()}


def _digest(name: str, cells: Mapping[str, Table]) -> Digest:
    rows = {cell: table[name] for cell, table in cells.items()}
    where = max(rows, key=lambda cell: rows[cell].mean)
    behind = 0
    for table in cells.values():
        behind += table[name].mean > (1 + NOISE) * _baseline(table)
    return Digest(
        mean=geometric_mean(row.mean for row in rows.values()),
        p95=geometric_mean(row.p95 for row in rows.values()),
        worst=rows[where].mean,
        where=where,
        near=sum(row.mean <= NEAR_MEAN and row.p95 <= NEAR_P95 for row in rows.values()),
        behind=behind,
    )


def _baseline(table: Table) -> float:
    """Returns the mean of the better one of BASELINES; infinite if none ran."""
    return min((table[name].mean for name in BASELINES if name in table), default=inf)


def cold_text(tables: Mapping[str, Mapping[str, Table]], policy: str) -> str:
    """Renders what a policy costs before it has learned: the digest of its cells, and those that miss a goal."""
    cells = _cells(tables)
    missed = {name: table for name, table in cells.items() if table[policy].mean > min(COLD_MEAN, (1 + COLD_NOISE) * _baseline(table))}
    lines = [
        f"{policy}, cold: {geometric_mean(table[policy].mean for table in cells.values()):.2f} times the oracle's mean; "
        f"{len(missed)} of {len(cells)} cells are above {COLD_MEAN:.2f}, or {COLD_NOISE:.0%} above the better simple policy:"
    ]
    lines += [f"  {name:30} {table[policy].mean:5.2f}, simple {_baseline(table):5.2f}" for name, table in missed.items()]
    return "\n".join(lines)


def traces_text(tables: Mapping[str, Mapping[str, Table]], policy: str) -> str:
    """Renders the cells in which a policy misses a goal for traces of real traffic, with its cached tokens divided by the first row's."""
    cells = _cells(tables)
    cached = {name: _cached(table, policy) for name, table in cells.items()}
    rows = {name: table[policy] for name, table in cells.items()}
    missed = [name for name, row in rows.items() if row.mean > TRACE_MEAN or row.p95 > TRACE_P95 or cached[name] < TRACE_CACHED]
    lines = [
        f"{policy}: {len(missed)} of {len(cells)} cells are above {TRACE_MEAN:.2f} times the oracle's mean or {TRACE_P95:.2f} times its "
        f"p95, or below {TRACE_CACHED:.2f} times its cached tokens:"
    ]
    lines += [f"  {name:50} {rows[name].mean:5.2f} {rows[name].p95:5.2f} {cached[name]:5.2f}" for name in missed]
    return "\n".join(lines)


def _cached(table: Table, policy: str) -> float:
    """Returns the cached tokens of a policy, divided by those of the first row, which is the oracle's; 1 if it has none."""
    oracle = next(iter(table.values())).cached
    return table[policy].cached / oracle if oracle else 1.0


def digest_text(tables: Mapping[str, Mapping[str, Table]]) -> str:
    """Renders the digest of all policies."""
    cells = sum(map(len, tables.values()))
    lines = [f"{f'all {cells} cells':26}    mean     p95   worst   near  behind"]
    for name, row in digest(tables).items():
        lines.append(f"  {name:24} {row.mean:7.2f} {row.p95:7.2f} {row.worst:7.2f} {row.near:6} {row.behind:7}  {row.where}")
    return "\n".join(lines)


def markdown(tables: Mapping[str, Mapping[str, Table]]) -> str:
    """Renders the tables of the documentation: the digest, and a table per model with a row per policy and a column per traffic.

    A cell is the mean ± half of its range / p95, the failed requests, and the share of requests that went to a server that answers errors,
    if there are any.
    """
    parts = ["| policy | mean | p95 | worst mean | near | behind |", "|---|---|---|---|---|---|"]
    parts += [
        f"| {name} | {row.mean:.2f} | {row.p95:.2f} | {row.worst:.2f} ({row.where}) | {row.near} | {row.behind} |"
        for name, row in digest(tables).items()
    ]
    parts.append("")
    for kind, panel in tables.items():
        names = list(next(iter(panel.values())))
        parts += [f"| `{kind}` | " + " | ".join(panel) + " |", "|---" * (1 + len(panel)) + "|"]
        for name in names:
            rows = [table[name] for table in panel.values()]
            parts.append(f"| {name} | " + " | ".join(map(_cell, rows)) + " |")
        parts.append("")
    return "\n".join(parts)


def _cell(row: Row) -> str:
    errors = f", {row.errors:.0f} errors" if row.errors else ""
    errors += f", {row.astray:.0%} astray".replace("%", " %") if row.astray else ""
    return f"{row.mean:.2f} ± {row.mean_range:.2f} / {row.p95:.2f}{errors}"
