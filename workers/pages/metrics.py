"""Makes the metrics page: formats lanes, series, table and index as exposition text, with the values at the time of the scrape.

Counters and histograms are sums over all lanes. A successor continues with its predecessor's lane, so the sums never fall. The averages
of the pool keep their last values while no endpoint is fresh, as dashboards of the reference picker expect. Values that differ by worker
have the label `worker`; seats that never had a worker are left out. Each metric is followed by its older name (its *twin*), unless legacy
names are off. A twin with fewer labels has sums over the labels that it lacks.

A page is generated while it is sent. Counters, histograms and series are read before its first line, so that the buckets of a
histogram, its count, its sum and its twin agree. Gauges are read when their lines are generated. `series` formats metrics with labels
that come from requests.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client.exposition import choose_encoder

from compiled.finder import choose
from epp.candidates import Endpoint
from epp.data import KV_USAGE, RUNNING, WAITING
from epp.decision.tryout import WHOLE
from epp.metrics import PREFIX, Group, Metric
from epp.metrics.computed import (
    BUS_CORRUPT,
    CONFIG_GENERATION,
    CONFIG_SUCCESSFUL,
    CONFIG_TIMESTAMP,
    CONFIG_TRYOUT,
    CONFIG_TRYOUT_SHARE,
    EJECTED_ENDPOINTS,
    ENDPOINT_AGE,
    ENDPOINT_FAILING,
    ENDPOINT_QUEUE,
    ENDPOINT_REQUESTS,
    ENDPOINT_SCRAPE,
    ENDPOINT_TOKENS,
    INDEX_DROPPED,
    INDEX_EVICTIONS,
    INDEX_FREED,
    INDEX_SIZE,
    INFO,
    LEADER,
    POOL_AVERAGES,
    POOL_DEVIATIONS,
    POOL_FIGURES,
    READY_ENDPOINTS,
    SERIES_OVERFLOW,
    SERIES_USED,
    WORKER_BEAT_AGE,
    WORKER_LOOP_LAG,
    WORKER_SERVING,
    WORKER_SHARE,
    WORKER_STARTS,
)
from epp.metrics.lanes import (
    EXTRACT_ERRORS,
    GRPC_CODES,
    LOOP_LAG,
    POLL_ERRORS,
    STREAM_COUNTERS,
    STREAM_DURATION,
    STREAMS_BY_CODE,
    STREAMS_INFLIGHT,
    SUPERVISOR_COUNTERS,
    WORKER_COUNTERS,
    WORKER_GAUGES,
)
from epp.metrics.older_names import TWINS, older_name
from shm.lanes import Lanes
from shm.series_reader import SeriesReader
from shm.table import EJECTED, State, TableCopy, TableReader
from workers.host.build import commit, version
from workers.host.memory import Leaving
from workers.pages.flow import FlowFigures
from workers.pages.kv_events import KvFigures
from workers.pages.latency import LatencyFigures
from workers.pages.page import PageAnswer, Request
from workers.pages.processes import ProcessFigures
from workers.pages.replicas import ReplicaFigures
from workers.pages.scaling import scaling_rows
from workers.pages.series import SeriesText, go_float, header, pairs, pieces
from workers.process.layout import LEAVING
from workers.process.layout import Family as Declared
from workers.shared.documents import EndpointsView
from workers.shared.reload_status import ReloadStatus

Floats = NDArray[np.float64]
Value = float | tuple[list[int], float]  # a histogram has cumulative counts and a sum
Row = tuple[tuple[str, ...], Value]

POOL_COLUMNS = dict(zip(POOL_FIGURES, (KV_USAGE.name, WAITING.name, RUNNING.name), strict=True))
COUNTERS = frozenset(metric.name for metric in (*WORKER_COUNTERS, *SUPERVISOR_COUNTERS))
INDEXED = "prefix_indexer_hit_ratio"  # plugins that declare this metric use the prefix index
OPENMETRICS = "application/openmetrics-text"
END = "# EOF\n"
LINES_AT_ONCE = 100
NO_ELECTION: Mapping[str, Callable[[], bool]] = {}


class Pool:
    """Computes the figures of the pool and of its endpoints."""

    def __init__(self, table: TableReader, endpoints: EndpointsView, *, name: str, fresh_for_s: float) -> None:
        self._table = table
        self._endpoints = endpoints
        self._columns = {column: index for index, column in enumerate(table.schema.columns)}
        self._fresh_for_s = fresh_for_s
        self.name = name
        self.ready = self.ejected = 0
        self.figures: dict[str, tuple[float, float]] = {}

    def refresh(self, now: float) -> None:
        """Computes mean and sample deviation over the endpoints with fresh values. If there are none, the last figures stay."""
        copy, endpoints = self._current()
        slots = [endpoint.slot for endpoint in endpoints]
        fresh = (copy.state[slots] == State.FRESH) & (now - copy.updated_at[slots] <= self._fresh_for_s)
        self.ready = int(fresh.sum())
        self.ejected = int(((copy.flags[slots] & np.uint64(EJECTED)) != 0).sum())
        for figure, column in POOL_COLUMNS.items():
            values = self._values(copy, slots, column)[fresh]
            values = values[~np.isnan(values)]
            if len(values):
                deviation = values.std(ddof=1) if len(values) > 1 else 0.0
                self.figures[figure] = round(float(values.mean()), 2), round(float(deviation), 2)

    def endpoints(self) -> list[Endpoint]:
        """Returns the endpoints that are in the table."""
        return self._current()[1]

    def queues(self) -> list[tuple[str, float]]:
        """Returns (endpoint name, waiting requests), without endpoints that were never scraped."""
        copy, endpoints = self._current()
        values = self._values(copy, [endpoint.slot for endpoint in endpoints], WAITING.name).tolist()
        return [(endpoint.name, value) for endpoint, value in zip(endpoints, values, strict=True) if value == value]

    def ages(self, now: float) -> list[tuple[str, float]]:
        """Returns (endpoint name, seconds since its last good scrape), without endpoints that were never scraped."""
        copy, endpoints = self._current()
        updated_at = copy.updated_at[[endpoint.slot for endpoint in endpoints]].tolist()
        return [(endpoint.name, now - at) for endpoint, at in zip(endpoints, updated_at, strict=True) if at]

    def _current(self) -> tuple[TableCopy, list[Endpoint]]:
        copy = self._table.copy()
        rows = len(copy.rows)
        generations = copy.generation
        known = self._endpoints.current()
        return copy, [e for e in known if e.slot < rows and int(generations[e.slot]) == e.generation]

    def _values(self, copy: TableCopy, slots: Sequence[int], column: str) -> Floats:
        """Returns the values of a column in these slots, with NaN for missing values."""
        index = self._columns.get(column)
        if index is None:
            return np.full(len(slots), np.nan)
        present = (copy.present[slots] >> np.uint64(index)) & np.uint64(1)
        return np.where(present, copy.column(index)[slots], np.nan)


class IndexFigures(NamedTuple):
    """Functions that return the counts of the index writer and of the bus."""

    size: Callable[[], int]
    evictions: Callable[[], int]
    dropped: Callable[[], int]
    corrupt: Callable[[], int]
    freed: Callable[[], Mapping[str, int]] = dict  # by cause


class Family(NamedTuple):
    """One metric on the page, with its rows."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    rows: Sequence[Row]
    bounds: tuple[float, ...] = ()


