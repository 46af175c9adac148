"""Makes the metrics page: formats areas, series, table and index as exposition text, with the values at the time of the scrape.

Counters and histograms are sums over all areas. A successor continues with its predecessor's area, so the sums never fall. The averages of
the pool keep their last values while no endpoint is fresh, as dashboards of the reference picker expect. Values that differ by worker have
the label `worker`; ordinals that never had a worker do not appear. Each metric is followed by its older name (its *twin*), unless legacy
names are off. A twin with fewer labels has sums over the missing labels.

A page is generated while it is sent. Counters, histograms and series are read before its first line, so that the buckets of a
histogram, its count, its sum and its twin agree. Gauges are read when their lines are generated.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import isfinite
from typing import NamedTuple

from prometheus_client.exposition import choose_encoder

from compiled.finder import choose
from epp.decision.tryout import WHOLE
from epp.learning.model import LatencyModel
from epp.metrics import POOL, PREFIX, Group, Metric, computed
from epp.metrics.areas import (
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
from epp.metrics.computed import Figures, Row
from epp.metrics.older_names import TWINS, older_name
from shm.areas import Areas
from shm.prefix_writer import IndexWriter
from shm.series_reader import SeriesReader
from workers.host.build import commit, version
from workers.host.memory import Leaving
from workers.process.layout import HEADROOM, LEAVING, REPLICAS_NEEDED, UNKNOWN_HEADROOM
from workers.process.names import Family as Declared
from workers.shared.reload_status import ReloadStatus
from workers.supervisor.pages.exposition import Family, SeriesText, lines_of, pieces
from workers.supervisor.pages.page import PageAnswer, Request
from workers.supervisor.pages.pool_gauges import PoolGauges
from workers.supervisor.pages.sections import Sections, latency_figures, replica_figures

COUNTERS = frozenset(metric.name for metric in (*WORKER_COUNTERS, *SUPERVISOR_COUNTERS))
# A counter of errors -> the counters of further data sources, and the labels of all of them.
SCRAPE_ERRORS: Mapping[str, tuple[Sequence[str], tuple[str, ...]]] = {
    "datalayer_poll_errors_total": (POLL_ERRORS, ("source_type",)),
    "datalayer_extract_errors_total": (EXTRACT_ERRORS, ("source_type", "extractor_type")),
}
INDEXED = "prefix_indexer_hit_ratio"  # plugins that declare this metric use the prefix index
OPENMETRICS = "application/openmetrics-text"
END = "# EOF\n"
LINES_AT_ONCE = 100
NO_ELECTION: Mapping[str, Callable[[], bool]] = {}


class IndexFigures(NamedTuple):
    """The objects that count changes of the prefix index. `corrupt`: returns the number of malformed frames on the bus."""

    writer: IndexWriter
    corrupt: Callable[[], int]


class AreaSums(NamedTuple):
    """The sums over all areas at one moment."""

    counters: Mapping[str, int]
    histograms: Mapping[str, tuple[list[int], float]]


class Content(NamedTuple):
    """The part of the page that comes from areas and series. `producer_name`: the plugin that counts tokens in flight."""

    families: Sequence[Declared]
    series: Sequence[tuple[Group, SeriesReader]] = ()
    producer_name: str = ""
    stream_metrics: bool = False
    legacy_names: bool = True


class Readings(NamedTuple):
    """The data layer's figures of its scrapes.

    `types`: the types of each data source and its extractor, which are the labels of their errors. The first entry is for the metrics
    pages. `seconds`, `failing`: as `EndpointTable.scrape_seconds` and `failing`.
    """

    types: Sequence[tuple[str, str]]
    seconds: Callable[[], Mapping[tuple[int, str], float]] = dict
    failing: Callable[[], Mapping[tuple[int, str, str], float]] = dict


class MetricsPage:
    """Makes the page with all metrics.

    `leads`: lease name -> function that says whether this picker leads. `reload`: returns the state of the configuration, or with several
    pools the state of their list; None if it cannot be reloaded. `reloads`: returns the states of several pools by their names.
    """

    def __init__(
        self,
        areas: Areas,
        content: Content,
        pools: Sequence[PoolGauges],
        index: IndexFigures,
        readings: Readings,
        sections: Sections,
        *,
        now: Callable[[], float],
        leads: Mapping[str, Callable[[], bool]] = NO_ELECTION,
        reload: Callable[[], ReloadStatus | None] = lambda: None,
        reloads: Callable[[], Mapping[str, ReloadStatus]] | None = None,
    ) -> None:
        self._areas = areas
        self._content = content
        self._pools = pools
        self._names = {pool.number: pool.name for pool in pools}  # places without a pool have no name
        self._alone = pools[0] if len(pools) == 1 else None
        self._index = index
        self._readings = readings
        self._sections = sections
        self._now = now
        self._series_texts = [SeriesText(group, reader, legacy=content.legacy_names) for group, reader in content.series]
        self._leads = leads
        self._reload, self._reloads = reload, reloads

    def page(self, request: Request) -> PageAnswer:
        """Returns the page in the format that the client prefers: Prometheus text or OpenMetrics."""
        _, content_type = choose_encoder(request.accept)
        openmetrics = content_type.startswith(OPENMETRICS)
        return PageAnswer(pieces(self._text(openmetrics=openmetrics)), content_type)

    def _text(self, *, openmetrics: bool) -> Iterator[str]:
        """Yields the lines in parts, and an empty part wherever the event loop may turn."""
        sums = AreaSums(self._areas.counters(), self._areas.histograms())
        totals = []
        for text in self._series_texts:
            for total in text.reading():  # noqa: B007 - the last one is the result
                yield ""
            assert total is not None
            totals.append(total)
        families = self._families_of(sums)
        parts = (lines_of(family, openmetrics=openmetrics) if family is not None else ("",) for family in families)
        for number, part in enumerate(chain.from_iterable(parts)):
            yield part
            if number % LINES_AT_ONCE == 0:
                yield ""
        for text, total in zip(self._series_texts, totals, strict=True):
            yield from text.lines(total, openmetrics=openmetrics)
        if openmetrics:
            yield END

    def _families_of(self, sums: AreaSums) -> Iterator[Family | None]:
        """Yields all families, and None where the event loop may turn."""
        sections = self._sections
        yield from self._info()
        yield from self._counters(sums)
        yield from self._histograms(sums)
        yield from self._streams(sums)
        yield from self._workers()
        if sections.processes is not None:
            yield from self._merged((sections.processes.families(),))
        yield from self._pool_gauges()
        yield from self._scaling()
        yield from self._endpoints()
        yield from self._prefix_index()
        yield from self._merged(figures.families() for figures in sections.flow)
        if (kv_events := sections.kv_events) is not None:
            precise = [pool for pool in self._pools if pool.number in kv_events.pools]
            yield from self._merged((kv_events.totals(),))
            yield from self._merged(kv_events.of_endpoints(pool.name, pool.ranks(), self._now()) for pool in precise)
        if sections.latency is not None:
            yield from self._merged(self._learned(sections.latency))
        if sections.replicas is not None:
            yield from self._merged((replica_figures(sections.replicas, self._now()),))
        yield from self._series_tables()

    def _info(self) -> Iterator[Family]:
        status = self._reload()
        labels = (*self._build, str(choose()), status.hash if status is not None else "")
        yield from self._shown(computed.INFO, ("commit", "build_ref", "code", "config_hash"), [(labels, 1)])
        if self._reloads is not None:
            yield from self._configurations((POOL,), {(name,): each for name, each in self._reloads().items()})
        elif status is not None:
            yield from self._configurations((), {(): status})
        if self._leads:
            rows: list[Row] = [((lease,), leads()) for lease, leads in self._leads.items()]
            yield from self._shown(computed.LEADER, computed.LEADER.labels, rows)

    def _configurations(self, labels: tuple[str, ...], found: Mapping[tuple[str, ...], ReloadStatus]) -> Iterator[Family]:
        """Yields the configurations in force and the candidates, by the values of `labels`."""
        columns: Mapping[Metric, Callable[[ReloadStatus], float]] = {
            computed.CONFIG_GENERATION: lambda status: status.generation,
            computed.CONFIG_SUCCESSFUL: lambda status: int(status.successful),
            computed.CONFIG_TIMESTAMP: lambda status: status.since,
            computed.CONFIG_TRYOUT: lambda status: status.tryout.generation if status.tryout is not None else 0,
            computed.CONFIG_TRYOUT_SHARE: lambda status: status.tryout.share.millionths / WHOLE if status.tryout is not None else 0.0,
        }
        for metric, value in columns.items():
            yield from self._shown(metric, labels, [(values, value(status)) for values, status in found.items()])

    @functools.cached_property
    def _build(self) -> tuple[str, str]:
        return commit(), os.environ.get("EPP_BUILD_REF", "") or version()

    def _counters(self, sums: AreaSums) -> Iterator[Family]:
        for metric in (*WORKER_COUNTERS, *SUPERVISOR_COUNTERS):
            further, labels = SCRAPE_ERRORS.get(metric.name, ((), ()))
            rows: Counter[tuple[str, ...]] = Counter()
            for name, kinds in zip((metric.name, *further), self._readings.types, strict=False):
                rows[kinds[: len(labels)]] += sums.counters[name]
            yield from self._shown(metric, labels, list(rows.items()))

    def _histograms(self, sums: AreaSums) -> Iterator[Family]:
        rows: dict[Metric, list[Row]] = {}
        labels: dict[Metric, tuple[str, ...]] = {}
        for family in self._content.families:
            if family.metric is STREAM_DURATION and not self._content.stream_metrics:
                continue
            counts, total = sums.histograms[family.key]
            labels[family.metric] = tuple(family.labels)
            row = tuple(family.labels.values()), (list(accumulate(counts)), total)
            rows.setdefault(family.metric, []).append(row)
        for metric, metric_rows in rows.items():
            yield from self._shown(metric, labels[metric], metric_rows)

    def _streams(self, sums: AreaSums) -> Iterator[Family]:
        if not self._content.stream_metrics:
            return
        areas = self._areas
        open_ = areas.scalars(STREAMS_INFLIGHT.name)
        inflight = sum(count for ordinal, count in enumerate(open_) if areas.serving(ordinal))
        yield from self._shown(STREAMS_INFLIGHT, (), [((), inflight)])
        ended = sums.counters
        rows: list[Row] = [((code,), ended[name]) for code, name in zip(GRPC_CODES, STREAM_COUNTERS, strict=True)]
        yield from self._shown(STREAMS_BY_CODE, ("code",), rows)

    def _workers(self) -> Iterator[Family]:
        areas, ages = self._areas, self._areas.ages(self._now())
        starts = areas.successions()
        used = [s for s, age in enumerate(ages) if s and (starts[s] or isfinite(age) or areas.serving(s))]
        leaving = areas.scalars(LEAVING)
        # A worker that was removed on purpose has no gauges: an age that grows for ever would look like a fault.
        removed = {s for s in used if leaving[s] == Leaving.LEAVES and not areas.serving(s)}
        every = range(1, max(used, default=0) + 1)
        present = [ordinal for ordinal in every if ordinal not in removed]
        gauges: dict[Metric, Sequence[float]] = {
            metric._replace(name=_gauge_name(metric.name)): areas.scalars(metric.name) for metric in WORKER_GAUGES if metric is not LOOP_LAG
        }
        gauges[computed.WORKER_LOOP_LAG] = [lag / 1e6 for lag in areas.scalars(LOOP_LAG.name)]
        gauges[computed.WORKER_SERVING] = [areas.serving(ordinal) for ordinal in range(len(ages))]
        gauges[computed.WORKER_BEAT_AGE] = ages
        gauges[computed.WORKER_SHARE] = _shares(areas, "connections_total")
        gauges[computed.WORKER_STARTS] = starts
        for metric, values in gauges.items():
            ordinals = every if metric is computed.WORKER_STARTS else present  # the counter stays after a worker was removed
            yield from self._shown(metric, ("worker",), [((str(ordinal - 1),), values[ordinal]) for ordinal in ordinals])

    def _merged(self, parts: Iterable[Iterable[Figures]]) -> Iterator[Family | None]:
        """Yields the figures of all parts, such as pools: each metric once, with the rows of all parts."""
        found: dict[str, tuple[Metric, tuple[str, ...], list[Row]]] = {}
        for figures in parts:
            for metric, labels, rows in figures:
                found.setdefault(metric.name, (metric, labels, []))[2].extend(rows)
            yield None
        for metric, labels, rows in found.values():
            yield from self._shown(metric, labels, rows)

    def _learned(self, models: Callable[[int], LatencyModel | None]) -> Iterator[Iterator[Figures]]:
        """Yields the figures of the latency model of each pool that has one."""
        now, alone = self._now(), self._alone is not None
        for pool in self._pools:
            if (model := models(pool.number)) is not None:
                yield latency_figures(model, pool.name, pool.endpoints(), now, alone=alone)

    def _pool_gauges(self) -> Iterator[Family | None]:
        pools = self._pools
        for pool in pools:
            pool.refresh(self._now())
            yield None
        for figure in dict.fromkeys(figure for pool in pools for figure in pool.figures):
            for at, metrics in enumerate((computed.POOL_AVERAGES, computed.POOL_DEVIATIONS)):
                rows: list[Row] = [((pool.name,), pool.figures[figure][at]) for pool in pools if figure in pool.figures]
                yield from self._shown(metrics[figure], ("name",), rows)
        yield from self._shown(computed.READY_ENDPOINTS, ("name",), [((pool.name,), pool.ready) for pool in pools])
        yield from self._shown(computed.EJECTED_ENDPOINTS, ("name",), [((pool.name,), pool.ejected) for pool in pools])

    def _scaling(self) -> Iterator[Family]:
        """Yields the scaling signal (`workers.supervisor.scaling`); no rows while it is not known."""
        if (signals := self._sections.signals) is not None:
            found = [each for each in signals() if each[0] in self._names]  # a pool may have just gone
        else:
            needed, headroom = (self._areas.scalars(name)[0] for name in (REPLICAS_NEEDED, HEADROOM))
            found = [(0, needed, None if headroom == UNKNOWN_HEADROOM else headroom / 1000)] if needed else []
        names = self._names
        for metric, rows in (
            (computed.REPLICAS_NEEDED, [((names[pool],), needed) for pool, needed, _ in found]),
            (computed.POOL_HEADROOM, [((names[pool],), headroom) for pool, _, headroom in found if headroom is not None]),
        ):
            if rows:
                yield from self._shown(metric, ("name",), rows)

    def _endpoints(self) -> Iterator[Family]:
        names, now = self._names, self._now()
        by_endpoint = ("name", "model_server_endpoint")
        queues = [((pool.number, name), value) for pool in self._pools for name, value in pool.queues()]
        ages = [((pool.number, name), value) for pool in self._pools for name, value in pool.ages(now)]
        for metric, found in (
            (computed.ENDPOINT_QUEUE, queues),
            (computed.ENDPOINT_AGE, ages),
            (computed.ENDPOINT_SCRAPE, self._readings.seconds().items()),
        ):
            # The table may have endpoints of a pool that has just come, which the page does not know yet.
            yield from self._shown(metric, by_endpoint, [((names[pool], name), value) for (pool, name), value in found if pool in names])
        failing = self._readings.failing().items()
        shares: list[Row] = [((names[pool], name, cause), share) for (pool, name, cause), share in failing if pool in names]
        yield from self._shown(computed.ENDPOINT_FAILING, (*by_endpoint, "cause"), shares)
        endpoints = [(endpoint, pool.name) for pool in self._pools for endpoint in pool.endpoints()]
        slots = max((endpoint.slot + 1 for endpoint, _ in endpoints), default=0)
        labels = ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority", *(() if self._alone else ("pool",)))
        producer = self._content.producer_name
        for metric, count in ((computed.ENDPOINT_REQUESTS, self._areas.inflight), (computed.ENDPOINT_TOKENS, self._areas.tokens)):
            counts = count(slots).tolist()
            rows: list[Row] = [((e.name, e.namespace, producer, "", "", pool)[: len(labels)], counts[e.slot]) for e, pool in endpoints]
            yield from self._shown(metric, labels, rows)

    def _prefix_index(self) -> Iterator[Family]:
        (index, corrupt), size = self._index, self._index.writer.size()
        users = [(f.plugin_name, f.plugin_type) for f in self._content.families if f.metric.name == INDEXED]
        rows: list[Row] = [(user, size) for user in users]
        # All plugins use the same index, so the twin is not the sum over plugins.
        yield from self._shown(computed.INDEX_SIZE, ("plugin_name", "plugin_type"), rows, of_twin=[((), size)] if users else [])
        for metric, count in (
            (computed.INDEX_EVICTIONS, index.evictions),
            (computed.INDEX_DROPPED, index.dropped),
            (computed.BUS_CORRUPT, corrupt()),
        ):
            yield from self._shown(metric, (), [((), count)])
        freed: list[Row] = [((cause,), count) for cause, count in index.freed().items()]
        yield from self._shown(computed.INDEX_FREED, computed.INDEX_FREED.labels, freed)

    def _series_tables(self) -> Iterator[Family]:
        used: list[Row] = []
        overflowed: list[Row] = []
        for group, reader in self._content.series:
            overflowed.append(((group.name,), reader.overflowed()))
            used += [((group.name, str(worker)), count) for worker, count in enumerate(reader.used()) if count]
        yield from self._shown(computed.SERIES_USED, ("group", "worker"), used)
        yield from self._shown(computed.SERIES_OVERFLOW, ("group",), overflowed)

    def _shown(
        self, metric: Metric, labels: tuple[str, ...], rows: Sequence[Row], *, of_twin: Sequence[Row] | None = None
    ) -> Iterator[Family]:
        """Yields a metric and its twin. `of_twin`: the rows of the twin, if these are not sums of `rows`."""
        yield Family(PREFIX + metric.name, metric.kind, metric.help, labels, rows, metric.buckets)
        twin = TWINS.get(metric.name)
        if twin is None or not self._content.legacy_names:
            return
        if of_twin is None:
            places = twin.places(labels)
            of_twin = [(tuple(values[place] for place in places), value) for values, value in rows]
        yield Family(twin.name, metric.kind, older_name(metric), twin.labels, of_twin, metric.buckets)


def _shares(areas: Areas, counter: str) -> list[float]:
    """Returns the share that each area has in the sum of a counter, ordered by area."""
    place = areas.schema.counter[counter]
    counts = [areas.area(ordinal).counters[place] for ordinal in range(areas.schema.areas)]
    return [count / (sum(counts) or 1) for count in counts]


def _gauge_name(name: str) -> str:
    """Returns the name of a gauge on a page. OpenMetrics uses the name `x` for the counter `x_total`, so a gauge `x` becomes `x_open`
    if there is such a counter.
    """
    return f"{name}_open" if f"{name}_total" in COUNTERS else name
