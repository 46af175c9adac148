"""Records every request: in counters and histograms of the area, labelled metrics, the last decisions, and comparisons.

The stream reports events (`routed`, `refused`, `answered`, …). Only this module knows which counters count them.
"""

from collections.abc import Callable
from typing import Final

from epp.candidates import Endpoint
from epp.decision.decision import Decision, Usage
from epp.errors import Cause, Refused
from epp.metrics.request_series import USAGE_BEYOND_BOUNDS
from epp.points.isolation import culprit
from epp.request import Request
from epp.request.tokens import drop_prompt
from shm.areas import Area
from shm.series import SeriesWriter
from workers.host.log import Rarely, error_text
from workers.shared.decisions import Recent, Used
from workers.worker.telemetry.access_log import AccessLog
from workers.worker.telemetry.alternatives import Agreements
from workers.worker.telemetry.cache_prediction import Comparison
from workers.worker.telemetry.recorder import Recorder
from workers.worker.telemetry.request_metrics import Exchange, RequestMetrics
from workers.worker.telemetry.tenant_counts import TenantCounts

FOR_LOAD: Final = frozenset((Cause.NOT_ADMITTED, Cause.SHED, Cause.QUEUE_AT_CAPACITY, Cause.TTL_EXPIRED, Cause.DISPLACED))
SERVERS_MAX: Final = 1024  # the number of servers with doubted reports
NOT_SCHEDULED: Final = frozenset((Cause.NO_CANDIDATES, Cause.NO_ENDPOINT_LEFT))


class Counters:
    """Indices of a worker's counters and histograms in its area."""

    __slots__ = (
        "cached_tokens", "completion_tokens", "failed_answers", "faults", "load_refusals", "picks", "prompt_tokens", "refusals",
        "request_processing", "response_processing", "scheduler_e2e", "streams", "streams_not_duplex", "subset_empty", "violations",
    )  # fmt: skip

    def __init__(self, area: Area) -> None:
        counter, histogram = area.schema.counter, area.schema.histogram
        self.streams = counter["streams_total"]
        self.picks = counter["picks_total"]
        self.refusals = counter["refusals_total"]
        self.load_refusals = counter["load_refusals_total"]
        self.failed_answers = counter["failed_answers_total"]
        self.faults = counter["faults_total"]
        self.violations = counter["violations_total"]
        self.streams_not_duplex = counter["streams_not_duplex_total"]
        self.subset_empty = counter["subset_empty_total"]
        self.prompt_tokens = counter["prompt_tokens_total"]
        self.cached_tokens = counter["cached_prompt_tokens_total"]
        self.completion_tokens = counter["completion_tokens_total"]
        self.request_processing = histogram["request_processing_duration_seconds"]
        self.response_processing = histogram["response_processing_duration_seconds"]
        self.scheduler_e2e = histogram["scheduler_e2e_duration_seconds"]


class UsageDoubts:
    """Reports model servers that report more tokens than their answers can have: in a counter, and in the log at a limited rate."""

    def __init__(self, series: SeriesWriter, report: Callable[..., None], now: Callable[[], float]) -> None:
        """`series`: the writer of the group PREDICTION. `report`: a method of a logger, see `Rarely`. Each server has its own rate
        limit.
        """
        self._series = series
        self._report = report
        self._now = now
        self._by_server: dict[Endpoint, Rarely] = {}

    def __call__(self, server: Endpoint, reported: Usage, within: Usage) -> None:
        """Counts a report. `within`: the same report limited to its bounds, which is used instead."""
        self._series.count(USAGE_BEYOND_BOUNDS.name, (server.name, server.namespace, str(server.port)))
        rarely = self._by_server.get(server)
        if rarely is None:
            if len(self._by_server) >= SERVERS_MAX:
                self._by_server.clear()
            rarely = self._by_server[server] = Rarely("a server reports more tokens than its answers can have", self._report)
        rarely.tell(
            self._now(),
            f"{server.namespace}/{server.name} ({server.address}): {reported.prompt} prompt and {reported.completion} completion tokens "
            f"reported, {within.prompt} and {within.completion} possible",
        )