class Sums(NamedTuple):
    """The sums over all lanes at one moment."""

    counters: Mapping[str, int]
    histograms: Mapping[str, tuple[list[int], float]]


class MetricsPage:
    """Makes the page with all metrics.

    `source_type` and `extractor_type`: labels of the data layer's errors. `producer_name`: the plugin that counts tokens in flight.
    `scrape_seconds`: returns endpoint name -> duration of its last scrape. `failing`: as `EndpointTable.failing`. `leads`: lease name ->
    function that says whether this picker leads. `reload`: returns the state of the configuration; None if it cannot be reloaded.
    """

    def __init__(
        self,
        lanes: Lanes,
        families: Sequence[Declared],
        pool: Pool,
        index: IndexFigures,
        *,
        source_type: str,
        extractor_type: str,
        further_sources: Sequence[tuple[str, str]] = (),
        now: Callable[[], float],
        series: Sequence[tuple[Group, SeriesReader]] = (),
        producer_name: str = "",
        scrape_seconds: Callable[[], Mapping[str, float]] = dict,
        failing: Callable[[], Mapping[tuple[str, str], float]] = dict,
        stream_metrics: bool = False,
        legacy_names: bool = True,
        flow: FlowFigures | None = None,
        leads: Mapping[str, Callable[[], bool]] = NO_ELECTION,
        kv_events: KvFigures | None = None,
        latency: LatencyFigures | None = None,
        replicas: ReplicaFigures | None = None,
        processes: ProcessFigures | None = None,
        reload: Callable[[], ReloadStatus | None] = lambda: None,
    ) -> None:
        self._lanes = lanes
        self._families = families
        self._pool = pool
        self._index = index
        self._error_labels = {
            "datalayer_poll_errors_total": {"source_type": source_type},
            "datalayer_extract_errors_total": {"source_type": source_type, "extractor_type": extractor_type},
        }
        of_further = [{"source_type": of[0], "extractor_type": of[1]} for of in further_sources]
        self._further_errors = {
            name.partition("@")[0]: list(zip(names, of_further, strict=False))
            for names in (POLL_ERRORS, EXTRACT_ERRORS)
            for name in names[:1]
        }
        self._now = now
        self._series = series
        self._series_texts = [SeriesText(group, reader, legacy=legacy_names) for group, reader in series]
        self._producer_name = producer_name
        self._scrape_seconds = scrape_seconds
        self._failing = failing
        self._stream_metrics = stream_metrics
        self._legacy_names = legacy_names
        self._flow = flow
        self._leads = leads
        self._kv_events = kv_events
        self._latency = latency
        self._replicas = replicas
        self._processes = processes
        self._reload = reload

    def page(self, request: Request) -> PageAnswer:
        """Returns the page in the format that the client prefers: Prometheus text or OpenMetrics."""
        _, content_type = choose_encoder(request.accept)
        openmetrics = content_type.startswith(OPENMETRICS)
        return PageAnswer(pieces(self._text(openmetrics=openmetrics)), content_type)

    def _text(self, *, openmetrics: bool) -> Iterator[str]:
        """Yields the lines in parts, and an empty part wherever the event loop may turn."""
        sums = Sums(self._lanes.counters(), self._lanes.histograms())
        totals = []
        for text in self._series_texts:
            for total in text.reading():  # noqa: B007 - the last one is the result
                yield ""
            assert total is not None
            totals.append(total)
        parts = (_lines(family, openmetrics=openmetrics) for family in self._families_of(sums))
        for number, part in enumerate(chain.from_iterable(parts)):
            yield part
            if number % LINES_AT_ONCE == 0:
                yield ""
        for text, total in zip(self._series_texts, totals, strict=True):
            yield from text.lines(total, openmetrics=openmetrics)
        if openmetrics:
            yield END

    def _families_of(self, sums: Sums) -> Iterator[Family]:
        yield from self._info()
        yield from self._counters(sums)
        yield from self._histograms(sums)
        yield from self._streams(sums)
        yield from self._workers()
        yield from self._process_figures()
        yield from self._pool_gauges()
        for metric, labels, needed in scaling_rows(self._lanes, self._pool.name):
            yield from self._shown(metric, labels, needed)
        yield from self._endpoints()
        yield from self._prefix_index()
        for metric, labels, rows in self._flow.families() if self._flow is not None else ():
            yield from self._shown(metric, labels, rows)
        if self._kv_events is not None:
            for metric, labels, rows in self._kv_events.families(self._pool.name, self._pool.endpoints(), self._now()):
                yield from self._shown(metric, labels, rows)
        if self._latency is not None:
            figures = self._latency.families(self._pool.name, self._pool.endpoints(), self._now())
            for metric, labels, learned in figures:
                yield from self._shown(metric, labels, learned)
        for metric, labels, rows in self._replicas.families(self._now()) if self._replicas is not None else ():
            yield from self._shown(metric, labels, rows)
        yield from self._series_tables()

    def _info(self) -> Iterator[Family]:
        status = self._reload()
        labels = (*self._build, str(choose()), status.hash if status is not None else "")
        yield from self._shown(INFO, ("commit", "build_ref", "code", "config_hash"), [(labels, 1)])
        if status is not None:
            yield from self._shown(CONFIG_GENERATION, (), [((), status.generation)])
            yield from self._shown(CONFIG_SUCCESSFUL, (), [((), int(status.successful))])
            yield from self._shown(CONFIG_TIMESTAMP, (), [((), status.since)])
            tryout = status.tryout
            yield from self._shown(CONFIG_TRYOUT, (), [((), tryout.generation if tryout is not None else 0)])
            share = tryout.share.millionths / WHOLE if tryout is not None else 0.0
            yield from self._shown(CONFIG_TRYOUT_SHARE, (), [((), share)])
        if self._leads:
            rows: list[Row] = [((lease,), leads()) for lease, leads in self._leads.items()]
            yield from self._shown(LEADER, LEADER.labels, rows)

    @functools.cached_property
    def _build(self) -> tuple[str, str]:
        return commit(), os.environ.get("EPP_BUILD_REF", "") or version()

    def _counters(self, sums: Sums) -> Iterator[Family]:
        for metric in (*WORKER_COUNTERS, *SUPERVISOR_COUNTERS):
            labels = self._error_labels.get(metric.name, {})
            rows = Counter({tuple(labels.values()): sums.counters[metric.name]})
            for name, further in self._further_errors.get(metric.name, ()):
                rows[tuple(further[label] for label in labels)] += sums.counters[name]
            yield from self._shown(metric, tuple(labels), list(rows.items()))

    def _histograms(self, sums: Sums) -> Iterator[Family]:
        rows: dict[Metric, list[Row]] = {}
        labels: dict[Metric, tuple[str, ...]] = {}
        for family in self._families:
            if family.metric is STREAM_DURATION and not self._stream_metrics:
                continue
            counts, total = sums.histograms[family.key]
            labels[family.metric] = tuple(family.labels)
            row = tuple(family.labels.values()), (list(accumulate(counts)), total)
            rows.setdefault(family.metric, []).append(row)
        for metric, metric_rows in rows.items():
            yield from self._shown(metric, labels[metric], metric_rows)

    def _streams(self, sums: Sums) -> Iterator[Family]:
        if not self._stream_metrics:
            return
        lanes = self._lanes
        open_ = lanes.scalars(STREAMS_INFLIGHT.name)
        inflight = sum(count for seat, count in enumerate(open_) if lanes.serving(seat))
        yield from self._shown(STREAMS_INFLIGHT, (), [((), inflight)])
        ended = sums.counters
        rows: list[Row] = [((code,), ended[name]) for code, name in zip(GRPC_CODES, STREAM_COUNTERS, strict=True)]
        yield from self._shown(STREAMS_BY_CODE, ("code",), rows)

    def _workers(self) -> Iterator[Family]:
        lanes, ages = self._lanes, self._lanes.ages(self._now())
        starts = lanes.successions()
        used = [s for s, age in enumerate(ages) if s and (starts[s] or isfinite(age) or lanes.serving(s))]
        leaving = lanes.scalars(LEAVING)
        # A worker that was removed on purpose has no gauges: an age that grows for ever would look like a fault.
        removed = {s for s in used if leaving[s] == Leaving.LEAVES and not lanes.serving(s)}
        every = range(1, max(used, default=0) + 1)
        present = [seat for seat in every if seat not in removed]
        gauges: dict[Metric, Sequence[float]] = {
            metric._replace(name=_gauge_name(metric.name)): lanes.scalars(metric.name)
            for metric in WORKER_GAUGES
            if metric is not LOOP_LAG
        }
        gauges[WORKER_LOOP_LAG] = [lag / 1e6 for lag in lanes.scalars(LOOP_LAG.name)]
        gauges[WORKER_SERVING] = [lanes.serving(seat) for seat in range(len(ages))]
        gauges[WORKER_BEAT_AGE] = ages
        gauges[WORKER_SHARE] = _shares(lanes, "connections_total")
        gauges[WORKER_STARTS] = starts
        for metric, values in gauges.items():
            seats = every if metric is WORKER_STARTS else present  # the counter stays after a worker was removed
            yield from self._shown(metric, ("worker",), [((str(seat - 1),), values[seat]) for seat in seats])

    def _process_figures(self) -> Iterator[Family]:
        for metric, labels, rows in self._processes.families() if self._processes is not None else ():
            yield from self._shown(metric, labels, rows)

    def _pool_gauges(self) -> Iterator[Family]:
        pool = self._pool
        pool.refresh(self._now())
        for figure, (mean, deviation) in pool.figures.items():
            yield from self._shown(POOL_AVERAGES[figure], ("name",), [((pool.name,), mean)])
            yield from self._shown(POOL_DEVIATIONS[figure], ("name",), [((pool.name,), deviation)])
        yield from self._shown(READY_ENDPOINTS, ("name",), [((pool.name,), pool.ready)])
        yield from self._shown(EJECTED_ENDPOINTS, ("name",), [((pool.name,), pool.ejected)])

    def _endpoints(self) -> Iterator[Family]:
        pool = self._pool
        by_endpoint = ("name", "model_server_endpoint")
        for metric, found in (
            (ENDPOINT_QUEUE, pool.queues()),
            (ENDPOINT_AGE, pool.ages(self._now())),
            (ENDPOINT_SCRAPE, self._scrape_seconds().items()),
        ):
            yield from self._shown(metric, by_endpoint, [((pool.name, name), value) for name, value in found])
        shares: list[Row] = [((pool.name, *which), share) for which, share in self._failing().items()]
        yield from self._shown(ENDPOINT_FAILING, (*by_endpoint, "cause"), shares)
        endpoints = pool.endpoints()
        slots = max((endpoint.slot + 1 for endpoint in endpoints), default=0)
        labels = ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority")
        for metric, count in ((ENDPOINT_REQUESTS, self._lanes.inflight), (ENDPOINT_TOKENS, self._lanes.tokens)):
            counts = count(slots).tolist()
            rows: list[Row] = [((e.name, e.namespace, self._producer_name, "", ""), counts[e.slot]) for e in endpoints]
            yield from self._shown(metric, labels, rows)

    def _prefix_index(self) -> Iterator[Family]:
        index, size = self._index, self._index.size()
        users = [(f.plugin_name, f.plugin_type) for f in self._families if f.metric.name == INDEXED]
        rows: list[Row] = [(user, size) for user in users]
        # All plugins use the same index, so the twin is not the sum over plugins.
        yield from self._shown(INDEX_SIZE, ("plugin_name", "plugin_type"), rows, of_twin=[((), size)] if users else [])
        for metric, count in (
            (INDEX_EVICTIONS, index.evictions),
            (INDEX_DROPPED, index.dropped),
            (BUS_CORRUPT, index.corrupt),
        ):
            yield from self._shown(metric, (), [((), count())])
        freed: list[Row] = [((cause,), count) for cause, count in index.freed().items()]
        yield from self._shown(INDEX_FREED, INDEX_FREED.labels, freed)

    def _series_tables(self) -> Iterator[Family]:
        used: list[Row] = []
        overflowed: list[Row] = []
        for group, reader in self._series:
            overflowed.append(((group.name,), reader.overflowed()))
            used += [((group.name, str(worker)), count) for worker, count in enumerate(reader.used()) if count]
        yield from self._shown(SERIES_USED, ("group", "worker"), used)
        yield from self._shown(SERIES_OVERFLOW, ("group",), overflowed)

    def _shown(
        self, metric: Metric, labels: tuple[str, ...], rows: Sequence[Row], *, of_twin: Sequence[Row] | None = None
    ) -> Iterator[Family]:
        """Yields a metric and its twin. `of_twin`: the rows of the twin if they are not sums of `rows`."""
        yield Family(PREFIX + metric.name, metric.kind, metric.help, labels, rows, metric.buckets)
        twin = TWINS.get(metric.name)
        if twin is None or not self._legacy_names:
            return
        if of_twin is None:
            places = twin.places(labels)
            of_twin = [(tuple(values[place] for place in places), value) for values, value in rows]
        yield Family(twin.name, metric.kind, older_name(metric), twin.labels, of_twin, metric.buckets)


