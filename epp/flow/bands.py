"""Keeps the bands, flows and waiting requests of one worker: bookkeeping only, without clock, futures or other shards.

    Band (one priority) ──▶ Flow (one fairness id) ──▶ Queue (a plugin) ──▶ Entry (one request)
        │ FairShare: which flow is next                  │ ordered by the OrderingPolicy's key
        │ arrivals: all entries by age

Invariants:
- The counters of a band equal the sums over the queues of its flows.
- `active` holds exactly the flows that are not empty.
- An entry is in exactly one queue from `offer` until `take` or `remove`. After that its handle is void.
- The `FairShare` of a band receives every change of a flow's head.

A plain rule replaces a policy that raises (`epp/flow/failure_breaker.py`), so a band always dispatches what it holds.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from epp.flow.failure_breaker import FailureBreaker, Report, Unranked
from epp.flow.fifo_queue import FifoQueue
from epp.flow.outcomes import Outcome
from epp.flow.plan import BandPlan
from epp.flow.ports import Future
from epp.flow.rate import DrainRate
from epp.plugin import FairShare, Ledger, Queue
from epp.request.flows import FlowKey, Item, Queued

DEAD_MAX = 64  # lists are cleaned lazily: a list may hold one ended entry per live entry, and this many more


class Entry:
    """Holds one waiting request: the fields that policies see (`Queued`), and its state. `outcome` is set exactly once."""

    __slots__ = ("arrival", "bytes", "empty_ttl_s", "flow", "future", "handle", "last_s", "outcome", "place", "request", "ttl_s", "waits")

    def __init__(self, item: Item, place: "Flow", arrival: float) -> None:
        self.flow = item.flow
        self.arrival = arrival
        self.bytes = item.bytes
        self.request: Any = item
        self.place = place  # the flow that has the entry
        self.ttl_s = self.empty_ttl_s = self.last_s = 0.0  # set by `Deadlines`
        self.handle: Any = None
        self.waits = False  # whether the entry is in a queue
        self.future: Future | None = None
        self.outcome: Outcome | None = None

    @property
    def ended(self) -> bool:
        """Returns whether the entry has its outcome."""
        return self.outcome is not None


class Flow:
    """Holds the waiting requests of one flow key in this worker. `leases` counts the requests that refer to the flow; at 0, it is idle."""

    __slots__ = ("band", "claim", "idle_since", "key", "leases", "queue")

    def __init__(self, key: FlowKey, band: "Band", queue: Queue) -> None:
        self.key = key
        self.band = band
        self.queue = queue
        self.leases = 0
        self.idle_since = 0.0
        self.claim = 0.0  # when the flow's wait for its turn began: when it became non-empty, or was last served

    @property
    def bytes(self) -> int:
        return self.queue.bytes

    @property
    def head(self) -> Queued | None:
        return self.queue.head()

    @property
    def tail(self) -> Queued | None:
        return self.queue.tail()

    def __len__(self) -> int:
        return len(self.queue)

    def scan(self) -> Iterable[Queued]:
        return self.queue.scan()


class Band:
    """Holds all flows of one priority in this worker. Displacement policies see it as a `BandView`."""

    def __init__(self, plan: BandPlan, report: Report, ledger: Ledger) -> None:
        self.plan = plan
        self.priority = plan.priority
        self.tolerance = plan.fairness.tolerance
        self.holds = plan.fairness.holds
        self.requests = 0
        self.bytes = 0
        self.active: dict[FlowKey, Flow] = {}
        self.known: dict[FlowKey, Flow] = {}  # all flows of the band: those in `active`, and the idle ones
        self.leaving = False  # whether the band is gone from the configuration: it accepts nothing new and is removed once empty
        self.rate = DrainRate()
        self._arrivals: deque[Entry] = deque()
        self._now = 0.0
        self._ordering_breaker = FailureBreaker(plan.ordering.name, report)
        self._fairness_breaker = FailureBreaker(plan.fairness.name, report)
        self._displacement_breaker = FailureBreaker(plan.displacement.name, report)
        self._queue_breaker = FailureBreaker(plan.queue.name, report)
        self._key = plan.ordering.key
        self._ledger = ledger
        self._share: FairShare = self._make_share()

    def __len__(self) -> int:
        return self.requests

    @property
    def flows(self) -> Collection[Flow]:
        return self.active.values()

    @property
    def oldest(self) -> float:
        """Returns the arrival time of the entry that has waited longest; 0 if no entry waits."""
        entry = self._first()
        return entry.arrival if entry is not None else 0.0

    def entries(self) -> Iterator[Entry]:
        """Yields all waiting entries, oldest first."""
        return (entry for entry in self._arrivals if entry.waits)

    # Flows.

    def flow(self, key: FlowKey) -> Flow:
        """Creates a flow and adds it to `known`."""
        try:
            queue = self.plan.queue.make(self._ranked)
        except Exception as problem:  # FAIL-OPEN
            self._queue_breaker.failed(problem, self._now)
            queue = FifoQueue("plain")
        flow = self.known[key] = Flow(key, self, queue)
        return flow

    def forget(self, flow: Flow) -> None:
        """Removes an idle flow."""
        del self.known[flow.key]
        try:
            self._share.forget(flow.key)
        except Exception as problem:
            self._replace_share(problem)

    def _ranked(self, item: Queued) -> Any:
        """Returns the ordering policy's key for an item. If the policy raises, returns an `Unranked` key."""
        if not self._ordering_breaker.tripped:
            try:
                return self._key(item)
            except Exception as problem:  # FAIL-OPEN: the item sorts after those that have a key
                self._ordering_breaker.failed(problem, self._now)
        return Unranked(item.arrival)

    # Items.

    def offer(self, entry: Entry, now: float) -> None:
        self._now = now
        flow = entry.place
        was_empty = not len(flow.queue)
        before = None if was_empty else self._head(flow)
        try:
            entry.handle = flow.queue.offer(entry)
        except Exception as problem:  # FAIL-OPEN: a plain queue takes over the waiting items
            self._queue_breaker.failed(problem, now)
            entry.handle = self._rebuilt(flow).offer(entry)
        entry.waits = True
        self.requests += 1
        self.bytes += entry.bytes
        self._arrivals.append(entry)
        if was_empty:
            self.active[flow.key] = flow
            flow.claim = now
            self._changed(flow)
        elif self._head(flow) is not before:
            self._changed(flow)

    def pick(self, now: float) -> Flow | None:
        """Returns the flow to serve next, or None if the policy holds back all waiting requests. The band must not be empty."""
        self._now = now
        if not self._fairness_breaker.tripped:
            try:
                flow = self._share.pick(now)
                if flow is None and self.holds:
                    return None
                known = self.active.get(flow.key) if flow is not None else None
                if known is not None and known is flow:
                    return known
                raise LookupError(f"picked {flow and flow.key}, which is none of the {len(self.active)} flows with waiting requests")
            except Exception as problem:  # FAIL-OPEN: first come, first served
                self._replace_share(problem)
        first = self._first()
        assert first is not None, "pick from an empty band"
        return first.place

    def take(self, flow: Flow, now: float) -> Entry:
        """Removes the head of a flow and returns it for dispatch."""
        self._now = now
        try:
            entry = flow.queue.take()
            if not isinstance(entry, Entry) or entry.place is not flow or not entry.waits:
                raise LookupError(f"queue '{self.plan.queue.name}' returned an item that does not wait in it")
        except Exception as problem:  # FAIL-OPEN: as in `offer`
            self._queue_breaker.failed(problem, now)
            entry = self._rebuilt(flow).take()
        assert isinstance(entry, Entry)
        flow.claim = now
        self._removed(entry)
        try:
            self._share.dispatched(flow, entry, now)
            self._share.changed(flow)
        except Exception as problem:
            self._replace_share(problem)
        return entry

    def remove(self, entry: Entry, now: float) -> None:
        """Removes an entry that was cancelled, expired or displaced, from any position."""
        self._now = now
        flow = entry.place
        before = self._head(flow)
        try:
            flow.queue.remove(entry.handle)
        except Exception as problem:  # FAIL-OPEN: as in `offer`
            self._queue_breaker.failed(problem, now)
            self._rebuilt(flow, without=entry)
        self._removed(entry)
        if before is entry or not len(flow.queue):
            self._changed(flow)

    def victim(self, now: float) -> Entry:
        """Returns the entry to displace next. The band must not be empty."""
        self._now = now
        if not self._displacement_breaker.tripped:
            try:
                chosen = self.plan.displacement.victim(self)
                if isinstance(chosen, Entry) and chosen.waits and chosen.place.band is self:
                    return chosen
                raise LookupError(f"displacement policy '{self.plan.displacement.name}' chose an item that does not wait in the band")
            except Exception as problem:  # FAIL-OPEN: displace the newest
                self._displacement_breaker.failed(problem, now)
        return next(entry for entry in reversed(self._arrivals) if entry.waits)

    def claim(self, flow: Flow) -> float:
        """Returns the claim of a flow. Shards compare the claims of their flows: the smallest claim goes first.

        The attributes of the fairness policy determine what the claim is:
        - with `ranks`, a number that the policy computes;
        - with `isolates` only, when the flow became non-empty or was last served, so that the flow that has waited longest goes first;
        - otherwise the arrival time of the flow's head.
        """
        fairness = self.plan.fairness
        if fairness.ranks:
            if not self._fairness_breaker.tripped:
                try:
                    claim: float = self._share.claim(flow)  # type: ignore[attr-defined]
                    if claim == claim:
                        return claim
                    raise ValueError("a claim is not a number")
                except Exception as problem:  # FAIL-OPEN: use the claim of a new flow
                    self._replace_share(problem)
            return self._ledger.time()
        if fairness.isolates:
            return flow.claim
        head = self._head(flow)
        return head.arrival if head is not None else flow.claim

    # Bookkeeping.

    def _make_share(self) -> FairShare:
        fairness = self.plan.fairness
        share = fairness.share(self._ranked)
        if fairness.ranks:
            try:
                share.meet(self._ledger)  # type: ignore[attr-defined]
            # FAIL-OPEN: without the other shards, this shard computes shares from what its own worker sees.
            except Exception as problem:
                self._fairness_breaker.failed(problem, self._now)
        return share

    def _first(self) -> Entry | None:
        arrivals = self._arrivals
        while arrivals:
            if arrivals[0].waits:
                return arrivals[0]
            arrivals.popleft()
        return None

    def _removed(self, entry: Entry) -> None:
        flow = entry.place
        entry.waits = False
        entry.handle = None
        self.requests -= 1
        self.bytes -= entry.bytes
        if not len(flow.queue):
            del self.active[flow.key]
        if len(self._arrivals) > 2 * self.requests + DEAD_MAX:
            self._arrivals = deque(entry for entry in self._arrivals if entry.waits)

    def _head(self, flow: Flow) -> Queued | None:
        try:
            return flow.queue.head()
        except Exception as problem:  # FAIL-OPEN: as in `offer`
            self._queue_breaker.failed(problem, self._now)
            return self._rebuilt(flow).head()

    def _rebuilt(self, flow: Flow, without: Entry | None = None) -> FifoQueue:
        """Replaces the queue of a flow after a failure by a plain queue with the same entries."""
        queue = flow.queue = FifoQueue("plain")
        for entry in self._arrivals:
            if entry.place is flow and entry.waits and entry is not without:
                entry.handle = queue.offer(entry)
        return queue

    def _changed(self, flow: Flow) -> None:
        if not self._fairness_breaker.tripped:
            try:
                self._share.changed(flow)
            except Exception as problem:
                self._replace_share(problem)

    def _replace_share(self, problem: Exception) -> None:
        """FAIL-OPEN: replaces a share that raised, which may have lost track of a flow. The new share gets all flows that wait."""
        self._fairness_breaker.failed(problem, self._now)
        try:
            self._share = self._make_share()
            for flow in self.active.values():
                self._share.changed(flow)
        except Exception as again:
            self._fairness_breaker.failed(again, self._now)
