"""Bands, flows and what waits in them, in one worker: bookkeeping alone, no clock, no futures, no other shards.

    Band (one priority) ──▶ Flow (one fairness id) ──▶ Queue (a plugin) ──▶ Entry (one request)
        │ FairShare: whose turn it is                    │ ordered by the OrderingPolicy's key
        │ arrivals: all entries by age

Invariants: the counters of a band equal the sums over its flows' queues; `active` holds the flows that are not empty and no others;
an entry is in exactly one queue from `offer` until `take` or `remove`, and its handle is void afterwards. The share is told
of every change of a flow's head. A policy that raises is replaced by its plain rule (`epp/flow/fallback.py`): a band
always dispatches what it holds.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from epp.flow.fallback import PlainQueue, Report, Trust, Unranked
from epp.flow.outcomes import Outcome
from epp.flow.plan import BandPlan
from epp.flow.ports import Future
from epp.flow.rate import DrainRate
from epp.flows import FlowKey, Item, Queued
from epp.plugin import FairShare, Ledger, Queue

DEAD_MAX = 64  # ended entries that a lazily cleaned list may hold beside as many as are alive


class Entry:
    """One waiting request: what policies see (`Queued`), and where it stands. `outcome` is set exactly once."""

    __slots__ = (
        "arrival",
        "bytes",
        "empty_ttl_s",
        "flow",
        "future",
        "handle",
        "last_s",
        "outcome",
        "place",
        "request",
        "ttl_s",
        "waits",
    )

    def __init__(self, item: Item, place: "Flow", arrival: float) -> None:
        self.flow = item.flow
        self.arrival = arrival
        self.bytes = item.bytes
        self.request: Any = item
        self.place = place
        self.ttl_s = self.empty_ttl_s = self.last_s = 0.0  # set by `Deadlines`
        self.handle: Any = None
        self.waits = False  # whether it is in a queue
        self.future: Future | None = None
        self.outcome: Outcome | None = None


class Flow:
    """The items of one flow key in this worker. `leases` counts requests that refer to it; an idle one has none."""

    __slots__ = ("band", "claim", "idle_since", "key", "leases", "queue")

    def __init__(self, key: FlowKey, band: "Band", queue: Queue) -> None:
        self.key = key
        self.band = band
        self.queue = queue
        self.leases = 0
        self.idle_since = 0.0
        self.claim = 0.0  # since when it has waited for its turn: when it got something to wait, or was served last

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
    """All flows of one priority in this worker; a `BandView` for displacement policies."""

    def __init__(self, plan: BandPlan, report: Report, ledger: Ledger) -> None:
        self.plan = plan
        self.priority = plan.priority
        self.tolerance = plan.fairness.tolerance
        self.requests = 0
        self.bytes = 0
        self.active: dict[FlowKey, Flow] = {}
        self.known: dict[FlowKey, Flow] = {}  # with the idle ones
        self.leaving = False  # its configuration is gone: it takes nothing in, and goes when it is empty
        self.rate = DrainRate()
        self._arrivals: deque[Entry] = deque()
        self._now = 0.0
        self._ordering = Trust(plan.ordering.name, report)
        self._fairness = Trust(plan.fairness.name, report)
        self._displacement = Trust(plan.displacement.name, report)
        self._queueing = Trust(plan.queue.name, report)
        self._key = plan.ordering.key
        self._ledger = ledger
        self._share: FairShare = self._made_share()

    def __len__(self) -> int:
        return self.requests

    @property
    def flows(self) -> Collection[Flow]:
        return self.active.values()

    @property
    def oldest(self) -> float:
        """Arrival of what has waited the longest; 0: nothing waits."""
        entry = self._first()
        return entry.arrival if entry is not None else 0.0

    def entries(self) -> Iterator[Entry]:
        """All that wait, by age."""
        return (entry for entry in self._arrivals if entry.waits)

    # Flows.

    def flow(self, key: FlowKey) -> Flow:
        """A new flow, known from now on."""
        try:
            queue = self.plan.queue.make(self._ranked)
        except Exception as problem:  # FAIL-OPEN
            self._queueing.failed(problem, self._now)
            queue = PlainQueue()
        flow = self.known[key] = Flow(key, self, queue)
        return flow

    def forget(self, flow: Flow) -> None:
        """An idle flow is given up."""
        del self.known[flow.key]
        try:
            self._share.forget(flow.key)
        except Exception as problem:
            self._begin_anew(problem)

    def _ranked(self, item: Queued) -> Any:
        """The ordering policy's key, whatever the policy does."""
        if not self._ordering.lost:
            try:
                return self._key(item)
            except Exception as problem:  # FAIL-OPEN: the item goes behind those that have a key
                self._ordering.failed(problem, self._now)
        return Unranked(item.arrival)

    # Items.

    def offer(self, entry: Entry, now: float) -> None:
        self._now = now
        flow = entry.place
        was_empty = not len(flow.queue)
        before = None if was_empty else self._head(flow)
        try:
            entry.handle = flow.queue.offer(entry)
        except Exception as problem:  # FAIL-OPEN: a plain queue takes over, with what waits
            self._queueing.failed(problem, now)
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

    def pick(self, now: float) -> Flow:
        """Whose head goes next. The band is not empty."""
        self._now = now
        if not self._fairness.lost:
            try:
                flow = self._share.pick(now)
                known = self.active.get(flow.key) if flow is not None else None
                if known is not None and known is flow:
                    return known
                raise LookupError(
                    f"{flow and flow.key} was picked, of {len(self.active)} flows in which something waits"
                )
            except Exception as problem:  # FAIL-OPEN: first come, first served
                self._begin_anew(problem)
        first = self._first()
        assert first is not None, "pick from an empty band"
        return first.place

    def take(self, flow: Flow, now: float) -> Entry:
        """Removes the head of a flow, which is to be served."""
        self._now = now
        try:
            entry = flow.queue.take()
            if not isinstance(entry, Entry) or entry.place is not flow or not entry.waits:
                raise LookupError(f"queue '{self.plan.queue.name}' gave out an item that does not wait in it")
        except Exception as problem:  # FAIL-OPEN: as in `offer`
            self._queueing.failed(problem, now)
            entry = self._rebuilt(flow).take()
        assert isinstance(entry, Entry)
        flow.claim = now
        self._gone(entry)
        try:
            self._share.dispatched(flow, entry, now)
            self._share.changed(flow)
        except Exception as problem:
            self._begin_anew(problem)
        return entry

    def remove(self, entry: Entry, now: float) -> None:
        """Takes an entry out wherever it stands: cancelled, expired, displaced."""
        self._now = now
        flow = entry.place
        before = self._head(flow)
        try:
            flow.queue.remove(entry.handle)
        except Exception as problem:  # FAIL-OPEN: as in `offer`
            self._queueing.failed(problem, now)
            self._rebuilt(flow, without=entry)
        self._gone(entry)
        if before is entry or not len(flow.queue):
            self._changed(flow)

    def victim(self, now: float) -> Entry:
        """Who gives way next. The band is not empty."""
        self._now = now
        if not self._displacement.lost:
            try:
                chosen = self.plan.displacement.victim(self)
                if isinstance(chosen, Entry) and chosen.waits and chosen.place.band is self:
                    return chosen
                raise LookupError(
                    f"displacement policy '{self.plan.displacement.name}' chose what does not wait in the band"
                )
            except Exception as problem:  # FAIL-OPEN: the newest
                self._displacement.failed(problem, now)
        return next(entry for entry in reversed(self._arrivals) if entry.waits)

    def claim(self, flow: Flow) -> float:
        """How early the turn of this band's next flow is; compares with that of other shards, and the smallest goes first.

        A policy that ranks says it itself. Where flows are kept apart without, turns count: who was served longest ago in its shard
        goes first, however old a backlog is. Else age does.
        """
        fairness = self.plan.fairness
        if fairness.ranks:
            if not self._fairness.lost:
                try:
                    claim: float = self._share.claim(flow)  # type: ignore[attr-defined]
                    if claim == claim:
                        return claim
                    raise ValueError("a claim is not a number")
                except Exception as problem:  # FAIL-OPEN: as if the flow were a new one
                    self._begin_anew(problem)
            return self._ledger.time()
        if fairness.isolates:
            return flow.claim
        head = self._head(flow)
        return head.arrival if head is not None else flow.claim

    # How it is kept.

    def _made_share(self) -> FairShare:
        fairness = self.plan.fairness
        share = fairness.share(self._ranked)
        if fairness.ranks:
            try:
                share.meet(self._ledger)  # type: ignore[attr-defined]
            except Exception as problem:  # FAIL-OPEN: it goes by what it sees itself
                self._fairness.failed(problem, self._now)
        return share

    def _first(self) -> Entry | None:
        arrivals = self._arrivals
        while arrivals:
            if arrivals[0].waits:
                return arrivals[0]
            arrivals.popleft()
        return None

    def _gone(self, entry: Entry) -> None:
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
            self._queueing.failed(problem, self._now)
            return self._rebuilt(flow).head()

    def _rebuilt(self, flow: Flow, without: Entry | None = None) -> PlainQueue:
        """A plain queue with what waits in a flow whose own queue broke."""
        queue = flow.queue = PlainQueue()
        for entry in self._arrivals:
            if entry.place is flow and entry.waits and entry is not without:
                entry.handle = queue.offer(entry)
        return queue

    def _changed(self, flow: Flow) -> None:
        if not self._fairness.lost:
            try:
                self._share.changed(flow)
            except Exception as problem:
                self._begin_anew(problem)

    def _begin_anew(self, problem: Exception) -> None:
        """FAIL-OPEN: a share that raised may have lost track of a flow; another one is told what waits."""
        self._fairness.failed(problem, self._now)
        try:
            self._share = self._made_share()
            for flow in self.active.values():
                self._share.changed(flow)
        except Exception as again:
            self._fairness.failed(again, self._now)
