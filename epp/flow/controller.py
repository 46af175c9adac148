"""Flow control of one worker: a request enters by `passes` or `enqueue_and_wait` and ends with exactly one `Outcome`.

Read this module from top to bottom. A request passes if nothing waits in any shard and the gate has room: no future, no timer, no queue.
Otherwise it joins the queue of its flow and awaits a future. One of four calls sets the future, once:

    cycle       dispatches as long as there is room
    sweep       ends requests past their TTL
    _displace   makes room for a more important request
    shut_down   ends everything

The caller may leave at any moment (`close()` or `throw()` on the coroutine).

    passes ───────────────────────────────▶ Dispatched, then `settled` by the caller
    enqueue_and_wait ──▶ queue ──▶ cycle ──▶ Dispatched, then `settled` by the caller
                                     ▲
        a new arrival, `released` (a response ended here), `woken` (another shard, or 5 ms have passed)

Everything runs on the worker's loop. Nothing here blocks, logs or opens anything.

One comparison orders bands everywhere: `epp.request.flows.rank`. A policy that raises is counted, and a plain rule replaces it.
"""

from collections.abc import Callable, Collection
from typing import Final

from epp.flow import outcomes
from epp.flow.bands import Band, Entry, Flow
from epp.flow.deadlines import Deadlines
from epp.flow.displacement import OWN, Demands, Limits
from epp.flow.outcomes import Ending, Outcome, Undispatched
from epp.flow.plan import FlowPlan
from epp.flow.ports import Future, Gate, Observer, Peers, Wanted
from epp.flow.registry import Registry
from epp.flow.shard_order import ShardOrder
from epp.request.flows import Item

CYCLE_MAX: Final = 256  # requests dispatched by one cycle: about 4 ms; the next wake continues
EVICTED: Final = {
    each.outcome: each
    for each in (
        outcomes.EVICTED_TTL, outcomes.EVICTED_NO_ENDPOINTS, outcomes.EVICTED_CONTEXT_CANCELLED, outcomes.EVICTED_DISPLACED,
        outcomes.EVICTED_SHUT_DOWN,
    )
}  # fmt: skip


def _always() -> bool:
    return True


