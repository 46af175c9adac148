"""Counts what each tenant uses: requests, waits, tokens and refusals, in this worker's series (`epp.metrics.series.TENANT`)."""

from typing import Final

from compiled.calls import increase
from epp.decision.decision import Usage
from shm.series import SeriesWriter

KEPT_MAX: Final = 4096
REQUESTS, WAITED, INPUT, CACHED, OUTPUT, OVER_BUDGET, REFUSED = range(7)  # in the order of `epp.metrics.series.TENANT_FIGURES`


class TenantCounts:
    """Counts for the streams of one worker. A tenant is named as the fairness id of its requests."""

    def __init__(self, series: SeriesWriter) -> None:
        self._series = series
        self._first = min(series.counter_at.values())
        self._epoch = series.epoch
        self._at: dict[str, int] = {}  # name -> the word of its first counter

    def routed(self, tenant: str, *, waited: bool) -> None:
        """Counts a request that got an endpoint."""
        words, at = self._series.words, self._of(tenant)
        increase(words, at + REQUESTS)
        if waited:
            increase(words, at + WAITED)

    def refused(self, tenant: str, *, over_budget: bool) -> None:
        """Counts a request that the picker refused."""
        words, at = self._series.words, self._of(tenant)
        increase(words, at + REFUSED)
        if over_budget:
            increase(words, at + OVER_BUDGET)

    def answered(self, tenant: str, usage: Usage) -> None:
        """Counts the tokens of an answer."""
        words, at = self._series.words, self._of(tenant)
        increase(words, at + INPUT, usage.prompt or 0)
        increase(words, at + CACHED, usage.cached or 0)
        increase(words, at + OUTPUT, usage.completion or 0)

    def _of(self, tenant: str) -> int:
        series = self._series
        if self._epoch != series.epoch or len(self._at) >= KEPT_MAX:  # blocks were freed, or many tenants have come
            self._epoch = series.epoch
            self._at.clear()
        at = self._at.get(tenant)
        if at is None:
            at = self._at[tenant] = series.block((tenant,)) + self._first
        return at
