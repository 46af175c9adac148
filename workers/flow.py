"""Flow control in one worker: the controller of `epp.flow`, joined with lanes, eventfds, timers, futures and metrics.

    stream ── decided ──▶ FlowControl ── enqueue_and_wait ──▶ FlowController ── LanePeers ──▶ lanes, eventfds
      │                       ▲   ▲                                 └───────── PoolProbe ──▶ pool, detector
      └ settled, released ────┘   └ woken: an eventfd, or LOOK_S while something waits; swept: the next deadline

A request that goes straight through makes no future, task or timer here. While something waits there are two timers: one looks
every LOOK_S, for room that nobody told of, and one ends what has waited for as long as it may; when nothing waits there is at
most one, which gives up flows that are idle.

What this does not do: decide who goes. That stands in `epp.flow.controller`.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from epp.decide import Pool, decide
from epp.decision import Decision
from epp.flow.controller import FlowController
from epp.flow.gate import PoolGate
from epp.flow.outcomes import Outcome, Undispatched
from epp.flow.plan import FlowPlan
from epp.flow.ports import Probe, Reading
from epp.flows import FlowKey
from epp.pipeline import Pipeline
from epp.request import Request
from workers.eviction import Evictions
from workers.flow_metrics import FlowMetrics
from workers.flow_peers import LanePeers

LOOK_S: Final = 0.005
SWEEP_S: Final = 0.1  # while something waits, at least so often


class Asked:
    """What flow control is handed: `epp.flows.Item`. Policies reach the request by it."""

    __slots__ = ("block", "bytes", "flow", "request", "ttl_s", "waits")

    def __init__(self, request: Request, ttl_s: float | None) -> None:
        self.request = request
        self.flow = FlowKey(request.fairness_id, request.priority)
        self.bytes = request.body_bytes
        self.ttl_s = ttl_s
        self.waits = False
        self.block = 0  # where it is counted while it waits


class Controller(FlowController):
    """With its cycles timed."""

    timed: Callable[[float], None]
    clock: Callable[[], float]

    def cycle(self) -> None:
        if not self.waiting:
            super().cycle()
            return
        begun = self.clock()
        super().cycle()
        self.timed(self.clock() - begun)


class Observed:
    """`epp.flow.ports.Observer`; requests are counted by `FlowControl`, which knows their labels."""

    def __init__(
        self, blocked: Callable[[], object] | None, policy_failed: Callable[[str, BaseException], None]
    ) -> None:
        self._blocked = blocked
        self.policy_failed = policy_failed

    def ended(self, key: FlowKey, outcome: Outcome, waited_s: float, bytes: int) -> None:
        pass

    def queued(self, key: FlowKey, requests: int, bytes: int) -> None:
        pass

    def blocked(self, reading: Reading, priority: int) -> None:
        if self._blocked is not None:
            self._blocked()


class FlowControl:
    """One worker's shard, as streams and the worker see it."""

    def __init__(
        self,
        plan: FlowPlan,
        probe: Probe,
        peers: LanePeers,
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
        self._asking: Asked | None = None
        self._begun = 0.0
        self._look: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._sweep_at = math.inf
        self.evictions: Evictions | None = None
        self.gate = PoolGate(probe, plan.usage_limits, plan.detector.name, now=now, report=policy_failed)
        self._controller = Controller(
            plan, self.gate, peers, Observed(self._blocked, policy_failed), now=now, make_future=self._future
        )
        self._controller.timed = timed
        self._controller.clock = now
        self._static = plan.static()
        self.released = self._controller.released

    # What streams call.

    async def decided(
        self, pipeline: Pipeline, request: Request, pool: Pool, ttl_ms: int | None, bound: Callable[[], Pipeline]
    ) -> Decision:
        """Waits for the request's turn, then decides. Who gets a decision calls `settled` once it counts as in flight.

        One that has waited is decided by the pipeline that is `bound` then: a plugin that fails may have been left out meanwhile.
        """
        controller, now = self._controller, self._now
        asked = self._asking = Asked(request, None if ttl_ms is None else ttl_ms / 1000.0)
        begun = self._begun = now()
        try:
            await controller.enqueue_and_wait(asked)
        except Undispatched as refused:
            self._turned_away(asked, refused.outcome, now() - begun)
            raise
        except GeneratorExit:
            self._turned_away(asked, Outcome.EVICTED_CONTEXT_CANCELLED, now() - begun)
            raise
        except BaseException:  # a fault of ours
            self._turned_away(asked, Outcome.EVICTED_OTHER if asked.waits else Outcome.REJECTED_OTHER, now() - begun)
            raise
        ended = now()
        if asked.waits:
            self._metrics.leaves(asked.block, asked.bytes)
            self._metrics.ended(request, Outcome.DISPATCHED, ended - begun)
            request.now = ended  # another phase
            pipeline = bound()
        else:
            self._asking = None
            self._metrics.straight(request, ended - begun)
        try:
            return await decide(pipeline, request, pool)
        except BaseException:
            controller.settled(placed=False)
            raise

    def settled(self) -> None:
        """The request counts as in flight."""
        self._controller.settled(placed=True)

    def _turned_away(self, asked: Asked, outcome: Outcome, seconds: float) -> None:
        if asked.waits:
            self._metrics.leaves(asked.block, asked.bytes)
            self._metrics.ended(asked.request, outcome, seconds)
        else:
            self._asking = None  # as in `_future`
            self._metrics.refused(asked.request, outcome, seconds)

    # What the worker calls.

    def know(self, places: Mapping[int, int]) -> None:
        """The bands that exist, and their places in the lanes."""
        self._peers.know(places)
        self._controller.provision([priority for priority in places if priority not in self._static])

    def woken(self) -> None:
        """Another worker has written to this one's eventfd."""
        self._controller.woken()
        if self.evictions is not None and not self._controller.waiting:
            self._blocked()  # nothing waits here, but here may be who gives way

    def shut_down(self) -> None:
        """The drain timeout is over: whatever waits is refused, and what comes."""
        self._controller.shut_down()
        self.close()

    def close(self) -> None:
        """No timer is left."""
        for timer in (self._look, self._sweep):
            if timer is not None:
                timer.cancel()
        self._look = self._sweep = None
        self._sweep_at = math.inf

    @property
    def waiting(self) -> int:
        """How many requests wait here."""
        return self._controller.waiting

    # Timers and futures.

    def _future(self) -> asyncio.Future[Any]:
        """The request that is being asked for has to wait."""
        asked = self._asking
        assert asked is not None
        self._asking = None  # its body must not be kept from here
        asked.waits = True
        asked.block = self._metrics.enters(asked.request, asked.bytes, self._now() - self._begun)
        if self._look is None:
            self._look = self._loop.call_later(LOOK_S, self._looked)
        if self._sweep is None or self._sweep_at > self._now() + SWEEP_S:
            self._plan_sweep(self._controller.sweep(self._now()))
        return self._loop.create_future()

    def _looked(self) -> None:
        self._look = None
        try:
            self._controller.woken()
        finally:  # whatever a plugin does, who waits is looked after
            if self._controller.waiting:
                self._look = self._loop.call_later(LOOK_S, self._looked)

    def _swept(self) -> None:
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
            self._sweep = self._loop.call_later(max(0.0, due - now), self._swept)

    def _blocked(self) -> None:
        if self.evictions is not None:
            self.evictions.blocked()


class ShutBands:
    """What in-flight eviction is to know (`workers.eviction.Shut`): the gate's reading, and who waits in any worker."""

    def __init__(self, flow: FlowControl, waits: Callable[[int], bool], in_flight: Callable[[], int]) -> None:
        self._gate = flow.gate
        self._waits = waits
        self.in_flight = in_flight

    def saturation(self) -> float:
        return self._gate.read().saturation

    def bands(self) -> Sequence[tuple[int, float, bool]]:
        ceilings = self._gate.read().ceilings
        return [(priority, ceiling, self._waits(priority)) for priority, ceiling in ceilings.items()]
