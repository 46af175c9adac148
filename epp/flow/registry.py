"""The registry of bands and flows: the control plane of flow control, separate from the path of requests.

The path of a request can only create a flow:

    enqueue ──▶ band of its priority (else band 0) ──▶ lease of its flow ──▶ queue ──▶ pick ──▶ dispatched; lease released

The path of configuration touches no request:

    FlowPlan ─────────▶ static bands, templates ──┐
    objectives ──▶ provision(priorities) ─────────┴──▶ the bands that accept requests, and the order of all bands
                                                 └──▶ a band that is no longer named: leaving ──▶ empty ──▶ removed

The two paths share two variables: which band accepts a priority, and the order of the bands. The path of a request reads them, and the
path of configuration replaces each as a whole. So no change of configuration loses a request. A leaving band accepts no new requests. It
stays in the order until it is empty. If an objective names its priority again before that, the same band accepts requests again.

A flow exists from its first waiting request on. Each waiting request holds a lease of its flow. A flow without leases is idle. It is
removed after `IDLE_S`, or earlier if there are `FLOWS_MAX` flows. If there are FLOWS_MAX flows and no flow is idle, all new flows of a
band share one flow, `OVERFLOW`. So a million fairness ids cost no more than the first ten thousand.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from epp.flow.bands import Band, Flow
from epp.flow.failure_breaker import Report
from epp.flow.plan import DEFAULT_BAND, FlowPlan
from epp.plugin import Ledger
from epp.request.flows import FlowKey, rank

IDLE_S: Final = 60.0
FLOWS_MAX = 10_000  # flows with state, in one worker
OVERFLOW: Final = "other"
COLLECT_MAX: Final = 200  # flows that one sweep removes at most


class Registry:
    """Holds the bands and flows of one worker. `order` lists all bands, including leaving ones, the most important first."""

    def __init__(
        self, plan: FlowPlan, report: Report, reordered: Callable[[Sequence[int]], None], ledger: Callable[[int, str], Ledger]
    ) -> None:
        self._plan = plan
        self._report = report
        self._ledger = ledger  # makes the ledger of the band with this priority and this type of fairness policy
        self._reordered = reordered  # called with the existing priorities whenever they change
        self._bands: dict[int, Band] = {}
        self._accepting: Mapping[int, Band] = {}
        self._idle: OrderedDict[Flow, None] = OrderedDict()  # idle flows, the longest idle one first
        self._count = 0
        self.order: tuple[Band, ...] = ()
        self.provision(())

    # The path of a request.

    def band(self, priority: int) -> Band:
        """Returns the band that accepts requests of this priority."""
        band = self._accepting.get(priority)
        # Not `band or …`, because a band without requests is false.
        return band if band is not None else self._accepting[DEFAULT_BAND]

    def lease(self, key: FlowKey) -> Flow:
        """Returns the flow of this key, which is created if necessary. The flow stays until the lease is released."""
        band = self.band(key.priority)
        if key.priority != band.priority:
            key = FlowKey(key.fairness_id, band.priority)
        flow = band.known.get(key)
        if flow is None:  # not `if not flow`, because a flow without requests is false
            flow = self._create(band, key)
        if not flow.leases:
            self._idle.pop(flow, None)
        flow.leases += 1
        return flow

    def release(self, flow: Flow, now: float) -> None:
        """Releases one lease of a flow."""
        flow.leases -= 1
        if not flow.leases:
            flow.idle_since = now
            self._idle[flow] = None
            if flow.band.leaving and not flow.band.requests:
                self._settle()

    def _create(self, band: Band, key: FlowKey) -> Flow:
        if self._count >= FLOWS_MAX:
            if self._idle:
                self._drop(next(iter(self._idle)))
            else:
                key = FlowKey(OVERFLOW, band.priority)
                if key in band.known:
                    return band.known[key]
        self._count += 1
        return band.flow(key)

    def _drop(self, flow: Flow) -> None:
        del self._idle[flow]
        self._count -= 1
        flow.band.forget(flow)

    def collect(self, now: float) -> None:
        """Removes flows that were idle for IDLE_S, at most COLLECT_MAX of them."""
        for _ in range(COLLECT_MAX):
            flow = next(iter(self._idle), None)
            if flow is None or now - flow.idle_since < IDLE_S:
                return
            self._drop(flow)

    def next_idle_end(self) -> float:
        """Returns when `collect` next has a flow to remove; inf if no flow is idle."""
        flow = next(iter(self._idle), None)
        return flow.idle_since + IDLE_S if flow is not None else float("inf")

    @property
    def flows(self) -> int:
        """Returns the number of flows with state."""
        return self._count

    # The path of configuration.

    def take_over(self, bands: Sequence[Band], now: float) -> None:
        """Takes over the waiting requests of another registry's bands, in the order of their arrival, and the rates of these bands.

        Requests of a priority that has no band here join band 0.
        """
        waiting = [entry for band in bands for entry in band.entries()]
        for entry in sorted(waiting, key=lambda entry: entry.arrival):
            entry.place = self.lease(entry.flow)
            entry.place.band.offer(entry, now)
        for band in bands:
            if (successor := self.find(band.priority)) is not None:
                successor.rate = band.rate

    def find(self, priority: int) -> Band | None:
        """Returns the band of exactly this priority, leaving or not."""
        return self._bands.get(priority)

    def provision(self, priorities: Collection[int]) -> None:
        """Lets exactly the bands of the plan and of these priorities accept requests."""
        wanted = frozenset(self._plan.priorities(priorities))
        for priority in wanted:
            if priority not in self._bands:
                plan = self._plan.band(priority)
                self._bands[priority] = Band(plan, self._report, self._ledger(priority, plan.fairness.type_name))
        for priority, band in self._bands.items():
            band.leaving = priority not in wanted
        self._settle()

    def _settle(self) -> None:
        """Removes the leaving bands that are empty, and publishes the order."""
        for band in list(self._bands.values()):
            if band.leaving and not any(flow.leases for flow in band.known.values()):
                for flow in list(band.known.values()):
                    self._drop(flow)
                del self._bands[band.priority]
        self._accepting = {priority: band for priority, band in self._bands.items() if not band.leaving}
        self.order = tuple(sorted(self._bands.values(), key=lambda band: rank(band.priority)))
        self._reordered([band.priority for band in self.order])
