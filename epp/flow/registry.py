"""Which bands and flows there are: the control plane of flow control, apart from the path of requests.

The path of a request, which creates a flow at most:

    enqueue ──▶ band of its priority (else band 0) ──▶ lease of its flow ──▶ queue ──▶ pick ──▶ served; lease given back

The path of configuration, which touches no request:

    FlowPlan ─────────▶ static bands, templates ──┐
    objectives ──▶ provision(priorities) ─────────┴──▶ the bands that take requests in, and the order of all
                                                 └──▶ a band that is wanted no more: leaving ──▶ empty ──▶ gone

No arrow belongs to both. They meet in two words that the first reads and the second replaces whole: which band takes in a
priority, and the order of bands. So no change of configuration loses a request or leaves one behind: a band that is leaving takes
nothing in, is served in its place among the others until it is empty, and comes back as it was when it is wanted again.

A flow exists from its first waiting request on; each request that waits holds a lease of it. Without leases it is idle, and goes after
`IDLE_S`, or earlier when there are `FLOWS_MAX` of them. When none of so many is idle, further flows of a band share one flow,
`OVERFLOW`: a million fairness ids cost no more than the first ten thousand.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from epp.flow.bands import Band, Flow
from epp.flow.fallback import Report
from epp.flow.plan import DEFAULT_BAND, FlowPlan
from epp.flows import FlowKey, rank
from epp.plugin import Ledger

IDLE_S = 60.0
FLOWS_MAX = 10_000  # with state, in one worker
OVERFLOW = "other"
COLLECT_MAX = 200  # flows per sweep


class ControlPlane(Protocol):
    """What the controller needs of its registry. `Registry` is the real one; tests put their own in its place."""

    order: tuple[Band, ...]

    def band(self, priority: int) -> Band: ...
    def lease(self, key: FlowKey) -> Flow: ...
    def release(self, flow: Flow, now: float) -> None: ...
    def find(self, priority: int) -> Band | None: ...
    def provision(self, priorities: Collection[int]) -> None: ...
    def collect(self, now: float) -> None: ...
    def next_idle_end(self) -> float: ...


class Registry:
    """Bands and flows of one worker. `order` goes from the most important band to the least, leaving ones too."""

    def __init__(
        self,
        plan: FlowPlan,
        report: Report,
        reordered: Callable[[Sequence[int]], None],
        ledger: Callable[[int], Ledger],
    ) -> None:
        self._plan = plan
        self._report = report
        self._ledger = ledger  # of the band of a priority
        self._reordered = reordered  # told of the priorities that exist
        self._bands: dict[int, Band] = {}
        self._taking: Mapping[int, Band] = {}
        self._idle: OrderedDict[Flow, None] = OrderedDict()  # the longest idle first
        self._count = 0
        self.order: tuple[Band, ...] = ()
        self.provision(())

    # The path of a request.

    def band(self, priority: int) -> Band:
        """Which band takes in requests of this priority."""
        band = self._taking.get(priority)
        return band if band is not None else self._taking[DEFAULT_BAND]  # an empty band is false

    def lease(self, key: FlowKey) -> Flow:
        """The flow of this key, made if need be; it stays until the lease is given back."""
        band = self.band(key.priority)
        if key.priority != band.priority:
            key = FlowKey(key.fairness_id, band.priority)
        flow = band.known.get(key)
        if flow is None:  # an empty flow is false
            flow = self._made(band, key)
        if not flow.leases:
            self._idle.pop(flow, None)
        flow.leases += 1
        return flow

    def release(self, flow: Flow, now: float) -> None:
        """A lease is given back."""
        flow.leases -= 1
        if not flow.leases:
            flow.idle_since = now
            self._idle[flow] = None
            if flow.band.leaving and not flow.band.requests:
                self._settle()

    def _made(self, band: Band, key: FlowKey) -> Flow:
        if self._count >= FLOWS_MAX:
            if self._idle:
                self._forget(next(iter(self._idle)))
            else:
                key = FlowKey(OVERFLOW, band.priority)
                if key in band.known:
                    return band.known[key]
        self._count += 1
        return band.flow(key)

    def _forget(self, flow: Flow) -> None:
        del self._idle[flow]
        self._count -= 1
        flow.band.forget(flow)

    def collect(self, now: float) -> None:
        """Gives up flows that were idle for long."""
        for _ in range(COLLECT_MAX):
            flow = next(iter(self._idle), None)
            if flow is None or now - flow.idle_since < IDLE_S:
                return
            self._forget(flow)

    def next_idle_end(self) -> float:
        """When `collect` has something to do; inf: not of itself."""
        flow = next(iter(self._idle), None)
        return flow.idle_since + IDLE_S if flow is not None else float("inf")

    @property
    def flows(self) -> int:
        """How many have state."""
        return self._count

    # The path of configuration.

    def find(self, priority: int) -> Band | None:
        """The band of exactly this priority, leaving or not."""
        return self._bands.get(priority)

    def provision(self, priorities: Collection[int]) -> None:
        """Makes the bands of the plan and of these priorities the ones that take requests in."""
        wanted = frozenset(self._plan.priorities(priorities))
        for priority in wanted - self._bands.keys():
            self._bands[priority] = Band(self._plan.band(priority), self._report, self._ledger(priority))
        for priority, band in self._bands.items():
            band.leaving = priority not in wanted
        self._settle()

    def _settle(self) -> None:
        """Drops the leaving bands that are empty, and makes the order known."""
        for band in list(self._bands.values()):
            if band.leaving and not any(flow.leases for flow in band.known.values()):
                for flow in list(band.known.values()):
                    self._forget(flow)
                del self._bands[band.priority]
        self._taking = {priority: band for priority, band in self._bands.items() if not band.leaving}
        self.order = tuple(sorted(self._bands.values(), key=lambda band: rank(band.priority)))
        self._reordered([band.priority for band in self.order])
