"""Reads what workers count about requests by label: times to the first token, errors, waiting flows, and outcomes of flow control."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from typing import Final

from epp.metrics.flow_control import FLOW_QUEUES, FLOW_REQUESTS
from epp.metrics.series import ERROR, REQUEST, TIME_TO_FIRST, TTFT_STREAMING, TTFT_WHOLE
from shm.series import SeriesReader
from workers.pages.state.look import FlowLook, OutcomeLook

FLOWS_MAX: Final = 100  # the flows with the longest queues that a look has


class Served:
    """Sums series over all workers. A group that the picker does not have counts nothing."""

    def __init__(self, series: Callable[[str], SeriesReader | None]) -> None:
        """`series`: returns the reader of the series with this name; None if there are none."""
        self._requests = series(REQUEST.name)
        self._errors = series(ERROR.name)
        self._queues = series(FLOW_QUEUES.name)
        self._outcomes = series(FLOW_REQUESTS.name)
        self.bounds: Mapping[str, Sequence[float]] = {}
        if self._requests is not None:
            self.bounds = {TIME_TO_FIRST.name: self._requests.schema.histograms[TTFT_STREAMING][1]}

    def first_tokens(self) -> Mapping[str, Sequence[int]]:
        """Returns the histogram of times to the first token over all requests, streamed or not, by its name."""
        if self._requests is None:
            return {}
        schema, totals = self._requests.schema, self._requests.totals()
        counts = totals.ints.sum(axis=0)
        parts = []
        for place in (TTFT_STREAMING, TTFT_WHOLE):
            first = schema.histograms_at[place] - schema.values_at + 1
            parts.append(counts[first : first + len(schema.histograms[place][1]) + 1])
        return {TIME_TO_FIRST.name: (parts[0] + parts[1]).tolist()}

    def errors(self) -> Mapping[str, int]:
        """Returns error code -> failed requests since the start."""
        found: Counter[str] = Counter()
        if self._errors is not None:
            for labels, values in self._errors.rows().items():
                found[labels[-1]] += values.counters[0]
        return found

    def flows(self) -> Sequence[FlowLook]:
        """Returns the FLOWS_MAX flows with the longest queues, the longest first."""
        if self._queues is None:
            return ()
        waiting: Counter[tuple[str, str]] = Counter()
        size: Counter[tuple[str, str]] = Counter()
        for (fairness_id, priority, *_), values in self._queues.rows().items():
            waiting[fairness_id, priority] += values.gauges[0]
            size[fairness_id, priority] += values.gauges[1]
        return [
            FlowLook(fairness_id=flow[0], priority=_whole(flow[1]), requests=requests, bytes=size[flow])
            for flow, requests in nlargest(FLOWS_MAX, waiting.items(), key=lambda item: item[1])
            if requests > 0
        ]

    def outcomes(self) -> Sequence[OutcomeLook]:
        """Returns how requests have left flow control since the start, the most important priority first."""
        if self._outcomes is None:
            return ()
        rows = self._outcomes.rows().items()
        found = [
            OutcomeLook(outcome=outcome, priority=_whole(priority), requests=values.counters[0])
            for (outcome, priority, *_), values in rows
            if values.counters[0]
        ]
        return sorted(found, key=lambda each: (-each.priority, each.outcome))


def _whole(priority: str) -> int:
    """Returns a priority as a number. Label sets that found no room count as `other`; they show as priority 0."""
    try:
        return int(priority)
    except ValueError:
        return 0
