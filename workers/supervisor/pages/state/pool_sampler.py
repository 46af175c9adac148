"""Takes the samples of the history of each of several pools: some array operations for all pools together.

Unlike the samples of the picker, they come once in POOL_STEP_S, because there may be a thousand pools.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from epp.metrics.series import TIME_TO_FIRST
from workers.supervisor.pages.state.history import ENDPOINT_FIGURES, POOL_FIGURES, POOL_STEP_S, STEP_S, Floats, PoolSample, key_of
from workers.supervisor.pages.state.pool_counts import PoolCounts
from workers.supervisor.pages.state.quantiles import quantile
from workers.supervisor.pages.state.source import Source

SUMMED: Final = ("running", "waiting", "in_flight")


class PoolSampler:
    """Takes one sample after the other. Rates, quantiles and shares are of the time since the sample before."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0.0
        self._names: Sequence[str] = ()
        self._counts: PoolCounts | None = None

    def sample(self, now: float, cells: Floats) -> PoolSample | None:
        """Takes a sample. Returns None if none is due, or if there is only one pool. `cells`: the figures of all slots."""
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
        """Returns the sums over the endpoints of each pool, and the mean of their KV caches in use. Unknown figures count as 0."""
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
