"""Formats figures as text: a few lines about the instance, a table of workers, a table of endpoints.

A narrow terminal shows only the most important columns. If not all rows fit, only the busiest rows are shown, and a line gives the number
of the others; if all fit, rows are in the order of names. Colours only repeat what the words say.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from epp.data import KV_USAGE, RUNNING, WAITING
from shm.remote_area import FRESH_S
from workers.host.printable import printable
from workers.supervisor.pages.state.figures import EndpointFigures, Figures, Supervisor, Worker
from workers.supervisor.pages.state.look import BandLook, Configuration, TriedSide, TryoutFigures
from workers.supervisor.pages.state.pool_figures import PoolFigures

UNKNOWN = "–"
GAP = 2
NAME_WIDTH_MIN = 12
WORKER_ROWS_MIN = 4
STYLES = {
    "stale": "yellow",
    "unknown": "dim",
    "down": "red",
    "ejected": "red",
    "failing": "yellow",
    "on trial": "yellow",
    "draining": "magenta",
    "leaving": "magenta",
    "not serving": "red",
}
HEARTBEAT_LATE_S = 1.0

Row = TypeVar("Row")


class Column(NamedTuple, Generic[Row]):
    """A column of a table. `width`: in characters; a column of width 0 gets the rest of the width.

    A narrow terminal drops the columns of the highest rank first, and never those of rank 0. A cell that is too long ends in "…"; in a
    column that is shown `whole`, it continues on the next line.
    """

    title: str
    width: int
    cell: Callable[[Row], str | Text]
    rank: int = 0
    left: bool = False
    optional: bool = False  # whether to hide the column if no row has a value
    whole: bool = False


WORKERS: Sequence[Column[Worker]] = (
    Column("worker", 6, lambda w: str(w.worker), left=True),
    Column("state", 11, lambda w: _styled(w.state), left=True),
    Column("heartbeat", 9, lambda w: _late(w.heartbeat_age_s)),
    Column("starts", 6, lambda w: str(w.starts), rank=3),
    Column("streams", 7, lambda w: _count(w.streams)),
    Column("conns", 5, lambda w: _count(w.connections)),
    Column("accepted", 8, lambda w: _share(w.accepted_share), rank=2),
    Column("lag", 7, lambda w: _short_time(w.loop_lag_s), rank=1, optional=True),
    Column("requests/s", 10, lambda w: _rate(w.requests_per_s)),
    Column("in flight", 9, lambda w: _count(w.in_flight), rank=4),
)
POOLS: Sequence[Column[PoolFigures]] = (
    Column("pool", 0, lambda p: p.name, left=True),
    Column("fresh", 9, lambda p: Text(f"{p.fresh}/{p.endpoints}", "" if p.endpoints and p.fresh == p.endpoints else "yellow")),
    Column("in flight", 9, lambda p: _count(p.in_flight)),
    Column("waiting", 7, lambda p: _count(p.waiting), rank=2),
    Column("queued", 6, lambda p: _count(p.queued), rank=1),
    Column("requests/s", 10, lambda p: _rate(p.requests_per_s)),
    Column("errors/s", 8, lambda p: Text(_rate(p.errors_per_s), "red" if p.errors_per_s else "")),
    Column("first token", 11, lambda p: _short_time(p.first_token_p50_s), rank=3),
    Column("95 %", 7, lambda p: _short_time(p.first_token_p95_s), rank=4),
    Column("config", 14, lambda p: _in_force(p.configuration), rank=3),
)
ENDPOINTS: Sequence[Column[EndpointFigures]] = (
    Column("endpoint", 0, lambda e: Text(printable(e.name)), left=True),
    Column("pool", 12, lambda e: UNKNOWN if e.pool is None else e.pool, left=True, optional=True),
    Column("address", 21, lambda e: Text(printable(e.address)), left=True, whole=True),
    Column("state", 8, lambda e: _styled(e.state), left=True),
    Column("age", 5, lambda e: _age(e.age_s), rank=2),
    Column("waiting", 7, lambda e: _scraped(e, WAITING.name)),
    Column("running", 7, lambda e: _scraped(e, RUNNING.name), rank=1, optional=True),
    Column("KV", 4, lambda e: _share(e.scraped.get(KV_USAGE.name))),
    Column("in fl.", 6, lambda e: _count(e.in_flight)),
    Column("tokens", 6, lambda e: _count(e.tokens_in_flight), rank=3),
    Column("picks/s", 7, lambda e: _rate(e.picks_per_s), rank=5),
    Column("share", 5, lambda e: _share(e.traffic_share), rank=1),
    Column("predicted", 9, lambda e: _share(e.predicted_share), rank=5, optional=True),
    Column("cached", 6, lambda e: _share(e.reported_share), rank=3, optional=True),
    Column("blocks", 6, lambda e: _count(e.index_entries), rank=6),
    Column("cache", 7, lambda e: _known(e), rank=1, left=True, optional=True),
    Column("events", 6, lambda e: _age(e.events_age_s), rank=4, optional=True),
    Column("held", 6, lambda e: UNKNOWN if e.held_blocks is None else _count(e.held_blocks), rank=4, optional=True),
)


BANDS: Sequence[Column[BandLook]] = (
    Column("pool", 12, lambda b: UNKNOWN if b.pool is None else b.pool, left=True, optional=True),
    Column("priority", 11, lambda b: str(b.priority), left=True),
    Column("waiting", 7, lambda b: _count(b.requests)),
    Column("bytes", 7, lambda b: _count(b.bytes)),
    Column("oldest", 7, lambda b: _age(b.oldest_age_s)),
)
SIDES: Sequence[Column[TriedSide]] = (
    Column("tried", 9, lambda s: s.configuration.replace("_", " "), left=True),
    Column("requests", 8, lambda s: _count(s.requests)),
    Column("errors", 6, lambda s: _share(s.error_share)),
    Column("ttft p50", 8, lambda s: _short_time(s.first_token_p50_s)),
    Column("p95", 7, lambda s: _short_time(s.first_token_p95_s)),
    Column("cached", 6, lambda s: _share(s.cached_share)),
    Column("computed", 8, lambda s: UNKNOWN if s.computed_tokens is None else _count(round(s.computed_tokens))),
    Column("decision", 8, lambda s: _short_time(s.decision_s)),
)
BAND_ROWS_MAX = 8
POOL_ROWS_MAX = 12  # rows of pools on a terminal
LEARNED_ROWS_MAX = 8


def screen(figures: Figures, width: int, height: int | None) -> Group:
    """Returns the whole view. `width` and `height`: in characters; with `height` None, all rows are shown."""
    lines = header(figures)
    bands, pools = figures.bands or (), figures.pools
    tryout = figures.configuration.tryout if figures.configuration is not None else None
    sides = tryout.sides if tryout is not None else ()
    learned = _learned(figures.endpoints)
    worker_rows = endpoint_rows = pool_rows = None
    if height is not None:
        free = (
            height
            - sum(-(-line.cell_len // width) for line in lines)
            - 6
            - (2 + min(POOL_ROWS_MAX, len(pools)) + (len(pools) > POOL_ROWS_MAX)) * bool(pools)
            - (2 + min(BAND_ROWS_MAX, len(bands))) * bool(bands)
            - (2 + len(sides)) * bool(sides)
            - sum(-(-line.cell_len // width) for line in learned)
        )  # 6 lines: blank lines, titles, and the lines about rows that are not shown
        pool_rows = POOL_ROWS_MAX
        worker_rows = min(len(figures.workers), max(WORKER_ROWS_MIN, free // 3))
        endpoint_rows = max(1, free - worker_rows)
    return Group(
        *lines,
        *((Text(""), *table(POOLS, pools, "pools", width, pool_rows, _busy_pool)) if pools else ()),
        *((Text(""), *table(SIDES, sides, "sides", width, None, lambda _: ())) if sides else ()),
        *((Text(""), *table(BANDS, bands, "bands", width, BAND_ROWS_MAX, lambda b: (b.requests, b.priority))) if bands else ()),
        Text(""),
        *table(WORKERS, figures.workers, "workers", width, worker_rows, lambda w: (w.requests_per_s or 0.0, w.streams)),
        Text(""),
        *table(ENDPOINTS, figures.endpoints, "endpoints", width, endpoint_rows, _busy_endpoint),
        *learned,
    )


def header(figures: Figures) -> list[Text]:
    """Returns the lines about the instance."""
    instance, requests, index = figures.instance, figures.requests, figures.index
    first = Text.assemble((printable(instance.name), "bold"), f"  pid {instance.pid}  up {_age(instance.uptime_s)}  ")
    if instance.life != "running":
        first.append(f"{instance.life}  ", "red")
    wanted = sum(worker.state != "removed" for worker in figures.workers)
    first.append(f"{figures.workers_serving} of {wanted} workers serving", "" if figures.workers_serving == wanted else "red")
    first.append("  supervisor heartbeat ").append(_late(figures.supervisor.heartbeat_age_s))
    second = Text(f"requests {_rate(requests.per_s)}/s  ")
    second.append(f"errors {_rate(requests.errors_per_s)}/s", "red" if requests.errors_per_s else "")
    second.append(
        f"  processing p50 {_short_time(requests.processing_p50_s)} p99 {_short_time(requests.processing_p99_s)}"
        f"  in flight {_count(requests.in_flight)}"
    )
    tokens = f"tokens in flight {_count(requests.tokens_in_flight)}  prompt from cache {_share(requests.cached_share)}"
    if requests.predicted_share is not None:
        tokens += f"  predicted {_share(requests.predicted_share)}, reported {_share(requests.reported_share)}"
    if requests.salt_lost_share is not None:
        tokens += f"  lost to salts {_share(requests.salt_lost_share)}"
    estimated = "about " if index.estimated else ""
    third = Text(
        f"prefix index {estimated}{_count(index.used)} of {_count(index.entries)} entries ({_share(index.used_share)})  "
        f"evictions {_count(index.evictions)}  dropped {_count(index.dropped)}  "
    )
    third.append(f"bus drops {_count(figures.bus_drops)}", "yellow" if figures.bus_drops else "")
    lines = [first, second, Text(tokens), third, *_scaling(figures.supervisor)]
    lines += _precise(figures.endpoints)
    if (configuration := figures.configuration) is not None:
        line = Text(f"configuration {configuration.generation} ({configuration.hash})  ")
        behind = configuration.workers != figures.workers_serving
        line.append(f"in {configuration.workers} of {figures.workers_serving} workers", "red" if behind else "")
        if configuration.last_reload_failed:
            line.append(f"  last reload failed: {printable(configuration.last_reload_failed.splitlines()[0])}", "red")
        lines.append(line)
        if configuration.tryout is not None:
            lines.append(_tryout(configuration.tryout))
    if (others := figures.others) is not None:
        text = f"other replicas {others.replicas}: {others.requests} requests in flight, {others.waiting} waiting"
        stale = others.age_s > FRESH_S
        lines.append(Text(f"{text}  {others.age_s:.1f} s ago{', so they are ignored' if stale else ''}", "red" if stale else ""))
    if figures.left_out:
        names = ", ".join(f"{printable(name)} (in {workers})" for name, workers in sorted(figures.left_out.items()))
        lines.append(Text(f"plugins that are left out for a while, because they failed too often: {names}", "red"))
    return lines


def _learned(endpoints: Sequence[EndpointFigures]) -> list[Text]:
    """Returns one line per busiest endpoint with the speed that the latency model has learned."""
    known = [endpoint for endpoint in endpoints if endpoint.first_token is not None]
    shown = sorted(known, key=_busy_endpoint, reverse=True)[:LEARNED_ROWS_MAX]
    lines = [Text(f"{printable(each.name)}: first token in {each.first_token}") for each in shown]
    return [Text(""), *lines] if lines else []


def _scaling(supervisor: Supervisor) -> list[Text]:
    """Returns a line about the replicas that the pool needs, or no line while the number is not known."""
    if supervisor.replicas_needed is None:
        return []
    line = Text(f"the work that arrives needs {supervisor.replicas_needed} replicas")
    if (headroom := supervisor.headroom) is not None and headroom >= 0.0:
        line.append(f"; {_share(headroom)} of the pool is free")
    elif headroom is not None:
        line.append(f"; {_share(-headroom)} more work than the pool should do", "yellow")
    return [line]


def _tryout(tried: TryoutFigures) -> Text:
    line = f"candidate {tried.generation} ({tried.hash}) of {printable(tried.source)}  "
    if tried.share:
        return Text(f"{line}decides {100 * tried.share:g}% of the requests, by {tried.by}")
    compared = tried.agreed + tried.differed + tried.failed
    agreed = _share(tried.agreed / compared if compared else None)
    return Text(f"{line}a shadow  {_count(compared)} decisions compared, {agreed} agreed, {_count(tried.failed)} failed")


def _precise(endpoints: Sequence[EndpointFigures]) -> list[Text]:
    """Returns a line about event streams: how many endpoints have precise matches, and why others do not."""
    whys = [endpoint.not_precise for endpoint in endpoints if endpoint.not_precise is not None]
    if not whys:
        return []
    line = Text(f"matched precisely {whys.count('')} of {len(whys)} endpoints")
    reasons = Counter(why for why in whys if why)
    if reasons:
        line.append("  approximately: " + ", ".join(f"{n} ({printable(why)})" for why, n in reasons.most_common()), "yellow")
    return [line]


def table(
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    noun: str,
    width: int,
    rows_max: int | None,
    busy: Callable[[Row], tuple[float, ...]],
) -> list[RenderableType]:
    """Returns the table with the rows that fit, and a line with the number of the others. `noun`: names the rows.

    `busy`: the sort key that chooses the rows that fit, highest first.
    """
    if not rows:
        return [Text(f"no {noun}", "dim")]
    columns = [_widened(column, rows) if column.whole else column for column in columns]
    hidden = 0 if rows_max is None else max(0, len(rows) - rows_max)
    if hidden:
        rows = sorted(rows, key=busy, reverse=True)[:rows_max]
    shown = fitting([c for c in columns if not c.optional or any(c.cell(row) != UNKNOWN for row in rows)], width)
    reserved = sum(column.width + GAP for column in shown) - GAP
    drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column in shown:
        size = column.width or max(NAME_WIDTH_MIN, width - reserved)
        fixed = column.width or None
        drawn.add_column(
            column.title,
            justify="left" if column.left else "right",
            no_wrap=not column.whole,
            overflow="fold" if column.whole else "ellipsis",
            min_width=fixed,
            max_width=min(size, width),
        )
    for row in rows:
        drawn.add_row(*(column.cell(row) for column in shown))
    return [drawn, Text(f"… and {hidden} more {noun}", "dim")] if hidden else [drawn]


def _widened(column: Column[Row], rows: Sequence[Row]) -> Column[Row]:
    """Returns the column, made wide enough for its longest cell, because an address must not be cut."""
    return column._replace(width=max(column.width, *(len(str(column.cell(row))) for row in rows)))


def fitting(columns: Sequence[Column[Row]], width: int) -> list[Column[Row]]:
    """Returns the columns that fit into `width`: drops the columns of the highest rank until the rest fits."""
    shown = list(columns)
    while sum((column.width or NAME_WIDTH_MIN) + GAP for column in shown) - GAP > width:
        least = max(shown, key=lambda column: column.rank)
        if not least.rank:
            break
        shown.remove(least)
    return shown


def _in_force(configuration: Configuration | None) -> Text:
    """Returns the number of the configuration of one of several pools, and whether the last reload failed or a candidate is tried."""
    if configuration is None:
        return Text("none", "red")
    if configuration.last_reload_failed:
        return Text(f"{configuration.generation}, refused", "red")
    return Text(f"{configuration.generation}, tries" if configuration.tryout is not None else str(configuration.generation))


def _busy_pool(pool: PoolFigures) -> tuple[float, ...]:
    return pool.errors_per_s or 0.0, pool.requests_per_s or 0.0, pool.queued, pool.in_flight


def _busy_endpoint(endpoint: EndpointFigures) -> tuple[float, ...]:
    queued = endpoint.scraped.get(WAITING.name, 0.0) + endpoint.scraped.get(RUNNING.name, 0.0)
    return endpoint.in_flight, queued, endpoint.picks_per_s or 0.0


def _known(endpoint: EndpointFigures) -> str | Text:
    """Returns how the picker knows what the endpoint has cached: by precise or by approximate matches."""
    if endpoint.not_precise is None:
        return UNKNOWN
    return Text("approx", "yellow") if endpoint.not_precise else "precise"


def _styled(word: str) -> Text:
    return Text(word, STYLES.get(word, ""))


def _late(age_s: float | None) -> Text:
    return Text(_age(age_s), "red" if age_s is None or age_s > HEARTBEAT_LATE_S else "")


def _scraped(endpoint: EndpointFigures, column: str) -> str:
    value = endpoint.scraped.get(column)
    return UNKNOWN if value is None else _count(value)


def _count(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            scaled = number / (1e3 if letter == "k" else size)
            return f"{scaled:.1f}{letter}" if scaled < 100 else f"{scaled:.0f}{letter}"
    return f"{number:g}"


def _rate(per_s: float | None) -> str:
    if per_s is None:
        return UNKNOWN
    return f"{per_s:.1f}" if per_s < 100 else _count(round(per_s))


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def _short_time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{seconds * 1e3:.1f}ms" if seconds < 1 else f"{seconds:.1f}s"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < 10:
        return f"{max(0.0, seconds):.2f}s"
    for size, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{letter}"
    return f"{seconds:.0f}s"
