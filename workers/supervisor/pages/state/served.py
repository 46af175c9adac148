"""Reads the workers' counts of requests by label: times to the first token, errors, waiting flows, and outcomes of flow control."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from typing import Final, TypeVar

from epp.metrics.flow_control import FLOW_DURATIONS, FLOW_QUEUE_DURATION, FLOW_QUEUES, FLOW_REQUESTS
from epp.metrics.request_series import ATTEMPTS, ERROR, PREDICTION, REQUEST_FIGURES, TIME_TO_FIRST, TTFT_STREAMING, TTFT_WHOLE
from shm.series_reader import SeriesReader
from workers.supervisor.pages.state.look import BandLook, Configuration, FlowLook, OutcomeLook, PoolLook
from workers.supervisor.pages.state.pool_figures import PoolCounts, counts_by_pool

K = TypeVar("K")
FLOWS_MAX: Final = 100  # the flows with the longest queues that a look has


class Served:
    """Sums series over all workers. For a group that the picker does not have, all counts are 0."""

    def __init__(self, series: Callable[[str], SeriesReader | None], *, several: bool) -> None:
        """`series`: returns the reader of the series with this name, or None. `several`: whether the picker has several pools."""
        self._several = several
        self._requests = series(REQUEST_FIGURES.name)
        self._errors = series(ERROR.name)
        self._attempts = series(ATTEMPTS.name)
        self._queues = series(FLOW_QUEUES.name)
        self._outcomes = series(FLOW_REQUESTS.name)
        self._waits = series(FLOW_DURATIONS.name)
        self._predictions = series(PREDICTION.name)
        self.bounds: dict[str, Sequence[float]] = {}
        if self._requests is not None:
            self.bounds[TIME_TO_FIRST.name] = self._requests.schema.histograms[TTFT_STREAMING][1]
        if self._waits is not None:
            self.bounds[FLOW_QUEUE_DURATION.name] = self._waits.schema.histograms[0][1]

    def histograms(self) -> Mapping[str, Sequence[int]]:
        """Returns histograms over all requests, by name: times to the first token, streamed or not, and times in flow control."""
        found: dict[str, Sequence[int]] = {}
        if self._requests is not None:
            found[TIME_TO_FIRST.name] = _summed(self._requests, TTFT_STREAMING, TTFT_WHOLE)
        if self._waits is not None:
            found[FLOW_QUEUE_DURATION.name] = _summed(self._waits, 0)
        return found

    def errors(self, label: str = "error_code") -> Mapping[str, int]:
        """Returns error code, or another label's value, -> failed requests since the start."""
        found: Counter[str] = Counter()
        if self._errors is not None:
            at = self._errors.schema.labels.index(label)
            for labels, values in self._errors.rows().items():
                found[labels[at]] += values.counters[0]
        return found

    def flows(self) -> Sequence[FlowLook]:
        """Returns the FLOWS_MAX flows with the longest queues, the longest first."""
        flows = self._waiting(lambda fairness_id, priority, pool: (fairness_id, priority, pool))
        longest = nlargest(FLOWS_MAX, flows.items(), key=lambda item: item[1][0])
        return [
            FlowLook(fairness_id=fairness_id, priority=priority, requests=requests, bytes=size, pool=self._shown(pool))
            for (fairness_id, priority, pool), (requests, size) in longest
            if requests > 0
        ]

    def bands(self) -> Sequence[BandLook]:
        """Returns the bands with waiting requests of several pools, by pool and priority, because only workers know the places of these
        bands.
        """
        waiting = self._waiting(lambda _, priority, pool: (pool, priority))
        return [
            BandLook(priority=priority, requests=requests, bytes=size, oldest_age_s=None, pool=pool)
            for (pool, priority), (requests, size) in sorted(waiting.items())
            if requests > 0
        ]

    def _waiting(self, key: Callable[[str, int, str], K]) -> Mapping[K, list[int]]:
        """Returns the number and the bytes of waiting requests, by a key that is made of fairness id, priority and pool."""
        found: dict[K, list[int]] = {}
        for (fairness_id, priority, pool, *_), values in self._queues.rows().items() if self._queues is not None else ():
            sums = found.setdefault(key(fairness_id, _whole(priority), pool), [0, 0])
            sums[0] += values.gauges[0]
            sums[1] += values.gauges[1]
        return found

    def outcomes(self) -> Sequence[OutcomeLook]:
        """Returns how requests have left flow control since the start, the most important priority first."""
        if self._outcomes is None:
            return ()
        rows = self._outcomes.rows().items()
        found = [
            OutcomeLook(outcome=outcome, priority=_whole(priority), requests=values.counters[0], pool=self._shown(pool))
            for (outcome, priority, pool, *_), values in rows
            if values.counters[0]
        ]
        return sorted(found, key=lambda each: (-each.priority, each.outcome, each.pool or ""))

    def pools(self, names: Sequence[str], queued: Sequence[int], configurations: Sequence[Configuration | None]) -> Sequence[PoolLook]:
        """Returns the figures of each of several pools that are not about a single endpoint. `queued`: requests in flow control.

        `configurations`: the configurations in force.
        """
        if not names:
            return ()
        counts = self.counts(names)
        rows = zip(names, counts.routed.tolist(), counts.failed.tolist(), queued, counts.first_token.tolist(), strict=True)
        return [
            PoolLook(name=name, routed=routed, failed=failed, queued=waiting, first_token=first_token, configuration=configuration)
            for (name, routed, failed, waiting, first_token), configuration in zip(rows, configurations, strict=True)
        ]

    def counts(self, names: Sequence[str]) -> PoolCounts:
        """Returns the counts of each of several pools."""
        return counts_by_pool(names, self._attempts, self._errors, self._requests, self._predictions)

    def _shown(self, pool: str) -> str | None:
        return pool if self._several else None


def _summed(series: SeriesReader, *places: int) -> Sequence[int]:
    """Returns the counts per bucket of histograms with the same bounds, summed over all labels. `places`: their positions."""
    schema, counts = series.schema, series.totals().ints.sum(axis=0)
    return sum(counts[schema.counts(place)] for place in places).tolist()  # type: ignore[no-any-return]


def _whole(priority: str) -> int:
    """Returns a priority as a number. Label sets that found no room are counted as `other`, and are shown with priority 0."""
    try:
        return int(priority)
    except ValueError:
        return 0
