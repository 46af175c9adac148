"""How a request leaves flow control: exactly one `Outcome`, which is a label of metrics, and a refusal for each outcome but DISPATCHED.

A *rejected* request was never in a queue. An *evicted* one, here, left its queue without being dispatched; elsewhere eviction ends
requests in service. `chain` begins the text that the client sees; `epp.protocol.refusals` adds the status, and words before it.
"""

import enum
from typing import ClassVar

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


class Undispatched(Refused):
    """Base of all refusals by flow control. Only the classes below `Evicted` are raised."""

    outcome: ClassVar[Outcome]
    answered_as: ClassVar[Cause]
    chain: ClassVar[str]  # phase and cause in words

    def __init__(self, retry_after_s: int = 0, detail: str = "") -> None:
        text = f"{self.chain}: {detail}" if detail else self.chain
        super().__init__(self.answered_as, text, retry_after_s)


class Rejected(Undispatched):
    """Says that the request was never in a queue."""


class Evicted(Undispatched):
    """Says that the request was in a queue and left it without being dispatched."""


class RejectedCapacity(Rejected):
    outcome = Outcome.REJECTED_CAPACITY
    answered_as = Cause.QUEUE_AT_CAPACITY
    chain = "request rejected pre-queue: queue at capacity"


class RejectedNoEndpoints(Rejected):
    outcome = Outcome.REJECTED_NO_ENDPOINTS
    answered_as = Cause.QUEUE_WITHOUT_ENDPOINTS
    chain = "request rejected pre-queue: no endpoints available"


class RejectedShutDown(Rejected):
    outcome = Outcome.REJECTED_OTHER
    answered_as = Cause.SHUTTING_DOWN
    chain = "request rejected pre-queue"  # the error text starts with it and adds the cause


class RejectedFault(Rejected):
    outcome = Outcome.REJECTED_OTHER
    answered_as = Cause.FLOW_CONTROL
    chain = "request rejected pre-queue"


class EvictedTTL(Evicted):
    outcome = Outcome.EVICTED_TTL
    answered_as = Cause.TTL_EXPIRED
    chain = "request evicted from queue: request TTL expired"


class EvictedNoEndpoints(Evicted):
    outcome = Outcome.EVICTED_NO_ENDPOINTS
    answered_as = Cause.TTL_EXPIRED_WITHOUT_ENDPOINTS
    chain = "request evicted from queue: request TTL expired: no endpoints available"


class EvictedContextCancelled(Evicted):
    outcome = Outcome.EVICTED_CONTEXT_CANCELLED
    answered_as = Cause.CONTEXT_CANCELLED
    chain = "request evicted from queue: request context cancelled"


class EvictedDisplaced(Evicted):
    outcome = Outcome.EVICTED_DISPLACED
    answered_as = Cause.DISPLACED
    chain = "request evicted from queue: request displaced"


class EvictedShutDown(Evicted):
    outcome = Outcome.EVICTED_OTHER
    answered_as = Cause.SHUTTING_DOWN
    chain = "request evicted from queue"


class EvictedFault(Evicted):
    outcome = Outcome.EVICTED_OTHER
    answered_as = Cause.FLOW_CONTROL
    chain = "request evicted from queue"
