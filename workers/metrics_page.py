"""The metrics page: lanes, table and index -> exposition text, at the moment of the scrape.

Counters and histograms are sums over all lanes; a successor goes on with its predecessor's lane, so they never fall. The pool's
averages stay while no endpoint is fresh, as dashboards expect of the field's reference picker. Values that differ by worker
carry the label `worker`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Exposed
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from epp.candidates import Endpoint
from epp.data import KV_USAGE, RUNNING, WAITING
from epp.metrics import PREFIX, SUPERVISOR_COUNTERS, WORKER_COUNTERS, WORKER_GAUGES
from shm.lanes import Lanes
from shm.table import State, TableCopy, TableReader
from workers.admin import Answer, Request
from workers.documents import EndpointsView
from workers.instance import Family

Floats = NDArray[np.float64]
POOL_COLUMNS = (
    (KV_USAGE.name, "kv_cache_utilization"),
    (WAITING.name, "queue_size"),
    (RUNNING.name, "running_requests"),
)
COUNTERS = frozenset(metric.name for metric in (*WORKER_COUNTERS, *SUPERVISOR_COUNTERS))
INDEXED = "prefix_indexer_hit_ratio"  # who declares it, uses the index


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
        for column, figure in POOL_COLUMNS:
            values = self._values(copy, slots, column)[fresh]
            values = values[~np.isnan(values)]
            if len(values):
                deviation = values.std(ddof=1) if len(values) > 1 else 0.0
                self.figures[figure] = round(float(values.mean()), 2), round(float(deviation), 2)

    def queues(self) -> list[tuple[str, float]]:
        """Waiting requests per endpoint; those that were never scraped are left out."""
        copy, endpoints = self._current()
        values = self._values(copy, [endpoint.slot for endpoint in endpoints], WAITING.name).tolist()
        return [(endpoint.name, value) for endpoint, value in zip(endpoints, values, strict=True) if value == value]

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


class MetricsPage(Collector):
    """Everything on the page. `source_type` and `extractor_type` label the data layer's errors."""

    def __init__(
        self,
        lanes: Lanes,
        families: Sequence[Family],
        pool: Pool,
        index: IndexFigures,
        *,
        source_type: str,
        extractor_type: str,
        now: Callable[[], float],
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
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def page(self, request: Request) -> Answer:
        """Text or OpenMetrics, as the client prefers."""
        encoder, content_type = choose_encoder(request.accept)
        return Answer(encoder(self._registry), content_type)

    def describe(self) -> Iterable[Exposed]:
        return ()

    def collect(self) -> Iterator[Exposed]:
        yield from self._info()
        yield from self._counters()
        yield from self._histograms()
        yield from self._workers()
        yield from self._pool_gauges()
        yield from self._prefix_index()

    def _info(self) -> Iterator[Exposed]:
        info = GaugeMetricFamily(f"{PREFIX}info", "What runs.", labels=("commit", "build_ref"))
        info.add_metric((os.environ.get("EPP_COMMIT", "unknown"), os.environ.get("EPP_BUILD_REF", "unknown")), 1)
        yield info

    def _counters(self) -> Iterator[Exposed]:
        sums = self._lanes.counters()
        for metric in (*WORKER_COUNTERS, *SUPERVISOR_COUNTERS):
            labels = self._error_labels.get(metric.name, {})
            family = CounterMetricFamily(PREFIX + metric.name, metric.help, labels=tuple(labels))
            family.add_metric(tuple(labels.values()), sums[metric.name])
            yield family

    def _histograms(self) -> Iterator[Exposed]:
        found = self._lanes.histograms()
        exposed: dict[str, HistogramMetricFamily] = {}
        for member in self._families:
            metric = member.metric
            labels = (
                {"plugin_name": member.plugin_name, "plugin_type": member.plugin_type} if member.plugin_name else {}
            )
            family = exposed.get(metric.name)
            if family is None:
                family = exposed[metric.name] = HistogramMetricFamily(
                    PREFIX + metric.name, metric.help, labels=tuple(labels)
                )
            counts, total = found[member.key]
            bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
            family.add_metric(
                tuple(labels.values()), list(zip(bounds, accumulate(counts), strict=True)), sum_value=total
            )
        yield from exposed.values()

    def _workers(self) -> Iterator[Exposed]:
        seats = range(1, self._lanes.schema.lanes)
        gauges = {
            _gauge_name(metric.name): (metric.help, [float(v) for v in self._lanes.scalars(metric.name)])
            for metric in WORKER_GAUGES
        }
        ages = self._lanes.ages(self._now())
        gauges["worker_serving"] = (
            "Whether the worker takes streams.",
            [float(self._lanes.serving(i)) for i in range(len(ages))],
        )
        gauges["worker_beat_age_seconds"] = "Time since the worker's event loop last turned.", ages
        for name, (text, values) in gauges.items():
            family = GaugeMetricFamily(PREFIX + name, text, labels=("worker",))
            for seat in seats:
                family.add_metric((str(seat - 1),), values[seat])
            yield family
        starts = CounterMetricFamily(
            f"{PREFIX}worker_starts_total", "How often the worker was started.", labels=("worker",)
        )
        for seat, count in enumerate(self._lanes.successions()[1:]):
            starts.add_metric((str(seat),), count)
        yield starts

    def _pool_gauges(self) -> Iterator[Exposed]:
        pool = self._pool
        pool.refresh(self._now())
        for figure, (mean, deviation) in pool.figures.items():
            for prefix, value in (("average", mean), ("std_dev", deviation)):
                family = GaugeMetricFamily(
                    f"{PREFIX}{prefix}_{figure}", "Over endpoints with fresh metrics.", labels=("name",)
                )
                family.add_metric((pool.name,), value)
                yield family
        ready = GaugeMetricFamily(f"{PREFIX}ready_endpoints", "Endpoints with fresh metrics.", labels=("name",))
        ready.add_metric((pool.name,), pool.ready)
        yield ready
        labels = ("name", "model_server_endpoint")
        queues = GaugeMetricFamily(
            f"{PREFIX}per_endpoint_queue_size", "Waiting requests of one endpoint.", labels=labels
        )
        for endpoint, waiting in pool.queues():
            queues.add_metric((pool.name, endpoint), waiting)
        yield queues

    def _prefix_index(self) -> Iterator[Exposed]:
        users = [(f.plugin_name, f.plugin_type) for f in self._families if f.metric.name == INDEXED]
        labels = ("plugin_name", "plugin_type")
        size = GaugeMetricFamily(
            f"{PREFIX}prefix_indexer_size", "Entries of the prefix index, over all endpoints.", labels=labels
        )
        for user in users:
            size.add_metric(user, self._index.size())
        yield size
        for name, text, count in (
            ("prefix_indexer_evictions_total", "Live entries overwritten.", self._index.evictions),
            ("prefix_indexer_dropped_total", "Blocks not taken into the index.", self._index.dropped),
            ("bus_corrupt_frames_total", "Frames from workers that were refused.", self._index.corrupt),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=count())


def _gauge_name(name: str) -> str:
    """OpenMetrics knows `x_total` as the family `x`: a gauge may not have that name too."""
    return f"{name}_open" if f"{name}_total" in COUNTERS else name
