"""Admission decides whether a request may be scheduled now, has to wait for its turn, or is refused.

`epp.decision.decide` calls `Admission.enter` before every decision, and awaits `Admission.turn` if the request has to wait. There are three
implementations: `Open` (every request passes), `workers.worker.extproc.shedding` (refuses sheddable requests while the pool is full) and
`workers.worker.flow.flow_control`.

    enter ──▶ Ticket ── decided, load counted ──▶ placed ──▶ … answer … ──▶ done
      └ turn ──▶ └───── no decision ─────────────────────────────────────▶ done
"""

from typing import Final, Protocol

from epp.decision.decision import Ticket
from epp.request import Request


class Admission(Protocol):
    """Decides when a request may be scheduled."""

    def enter(self, request: Request) -> Ticket | None:
        """Returns the request's ticket if the request may be scheduled now. Returns None if it must await its `turn`. Raises Refused."""

    async def turn(self, request: Request) -> Ticket:
        """Returns the request's ticket once the request may be scheduled. Raises Refused."""

    def passed(self) -> Ticket:
        """Returns a ticket for a request that never waits but is counted as in flight, such as a GET."""


class _Nothing:
    """The ticket of a request that holds no resources of flow control: its methods do nothing."""

    waited: Final = False

    def placed(self) -> None:
        pass

    def freed(self) -> None:
        pass

    def done(self) -> None:
        pass


HOLDS_NOTHING: Final = _Nothing()


class Open:
    """Lets every request pass at once."""

    def enter(self, request: Request) -> Ticket | None:
        return HOLDS_NOTHING

    async def turn(self, request: Request) -> Ticket:
        return HOLDS_NOTHING

    def passed(self) -> Ticket:
        return HOLDS_NOTHING


OPEN: Final = Open()
