"""The metrics page: lanes, series, table and index -> exposition text, at the moment of the scrape.

Counters and histograms are sums over all lanes; a successor goes on with its predecessor's lane, so they never fall. The pool's
averages stay while no endpoint is fresh, as dashboards expect of the field's reference picker. Values that differ by worker
carry the label `worker`; seats that never had a worker are left out. A metric's older name follows it, unless legacy names are
off; it is the sum over labels that it lacks.

A page is made while it is sent. What adds up (counters, histograms, series) is read before its first line, so that a
histogram's buckets, its count, its sum and its older name agree; gauges are read where they are shown. Labels that come with
requests are put into text by `series_page`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, chain
from math import isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client.exposition import choose_encoder

from epp import metrics as m
from epp.candidates import Endpoint
from epp.data import KV_USAGE, RUNNING, WAITING
from epp.metrics import PREFIX, TWINS, Group, Metric
from shm.lanes import Lanes
from shm.series import SeriesReader
from shm.table import State, TableCopy, TableReader
from workers.admin import Answer, Request
from workers.documents import EndpointsView
from workers.flow_page import FlowFigures
from workers.instance import Family as Declared
from workers.series_page import SeriesText, go_float, header, pairs, pieces

Floats = NDArray[np.float64]
Value = float | tuple[list[int], float]  # a histogram's is its cumulative counts and its sum
Row = tuple[tuple[str, ...], Value]

DISTRIBUTION = "endpoint-picker"
POOL_COLUMNS = dict(zip(m.POOL_FIGURES, (KV_USAGE.name, WAITING.name, RUNNING.name), strict=True))
COUNTERS = frozenset(metric.name for metric in (*m.WORKER_COUNTERS, *m.SUPERVISOR_COUNTERS))
INDEXED = "prefix_indexer_hit_ratio"  # who declares it, uses the index
OPENMETRICS = "application/openmetrics-text"
END = "# EOF\n"
BITS_AT_ONCE = 100
NO_ELECTION: Mapping[str, Callable[[], bool]] = {}


class Pool:
    """The endpoints as a whole."""

    def __init__(self, table: TableReader, endpoints: EndpointsView, *, name: str, fresh_for_s: float) -> None:
        self._table = table
        self._endpoints = endpoints
        self._columns = {column: index for index, column in enumerate(table.schema.columns)}
        self._fresh_for_s = fresh_for_s
        self.name = name
        self.ready = 0
        self.figures: dict[str, tuple[float, float]] = {}

    def refresh(self, now: float) -> None:
        """Mean and sample deviation over endpoints with fresh values; the last ones stay when there is none."""
        copy, endpoints = self._current()
        slots = [endpoint.slot for endpoint in endpoints]
        fresh = (copy.state[slots] == State.FRESH) & (now - copy.updated_at[slots] <= self._fresh_for_s)
        self.ready = int(fresh.sum())
        for figure, column in POOL_COLUMNS.items():
            values = self._values(copy, slots, column)[fresh]
            values = values[~np.isnan(values)]
            if len(values):
                deviation = values.std(ddof=1) if len(values) > 1 else 0.0
                self.figures[figure] = round(float(values.mean()), 2), round(float(deviation), 2)

    def endpoints(self) -> list[Endpoint]:
        """Those that are in the table."""
        return self._current()[1]

    def queues(self) -> list[tuple[str, float]]:
        """Waiting requests per endpoint; those that were never scraped are left out."""
        copy, endpoints = self._current()
        values = self._values(copy, [endpoint.slot for endpoint in endpoints], WAITING.name).tolist()
        return [(endpoint.name, value) for endpoint, value in zip(endpoints, values, strict=True) if value == value]

    def ages(self, now: float) -> list[tuple[str, float]]:
        """Seconds since each endpoint's last good scrape; those that were never scraped are left out."""
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
        """NaN where a value is missing."""
        index = self._columns.get(column)
        if index is None:
            return np.full(len(slots), np.nan)
        present = (copy.present[slots] >> np.uint64(index)) & np.uint64(1)
        return np.where(present, copy.column(index)[slots], np.nan)


class IndexFigures(NamedTuple):
    """What the index writer counts."""

    size: Callable[[], int]
    evictions: Callable[[], int]
    dropped: Callable[[], int]
    corrupt: Callable[[], int]
    freed: Callable[[], Mapping[str, int]] = dict  # by cause


