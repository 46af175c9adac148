"""Counts requests with labels from the request: model, target model, fairness id, priority.

The streams of a worker share one `RequestMetrics`. An `Exchange` is one request from its decision to its end. Both write only into this
worker's series. Routed and running requests are counted at once; the sizes, times and tokens of a request are counted at its end. A request
with a model or fairness id that no served request had before (`epp.metrics.label_caps`) runs under the name `other` until the headers of
its answer arrive. Then it is counted under its own names if a model server serves it, else as `other`.
"""

from math import nan
from typing import Final

from compiled.calls import increase
from epp.candidates import Endpoint
from epp.decision.decision import NO_USAGE, Usage
from epp.metrics import OTHER
from epp.metrics.label_caps import LabelCaps
from epp.metrics.request_series import BETWEEN_CHUNKS, REQUEST_BYTES, REQUEST_ERRORS, REQUEST_RUNNING, REQUEST_TOTAL, SCHEDULER_ATTEMPTS
from epp.request import Request
from shm.series import SeriesWriter
from workers.transport.interface import Clock

SUCCESS: Final = "success"
FAILURE: Final = "failure"
KEPT_MAX: Final = 4096
ALL_OTHER: Final = (OTHER, OTHER, OTHER, OTHER)

Labels = tuple[str, str, str, str]


class Cell:
    """The counters of the requests with one label tuple: words of the group REQUEST, and a block of the group REQUEST_FIGURES.

    `open`: the number of these requests that are under way. Meanwhile, their block is not freed.
    """

    __slots__ = ("figures", "open", "running", "total")

    def __init__(self, total: int, running: int, figures: int) -> None:
        self.total = total
        self.running = running
        self.figures = figures
        self.open = 0


class RequestMetrics:
    """Counts the requests, errors and scheduling attempts of one worker."""

    def __init__(
        self, clock: Clock, requests: SeriesWriter, figures: SeriesWriter, errors: SeriesWriter, attempts: SeriesWriter, caps: LabelCaps
    ) -> None:
        """Gets the writers of the groups REQUEST, REQUEST_FIGURES, ERROR and ATTEMPTS, and the names that they share."""
        self.clock = clock
        self.figures = figures
        self.words = requests.words
        self.shortest_gap_at = figures.schema.histograms_at[BETWEEN_CHUNKS] + 1
        self._requests = requests
        self._errors = errors
        self._attempts = attempts
        self._caps = caps
        self._running = requests.gauge_at[REQUEST_RUNNING.name]
        self._total = requests.counter_at[REQUEST_TOTAL.name]
        self._error = errors.counter_at[REQUEST_ERRORS.name]
        self._attempt = attempts.counter_at[SCHEDULER_ATTEMPTS.name]
        self._priorities: dict[int, str] = {}
        self._cells: dict[Labels, Cell] = {}
        # (target, model) -> the word that counts its successful scheduling attempts.
        self._successes: dict[tuple[Endpoint, str], int] = {}

    def routed(self, request: Request, target: Endpoint, received_at: float) -> "Exchange":
        """Counts a request that got an endpoint. `received_at`: when its headers came, in monotonic seconds."""
        priority = self._priorities.get(request.priority)
        if priority is None:
            priority = self._text(request.priority)
        labels = (request.model, request.target_model, request.fairness_id, priority)
        cell = self._cells.get(labels)
        if cell is None:
            folded = self._folded(labels)
            cell = self._cell(folded)
            if folded != labels:
                exchange = Exchange(self, cell, received_at, request.body_bytes)
                exchange.unnamed = labels
                exchange.target = target
                self._open(cell)
                return exchange
        success = self._attempted(target, request.target_model)
        exchange = Exchange(self, cell, received_at, request.body_bytes)
        self._count(cell, success)
        self._open(cell)
        return exchange

    def served(self, exchange: "Exchange") -> None:
        """Counts a request with new names under these names, because a model server serves it."""
        labels, target = exchange.unnamed, exchange.target
        assert labels is not None
        assert target is not None
        self._caps.served(labels[0], labels[1], labels[2])
        cell, success = self._cell(labels), self._attempted(target, labels[1])
        self.closed(exchange.cell)
        exchange.unnamed, exchange.cell = None, cell
        self._count(cell, success)
        self._open(cell)

    def unserved(self, exchange: "Exchange") -> None:
        """Counts a request with new names as `other`, because no model server has served it."""
        labels, target = exchange.unnamed, exchange.target
        assert labels is not None
        assert target is not None
        exchange.unnamed = None
        self._count(exchange.cell, self._attempted(target, labels[1]))

    def closed(self, cell: Cell) -> None:
        """Counts the end of a request."""
        cell.open -= 1
        increase(self.words, cell.running, -1)

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

    def held(self) -> frozenset[int]:
        """Returns the blocks of the group REQUEST_FIGURES that requests under way use."""
        return frozenset([cell.figures for cell in self._cells.values() if cell.open])

    def forget(self) -> None:
        """Forgets the counters of requests, except for requests under way. Called when blocks were freed."""
        self._cells = {labels: cell for labels, cell in self._cells.items() if cell.open}
        self._successes.clear()

    def _folded(self, labels: Labels) -> Labels:
        caps = self._caps
        return caps.model(labels[0]), caps.model(labels[1]), caps.fairness_id(labels[2]), labels[3]

    def _cell(self, labels: Labels) -> Cell:
        cell = self._cells.get(labels)
        if cell is None:
            if len(self._cells) >= KEPT_MAX:
                self.forget()
                if len(self._cells) >= KEPT_MAX and labels != ALL_OTHER:
                    return self._cell(ALL_OTHER)
            block = self._requests.block(labels)
            cell = Cell(block + self._total, block + self._running, self.figures.block(labels))
            self._cells[labels] = cell
        return cell

    def _count(self, cell: Cell, success: int) -> None:
        increase(self.words, cell.total)
        increase(self._attempts.words, success)

    def _open(self, cell: Cell) -> None:
        cell.open += 1
        increase(self.words, cell.running)

    def _text(self, priority: int) -> str:
        if len(self._priorities) >= KEPT_MAX:
            self._priorities.clear()
        return self._priorities.setdefault(priority, str(priority))

    def _attempted(self, target: Endpoint, model: str) -> int:
        """Returns the word that counts successful scheduling attempts with this target and model."""
        model = self._caps.model(model)
        word = self._successes.get((target, model))
        if word is None:
            if len(self._successes) >= KEPT_MAX:  # bounded, because models come from clients
                self._successes.clear()
            labels = (SUCCESS, model, target.name, target.namespace, str(target.port))
            word = self._successes[target, model] = self._attempts.block(labels) + self._attempt
        return word


