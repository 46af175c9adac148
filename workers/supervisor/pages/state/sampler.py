"""Takes the samples of the history: sums of areas, columns and series, without a step per endpoint."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from epp.data import KV_USAGE, RUNNING, WAITING
from epp.metrics.areas import REQUEST_PROCESSING
from epp.metrics.series import TIME_TO_FIRST
from shm.flow_areas import WAITING as QUEUED
from shm.table import DOWN, EJECTED, State, TableCopy
from workers.supervisor.pages.state.figures import ERRORS, REQUESTS
from workers.supervisor.pages.state.history import ENDPOINT_FIGURES, Floats, Sample
from workers.supervisor.pages.state.pool_counts import COMPARED
from workers.supervisor.pages.state.pool_sampler import PoolSampler
from workers.supervisor.pages.state.quantiles import quantile_since
from workers.supervisor.pages.state.recent import Recent
from workers.supervisor.pages.state.source import Source

SCRAPED: Final = (RUNNING.name, WAITING.name, KV_USAGE.name)
HISTOGRAMS: Final = (TIME_TO_FIRST.name, REQUEST_PROCESSING.name)


class Sampler:
    """Takes one sample after the other. Rates, quantiles and shares are of the time since the sample before.

    `recent`: gets the counters of the samples.
    """

    def __init__(self, source: Source, recent: Recent) -> None:
        self._source = source
        self._recent = recent
        self._pools = PoolSampler(source)
        self._at = 0.0
        self._counters: Mapping[str, int] = {}
        self._histograms: Mapping[str, Sequence[int]] = {}

    def sample(self, now: float) -> Sample:
        """Takes a sample. `now`: monotonic seconds."""
        source, elapsed = self._source, now - self._at
        areas, copy = source.areas, source.table.copy()
        counters, histograms = source.counters() | self._compared(), self._counts()
        self._recent.add(now, counters)
        new = {name: count - self._counters.get(name, count) for name, count in counters.items()}
        quantiles = {}
        if self._histograms:
            for name, q, shown in (
                (TIME_TO_FIRST.name, 0.5, "first_token_p50_s"),
                (TIME_TO_FIRST.name, 0.95, "first_token_p95_s"),
                (REQUEST_PROCESSING.name, 0.99, "processing_p99_s"),
            ):
                if name in histograms:
                    quantiles[shown] = quantile_since(q, self._bounds(name), histograms[name], self._histograms[name])
        prompt, predicted, reported = (new.get(name, 0) for name in COMPARED)
        endpoints = self._endpoints(copy)
        pools = self._pools.sample(now, endpoints)
        taken = copy.state != State.FREE
        pool: dict[str, float | None] = {
            **quantiles,
            "requests_per_s": sum(new.get(name, 0) for name in REQUESTS) / elapsed if self._at else None,
            "errors_per_s": sum(new.get(name, 0) for name in ERRORS) / elapsed if self._at else None,
            "predicted_share": predicted / prompt if prompt else None,
            "reported_share": reported / prompt if prompt else None,
            "queued": None if source.flow is None else source.flow.total(QUEUED),
            "workers_serving": sum(map(bool, areas.serving_words[1:])),
            "endpoints_ready": int(((copy.state == State.FRESH) & ((copy.flags & (DOWN | EJECTED)) == 0)).sum()),
        }
        known = endpoints[taken]
        if len(known):
            sums = np.nansum(known, axis=0)
            pool |= {"running": sums[0], "waiting": sums[1], "in_flight": sums[3]}
            usage = known[:, 2]
            pool["kv_cache_usage"] = float(np.nanmean(usage)) if not np.isnan(usage).all() else None
        self._at, self._counters, self._histograms = now, counters, histograms
        return Sample(now, pool, copy.generation, endpoints, pools)

    def _endpoints(self, copy: TableCopy) -> Floats:
        """Returns the figures of all slots, shape (slots, ENDPOINT_FIGURES); NaN where an endpoint does not report one."""
        schema, present = self._source.table.schema, copy.present
        cells = np.full((len(copy.rows), len(ENDPOINT_FIGURES)), np.nan, np.float32)
        for at, name in enumerate(SCRAPED):
            if name in schema.columns:
                index = schema.columns.index(name)
                reports = (present >> np.uint64(index)) & np.uint64(1) != 0
                cells[reports, at] = copy.column(index)[reports]
        cells[:, len(SCRAPED)] = self._source.areas.inflight(len(copy.rows))
        return cells

    def _counts(self) -> Mapping[str, Sequence[int]]:
        areas = self._source.areas.histograms()
        found = {name: areas[name][0] for name in HISTOGRAMS if name in areas}
        return {**found, **self._source.served.histograms()}

    def _bounds(self, name: str) -> Sequence[float]:
        return self._source.served.bounds.get(name) or dict(self._source.areas.schema.histograms)[name]

    def _compared(self) -> dict[str, int]:
        """Returns the prompt tokens of requests with a prediction, summed over all endpoints: all, predicted and reported ones."""
        series = self._source.predictions
        if series is None:
            return {}
        totals, places = series.totals().ints.sum(axis=0), series.schema.counter_at
        return {name: int(totals[places[name] - series.schema.values_at]) for name in COMPARED}
