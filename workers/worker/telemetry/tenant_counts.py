"""Counts requests, waits, tokens and refusals of each tenant in this worker's series (`epp.metrics.request_series.TENANT`)."""

from typing import Final

from compiled.calls import increase
from epp.decision.decision import Decision, Usage
from epp.request import Request
from shm.series import SeriesWriter
from workers.worker.telemetry.salt_watch import SaltWatch

KEPT_MAX: Final = 4096
REQUESTS, WAITED, INPUT, CACHED, OUTPUT, OVER_BUDGET, REFUSED = range(7)  # in the order of `epp.metrics.request_series.TENANT_FIGURES`


class TenantCounts:
    """Counts for the streams of one worker. The fairness id of requests names the tenant."""

    def __init__(self, series: SeriesWriter, salts: SaltWatch | None = None) -> None:
        """`salts`: None if tenants have no cache salts."""
        self._series = series
        self._salts = salts
        self._first = min(series.counter_at.values())
        self._epoch = series.epoch
        self._at: dict[str, int] = {}  # name -> the word of its first counter

    def routed(self, request: Request, *, waited: bool) -> None:
        """Counts a request that got an endpoint, and still has its prompt."""
        words, at = self._series.words, self._of(request.fairness_id)
        if self._salts is not None:
            self._salts.routed(request)
        increase(words, at + REQUESTS)
        if waited:
            increase(words, at + WAITED)

    def refused(self, request: Request, *, over_budget: bool) -> None:
        """Counts a request that the picker refused."""
        words, at = self._series.words, self._of(request.fairness_id)
        increase(words, at + REFUSED)
        if over_budget:
            increase(words, at + OVER_BUDGET)

    def answered(self, request: Request, decision: Decision, usage: Usage) -> None:
        """Counts the tokens of an answer."""
        words, at = self._series.words, self._of(request.fairness_id)
        if self._salts is not None:
            self._salts.answered(request, decision, usage)
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