class Telemetry:
    """Records the requests of one worker. Times are monotonic seconds."""

    def __init__(
        self,
        area: Area,
        metrics: RequestMetrics,
        recent: Recent,
        *,
        now: Callable[[], float],
        comparison: Comparison | None = None,
        doubts: UsageDoubts | None = None,
        agreements: Agreements | None = None,
        access_log: AccessLog | None = None,
        tenants: TenantCounts | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """`comparison`: None if no plugin predicts cached tokens. `doubts`: None in tests. `tenants`: None without
        tenants. `agreements`: None without shadow profiles.

        `look` sets `recorder` if a recording has begun that this worker does not know yet, as during a start.
        """
        self.access_log = access_log
        self.recorder: Recorder | None = None  # set while requests are recorded
        self.metrics = metrics
        self.recent = recent
        self.comparison = comparison
        self.doubts = doubts
        self.agreements = agreements
        self.tenants = tenants
        self._look = look
        self._area = area
        self._now = now
        self._at = Counters(area)

    def opened(self) -> None:
        """Records that a stream was opened."""
        self._area.add(self._at.streams)

    def routed(self, request: Request | None, decision: Decision, used: Used | None, received_at: float) -> Exchange | None:
        """Records that a request got its endpoint from the pipeline in `used`.

        `request`: None for a request that is no inference request. Then the result is None, too.
        """
        area, at = self._area, self._at
        now = self._now()
        area.add(at.picks)
        area.observe(at.request_processing, now - received_at)
        if request is None or used is None:
            return None
        if self.tenants is not None:  # before the prompt is dropped
            self.tenants.routed(request, waited=decision.ticket is not None and decision.ticket.waited)
        drop_prompt(request)
        request.sent_at = now
        area.observe(at.scheduler_e2e, now - request.now)
        recorded = 0
        if (recorder := self.recorder or self._begun()) is not None:
            recorded = recorder.decided(request, decision, received_at, now)
        self.recent.add(now, request, decision, used=used)
        if self.agreements is not None:
            self.agreements.count(decision)
        # The last step, because only the caller can end the count of running requests.
        exchange = self.metrics.routed(request, decision.targets[0], received_at)
        exchange.recorded, exchange.decided_at = recorded, now
        return exchange

    def refused(self, request: Request | None, refused: Refused, used: Used | None, received_at: float, request_id: str = "") -> None:
        """Records that a request was refused. `used`: None if the request had no pipeline yet. `request_id`: the id of a request without
        its body.
        """
        now = self._now()
        self._area.add(self._at.refusals)
        if refused.cause in FOR_LOAD:
            self._area.add(self._at.load_refusals)
        if request is not None:
            if self.tenants is not None:
                self.tenants.refused(request, over_budget=refused.cause is Cause.OVER_BUDGET)
            if refused.cause is Cause.NO_CANDIDATES and request.subset is not None:
                self._area.add(self._at.subset_empty)
            if (recorder := self.recorder or self._begun()) is not None:
                recorder.refused(request, refused.cause.value, received_at, now)
            if self.access_log is not None:
                self.access_log.refused(request, refused.cause.value, received_at, now)
            if used is not None:
                self.recent.add(now, request, None, refused, used=used)
            if refused.cause in NOT_SCHEDULED:
                self.metrics.not_scheduled(request.target_model)
        elif self.access_log is not None:
            self.access_log.turned_away(request_id, refused.cause.value, received_at, now)
        self._area.observe(self._at.request_processing, now - received_at)

    def faulted(self, request: Request, problem: Exception, used: Used) -> None:
        """Records why a request failed before its answer, for `epp explain`. The text contains no part of a prompt."""
        plugin = culprit(problem)
        named = f"plugin '{plugin.name}' raised " if plugin is not None else ""
        now = self._now()
        if (recorder := self.recorder or self._begun()) is not None:
            recorder.refused(request, Cause.INTERNAL.value, request.now, now)
        if self.access_log is not None:
            self.access_log.refused(request, Cause.INTERNAL.value, request.now, now)
        self.recent.add(now, request, None, Refused(Cause.INTERNAL, named + error_text(problem)), used=used)

    def _begun(self) -> Recorder | None:
        """Returns the recorder, if a recording has begun since the worker's last heartbeat."""
        if self._look is not None:
            self._look()
        return self.recorder

    def not_duplex(self) -> None:
        """Records that a gateway does not stream both bodies of a request in full duplex."""
        self._area.add(self._at.streams_not_duplex)

    def violated(self) -> None:
        """Records that the gateway broke the protocol."""
        self._area.add(self._at.violations)

    def fault(self) -> None:
        """Records that a plugin or the picker itself has raised an exception."""
        self._area.add(self._at.faults)

    def failed(self, request: Request | None, error: str) -> None:
        """Records that a request failed, in the picker or at the model server. `error`: see `epp.protocol.refusals`."""
        self.metrics.failed(request, error)

    def doubted(self, server: Endpoint, reported: Usage, within: Usage) -> None:
        """Records that a model server reported more tokens than its answer can have. `within`: the report that is used instead."""
        if self.doubts is not None:
            self.doubts(server, reported, within)

    def ended(self, exchange: Exchange, request: Request, decision: Decision, status: int) -> None:
        """Records the outcome of a request that got an endpoint. `status`: the status of the answer, or 0 without an answer."""
        if self.recorder is not None and exchange.recorded:
            self.recorder.ended(exchange, request, decision, status, self._now())
        if self.access_log is not None:
            self.access_log.ended(exchange, request, decision, status, self._now())

    def answered(self, request: Request, decision: Decision, usage: Usage | None, seconds: float | None, *, failed: bool) -> None:
        """Records that a request is over. `usage`: the usage that the model server has reported. `failed`: whether the answer has failed.

        `seconds`: the time that this process has spent on the answer, or None without an answer.
        """
        if failed:
            self._area.add(self._at.failed_answers)
        if seconds is not None:
            self._area.observe(self._at.response_processing, seconds)
        if usage is None:
            return
        area, at = self._area, self._at
        area.add(at.prompt_tokens, usage.prompt or 0)
        area.add(at.cached_tokens, usage.cached or 0)
        area.add(at.completion_tokens, usage.completion or 0)
        if self.tenants is not None:
            self.tenants.answered(request, decision, usage)
        if self.comparison is not None:
            self.comparison.answered(request, decision, usage)