class Exchange:
    """Collects the figures of one request that got an endpoint. Call `close` once at every end of the stream."""

    __slots__ = (
        "_last_at", "_metrics", "_request_size", "_together", "_ttft", "cell", "decided_at", "pieces", "received_at", "recorded", "size",
        "streaming", "target", "unnamed", "usage", "whole",
    )  # fmt: skip

    def __init__(self, metrics: RequestMetrics, cell: Cell, received_at: float, request_size: int) -> None:
        self._metrics = metrics
        self.cell = cell
        self.unnamed: Labels | None = None  # the request's labels, while it is not counted (`RequestMetrics.served`)
        self.target: Endpoint | None = None  # the target of such a request
        self.received_at = received_at  # when the request's headers came, in monotonic seconds
        self.decided_at = received_at  # when the request got its endpoint
        self.recorded = 0  # the number of the request in a recording, or 0 if it is not recorded
        self._request_size = request_size
        self.streaming = False  # set when the response's headers announce an event stream
        self.usage: Usage | None = None
        self.whole = False  # set when the response is complete
        self._last_at = 0.0
        self._together = 0  # chunks that came in the same read as the chunk before them
        self._ttft = nan
        self.size = 0  # bytes of the answer's body so far
        self.pieces = 0  # the pieces of the answer's body so far, without empty pieces

    @property
    def first_s(self) -> float:
        """The seconds from the request's headers to the first piece of the answer's body, or NaN without a piece."""
        return self._ttft

    def chunk(self, size: int) -> None:
        """Counts a piece of the answer's body that is not empty. This runs once per streamed chunk, so it must be fast."""
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
            self._metrics.figures.observe(self.cell.figures, BETWEEN_CHUNKS, now - last)

    def served(self) -> None:
        """Notes that a model server serves the request, or that the picker will not see the answer."""
        if self.unnamed is not None:
            self._metrics.served(self)

    def close(self) -> None:
        """Counts the end of the stream, and the request's figures."""
        metrics, streaming = self._metrics, self.streaming
        metrics.closed(self.cell)
        if self.unnamed is not None:
            metrics.unserved(self)
        block = self.cell.figures
        if self._together and streaming:
            self._count_together()
        size = float(self._request_size)
        if not self.whole:
            metrics.figures.observe(block, REQUEST_BYTES, size)
            return
        usage = self.usage or NO_USAGE
        duration, ttft = metrics.clock.now - self.received_at, self._ttft
        prompt, cached, completion = counted(usage.prompt), counted(usage.cached), counted(usage.completion)
        metrics.figures.observe_each(  # in the order of `epp.metrics.request_series.REQUEST_FIGURES`
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
            self._metrics.figures.words[self.cell.figures + self._metrics.shortest_gap_at] += together


def counted(tokens: int | None) -> float:
    """Returns a number of tokens for a histogram. Returns NaN, which a histogram ignores, for 0 and for an unknown number."""
    return float(tokens) if tokens else nan
