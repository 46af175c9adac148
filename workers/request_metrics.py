"""What is measured of requests under the labels that come with them: model, target model, fairness id, priority.

`RequestMetrics` is what the streams of a worker share, `Exchange` one request from its decision to its end. Both write into this
worker's series and nowhere else. That a request was routed, and that it runs, is counted at once; its sizes, times and tokens
when it is over, together with those of others (`SeriesLedger`), at 1.1 us a request instead of 2.7.
"""

from collections.abc import Callable
from math import nan
from typing import Final

from epp import metrics as names
from epp.candidates import Endpoint
from epp.decision import Usage
from epp.request import Request
from shm.series import SeriesLedger, SeriesWriter
from workers.transport.interface import Clock

SUCCESS: Final = "success"
FAILURE: Final = "failure"
KEPT_MAX: Final = 4096
# What `Exchange.close` gives to the ledger, in this order.
AT_THE_END: Final = (
    names.DURATION, names.PER_OUTPUT_TOKEN, names.TTFT_STREAMING, names.TTFT_WHOLE, names.STREAMING_PER_TOKEN,
    names.INPUT_TOKENS, names.OUTPUT_TOKENS, names.CACHED_TOKENS, names.RESPONSE_BYTES, names.REQUEST_BYTES,
)  # fmt: skip

Later = Callable[[float, Callable[[], None]], object]


class RequestMetrics:
    """One worker's request, error and scheduling series."""

    def __init__(
        self, clock: Clock, later: Later, requests: SeriesWriter, errors: SeriesWriter, attempts: SeriesWriter
    ) -> None:
        self.clock = clock
        self.ledger = SeriesLedger(requests, AT_THE_END, later)
        self.words = requests.words
        self.observe = requests.observe
        self.running = requests.gauge_at[names.REQUEST_RUNNING.name]
        self.shortest_gap_at = requests.schema.histograms_at[names.BETWEEN_CHUNKS] + 1
        self._requests = requests
        self._errors = errors
        self._attempts = attempts
        self._error = errors.counter_at[names.REQUEST_ERRORS.name]
        self._attempt = attempts.counter_at[names.SCHEDULER_ATTEMPTS.name]
        self._total = requests.counter_at[names.REQUEST_TOTAL.name]
        self._priorities: dict[int, str] = {}
        self._successes: dict[tuple[Endpoint, str], int] = {}  # where attempts with this outcome are counted

    def routed(self, request: Request, target: Endpoint, received_at: float) -> "Exchange":
        """The request got an endpoint."""
        priority = self._priorities.get(request.priority)
        if priority is None:
            priority = self._text(request.priority)
        block = self._requests.block((request.model, request.target_model, request.fairness_id, priority))
        words = self.words
        words[block + self._total] += 1
        words[block + self.running] += 1
        success = self._successes.get((target, request.target_model))
        if success is None:
            success = self._success(target, request.target_model)
        self._attempts.words[success] += 1
        return Exchange(self, block, received_at, request.body_bytes)

    def not_scheduled(self, target_model: str) -> None:
        """The scheduler found no endpoint."""
        attempts = self._attempts
        attempts.words[attempts.block((FAILURE, target_model, "", "", "")) + self._attempt] += 1

    def failed(self, request: Request | None, code: str) -> None:
        """The request failed, here or at the model server; `code` as in the refusals' table."""
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
        if len(self._successes) >= KEPT_MAX:  # models come from clients: bounded
            self._successes.clear()
        labels = (SUCCESS, model, target.name, target.namespace, str(target.port))
        place = self._successes[target, model] = self._attempts.block(labels) + self._attempt
        return place


class Exchange:
    """The figures of one request that got an endpoint. `close` once, at the stream's end, whatever ended it."""

    __slots__ = (
        "_block", "_last_at", "_metrics", "_received_at", "_request_size", "_size", "_together", "_ttft", "streaming", "usage",
        "whole",
    )  # fmt: skip

    def __init__(self, metrics: RequestMetrics, block: int, received_at: float, request_size: int) -> None:
        self._metrics = metrics
        self._block = block
        self._received_at = received_at
        self._request_size = request_size
        self.streaming = False  # set when the response's headers say that events follow
        self.usage: Usage | None = None
        self.whole = False  # set when the response has ended as it should
        self._last_at = 0.0
        self._together = 0  # chunks that came with the one before
        self._ttft = nan
        self._size = 0

    def chunk(self, size: int) -> None:
        """A piece of the response's body that is not empty. Hot: once per streamed chunk."""
        self._size += size
        now = self._metrics.clock.now
        last = self._last_at
        if now == last:  # of the same read: no time between them; counted when the read is over
            self._together += 1
            return
        self._last_at = now
        if not last:
            self._ttft = now - self._received_at
        elif self.streaming:
            self._count_together()
            self._metrics.observe(self._block, names.BETWEEN_CHUNKS, now - last)

    def close(self) -> None:
        """The stream is over."""
        metrics, block, streaming = self._metrics, self._block, self.streaming
        metrics.words[block + metrics.running] -= 1
        if self._together and streaming:
            self._count_together()
        if not self.whole:
            metrics.ledger.add(block, nan, nan, nan, nan, nan, nan, nan, nan, nan, self._request_size)
            return
        whole, ttft = metrics.clock.now - self._received_at, self._ttft
        prompt = completion = cached = per_token = after_first = nan
        usage = self.usage
        if usage is not None:
            prompt, cached = usage.prompt or nan, usage.cached or nan
            if usage.completion:
                completion = usage.completion
                per_token = whole / completion
                if streaming and completion > 1:
                    after_first = (whole - ttft) / (completion - 1)
        metrics.ledger.add(
            block, whole, per_token, ttft if streaming else nan, nan if streaming else ttft, after_first,
            prompt, completion, cached, self._size, self._request_size,
        )  # fmt: skip

    def _count_together(self) -> None:
        together, self._together = self._together, 0
        if together:
            self._metrics.words[self._block + self._metrics.shortest_gap_at] += together