class FlowController:
    """Runs flow control in one worker (its shard). `waiting` and `waiting_bytes` count the items that wait in this shard."""

    def __init__(
        self,
        plan: FlowPlan,
        gate: Gate,
        peers: Peers,
        observer: Observer,
        *,
        now: Callable[[], float],
        make_future: Callable[[Item], Future],
    ) -> None:
        """`now` returns monotonic seconds."""
        self._limits = Limits(plan, peers)
        self._gate = gate
        self._peers = peers
        self._observer = observer
        self._provisioned: Collection[int] = ()
        self._now = now
        self._make_future = make_future
        self._registry = Registry(plan, observer.policy_failed, gate.bands, peers.ledger)
        self._deadlines = Deadlines(plan)
        self._shard_order = ShardOrder(peers)
        self._pending = 0  # requests that have passed the gate and have no endpoint yet
        self._closed = False
        self.waiting = 0
        self.waiting_bytes = 0

    def passes(self, priority: int, now: float) -> bool:
        """Returns whether a request of this priority may go to an endpoint at once. This call does not reach the observer. `now`: monotonic
        seconds.

        If the result is True, the caller must call `settled` once: when an endpoint is chosen, or when the request ends without an
        endpoint.
        """
        if self.waiting or self._closed or self._peers.waiting():
            return False
        band = self._registry.band(priority)
        if band.holds or not self._gate.room(band.priority):
            return False
        self._pending += 1
        self._peers.let_through(self._pending)
        band.rate.count(now)
        return True

    async def enqueue_and_wait(self, item: Item) -> Outcome:
        """Returns DISPATCHED once the request may go to an endpoint, which is at once if it `passes`.

        The caller must then call `settled`, as after `passes`. Raises Undispatched (`epp.flow.outcomes`).
        """
        if self.passes(item.flow.priority, self._now()):
            self._observer.ended(item.flow, Outcome.DISPATCHED, 0.0, item.bytes)
            return Outcome.DISPATCHED
        entry = self._enqueue(item)
        try:
            self.cycle()
            if not entry.ended:
                future = entry.future = self._make_future(item)
                if not entry.ended:  # check again, because making the future may have run a sweep
                    await future
        except BaseException:
            self._left(entry)
            raise
        outcome = entry.outcome
        if outcome is Outcome.DISPATCHED:
            return outcome
        if outcome is None:  # other code set the future: that is a bug, but the request must still end
            self._evict(entry, Outcome.EVICTED_OTHER, self._now())
            raise Undispatched(outcomes.EVICTED_FAULT, detail="woken without an outcome")
        raise self._refusal(EVICTED[outcome], entry.place.band)

    # Requests enter.

    def _enqueue(self, item: Item) -> Entry:
        """Puts the item into the queue of its flow. Raises Undispatched."""
        now = self._now()
        key, size = item.flow, item.bytes
        band = self._registry.band(key.priority)
        try:
            if size < 0:
                raise Undispatched(outcomes.REJECTED_FAULT, detail=f"an item of {size} bytes")
            demands = self._make_room(band, size, now)
        except Undispatched as refusal:
            self._observer.ended(key, refusal.ending.outcome, 0.0, size)
            raise
        flow = self._registry.lease(key)
        entry = Entry(item, flow, now)
        self._deadlines.add(entry, item.ttl_s)
        if not len(flow):
            self._shard_order.head_moved = True  # this flow may be the next to serve, so the head may change
        band.offer(entry, now)
        self.waiting += 1
        self.waiting_bytes += size
        self._show(flow)
        for shard, wanted in demands:  # after `_show`, so that the other shard sees that the limits are exceeded
            self._peers.demand(shard, wanted)
            self._peers.wake(shard)
        return entry

    def _make_room(self, band: Band, size: int, now: float) -> Demands:
        """Checks the limits over all shards. Displaces victims of this shard, and returns the demands for other shards.

        Raises Undispatched.
        """
        if self._closed:
            raise self._refusal(outcomes.REJECTED_SHUT_DOWN, band)
        requests, held = self._peers.band(band.priority)
        if requests + band.requests + 1 > band.plan.max_requests or held + band.bytes + size > band.plan.max_bytes:
            raise self._full(band)
        if not self._over(1, size):
            return ()
        self._answer(now)  # first displace what other shards have already demanded of this shard
        parts = self._limits.giving_way(band.priority, size, self._registry.order, self.waiting, self.waiting_bytes)
        if parts is None:
            raise self._full(band)
        for shard, wanted in parts:
            if shard == OWN:
                self._displace(wanted, now)
        return [part for part in parts if part[0] != OWN]

    def _over(self, requests: int = 0, size: int = 0) -> bool:
        """Returns whether this many more `requests` and bytes (`size`) would exceed the limits over all bands."""
        return self._limits.exceeded(self.waiting + requests, self.waiting_bytes + size)

    def _answer(self, now: float) -> None:
        """Displaces what other shards demand, as long as the limits are still exceeded."""
        for wanted in self._peers.demands():
            self._displace(wanted, now, needed=self._over)
            self._peers.answered(wanted)

    def _displace(self, wanted: Wanted, now: float, needed: Callable[[], bool] = _always) -> None:
        """Ends waiting items of one band until `wanted` is freed, the band is empty, or `needed` returns False."""
        band = self._registry.find(wanted.priority)
        if band is None:
            return
        requests, size = wanted.requests, wanted.bytes
        while band.requests and (requests > 0 or size > 0) and needed():
            victim = band.victim(now)
            requests -= 1
            size -= victim.bytes
            self._evict(victim, Outcome.EVICTED_DISPLACED, now)

    # Requests leave: dispatched.

    def cycle(self) -> None:
        """Dispatches as long as there is room: bands by rank, flows by fairness.

        A band for which the gate has no room blocks all bands below it. But a band whose fairness policy holds requests back does not block
        others.
        """
        if self.waiting:
            now = self._now()
            self._dispatch(now)
            self._observer.cycled(self._now() - now)

    def _dispatch(self, now: float) -> None:
        gate, peers, left = self._gate, self._peers, CYCLE_MAX
        for band in self._registry.order:
            while band.requests and left:
                if not gate.room(band.priority):
                    self._blocked(band, now)
                    return
                flow = band.pick(now)
                if flow is None:
                    break
                if peers.waiting() and self._shard_order.ahead(band.priority, band.claim(flow), band.tolerance, now):
                    self._shard_order.head_moved = True
                    self._shard_order.show_head(self._registry.order, now)
                    return
                self._serve(flow, now)
                left -= 1
        self._shard_order.show_head(self._registry.order, now)
        if not self.waiting and peers.waiting():
            self._shard_order.invite(now)

    def _serve(self, flow: Flow, now: float) -> None:
        band = flow.band
        entry = band.take(flow, now)
        self._pending += 1
        self._peers.let_through(self._pending)
        band.rate.count(now)
        self._ended(entry, Outcome.DISPATCHED, now)

    def _blocked(self, band: Band, now: float) -> None:
        """Ends a cycle at the first band for which the gate has no room: shows this shard's head and reports the gate's reading."""
        self._shard_order.no_room()
        self._shard_order.show_head(self._registry.order, now)
        reading = self._gate.read()
        self._deadlines.change(reading.empty, now)
        self._observer.blocked(reading, band.priority)

    def settled(self, *, placed: bool) -> None:
        """Call this when a dispatched request is counted as in flight at an endpoint (`placed`), or ended without an endpoint."""
        self._pending -= 1
        self._peers.pending(self._pending)
        if not placed:
            self.released()
        elif self.waiting and self._gate.one_by_one:
            self.cycle()

    def released(self) -> None:
        """Call this when a request in flight has ended in this worker: there may be room, for this shard or another."""
        self._gate.freed()
        if self.waiting:
            self.cycle()
        elif self._peers.waiting():
            self._shard_order.invite(self._now())

    def woken(self) -> None:
        """Call this when another shard has woken this one (it demands displacement, or leaves room), or 5 ms have passed."""
        self._gate.freed()
        self._answer(self._now())
        self.cycle()

    # Requests leave: not dispatched.

    def sweep(self, now: float) -> float:
        """Ends requests that have waited longer than their TTL. Returns the latest time for the next call."""
        self._deadlines.change(self._gate.read().empty, now)
        outcome = Outcome.EVICTED_NO_ENDPOINTS if self._deadlines.empty else Outcome.EVICTED_TTL
        for entry in self._deadlines.expired(now):
            self._evict(entry, outcome, now)
        self._registry.collect(now)
        return min(self._deadlines.next(), self._registry.next_idle_end())

    def shut_down(self) -> None:
        """Call this when the drain timeout is over. Ends all requests that wait, and rejects all that come later."""
        self._closed = True
        now = self._now()
        for band in self._registry.order:
            for entry in list(band.entries()):
                self._evict(entry, Outcome.EVICTED_OTHER, now)

    def _left(self, entry: Entry) -> None:
        """Ends an entry because the caller that waited for it has left."""
        if entry.outcome is None:
            self._evict(entry, Outcome.EVICTED_CONTEXT_CANCELLED, self._now())
        elif entry.outcome is Outcome.DISPATCHED:  # the caller left after the dispatch, before it learned of it
            self.settled(placed=False)

    def _evict(self, entry: Entry, outcome: Outcome, now: float) -> None:
        entry.place.band.remove(entry, now)
        self._ended(entry, outcome, now)
        if not self.waiting:
            self._shard_order.show_head(self._registry.order, now)

    def _ended(self, entry: Entry, outcome: Outcome, now: float) -> None:
        """Sets the outcome of an entry that has left its queue. Only this method sets an outcome."""
        flow = entry.place
        entry.outcome = outcome
        entry.request = None  # frees the memory of the body now; the lists that hold the entry are cleaned later
        self.waiting -= 1
        self.waiting_bytes -= entry.bytes
        self._shard_order.head_moved = True
        self._deadlines.ended()
        self._show(flow)
        self._registry.release(flow, now)
        self._observer.ended(entry.flow, outcome, now - entry.arrival, entry.bytes)
        future = entry.future
        if future is not None and not future.done():
            future.set_result(None)

    # What other shards see.

    def _show(self, flow: Flow) -> None:
        band = flow.band
        self._peers.publish(band.priority, band.requests, band.bytes, band.oldest)
        self._observer.queued(flow.key, len(flow), flow.bytes)

    def _full(self, band: Band) -> Undispatched:
        return self._refusal(outcomes.REJECTED_NO_ENDPOINTS if self._gate.read().empty else outcomes.REJECTED_CAPACITY, band)

    def _refusal(self, ending: Ending, band: Band) -> Undispatched:
        shards = 1 + len(self._peers.shards())
        waiting = band.requests + self._peers.band(band.priority)[0]
        return Undispatched(ending, band.rate.retry_after_s(waiting / shards, self._now()))  # each shard drains its share of the band

    # Configuration.

    def provision(self, priorities: Collection[int]) -> None:
        """Takes over the priorities of all objectives. Creates the missing bands, and removes an empty band that nothing needs."""
        self._provisioned = tuple(priorities)
        self._registry.provision(priorities)

    def use(self, plan: FlowPlan, gate: Gate) -> None:
        """Replaces the plan and its gate. Waiting requests keep their arrival times and deadlines, and may exceed the new limits."""
        now, old = self._now(), self._registry
        registry = Registry(plan, self._observer.policy_failed, gate.bands, self._peers.ledger)
        registry.provision(self._provisioned)
        self._limits, self._gate, self._registry = Limits(plan, self._peers), gate, registry
        self._deadlines.use(plan)
        registry.take_over(old.order, now)
        for band in old.order:
            self._peers.publish(band.priority, 0, 0, 0.0)
        for band in registry.order:
            self._peers.publish(band.priority, band.requests, band.bytes, band.oldest)
        self._shard_order.head_moved = True
        self.cycle()
