"""Counts requests with labels from the request: model, target model, fairness id, priority.

The streams of a worker share one `RequestMetrics`. An `Exchange` is one request from its decision to its end. Both write only into this
worker's series. Routed and running requests are counted at once, and the sizes, times and tokens of a request when it is over.
"""

from math import nan
from typing import Final

from compiled.calls import increase
from epp.candidates import Endpoint
from epp.decision import Usage
from epp.metrics.series import (
    BETWEEN_CHUNKS,
    REQUEST_BYTES,
    REQUEST_ERRORS,
    REQUEST_RUNNING,
    REQUEST_TOTAL,
    SCHEDULER_ATTEMPTS,
)
from epp.request import Request
from shm.series import SeriesWriter
from workers.transport.interface import Clock

SUCCESS: Final = "success"
FAILURE: Final = "failure"
KEPT_MAX: Final = 4096
UNKNOWN: Final = Usage()


class RequestMetrics:
    """Counts the requests, errors and scheduling attempts of one worker."""

    def __init__(self, clock: Clock, requests: SeriesWriter, errors: SeriesWriter, attempts: SeriesWriter) -> None:
        self.clock = clock
        self.requests = requests
        self.words = requests.words
        self.running = requests.gauge_at[REQUEST_RUNNING.name]
        self.shortest_gap_at = requests.schema.histograms_at[BETWEEN_CHUNKS] + 1
        self._errors = errors
        self._attempts = attempts
        self._error = errors.counter_at[REQUEST_ERRORS.name]
        self._attempt = attempts.counter_at[SCHEDULER_ATTEMPTS.name]
        self._total = requests.counter_at[REQUEST_TOTAL.name]
        self._priorities: dict[int, str] = {}
        # (target, model) -> the word that counts its successful scheduling attempts.
        self._successes: dict[tuple[Endpoint, str], int] = {}

    def routed(self, request: Request, target: Endpoint, received_at: float) -> "Exchange":
        """Counts a request that got an endpoint. `received_at`: when its headers came, in monotonic seconds."""
        priority = self._priorities.get(request.priority)
        if priority is None:
            priority = self._text(request.priority)
        block = self.requests.block((request.model, request.target_model, request.fairness_id, priority))
        success = self._successes.get((target, request.target_model))
        if success is None:
            success = self._success(target, request.target_model)
        exchange = Exchange(self, block, received_at, request.body_bytes)
        words = self.words
        increase(words, block + self._total)
        increase(self._attempts.words, success)
        increase(words, block + self.running)
        return exchange

    def not_scheduled(self, target_model: str) -> None:
        """Counts a request for which the scheduler found no endpoint."""
        attempts = self._attempts
        attempts.words[attempts.block((FAILURE, target_model, "", "", "")) + self._attempt] += 1

    def failed(self, request: Request | None, code: str) -> None:
        """Counts a request that failed, in the picker or at the model server. `code`: see `epp.protocol.refusals`."""
        labels = ("", "", "", "0")
        if request is not None:
            labels = (request.model, request.target_model, request.fairness_id, self._text(request.priority))
        errors = self._errors
        errors.words[errors.block((*labels, code)) + self._error] += 1

    def _text(self, priority: int) -> str:
        if len(self._priorities) >= KEPT_MAX:
            self._priorities.clear()
        return self._priorities.setdefault(priority, str(priority))

    def _success(self, target: Endpoint, model: str) -> int:
        if len(self._successes) >= KEPT_MAX:  # bounded, because models come from clients
            self._successes.clear()
        labels = (SUCCESS, model, target.name, target.namespace, str(target.port))
        word = self._successes[target, model] = self._attempts.block(labels) + self._attempt
        return word


class Exchange:
    """Collects the figures of one request that got an endpoint. Call `close` once at the end of the stream, for whatever reason it ends."""

    __slots__ = (
        "_block", "_last_at", "_metrics", "_request_size", "_together", "_ttft", "decided_at", "pieces", "received_at", "recorded", "size",
        "streaming", "usage", "whole",
    )  # fmt: skip

    def __init__(self, metrics: RequestMetrics, block: int, received_at: float, request_size: int) -> None:
        self._metrics = metrics
        self._block = block
        self.received_at = received_at  # when the request's headers came, in monotonic seconds
        self.decided_at = received_at  # when the request got its endpoint
        self.recorded = 0  # the number of the request in a recording; 0: it is not recorded
        self._request_size = request_size
        self.streaming = False  # set when the response's headers announce an event stream
        self.usage: Usage | None = None
        self.whole = False  # set when the response is complete
        self._last_at = 0.0
        self._together = 0  # chunks that came in the same read as the chunk before them
        self._ttft = nan
        self.size = 0  # bytes of the answer's body so far
        self.pieces = 0  # of the answer's body so far, without empty ones

    @property
    def first_s(self) -> float:
        """The seconds from the request's headers to the first piece of the answer's body; NaN if none came."""
        return self._ttft

    def chunk(self, size: int) -> None:
        """Counts a piece of the answer's body that is not empty. Hot: runs once per streamed chunk."""
        self.size += size
        self.pieces += 1
        now = self._metrics.clock.now
        last = self._last_at
        if now == last:  # both chunks came in one read: their gap of 0 is counted when the next read comes
            self._together += 1
            return
        self._last_at = now
        if not last:
            self._ttft = now - self.received_at
        elif self.streaming:
            self._count_together()
            self._metrics.requests.observe(self._block, BETWEEN_CHUNKS, now - last)

    def close(self) -> None:
        """Counts the end of the stream, and the request's figures."""
        metrics, block, streaming = self._metrics, self._block, self.streaming
        increase(metrics.words, block + metrics.running, -1)
        if self._together and streaming:
            self._count_together()
        size = float(self._request_size)
        if not self.whole:
            metrics.requests.observe(block, REQUEST_BYTES, size)
            return
        usage = self.usage or UNKNOWN
        duration, ttft = metrics.clock.now - self.received_at, self._ttft
        prompt, cached, completion = counted(usage.prompt), counted(usage.cached), counted(usage.completion)
        metrics.requests.observe_each(  # in the order of `epp.metrics.series.REQUEST`
            block,
            (
                duration,
                size,
                float(self.size),
                prompt,
                completion,
                cached,
                duration / completion,
                ttft if streaming else nan,
                nan if streaming else ttft,
                (duration - ttft) / (completion - 1.0) if streaming and completion > 1 else nan,
            ),
        )

    def _count_together(self) -> None:
        together, self._together = self._together, 0
        if together:
            self._metrics.words[self._block + self._metrics.shortest_gap_at] += together


def counted(tokens: int | None) -> float:
    """Returns a number of tokens as a histogram takes it: NaN, which counts nowhere, for 0 and for an unknown number."""
    return float(tokens) if tokens else nan
