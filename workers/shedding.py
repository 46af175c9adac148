"""Admission without flow control: requests of a priority below 0 are refused while the endpoints that they may go to are full.

Everybody else passes, and costs nothing here. Nothing waits.
"""

from typing import Final, Protocol

from epp.candidates import Candidates
from epp.errors import Cause, Refused
from epp.plugin import SaturationDetector
from epp.request import Request, Subset

FULL: Final = 1.0


class Pool(Protocol):
    """Who may be picked."""

    def candidates(self, subset: Subset | None) -> Candidates: ...


class Shedding:
    """Asked for sheddable requests only."""

    def __init__(self, pool: Pool, detector: SaturationDetector) -> None:
        self._pool = pool
        self._detector = detector

    def check(self, request: Request) -> None:
        """Raises Refused. Nobody to go to counts as full."""
        candidates = self._pool.candidates(request.subset)
        if not len(candidates) or self._detector.saturation(candidates) >= FULL:
            raise Refused(Cause.SHED)
