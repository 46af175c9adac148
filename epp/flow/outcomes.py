"""How a request leaves flow control: with exactly one `Outcome`, a label of metrics, and with an `Ending` if it was not dispatched.

In this module, a *rejected* request was never in a queue, and an *evicted* request left its queue without being dispatched. In other
modules, eviction ends requests that are being served. `chain` is a part of the error text that the client sees (`epp.protocol.refusals`).
"""

import enum
from typing import NamedTuple

from epp.errors import Cause, Refused


class Outcome(enum.Enum):
    """Names how a request left flow control. The value is the metric label."""

    DISPATCHED = "Dispatched"
    REJECTED_CAPACITY = "RejectedCapacity"
    REJECTED_NO_ENDPOINTS = "RejectedNoEndpoints"
    REJECTED_OTHER = "RejectedOther"
    EVICTED_TTL = "EvictedTTL"
    EVICTED_NO_ENDPOINTS = "EvictedNoEndpoints"
    EVICTED_CONTEXT_CANCELLED = "EvictedContextCancelled"
    EVICTED_DISPLACED = "EvictedDisplaced"
    EVICTED_OTHER = "EvictedOther"


class Ending(NamedTuple):
    """An outcome without an endpoint, and the answer to the client. `chain`: phase and cause in words."""

    outcome: Outcome
    cause: Cause
    chain: str


_REJECTED = "request rejected pre-queue"
_EVICTED = "request evicted from queue"
REJECTED_CAPACITY = Ending(Outcome.REJECTED_CAPACITY, Cause.QUEUE_AT_CAPACITY, f"{_REJECTED}: queue at capacity")
REJECTED_NO_ENDPOINTS = Ending(Outcome.REJECTED_NO_ENDPOINTS, Cause.QUEUE_WITHOUT_ENDPOINTS, f"{_REJECTED}: no endpoints available")
REJECTED_SHUT_DOWN = Ending(Outcome.REJECTED_OTHER, Cause.SHUTTING_DOWN, _REJECTED)  # the error text begins with it and adds the cause
REJECTED_FAULT = Ending(Outcome.REJECTED_OTHER, Cause.FLOW_CONTROL, _REJECTED)
EVICTED_TTL = Ending(Outcome.EVICTED_TTL, Cause.TTL_EXPIRED, f"{_EVICTED}: request TTL expired")
EVICTED_NO_ENDPOINTS = Ending(
    Outcome.EVICTED_NO_ENDPOINTS, Cause.TTL_EXPIRED_WITHOUT_ENDPOINTS, f"{_EVICTED}: request TTL expired: no endpoints available"
)
EVICTED_CONTEXT_CANCELLED = Ending(Outcome.EVICTED_CONTEXT_CANCELLED, Cause.CONTEXT_CANCELLED, f"{_EVICTED}: request context cancelled")
EVICTED_DISPLACED = Ending(Outcome.EVICTED_DISPLACED, Cause.DISPLACED, f"{_EVICTED}: request displaced")
EVICTED_SHUT_DOWN = Ending(Outcome.EVICTED_OTHER, Cause.SHUTTING_DOWN, _EVICTED)
EVICTED_FAULT = Ending(Outcome.EVICTED_OTHER, Cause.FLOW_CONTROL, _EVICTED)


class Undispatched(Refused):
    """Says that flow control gives the request no endpoint."""

    def __init__(self, ending: Ending, retry_after_s: int = 0, detail: str = "") -> None:
        super().__init__(ending.cause, f"{ending.chain}: {detail}" if detail else ending.chain, retry_after_s)
        self.ending = ending
