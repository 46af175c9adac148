"""What is measured of flow control under the labels that come with requests; this worker's series and nothing else.

A request that goes straight through costs one look-up and four words: `Straight` remembers where they are. One that waits is
counted by its own labels while it waits, whatever flow it waits in.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from epp import metrics as names
from epp.flow.outcomes import Outcome
from epp.metrics import Group
from epp.request import Request
from shm.series import SeriesWriter

KEPT_MAX: Final = 4096
NOT_FINALIZED: Final = "NotYetFinalized"
DURATION = ENQUEUE = 0  # each the only histogram of its group


class Straight(NamedTuple):
    """Where a request of these labels is counted that goes straight through, in words."""

    requests: int
    durations: int
    enqueues: int


class FlowMetrics:
    """One worker's."""

    def __init__(self, series: dict[Group, SeriesWriter], pool: str, fold: Callable[[str], str]) -> None:
        """Series of `epp.metrics.FLOW_GROUPS`; `fold` says as what a fairness id is counted, so that new ones cost little too."""
        self._pool = pool
        self._fold = fold
        self._requests = series[names.FLOW_REQUESTS]
        self._durations = series[names.FLOW_DURATIONS]
        self._enqueues = series[names.FLOW_ENQUEUES]
        self._queues = series[names.FLOW_QUEUES]
        self._total = self._requests.counter_at[names.FLOW_REQUESTS_TOTAL.name]
        self._size = self._queues.gauge_at[names.FLOW_QUEUE_SIZE.name]
        self._bytes = self._queues.gauge_at[names.FLOW_QUEUE_BYTES.name]
        self._straight: dict[tuple[str, int, str, str], Straight] = {}

    def straight(self, request: Request, seconds: float) -> None:
        """It went through without waiting."""
        key = (request.fairness_id, request.priority, request.model, request.target_model)
        at = self._straight.get(key)
        if at is None:
            at = self._met(request)
        self._requests.words[at.requests] += 1
        self._durations.observe(at.durations, DURATION, seconds)
        self._enqueues.observe(at.enqueues, ENQUEUE, seconds)

    def enters(self, request: Request, size: int, seconds: float) -> int:
        """It waits from now on; what `leaves` needs. `seconds` it took to give it a place."""
        fairness_id = self._fold(request.fairness_id)
        block = self._queues.block(
            (fairness_id, str(request.priority), self._pool, request.model, request.target_model)
        )
        words = self._queues.words
        words[block + self._size] += 1
        words[block + self._bytes] += size
        enqueues = self._enqueues
        enqueues.observe(enqueues.block((fairness_id, str(request.priority), NOT_FINALIZED)), ENQUEUE, seconds)
        return block

    def leaves(self, block: int, size: int) -> None:
        """It waits no more."""
        words = self._queues.words
        words[block + self._size] -= 1
        words[block + self._bytes] -= size

    def ended(self, request: Request, outcome: Outcome, waited_s: float) -> None:
        """Of one that waited, or was turned away."""
        priority, said = str(request.priority), outcome.value
        requests, durations = self._requests, self._durations
        requests.words[requests.block((said, priority, self._pool)) + self._total] += 1
        labels = (self._fold(request.fairness_id), priority, said, self._pool, request.model, request.target_model)
        durations.observe(durations.block(labels), DURATION, waited_s)

    def refused(self, request: Request, outcome: Outcome, seconds: float) -> None:
        """It was turned away at once."""
        self.ended(request, outcome, seconds)
        enqueues = self._enqueues
        labels = (self._fold(request.fairness_id), str(request.priority), outcome.value)
        enqueues.observe(enqueues.block(labels), ENQUEUE, seconds)

    def _met(self, request: Request) -> Straight:
        """Of labels that were not met before; a fairness id that is folded is not remembered."""
        fairness_id = self._fold(request.fairness_id)
        key = (fairness_id, request.priority, request.model, request.target_model)
        at = self._straight.get(key)
        if at is None:
            at = self._places(request, fairness_id)
            self._straight[key] = at
        return at

    def _places(self, request: Request, fairness_id: str) -> Straight:
        if len(self._straight) >= KEPT_MAX:  # labels come from clients: bounded
            self._straight.clear()
        priority, said = str(request.priority), Outcome.DISPATCHED.value
        # A flow that never waits has a queue of length 0: who scales by it, needs the 0.
        self._queues.block((fairness_id, priority, self._pool, request.model, request.target_model))
        return Straight(
            self._requests.block((said, priority, self._pool)) + self._total,
            self._durations.block((fairness_id, priority, said, self._pool, request.model, request.target_model)),
            self._enqueues.block((fairness_id, priority, said)),
        )
