"""Flow control in one worker: joins the controller of `epp.flow` with areas, eventfds, timers, futures and metrics.

    decide ── enter ──▶ FlowControl ── passes ────────────▶ FlowController ── AreaPeers ──▶ areas, eventfds
              turn          ▲   ▲      enqueue_and_wait          └───────── PoolProbe ──▶ pool, detector
    ticket: placed, done ───┘   └ woken: an eventfd, or every LOOK_S while requests wait; sweep: the next deadline

For a request that does not wait, flow control creates only a ticket. While requests wait there are two timers. One checks every LOOK_S for
room that no other process has reported, and the other ends requests at their deadlines. At other times there is at most one timer, which
removes idle flows.

`epp.flow.controller` decides which request goes next.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from epp.decision.decision import Ticket
from epp.flow.controller import FlowController
from epp.flow.gate import PoolGate
from epp.flow.outcomes import Outcome, Undispatched
from epp.flow.plan import FlowPlan
from epp.flow.ports import Probe, Reading
from epp.request import Request
from epp.request.flows import FlowKey, Item
from shm.areas import Areas
from shm.flow_areas import FlowAreas
from workers.shared.documents import EndpointsView
from workers.shared.objectives import ObjectivesView
from workers.worker.flow.eviction import Evictions
from workers.worker.flow.metrics import FlowMetrics
from workers.worker.flow.peers import AreaPeers

LOOK_S: Final = 0.005
SWEEP_S: Final = 0.1  # the longest time between sweeps while requests wait


class FlowTicket:
    """The ticket of a request that may be scheduled. `done` tells the controller that the request has ended, with any outcome."""

    __slots__ = ("_controller", "_placed", "waited")

    def __init__(self, controller: FlowController) -> None:
        self._controller = controller
        self._placed = False
        self.waited = False

    def placed(self) -> None:
        self._placed = True
        self._controller.settled(placed=True)

    def freed(self) -> None:
        self._controller.released()

    def done(self) -> None:
        if self._placed:
            self._controller.released()
        else:
            self._controller.settled(placed=False)


class QueuedRequest(FlowTicket):
    """One request that must wait. It is both the item that the controller queues (`epp.request.flows.Item`) and the ticket that `turn`
    returns.

    Policies read the request from the item.
    """

    __slots__ = ("block", "bytes", "entered_at", "flow", "request", "ttl_s")

    def __init__(self, controller: FlowController, request: Request, now: float) -> None:
        super().__init__(controller)
        self.request = request
        self.flow = FlowKey(request.fairness_id, request.priority)
        self.bytes = request.body_bytes
        self.ttl_s = request.ttl_s
        self.entered_at = now
        self.block = 0  # the block of the series table that counts the request while it waits


class PassedRequest:
    """The ticket of a request that does not enter flow control. Its end makes room for other requests."""

    waited: Final = False

    def __init__(self, controller: FlowController) -> None:
        self._controller = controller

    def placed(self) -> None:
        pass

    def freed(self) -> None:
        self._controller.released()

    def done(self) -> None:
        self._controller.released()


class FlowObserver:
    """Tells eviction when dispatching has stopped, and how long cycles take. Implements `epp.flow.ports.Observer`.

    Its other calls do nothing: `FlowControl` counts requests itself, because it knows their labels.
    """

    def __init__(
        self, blocked: Callable[[], object] | None, cycled: Callable[[float], None], policy_failed: Callable[[str, BaseException], None]
    ) -> None:
        self._blocked = blocked
        self.cycled = cycled
        self.policy_failed = policy_failed

    def ended(self, key: FlowKey, outcome: Outcome, waited_s: float, bytes: int) -> None:
        pass

    def queued(self, key: FlowKey, requests: int, bytes: int) -> None:
        pass

    def blocked(self, reading: Reading, priority: int) -> None:
        if self._blocked is not None:
            self._blocked()


class FlowControl:
    """Runs one worker's shard of flow control. Implements `epp.decision.admission.Admission` for the worker's streams."""

    def __init__(
        self,
        plan: FlowPlan,
        probe: Probe,
        peers: AreaPeers,
        metrics: FlowMetrics,
        *,
        loop: asyncio.AbstractEventLoop,
        now: Callable[[], float],
        timed: Callable[[float], None],
        policy_failed: Callable[[str, BaseException], None],
    ) -> None:
        self._loop = loop
        self._now = now
        self._peers = peers
        self._metrics = metrics
        self._look: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._sweep_at = math.inf
        self.evictions: Evictions | None = None
        self.evicts = False  # whether the present configuration evicts requests in flight
        self.gate = PoolGate(probe, plan.usage_limits, plan.detector.name, now=now, report=policy_failed)
        self._observer = FlowObserver(self._blocked, timed, policy_failed)
        self._controller = FlowController(plan, self.gate, peers, self._observer, now=now, make_future=self._future)
        self._static = plan.static()
        self._passed = PassedRequest(self._controller)

    # Calls of streams.

    def enter(self, request: Request) -> Ticket | None:
        """Returns the request's ticket, or None if the request must wait."""
        now = self._now()
        if not self._controller.passes(request.priority, now):
            return None
        ticket = FlowTicket(self._controller)
        try:
            self._metrics.passed(request, self._now() - now)
        except BaseException:
            ticket.done()
            raise
        return ticket

    async def turn(self, request: Request) -> Ticket:
        """Waits for the request's turn and returns its ticket. Raises Undispatched, a subclass of Refused, if the request gets no turn."""
        now = self._now
        queued = QueuedRequest(self._controller, request, now())
        try:
            await self._controller.enqueue_and_wait(queued)
        except Undispatched as refused:
            self._count_undispatched(queued, refused.ending.outcome)
            raise
        except GeneratorExit:
            self._count_undispatched(queued, Outcome.EVICTED_CONTEXT_CANCELLED)
            raise
        except BaseException:  # only a bug raises another exception
            self._count_undispatched(queued, Outcome.EVICTED_OTHER if queued.waited else Outcome.REJECTED_OTHER)
            raise
        ended = now()
        waited_s = ended - queued.entered_at
        try:
            if queued.waited:
                self._metrics.leaves(queued.block, queued.bytes)
                self._metrics.ended(request, Outcome.DISPATCHED, waited_s)
                request.now = ended  # the decision begins at the end of the wait
            else:
                self._metrics.passed(request, waited_s)
        except BaseException:
            queued.done()
            raise
        return queued

    def forget_labels(self) -> None:
        """Forgets in which blocks requests are counted, because series were freed."""
        self._metrics.forget()

    def passed(self) -> Ticket:
        return self._passed

    def _count_undispatched(self, queued: QueuedRequest, outcome: Outcome) -> None:
        seconds = self._now() - queued.entered_at
        if queued.waited:
            self._metrics.leaves(queued.block, queued.bytes)
            self._metrics.ended(queued.request, outcome, seconds)
        else:
            self._metrics.refused(queued.request, outcome, seconds)

    # Calls of the worker.

    def know(self, places: Mapping[int, int]) -> None:
        """Sets the bands that exist. `places`: the place of each band's cells in the areas, by priority."""
        self._peers.know(places)
        self._controller.provision([priority for priority in places if priority not in self._static])

    def use(self, plan: FlowPlan, probe: Probe) -> None:
        """Continues with the plan of a later configuration (`FlowController.use`)."""
        self.gate = PoolGate(probe, plan.usage_limits, plan.detector.name, now=self._now, report=self._observer.policy_failed)
        self._static = plan.static()
        self._controller.use(plan, self.gate)
        if self._sweep is None or self._sweep_at > self._now() + SWEEP_S:
            self._plan_sweep(self._controller.sweep(self._now()))

    def woken(self) -> None:
        """Handles a write of another worker to this worker's eventfd."""
        self._controller.woken()
        if self.evicts and not self._controller.waiting:
            self._blocked()  # no request waits here, but a request in another worker may need this worker's victim

    def shut_down(self) -> None:
        """Refuses all waiting and all later requests. Called when the drain timeout is over."""
        self._controller.shut_down()
        self.close()

    def retire(self) -> None:
        """Ends the use of this worker's area, because another pool may get it. Running answers do not change the area any more."""
        self.shut_down()
        self._peers.retire()

    def close(self) -> None:
        """Cancels all timers."""
        for timer in (self._look, self._sweep):
            if timer is not None:
                timer.cancel()
        self._look = self._sweep = None
        self._sweep_at = math.inf

    @property
    def waiting(self) -> int:
        """The number of requests that wait in this worker."""
        return self._controller.waiting

    # Timers and futures.

    def _future(self, item: Item) -> asyncio.Future[Any]:
        """Creates the future of a request that must wait. Counts the request and starts the timers that it needs."""
        assert isinstance(item, QueuedRequest)
        item.block = self._metrics.enters(item.request, item.bytes, self._now() - item.entered_at)
        item.waited = True
        if self._look is None:
            self._look = self._loop.call_later(LOOK_S, self._check_room)
        if self._sweep is None or self._sweep_at > self._now() + SWEEP_S:
            self._plan_sweep(self._controller.sweep(self._now()))
        return self._loop.create_future()

    def _check_room(self) -> None:
        self._look = None
        try:
            self._controller.woken()
        finally:  # the timer continues even if a plugin raises
            if self._controller.waiting:
                self._look = self._loop.call_later(LOOK_S, self._check_room)

    def _sweep_due(self) -> None:
        self._sweep = None
        due = math.inf
        try:
            due = self._controller.sweep(self._now())
        finally:
            self._plan_sweep(due)

    def _plan_sweep(self, due: float) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        now = self._now()
        if self._controller.waiting:
            due = min(due, now + SWEEP_S)
        self._sweep_at = due
        if due < math.inf:
            self._sweep = self._loop.call_later(max(0.0, due - now), self._sweep_due)

    def _blocked(self) -> None:
        if self.evicts and self.evictions is not None:
            self.evictions.blocked()


class GatePoolState:
    """Implements `workers.worker.flow.eviction.PoolState` with the gate's reading and the areas of all workers."""

    def __init__(self, flow: FlowControl, waiting: FlowAreas, objectives: ObjectivesView, areas: Areas, endpoints: EndpointsView) -> None:
        """`waiting`: the flow areas. `endpoints`: the endpoints of the pool; without a pool number, these are all endpoints."""
        self._flow = flow
        self._waiting = waiting
        self._objectives = objectives
        self._areas = areas
        self._endpoints = endpoints

    def saturation(self) -> float:
        return self._flow.gate.read().saturation

    def bands(self) -> Sequence[tuple[int, float, bool]]:
        ceilings = self._flow.gate.read().ceilings
        return [(priority, ceiling, self._waits(priority)) for priority, ceiling in ceilings.items()]

    def in_flight(self) -> int:
        counts = self._areas.inflight(self._areas.schema.slots)
        if self._endpoints.pool is not None:
            self._endpoints.current()
            counts = counts[self._endpoints.slots]
        return int(np.add.reduce(counts))

    def _waits(self, priority: int) -> bool:
        place = self._objectives.content.places.get(priority)
        return place is not None and self._waiting.band(place).requests > 0
