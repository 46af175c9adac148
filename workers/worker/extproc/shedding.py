"""Admission without flow control: refuses a request with a priority below 0 while all endpoints that it may use are full.

All other requests pass. No request waits.
"""

from typing import Final

from epp.decision.admission import HOLDS_NOTHING, Open
from epp.decision.decide import EndpointPool
from epp.decision.decision import Ticket
from epp.errors import Cause, Refused
from epp.plugin import SaturationDetector
from epp.request import Request

FULL: Final = 1.0


class Shedding(Open):
    """Lets requests pass at once, but refuses those of low priority under load."""

    def __init__(self, pool: EndpointPool, detector: SaturationDetector) -> None:
        self._pool = pool
        self._detector = detector

    def enter(self, request: Request) -> Ticket | None:
        if request.priority < 0:
            self.check(request)
        return HOLDS_NOTHING

    def check(self, request: Request) -> None:
        """Raises Refused if the endpoints that this request may use are full, or if the request may use no endpoint."""
        candidates = self._pool.candidates(request.subset)
        if not len(candidates) or self._detector.saturation(candidates) >= FULL:
            raise Refused(Cause.SHED)
