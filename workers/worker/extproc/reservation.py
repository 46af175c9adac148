"""Counts one routed request for its endpoints: their load while it is in flight, and the result of its answer."""

from typing import Final

from compiled.calls import increase
from epp.decision.decision import ERRORS_FROM, SERVER_ERRORS_FROM, Decision, Ticket
from epp.flow.eviction import Victim
from epp.request import Request
from workers.shared.ejection import CONNECTION_POINTS
from workers.worker.extproc.answer_counts import NOT_COUNTED, outcome_of
from workers.worker.extproc.app import App

NOT_IMPLEMENTED: Final = 501
NOWHERE: Final = -1  # the slot of a request that is not counted at an endpoint


class Reservation:
    """Counts the load that one routed request adds to its endpoints, in this worker's area, from `place` to `release`.

    `secondary`: the slots of the secondary endpoints, which the profiles beside the primary one have picked. A secondary endpoint works
    for the request until the first piece of the answer comes.
    """

    __slots__ = ("_app", "_counted", "_failed", "_fingerprint", "_request", "_slot", "secondary", "ticket", "victim")

    def __init__(self, app: App, ticket: Ticket | None, request: Request | None, fingerprint: int) -> None:
        """`request`: None for a request that is no inference request. `fingerprint`: the fingerprint of the request."""
        self._app = app
        self._request = request
        self._fingerprint = fingerprint
        self._counted = NOT_COUNTED  # how the request is counted in the comparison of endpoints
        self._failed = False  # whether its answer was counted as failed
        self._slot = NOWHERE
        self.secondary: tuple[int, ...] = ()
        self.ticket = ticket
        self.victim: Victim | None = None  # the request's entry in in-flight eviction; None if it cannot be evicted

    def place(self, decision: Decision) -> None:
        """Counts the request at its endpoints. If this raises, `release` takes the counts back."""
        app, slot = self._app, decision.targets[0].slot
        others: tuple[int, ...] = ()
        if len(decision.runs) > 1:
            runs = [run for name, run in decision.runs.items() if run is not None and name != decision.primary]
            others = tuple(run.candidates.endpoint(run.picked[0]).slot for run in runs)
        if app.trials:
            for tried in (slot, *others):
                if tried in app.trials:
                    app.pool.tried(tried)
        inflight = app.area.inflight
        increase(inflight, slot)
        self._slot = slot
        for other in others:
            increase(inflight, other)
            self.secondary += (other,)
        if self._request is not None and app.answers.watched[0]:
            self._counted = app.answers.sent(self._request, self._slots(), app.number)
        if self.ticket is not None:
            self.ticket.placed()

    def move(self, slot: int) -> None:
        """Moves the load to another endpoint, which really serves the request."""
        inflight = self._app.area.inflight
        increase(inflight, slot)
        increase(inflight, self._slot, -1)
        self._slot = slot

    def outcome(self, status: int, *, sent: bool) -> None:
        """Counts the answer's status for the endpoints. `sent`: whether the answer comes from the model server, not from the gateway."""
        area = self._app.area
        if status >= ERRORS_FROM:
            self.fail(outcome_of(status))
        elif self._app.answers.watched[0]:
            self._app.answers.served(self._fingerprint)
        if status < SERVER_ERRORS_FROM or status == NOT_IMPLEMENTED:
            increase(area.served, self._slot)
            for slot in self.secondary:
                increase(area.served, slot)
        else:
            area.failed[self._slot] += 1 if sent else CONNECTION_POINTS

    def fail(self, outcome: int) -> None:
        """Counts a failed answer, for the comparison of endpoints. `outcome`: an index of `workers.shared.outliers.OUTCOMES`."""
        if self._request is not None and not self._failed:
            self._failed = True
            app = self._app
            app.answers.failed(self._request, self._slots(), outcome, self._fingerprint, self._counted, app.number)

    def _slots(self) -> tuple[int, ...]:
        """Returns the slots of all endpoints that work for the request, each once."""
        secondary = self.secondary
        return (self._slot, *[slot for slot in secondary if slot != self._slot]) if secondary else (self._slot,)

    def passed_over(self) -> None:
        """Counts a failed connection for the endpoint: the gateway could not reach it, and another endpoint serves the request."""
        self._app.area.failed[self._slot] += CONNECTION_POINTS

    def free_secondary(self) -> None:
        """Releases the load of the secondary endpoints, because their work for the request is done."""
        self._uncount_secondary()
        if self.ticket is not None:
            self.ticket.freed()

    def release(self) -> None:
        """Releases all load, because the request is no longer in flight. Its ticket ends later, after the ResponseComplete plugins."""
        if self._slot != NOWHERE:
            increase(self._app.area.inflight, self._slot, -1)
        if self.secondary:
            self._uncount_secondary()
        if self.victim is not None and self._app.evictions is not None:
            self._app.evictions.ended(self.victim)

    def _uncount_secondary(self) -> None:
        slots, self.secondary = self.secondary, ()
        for slot in slots:
            increase(self._app.area.inflight, slot, -1)