class Family(NamedTuple):
    """One family on the page."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    rows: Sequence[Row]
    bounds: tuple[float, ...] = ()


class Sums(NamedTuple):
    """What the lanes have come to, at one moment."""

    counters: Mapping[str, int]
    histograms: Mapping[str, tuple[list[int], float]]


class MetricsPage:
    """Everything on the page.

    `source_type` and `extractor_type` label the data layer's errors, `producer_name` who counts tokens in flight.
    `scrape_seconds` says by endpoint name how long the last scrape took, `leads` by lease whether this picker leads.
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
        now: Callable[[], float],
        series: Sequence[tuple[Group, SeriesReader]] = (),
        producer_name: str = "",
        scrape_seconds: Callable[[], Mapping[str, float]] = dict,
        stream_metrics: bool = False,
        legacy_names: bool = True,
        flow: FlowFigures | None = None,
        leads: Mapping[str, Callable[[], bool]] = NO_ELECTION,
    ) -> None:
        self._lanes = lanes
        self._families = families
        self._pool = pool
        self._index = index
        self._error_labels = {
            "datalayer_poll_errors_total": {"source_type": source_type},
            "datalayer_extract_errors_total": {"source_type": source_type, "extractor_type": extractor_type},
        }
        self._now = now
        self._series = series
        self._series_texts = [SeriesText(group, reader, legacy=legacy_names) for group, reader in series]
        self._producer_name = producer_name
        self._scrape_seconds = scrape_seconds
        self._stream_metrics = stream_metrics
        self._legacy_names = legacy_names
        self._flow = flow
        self._leads = leads

    def page(self, request: Request) -> Answer:
        """Text or OpenMetrics, as the client prefers."""
        _, content_type = choose_encoder(request.accept)
        openmetrics = content_type.startswith(OPENMETRICS)
        return Answer(pieces(self._text(openmetrics=openmetrics)), content_type)

    def _text(self, *, openmetrics: bool) -> Iterator[str]:
        """Lines, and empty strings where the event loop may turn."""
        sums = Sums(self._lanes.counters(), self._lanes.histograms())
        totals = []
        for text in self._series_texts:
            for total in text.reading():  # noqa: B007 - the last one is the result
                yield ""
            assert total is not None
            totals.append(total)
        bits = (_lines(family, openmetrics=openmetrics) for family in self._families_of(sums))
        for place, bit in enumerate(chain.from_iterable(bits)):
            yield bit
            if place % BITS_AT_ONCE == 0:
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
        yield from self._pool_gauges()
        yield from self._endpoints()
        yield from self._prefix_index()
        for metric, labels, rows in self._flow.families() if self._flow is not None else ():
            yield from self._shown(metric, labels, rows)
        yield from self._series_tables()

    def _info(self) -> Iterator[Family]:
        build = os.environ.get("EPP_COMMIT", ""), os.environ.get("EPP_BUILD_REF", "") or _version()
        yield from self._shown(m.INFO, ("commit", "build_ref"), [(build, 1)])
        if self._leads:
            rows: list[Row] = [((lease,), leads()) for lease, leads in self._leads.items()]
            yield from self._shown(m.LEADER, m.LEADER.labels, rows)

    def _counters(self, sums: Sums) -> Iterator[Family]:
        for metric in (*m.WORKER_COUNTERS, *m.SUPERVISOR_COUNTERS):
            labels = self._error_labels.get(metric.name, {})
            yield from self._shown(metric, tuple(labels), [(tuple(labels.values()), sums.counters[metric.name])])

    def _histograms(self, sums: Sums) -> Iterator[Family]:
        rows: dict[Metric, list[Row]] = {}
        labels: dict[Metric, tuple[str, ...]] = {}
        for family in self._families:
            if family.metric is m.STREAM_DURATION and not self._stream_metrics:
                continue
            counts, total = sums.histograms[family.key]
            labels[family.metric] = tuple(family.labels)
            row = tuple(family.labels.values()), (list(accumulate(counts)), total)
            rows.setdefault(family.metric, []).append(row)
        for metric, those in rows.items():
            yield from self._shown(metric, labels[metric], those)

    def _streams(self, sums: Sums) -> Iterator[Family]:
        if not self._stream_metrics:
            return
        lanes = self._lanes
        open_ = lanes.scalars(m.STREAMS_INFLIGHT.name)
        inflight = sum(count for seat, count in enumerate(open_) if lanes.serving(seat))
        yield from self._shown(m.STREAMS_INFLIGHT, (), [((), inflight)])
        ended = sums.counters
        rows: list[Row] = [((code,), ended[name]) for code, name in zip(m.GRPC_CODES, m.STREAM_COUNTERS, strict=True)]
        yield from self._shown(m.STREAMS_BY_CODE, ("code",), rows)

    def _workers(self) -> Iterator[Family]:
        lanes, ages = self._lanes, self._lanes.ages(self._now())
        starts = lanes.successions()
        used = [s for s, age in enumerate(ages) if s and (starts[s] or isfinite(age) or lanes.serving(s))]
        seats = range(1, max(used, default=0) + 1)
        gauges: dict[Metric, Sequence[float]] = {
            metric._replace(name=_gauge_name(metric.name)): lanes.scalars(metric.name)
            for metric in m.WORKER_GAUGES
            if metric is not m.LOOP_LAG
        }
        gauges[m.WORKER_LOOP_LAG] = [lag / 1e6 for lag in lanes.scalars(m.LOOP_LAG.name)]
        gauges[m.WORKER_SERVING] = [lanes.serving(seat) for seat in range(len(ages))]
        gauges[m.WORKER_BEAT_AGE] = ages
        gauges[m.WORKER_SHARE] = _shares(lanes, "connections_total")
        gauges[m.WORKER_STARTS] = starts
        for metric, values in gauges.items():
            yield from self._shown(metric, ("worker",), [((str(seat - 1),), values[seat]) for seat in seats])

    def _pool_gauges(self) -> Iterator[Family]:
        pool = self._pool
        pool.refresh(self._now())
        for figure, (mean, deviation) in pool.figures.items():
            yield from self._shown(m.POOL_AVERAGES[figure], ("name",), [((pool.name,), mean)])
            yield from self._shown(m.POOL_DEVIATIONS[figure], ("name",), [((pool.name,), deviation)])
        yield from self._shown(m.READY_ENDPOINTS, ("name",), [((pool.name,), pool.ready)])

    def _endpoints(self) -> Iterator[Family]:
        pool = self._pool
        by_endpoint = ("name", "model_server_endpoint")
        for metric, found in (
            (m.ENDPOINT_QUEUE, pool.queues()),
            (m.ENDPOINT_AGE, pool.ages(self._now())),
            (m.ENDPOINT_SCRAPE, self._scrape_seconds().items()),
        ):
            yield from self._shown(metric, by_endpoint, [((pool.name, name), value) for name, value in found])
        endpoints = pool.endpoints()
        slots = max((endpoint.slot + 1 for endpoint in endpoints), default=0)
        labels = ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority")
        for metric, count in ((m.ENDPOINT_REQUESTS, self._lanes.inflight), (m.ENDPOINT_TOKENS, self._lanes.tokens)):
            counts = count(slots).tolist()
            rows: list[Row] = [((e.name, e.namespace, self._producer_name, "", ""), counts[e.slot]) for e in endpoints]
            yield from self._shown(metric, labels, rows)

    def _prefix_index(self) -> Iterator[Family]:
        index, size = self._index, self._index.size()
        users = [(f.plugin_name, f.plugin_type) for f in self._families if f.metric.name == INDEXED]
        rows: list[Row] = [(user, size) for user in users]
        # All of them use the same index, so its size is not a sum over users.
        yield from self._shown(
            m.INDEX_SIZE, ("plugin_name", "plugin_type"), rows, of_twin=[((), size)] if users else []
        )
        for metric, count in (
            (m.INDEX_EVICTIONS, index.evictions),
            (m.INDEX_DROPPED, index.dropped),
            (m.BUS_CORRUPT, index.corrupt),
        ):
            yield from self._shown(metric, (), [((), count())])
        freed: list[Row] = [((cause,), count) for cause, count in index.freed().items()]
        yield from self._shown(m.INDEX_FREED, m.INDEX_FREED.labels, freed)

    def _series_tables(self) -> Iterator[Family]:
        used: list[Row] = []
        overflowed: list[Row] = []
        for group, reader in self._series:
            overflowed.append(((group.name,), reader.overflowed()))
            used += [((group.name, str(worker)), count) for worker, count in enumerate(reader.used()) if count]
        yield from self._shown(m.SERIES_USED, ("group", "worker"), used)
        yield from self._shown(m.SERIES_OVERFLOW, ("group",), overflowed)

    def _shown(
        self, metric: Metric, labels: tuple[str, ...], rows: Sequence[Row], *, of_twin: Sequence[Row] | None = None
    ) -> Iterator[Family]:
        """A metric, and under its older name."""
        yield Family(PREFIX + metric.name, metric.kind, metric.help, labels, rows, metric.buckets)
        twin = TWINS.get(metric.name)
        if twin is None or not self._legacy_names:
            return
        if of_twin is None:
            places = twin.places(labels)
            of_twin = [(tuple(values[place] for place in places), value) for values, value in rows]
        yield Family(twin.name, metric.kind, m.older_name(metric), twin.labels, of_twin, metric.buckets)


def _lines(family: Family, *, openmetrics: bool) -> Iterator[str]:
    """Values under the same labels are summed: a page that has labels twice is refused as a whole."""
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
    """Each lane's share of what all have counted."""
    place = lanes.schema.counter[counter]
    counts = [lanes.lane(seat).counters[place] for seat in range(lanes.schema.lanes)]
    return [count / (sum(counts) or 1) for count in counts]


def _gauge_name(name: str) -> str:
    """OpenMetrics knows `x_total` as the family `x`: a gauge may not have that name too."""
    return f"{name}_open" if f"{name}_total" in COUNTERS else name


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a source tree
        return ""
