"""Takes the samples of the history: sums of areas, columns and series, without a step per endpoint or pool."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from epp.data import KV_USAGE, RUNNING, WAITING
from epp.metrics.areas import REQUEST_PROCESSING
from epp.metrics.request_series import TIME_TO_FIRST
from shm.flow_areas import WAITING as QUEUED
from shm.table import DOWN, EJECTED, State, TableCopy
from workers.supervisor.pages.state.figures import ERRORS, REQUESTS
from workers.supervisor.pages.state.history import ENDPOINT_FIGURES, POOL_FIGURES, POOL_STEP_S, STEP_S, Floats, PoolSample, Sample, key_of
from workers.supervisor.pages.state.look import quantile, quantile_since
from workers.supervisor.pages.state.pool_figures import COMPARED, PoolCounts
from workers.supervisor.pages.state.source import Source

SUMMED: Final = ("running", "waiting", "in_flight")
SCRAPED: Final = (RUNNING.name, WAITING.name, KV_USAGE.name)
HISTOGRAMS: Final = (TIME_TO_FIRST.name, REQUEST_PROCESSING.name)


class Sampler:
    """Takes one sample after the other. Rates, quantiles and shares describe the time since the previous sample."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pools = PoolSampler(source)
        self._at = 0.0
        self._counters: Mapping[str, int] = {}
        self._histograms: Mapping[str, Sequence[int]] = {}

    def sample(self, now: float) -> Sample:
        """Takes a sample. `now`: monotonic seconds."""
        source, elapsed = self._source, now - self._at
        areas, copy = source.areas, source.table.copy()
        counters, histograms = source.counters() | self._compared(), self._counts()
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
        return Sample(now, counters, pool, copy.generation, endpoints, pools)

    def _endpoints(self, copy: TableCopy) -> Floats:
        """Returns the figures of all slots, shape (slots, ENDPOINT_FIGURES); NaN for figures that an endpoint does not report."""
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


class PoolSampler:
    """Takes the samples of each of several pools: some array operations for all pools together.

    They come once in POOL_STEP_S, because there may be a thousand pools.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0.0
        self._names: Sequence[str] = ()
        self._counts: PoolCounts | None = None

    def sample(self, now: float, cells: Floats) -> PoolSample | None:
        """Takes a sample. Returns None if no sample is due, or if the picker has one pool. `cells`: the figures of all slots."""
        names = self._source.pools()
        if not names or now - self._at < POOL_STEP_S - STEP_S / 2:
            return None
        counts, elapsed = self._source.served.counts(names), now - self._at
        values = np.full((len(names), len(POOL_FIGURES)), np.nan, np.float32)
        figures = self._of_endpoints(cells, len(names)) | {"queued": np.array(self._source.queued(), np.float32)}
        if self._counts is not None:
            same = np.array([name == before for name, before in zip(names, self._names, strict=True)])
            figures |= {name: np.where(same, found, np.nan) for name, found in self._since(counts.since(self._counts), elapsed).items()}
        for name, found in figures.items():
            values[:, POOL_FIGURES.index(name)] = found
        self._at, self._names, self._counts = now, tuple(names), counts
        return PoolSample(np.array([key_of(name) for name in names], np.uint64), values)

    def _since(self, new: PoolCounts, elapsed: float) -> Mapping[str, Floats]:
        bounds = self._source.served.bounds.get(TIME_TO_FIRST.name, ())
        counts = new.first_token.tolist()
        with np.errstate(divide="ignore", invalid="ignore"):
            prompt, predicted, reported = new.compared.T.astype(np.float32)
            shares = predicted / prompt, reported / prompt
        return {
            "requests_per_s": (new.routed / elapsed).astype(np.float32),
            "errors_per_s": (new.failed / elapsed).astype(np.float32),
            "first_token_p50_s": _quantiles(0.5, bounds, counts),
            "first_token_p95_s": _quantiles(0.95, bounds, counts),
            "predicted_share": shares[0],
            "reported_share": shares[1],
        }

    def _of_endpoints(self, cells: Floats, pools: int) -> dict[str, Floats]:
        """Returns the sums over the endpoints of each pool, and the mean of their KV caches in use. Unknown figures are added as 0."""
        slots, numbers = self._source.slots_of_pools()
        known = slots < len(cells)
        slots, numbers = slots[known], numbers[known]
        mine = cells[slots]
        sums = {
            name: np.bincount(numbers, weights=np.nan_to_num(mine[:, ENDPOINT_FIGURES.index(name)]), minlength=pools) for name in SUMMED
        }
        usage = mine[:, ENDPOINT_FIGURES.index("kv_cache_usage")]
        told = ~np.isnan(usage)
        total, count = (np.bincount(numbers[told], weights=weights, minlength=pools) for weights in (usage[told], None))
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = total / count
        return {name: found.astype(np.float32) for name, found in (sums | {"kv_cache_usage": mean}).items()}


def _quantiles(q: float, bounds: Sequence[float], counts: Sequence[Sequence[int]]) -> Floats:
    found = ((quantile(q, bounds, each) if any(each) else None) for each in counts)
    return np.array([np.nan if value is None else value for value in found], np.float32)
