"""Flow control of one worker: `enqueue_and_wait`, the caller's one entry, and what moves those that wait.

Read top to bottom. A request takes the fast path when nothing waits in any shard and the gate has room: no future, no timer, no
queue. Otherwise it gets a place in its band's queue and awaits a future, which is set once: by `cycle`, which serves as
long as there is room; by `sweep`, when its time is over; by a displacement for something more important; by `shut_down`. Whoever
awaits may leave at any moment (`close()` or `throw()` on the coroutine). Each ends with exactly one `Outcome`.

    enqueue_and_wait ──▶ queue ──▶ cycle ──▶ Dispatched, then `settled` by the caller
                                     ▲
        a new arrival, `released` (a response ended here), `woken` (another shard, or 5 ms have passed)

Who calls what: the stream `enqueue_and_wait`, and after Dispatched exactly one `settled`; the end of any response
`released`; an eventfd from another worker and, while something waits, a timer of 5 ms `woken`; a timer `sweep` at the moment
that it returned, and at least every 100 ms while something waits. Everything runs on the worker's loop; nothing here waits, logs
or opens anything.

One comparison orders bands everywhere: `epp.flows.rank`. A policy that raises is counted, and its plain rule takes its place.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from epp.flow.bands import Band, Entry, Flow
from epp.flow.deadlines import Deadlines
from epp.flow.displacement import OWN, Holding, giving_way
from epp.flow.neighbours import Neighbours
from epp.flow.outcomes import (
    EvictedContextCancelled,
    EvictedDisplaced,
    EvictedFault,
    EvictedNoEndpoints,
    EvictedShutDown,
    EvictedTTL,
    Outcome,
    Rejected,
    RejectedCapacity,
    RejectedFault,
    RejectedNoEndpoints,
    RejectedShutDown,
    Undispatched,
)
from epp.flow.plan import FlowPlan
from epp.flow.ports import Future, Gate, Observer, Peers, Wanted
from epp.flow.registry import ControlPlane, Registry
from epp.flows import Item

CYCLE_MAX = 256  # requests served by one cycle: about 4 ms; the next wake goes on
EVICTED = {
    each.outcome: each
    for each in (EvictedTTL, EvictedNoEndpoints, EvictedContextCancelled, EvictedDisplaced, EvictedShutDown)
}
U = TypeVar("U", bound=Undispatched)
Demands = Sequence[tuple[int, Wanted]]


class FlowController:
    """One worker's shard. `waiting` items wait in it."""

    def __init__(
        self,
        plan: FlowPlan,
        gate: Gate,
        peers: Peers,
        observer: Observer,
        *,
        now: Callable[[], float],
        make_future: Callable[[], Future],
        registry: ControlPlane | None = None,
    ) -> None:
        """`registry`: None for that of the plan."""
        self._plan = plan
        self._gate = gate
        self._peers = peers
        self._observer = observer
        self._now = now
        self._make_future = make_future
        self._registry: ControlPlane = (
            registry if registry is not None else Registry(plan, observer.policy_failed, gate.bands, peers.ledger)
        )
        self._deadlines = Deadlines(plan)
        self._neighbours = Neighbours(peers)
        self._pending = 0  # let through, endpoint not yet chosen
        self._front_moved = False
        self._closed = False
        self.waiting = 0
        self.waiting_bytes = 0

    async def enqueue_and_wait(self, item: Item) -> Outcome:
        """Returns DISPATCHED, or raises `Rejected` or `Evicted` (`epp.flow.outcomes`).

        Who is told DISPATCHED calls `settled` once, as soon as an endpoint is chosen or the request has ended without.
        """
        if not self.waiting and not self._closed and not self._peers.waiting():
            key = item.flow
            band = self._registry.band(key.priority)
            if self._gate.room(band.priority):
                self._pending += 1
                self._peers.let_through(self._pending)
                band.rate.count(self._now())
                self._observer.ended(key, Outcome.DISPATCHED, 0.0, item.bytes)
                return Outcome.DISPATCHED
        entry = self._enqueue(item)
        try:
            self.cycle()
            if entry.outcome is None:
                future = entry.future = self._make_future()
                if entry.outcome is None:  # making a future may sweep
                    await future
        except BaseException:
            self._left(entry)
            raise
        outcome = entry.outcome
        if outcome is Outcome.DISPATCHED:
            return outcome
        if outcome is None:  # the future was set by somebody else: a bug, but no reason to leave the request behind
            self._evict(entry, Outcome.EVICTED_OTHER, self._now())
            raise EvictedFault(detail="woken without an outcome")
        raise self._refusal(EVICTED[outcome], entry.place.band)

    # In.

    def _enqueue(self, item: Item) -> Entry:
        """A place in its flow's queue; raises `Rejected`."""
        now = self._now()
        key, size = item.flow, item.bytes
        band = self._registry.band(key.priority)
        try:
            if size < 0:
                raise RejectedFault(detail=f"an item of {size} bytes")
            demands = self._make_room(band, size, now)
        except Rejected as refusal:
            self._observer.ended(key, refusal.outcome, 0.0, size)
            raise
        flow = self._registry.lease(key)
        entry = Entry(item, flow, now)
        self._deadlines.add(entry, item.ttl_s)
        if not len(flow):
            self._front_moved = True  # its turn may be the next
        band.offer(entry, now)
        self.waiting += 1
        self.waiting_bytes += size
        self._show(flow)
        for shard, wanted in demands:  # after what waits is shown: who is asked sees why
            self._peers.demand(shard, wanted)
            self._peers.wake(shard)
        return entry

    def _make_room(self, band: Band, size: int, now: float) -> Demands:
        """Checks the limits over all shards; own victims give way at once, those elsewhere by the demands that are returned."""
        if self._closed:
            raise self._refusal(RejectedShutDown, band)
        requests, held = self._peers.band(band.priority)
        if requests + band.requests + 1 > band.plan.max_requests or held + band.bytes + size > band.plan.max_bytes:
            raise self._full(band)
        if not self._over(1, size):
            return ()
        self._answer(now)  # what others have asked of this shard is as good as gone
        parts = self._giving_way(band, size)
        if parts is None:
            raise self._full(band)
        for shard, wanted in parts:
            if shard == OWN:
                self._displace(wanted, now)
        return [part for part in parts if part[0] != OWN]

    def _over(self, requests: int, size: int) -> bool:
        """Whether so much more is beyond the limits over all bands."""
        plan = self._plan
        if not plan.max_requests and not plan.max_bytes:
            return False
        their_requests, their_bytes = self._peers.totals()
        total, total_bytes = their_requests + self.waiting + requests, their_bytes + self.waiting_bytes + size
        return (0 < plan.max_requests < total) or (0 < plan.max_bytes < total_bytes)

    def _giving_way(self, band: Band, size: int) -> Demands | None:
        """Who can give way to one request of this band, from what all shards show; nothing is evicted by this."""
        plan, peers = self._plan, self._peers
        holdings = []
        leaving = leaving_bytes = 0  # asked for already
        for other in self._registry.order:
            holdings.append(Holding(OWN, other.priority, other.requests, other.bytes))
            if not peers.band(other.priority)[0]:
                continue
            for shard in peers.shards():
                held, asked = peers.held(shard, other.priority), peers.asked(shard, other.priority)
                gone, gone_bytes = min(asked[0], held.requests), min(asked[1], held.bytes)
                leaving += gone
                leaving_bytes += gone_bytes
                holdings.append(Holding(shard, other.priority, held.requests - gone, held.bytes - gone_bytes))
        their_requests, their_bytes = peers.totals()
        total, total_bytes = (
            their_requests + self.waiting - leaving + 1,
            their_bytes + self.waiting_bytes - leaving_bytes + size,
        )
        return giving_way(
            band.priority,
            total - plan.max_requests if plan.max_requests else 0,
            total_bytes - plan.max_bytes if plan.max_bytes else 0,
            holdings,
        )

    def _answer(self, now: float) -> None:
        """Displaces what other shards have asked for, as far as the limits are still exceeded."""
        for wanted in self._peers.demands():
            self._displace(wanted, now, needed=lambda: self._over(0, 0))
            self._peers.answered(wanted)

    def _displace(self, wanted: Wanted, now: float, needed: Callable[[], bool] = lambda: True) -> None:
        """Ends items of one band until so many requests and bytes are free, the band is empty, or it is not needed."""
        band = self._registry.find(wanted.priority)
        if band is None:
            return
        requests, size = wanted.requests, wanted.bytes
        while band.requests and (requests > 0 or size > 0) and needed():
            victim = band.victim(now)
            requests -= 1
            size -= victim.bytes
            self._evict(victim, Outcome.EVICTED_DISPLACED, now)

    # Out: served.

    def cycle(self) -> None:
        """Serves as long as there is room: the bands by rank, in each whose turn it is. A band that is blocked blocks all below."""
        if not self.waiting:
            return
        now = self._now()
        gate, peers = self._gate, self._peers
        left = CYCLE_MAX
        for band in self._registry.order:
            while band.requests and left:
                if not gate.room(band.priority):
                    self._blocked(band, now)
                    return
                flow = band.pick(now)
                if peers.waiting() and self._neighbours.ahead(band.priority, band.claim(flow), band.tolerance, now):
                    self._front_moved = True
                    self._show_front(now)
                    return
                self._serve(flow, now)
                left -= 1
        self._show_front(now)
        if not self.waiting and peers.waiting():
            self._neighbours.invite(now)

    def _serve(self, flow: Flow, now: float) -> None:
        band = flow.band
        entry = band.take(flow, now)
        self._pending += 1
        self._peers.let_through(self._pending)
        band.rate.count(now)
        self._ended(entry, Outcome.DISPATCHED, now)

    def _blocked(self, band: Band, now: float) -> None:
        """No room for this band: it and all below wait."""
        self._neighbours.no_room()
        self._show_front(now)
        reading = self._gate.read()
        self._deadlines.regime(reading.empty, now)
        self._observer.blocked(reading, band.priority)

    def settled(self, *, placed: bool) -> None:
        """One that was told DISPATCHED has an endpoint and counts as in flight (`placed`), or ended without one."""
        self._pending -= 1
        self._peers.pending(self._pending)
        if not placed:
            self.released()
        elif self.waiting and self._gate.one_by_one:
            self.cycle()

    def released(self) -> None:
        """Something in flight has ended here: there may be room, for this shard or another."""
        self._gate.freed()
        if self.waiting:
            self.cycle()
        elif self._peers.waiting():
            self._neighbours.invite(self._now())

    def woken(self) -> None:
        """Another shard has asked for something or left room, or 5 ms have passed."""
        self._gate.freed()
        self._answer(self._now())
        self.cycle()

    # Out: not served.

    def sweep(self, now: float) -> float:
        """Ends what has waited for as long as it may; returns when to call again at the latest."""
        self._deadlines.regime(self._gate.read().empty, now)
        outcome = Outcome.EVICTED_NO_ENDPOINTS if self._deadlines.empty else Outcome.EVICTED_TTL
        for entry in self._deadlines.expired(now):
            self._evict(entry, outcome, now)
        self._registry.collect(now)
        return min(self._deadlines.next(), self._registry.next_idle_end())

    def shut_down(self) -> None:
        """The drain timeout is over: what waits is ended, what comes later is rejected."""
        self._closed = True
        now = self._now()
        for band in self._registry.order:
            for entry in list(band.entries()):
                self._evict(entry, Outcome.EVICTED_OTHER, now)

    def _left(self, entry: Entry) -> None:
        """Whoever waited has left."""
        if entry.outcome is None:
            self._evict(entry, Outcome.EVICTED_CONTEXT_CANCELLED, self._now())
        elif entry.outcome is Outcome.DISPATCHED:  # and nobody is left to make use of it
            self.settled(placed=False)

    def _evict(self, entry: Entry, outcome: Outcome, now: float) -> None:
        entry.place.band.remove(entry, now)
        self._ended(entry, outcome, now)
        if not self.waiting:
            self._show_front(now)

    def _ended(self, entry: Entry, outcome: Outcome, now: float) -> None:
        """An entry has left its queue: the one place where an outcome is set."""
        flow = entry.place
        entry.outcome = outcome
        entry.request = None  # its body is not held until the lists are cleaned
        self.waiting -= 1
        self.waiting_bytes -= entry.bytes
        self._front_moved = True
        self._deadlines.ended()
        self._show(flow)
        self._registry.release(flow, now)
        self._observer.ended(entry.flow, outcome, now - entry.arrival, entry.bytes)
        future = entry.future
        if future is not None and not future.done():
            future.set_result(None)

    # What others see.

    def _show(self, flow: Flow) -> None:
        band = flow.band
        self._peers.publish(band.priority, band.requests, band.bytes, band.oldest)
        self._observer.queued(flow.key, len(flow), flow.bytes)

    def _show_front(self, now: float) -> None:
        """Publishes which band goes next here, and how early its turn is; nobody reads it while this shard is alone.

        What others serve of the same flows moves turns too. Whoever leaves the room to others shows its own anew, so that no two wait
        for each other; else what is shown too early costs a wake.
        """
        if not self._front_moved:
            return
        for band in self._registry.order:
            if band.requests:
                if self._peers.shards():
                    self._peers.front(band.priority, band.claim(band.pick(now)))
                    self._front_moved = False
                return
        self._peers.front(None, 0.0)
        self._front_moved = False

    def _full(self, band: Band) -> Rejected:
        """Nothing more fits: because there is too much, or because nobody serves."""
        return self._refusal(RejectedNoEndpoints if self._gate.read().empty else RejectedCapacity, band)

    def _refusal(self, kind: type[U], band: Band) -> U:
        shards = 1 + len(self._peers.shards())
        waiting = band.requests + self._peers.band(band.priority)[0]
        return kind(band.rate.retry_after_s(waiting / shards, self._now()))  # this shard drains its part of the band

    # Configuration.

    def provision(self, priorities: Collection[int]) -> None:
        """The priorities of all objectives: their bands exist from now on, others go when they are empty."""
        self._registry.provision(priorities)
