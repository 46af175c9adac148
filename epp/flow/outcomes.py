"""How a request's way through flow control ends: exactly one `Outcome` each, and the exceptions that stand for all but one.

`Rejected*`: it was never in a queue; `Evicted*`: it was. An outcome is the metric label; the class that is raised holds the detail
and says two things of itself, the phase and the cause, so that a caller may catch either:

                       phase      cause
    RejectedCapacity   Rejected   QueueAtCapacity        EvictedTTL               Evicted   TTLExpired
    RejectedNoEndpoints Rejected  NoEndpoints            EvictedNoEndpoints       Evicted   TTLExpired, NoEndpoints
    RejectedShutDown   Rejected   ShuttingDown           EvictedContextCancelled  Evicted   ContextCancelled
    RejectedFault      Rejected   Other                  EvictedDisplaced         Evicted   Displaced
                                                         EvictedShutDown          Evicted   ShuttingDown
                                                         EvictedFault             Evicted   Other

What the client sees of each stands in `epp/protocol/refusals.py`.
"""

import enum
from typing import ClassVar

from epp.errors import Cause, Refused


class Outcome(enum.Enum):
    """The value is the metric label."""

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
    """What all of them share. Raised are the classes at the end of this file only."""

    outcome: ClassVar[Outcome]
    answered_as: ClassVar[Cause]
    chain: ClassVar[str]  # phase and cause in words

    def __init__(self, retry_after_s: int = 0, detail: str = "") -> None:
        text = f"{self.chain}: {detail}" if detail else self.chain
        super().__init__(self.answered_as, text, retry_after_s)


class Rejected(Undispatched):
    """It was never in a queue."""


class Evicted(Undispatched):
    """It was in a queue, and left it unserved."""


class QueueAtCapacity(Undispatched):
    """A limit of the band or of all bands is reached, and not enough that is less important waits."""


class NoEndpoints(Undispatched):
    """The pool is empty."""


class TTLExpired(Undispatched):
    """It waited for as long as it may."""


class ContextCancelled(Undispatched):
    """Whoever waited for it left."""


class Displaced(Undispatched):
    """It gave way to something more important."""


class ShuttingDown(Undispatched):
    """This worker leaves."""


class Other(Undispatched):
    """A fault of ours."""


class RejectedCapacity(Rejected, QueueAtCapacity):
    outcome = Outcome.REJECTED_CAPACITY
    answered_as = Cause.QUEUE_AT_CAPACITY
    chain = "request rejected pre-queue: queue at capacity"


class RejectedNoEndpoints(Rejected, NoEndpoints):
    outcome = Outcome.REJECTED_NO_ENDPOINTS
    answered_as = Cause.QUEUE_WITHOUT_ENDPOINTS
    chain = "request rejected pre-queue: no endpoints available"


class RejectedShutDown(Rejected, ShuttingDown):
    outcome = Outcome.REJECTED_OTHER
    answered_as = Cause.SHUTTING_DOWN
    chain = "request rejected pre-queue"  # the answer's text goes on


class RejectedFault(Rejected, Other):
    outcome = Outcome.REJECTED_OTHER
    answered_as = Cause.FLOW_CONTROL
    chain = "request rejected pre-queue"


class EvictedTTL(Evicted, TTLExpired):
    outcome = Outcome.EVICTED_TTL
    answered_as = Cause.TTL_EXPIRED
    chain = "request evicted from queue: request TTL expired"


class EvictedNoEndpoints(Evicted, TTLExpired, NoEndpoints):
    outcome = Outcome.EVICTED_NO_ENDPOINTS
    answered_as = Cause.TTL_EXPIRED_WITHOUT_ENDPOINTS
    chain = "request evicted from queue: request TTL expired: no endpoints available"


class EvictedContextCancelled(Evicted, ContextCancelled):
    outcome = Outcome.EVICTED_CONTEXT_CANCELLED
    answered_as = Cause.CONTEXT_CANCELLED
    chain = "request evicted from queue: request context cancelled"


class EvictedDisplaced(Evicted, Displaced):
    outcome = Outcome.EVICTED_DISPLACED
    answered_as = Cause.DISPLACED
    chain = "request evicted from queue: request displaced"


class EvictedShutDown(Evicted, ShuttingDown):
    outcome = Outcome.EVICTED_OTHER
    answered_as = Cause.SHUTTING_DOWN
    chain = "request evicted from queue"


class EvictedFault(Evicted, Other):
    outcome = Outcome.EVICTED_OTHER
    answered_as = Cause.FLOW_CONTROL
    chain = "request evicted from queue"
