"""What is measured of requests under the labels that come with them: model, target model, fairness id, priority.

`RequestMetrics` is what the streams of a worker share, `Exchange` one request from its decision to its end. Both write into this
worker's series and nowhere else. The labels are looked up once per request; after that every figure is a store at a known place.
"""

from typing import Final

from epp import metrics as names
from epp.candidates import Endpoint
from epp.decision import Usage
from epp.request import Request
from shm.series import SeriesWriter
from workers.transport.interface import Clock

SUCCESS: Final = "success"
FAILURE: Final = "failure"
PRIORITIES_MAX: Final = 1024


class RequestMetrics:
    """One worker's request, error and scheduling series."""

    def __init__(self, clock: Clock, requests: SeriesWriter, errors: SeriesWriter, attempts: SeriesWriter) -> None:
        self._clock = clock
        self._requests = requests
        self._errors = errors
        self._attempts = attempts
        self._error = errors.counter_at[names.REQUEST_ERRORS.name]
        self._attempt = attempts.counter_at[names.SCHEDULER_ATTEMPTS.name]
        self._total = requests.counter_at[names.REQUEST_TOTAL.name]
        self._priorities: dict[int, str] = {}
        self.words = requests.words
        self.observe = requests.observe
        self.running = requests.gauge_at[names.REQUEST_RUNNING.name]
        self.shortest_gap_at = requests.schema.histograms_at[names.BETWEEN_CHUNKS] + 1

    def routed(self, request: Request, target: Endpoint, received_at: float) -> "Exchange":
        """The request got an endpoint."""
        block = self._requests.block(self._labels(request))
        words = self.words
        words[block + self._total] += 1
        words[block + self.running] += 1
        self.observe(block, names.REQUEST_BYTES, request.body_bytes)
        attempts = self._attempts
        labels = (SUCCESS, request.target_model, target.name, target.namespace, str(target.port))
        attempts.words[attempts.block(labels) + self._attempt] += 1
        return Exchange(self, self._clock, block, received_at)

    def not_scheduled(self, target_model: str) -> None:
        """The scheduler found no endpoint."""
        attempts = self._attempts
        attempts.words[attempts.block((FAILURE, target_model, "", "", "")) + self._attempt] += 1

    def failed(self, request: Request | None, code: str) -> None:
        """The request failed, here or at the model server; `code` as in the refusals' table."""
        labels = self._labels(request) if request is not None else ("", "", "", "0")
        errors = self._errors
        errors.words[errors.block((*labels, code)) + self._error] += 1

    def _labels(self, request: Request) -> tuple[str, str, str, str]:
        priority = request.priority
        text = self._priorities.get(priority)
        if text is None:
            if len(self._priorities) >= PRIORITIES_MAX:
                self._priorities.clear()
            text = self._priorities[priority] = str(priority)
        return request.model, request.target_model, request.fairness_id, text


class Exchange:
    """The figures of one request that got an endpoint. `close` once, at the stream's end, whatever ended it."""

    __slots__ = (
        "_block",
        "_clock",
        "_last_at",
        "_metrics",
        "_received_at",
        "_size",
        "_streaming",
        "_together",
        "_ttft",
    )

    def __init__(self, metrics: RequestMetrics, clock: Clock, block: int, received_at: float) -> None:
        self._metrics = metrics
        self._clock = clock
        self._block = block
        self._received_at = received_at
        self._streaming = False
        self._last_at = 0.0
        self._together = 0  # chunks that came with the one before
        self._ttft = 0.0
        self._size = 0

    def responding(self, *, streaming: bool) -> None:
        """The response's headers are in; `streaming`: events follow."""
        self._streaming = streaming

    def chunk(self, size: int) -> None:
        """A piece of the response's body that is not empty. Hot: once per streamed chunk."""
        self._size += size
        now = self._clock.now
        if now == self._last_at:  # of the same read: no time between them; counted when the read is over
            self._together += 1
        else:
            self._apart(now)

    def complete(self, usage: Usage | None) -> None:
        """The response has ended as it should."""
        metrics, block = self._metrics, self._block
        self._count_together()
        observe = metrics.observe
        whole = self._clock.now - self._received_at
        observe(block, names.DURATION, whole)
        observe(block, names.RESPONSE_BYTES, self._size)
        if usage is None:
            return
        if usage.prompt:
            observe(block, names.INPUT_TOKENS, usage.prompt)
        if usage.cached:
            observe(block, names.CACHED_TOKENS, usage.cached)
        if usage.completion:
            observe(block, names.OUTPUT_TOKENS, usage.completion)
            observe(block, names.PER_OUTPUT_TOKEN, whole / usage.completion)
            if self._streaming and usage.completion > 1:
                observe(block, names.STREAMING_PER_TOKEN, (whole - self._ttft) / (usage.completion - 1))

    def close(self) -> None:
        """The stream is over."""
        self._count_together()
        self._metrics.words[self._block + self._metrics.running] -= 1

    def _apart(self, now: float) -> None:
        """The first chunk of a read."""
        self._count_together()
        last, self._last_at = self._last_at, now
        if last:
            if self._streaming:
                self._metrics.observe(self._block, names.BETWEEN_CHUNKS, now - last)
        else:
            self._ttft = ttft = now - self._received_at
            self._metrics.observe(self._block, names.TTFT_STREAMING if self._streaming else names.TTFT_WHOLE, ttft)

    def _count_together(self) -> None:
        together, self._together = self._together, 0
        if together and self._streaming:
            self._metrics.words[self._block + self._metrics.shortest_gap_at] += together
