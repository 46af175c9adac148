"""Counts requests in flow control by their labels, in this worker's series.

A request that does not wait costs one look-up, because `Cells` caches the positions of its counters. A request that waits is counted under
its own labels, even if it waits in the queue of another flow.
"""

from typing import Final, NamedTuple

from compiled.calls import increase
from epp.flow.outcomes import Outcome
from epp.metrics import OTHER, Group
from epp.metrics.flow_control import (
    FLOW_DURATIONS,
    FLOW_ENQUEUES,
    FLOW_QUEUE_BYTES,
    FLOW_QUEUE_SIZE,
    FLOW_QUEUES,
    FLOW_REQUESTS,
    FLOW_REQUESTS_TOTAL,
)
from epp.metrics.label_caps import LabelCaps
from epp.request import Request
from shm.series import SeriesWriter

KEPT_MAX: Final = 4096
NOT_FINALIZED: Final = "NotYetFinalized"
DURATION: Final = 0  # index of the histogram in its group; each group has only one
ENQUEUE: Final = 0


class Cells(NamedTuple):
    """The offsets, in words, of the counters for one set of labels. Only requests that do not wait use them."""

    requests: int
    durations: int
    enqueues: int


class FlowMetrics:
    """Counts the requests of one worker in flow control."""

    def __init__(self, series: dict[Group, SeriesWriter], pool: str, caps: LabelCaps) -> None:
        """`series`: the writers of `epp.metrics.flow_control.FLOW_GROUPS`. `caps`: the names that the writers know."""
        self._pool = pool
        self._caps = caps
        self._requests = series[FLOW_REQUESTS]
        self._durations = series[FLOW_DURATIONS]
        self._enqueues = series[FLOW_ENQUEUES]
        self._queues = series[FLOW_QUEUES]
        self._total = self._requests.counter_at[FLOW_REQUESTS_TOTAL.name]
        self._size = self._queues.gauge_at[FLOW_QUEUE_SIZE.name]
        self._bytes = self._queues.gauge_at[FLOW_QUEUE_BYTES.name]
        self._cells: dict[tuple[str, int, str, str], Cells] = {}

    def passed(self, request: Request, seconds: float) -> None:
        """Counts a request that did not wait. `seconds`: the time that it spent in flow control."""
        key = (request.fairness_id, request.priority, request.model, request.target_model)
        at = self._cells.get(key)
        if at is None:
            at = self._new_cells(request)
        increase(self._requests.words, at.requests)
        self._durations.observe(at.durations, DURATION, seconds)
        self._enqueues.observe(at.enqueues, ENQUEUE, seconds)

    def enters(self, request: Request, size: int, seconds: float) -> int:
        """Counts a request that begins to wait. `seconds`: how long the queueing took. Returns the block for `leaves`."""
        fairness_id = request.fairness_id
        block = self._queues.block((fairness_id, str(request.priority), self._pool, request.model, request.target_model))
        enqueues = self._enqueues
        enqueues.observe(enqueues.block((fairness_id, str(request.priority), NOT_FINALIZED)), ENQUEUE, seconds)
        words = self._queues.words
        words[block + self._size] += 1
        words[block + self._bytes] += size
        return block

    def leaves(self, block: int, size: int) -> None:
        """Counts that a request no longer waits. `block`: the result of `enters`."""
        words = self._queues.words
        words[block + self._size] -= 1
        words[block + self._bytes] -= size

    def ended(self, request: Request, outcome: Outcome, waited_s: float) -> None:
        """Counts the outcome of a request that waited or was refused."""
        priority, name = str(request.priority), outcome.value
        requests, durations = self._requests, self._durations
        requests.words[requests.block((name, priority, self._pool)) + self._total] += 1
        labels = (request.fairness_id, priority, name, self._pool, request.model, request.target_model)
        durations.observe(durations.block(labels), DURATION, waited_s)

    def refused(self, request: Request, outcome: Outcome, seconds: float) -> None:
        """Counts a request that was refused at once."""
        self.ended(request, outcome, seconds)
        enqueues = self._enqueues
        labels = (request.fairness_id, str(request.priority), outcome.value)
        enqueues.observe(enqueues.block(labels), ENQUEUE, seconds)

    def forget(self) -> None:
        """Forgets in which blocks requests are counted. Called when blocks were freed."""
        self._cells.clear()

    def _new_cells(self, request: Request) -> Cells:
        """Returns the cells of a request if they are not in the cache under its names. Caches the cells under the names that count the
        request.
        """
        caps = self._caps
        fairness_id, model = caps.fairness_id(request.fairness_id), caps.model(request.model)
        key = (fairness_id, request.priority, model, caps.model(request.target_model))
        at = self._cells.get(key)
        if at is None:
            if len(self._cells) >= KEPT_MAX:  # bounded, because labels come from clients
                self._cells.clear()
            at = self._cells[key] = self._find_cells(*key)
        return at

    def _find_cells(self, fairness_id: str, number: int, model: str, target_model: str) -> Cells:
        priority, name = str(number), Outcome.DISPATCHED.value
        if OTHER not in (fairness_id, model, target_model):
            # The queue length of a flow without waiting requests must be reported as 0, not be absent, because autoscalers read it.
            self._queues.block((fairness_id, priority, self._pool, model, target_model))
        return Cells(
            self._requests.block((name, priority, self._pool)) + self._total,
            self._durations.block((fairness_id, priority, name, self._pool, model, target_model)),
            self._enqueues.block((fairness_id, priority, name)),
        )