def _lines(family: Family, *, openmetrics: bool) -> Iterator[str]:
    """Yields the lines of a metric. Adds values with the same labels, because Prometheus refuses a page with duplicate labels."""
    yield header(family.name, family.kind, family.help, openmetrics=openmetrics)
    merged: dict[tuple[str, ...], list[Value]] = {}
    for values, value in family.rows:
        merged.setdefault(values, []).append(value)
    order = sorted(range(len(family.labels)), key=family.labels.__getitem__)
    names = [family.labels[place] for place in order]
    for values, found in merged.items():
        labels = pairs(names, [values[place] for place in order])
        if family.kind == "histogram":
            yield _histogram(family, labels, [part for part in found if isinstance(part, tuple)])
        else:
            total = sum(part for part in found if not isinstance(part, tuple))
            yield f"{family.name}{_braced(labels)} {go_float(total)}\n"


def _histogram(family: Family, labels: str, parts: Sequence[tuple[list[int], float]]) -> str:
    name, before, braced = family.name, f"{labels}," if labels else "", _braced(labels)
    counts = [sum(column) for column in zip(*(counts for counts, _ in parts), strict=True)]
    bounds = [*map(go_float, family.bounds), "+Inf"]
    lines = [
        f'{name}_bucket{{{before}le="{bound}"}} {go_float(count)}\n'
        for bound, count in zip(bounds, counts, strict=True)
    ]
    total = sum(total for _, total in parts)
    return "".join(
        (*lines, f"{name}_count{braced} {go_float(counts[-1])}\n", f"{name}_sum{braced} {go_float(total)}\n")
    )


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def _shares(lanes: Lanes, counter: str) -> list[float]:
    """Returns the share that each lane has in the sum of a counter, ordered by lane."""
    place = lanes.schema.counter[counter]
    counts = [lanes.lane(seat).counters[place] for seat in range(lanes.schema.lanes)]
    return [count / (sum(counts) or 1) for count in counts]


def _gauge_name(name: str) -> str:
    """Returns the name of a gauge on a page. OpenMetrics uses the name `x` for the counter `x_total`, so a gauge `x` becomes `x_open`
    if there is such a counter.
    """
    return f"{name}_open" if f"{name}_total" in COUNTERS else name
