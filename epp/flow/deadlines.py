"""Deadlines of waiting requests: which time to live (TTL) each request has, and when that TTL ends.

Each request has two TTLs. While the pool has endpoints, the request TTL is in force. While the pool is empty, the no-endpoint TTL
is in force. A TTL runs from the arrival, or from when it came into force if that was later, so that a pool that comes back
gives each request a full TTL. The total wait is at most the longer TTL plus `GRACE_S`.

The request TTL is the TTL of the band, or else the global TTL. If the configuration gives a global TTL, no band's TTL is longer
(`epp.config.flow_assembly`). A request can ask for a shorter TTL, never for a longer one. A shorter TTL that a request asks for applies
while the pool has endpoints and while it is empty.

Each TTL has a heap of (earliest possible end, number, entry). The end of an entry's TTL can only move to a later time. An entry that
reaches the top before its TTL has ended is pushed again with its present end. So a change of the TTL need not touch the entries. A
sweep takes a bounded number of steps.
"""

from heapq import heapify, heappop, heappush
from math import inf

from epp.flow.bands import DEAD_MAX, Entry
from epp.flow.plan import FlowPlan

GRACE_S = 2.0  # no wait exceeds the longer TTL by more than this, however often the TTL changes
STEPS_MAX = 1_000  # per sweep

Heap = list[tuple[float, int, Entry]]


class Deadlines:
    """Keeps the deadlines of all requests that wait in this worker."""

    def __init__(self, plan: FlowPlan) -> None:
        self._global_s = plan.request_ttl_s
        self._empty_s = plan.no_endpoint_ttl_s
        self._heaps: tuple[Heap, Heap] = ([], [])  # one per TTL; the index is `empty`
        self._count = 0
        self._alive = 0
        self.empty = False
        self._since = -inf  # when the present TTL came into force

    def use(self, plan: FlowPlan) -> None:
        """Takes the TTLs of later requests from this plan. Requests that already wait keep their TTLs."""
        self._global_s = plan.request_ttl_s
        self._empty_s = plan.no_endpoint_ttl_s

    def add(self, entry: Entry, wish_s: float | None) -> None:
        """Sets the TTLs of an entry. `wish_s`: the TTL that the request asks for, in seconds."""
        band_s = entry.place.band.plan.request_ttl_s
        ttl_s = self._global_s if band_s is None else band_s
        empty_s = self._empty_s
        if wish_s is not None:
            ttl_s, empty_s = min(ttl_s, wish_s), min(empty_s, wish_s)
        entry.ttl_s, entry.empty_ttl_s = ttl_s, empty_s
        entry.last_s = entry.arrival + max(ttl_s, empty_s) + GRACE_S
        self._count += 1
        self._alive += 1
        if ttl_s != inf:
            heappush(self._heaps[False], (entry.arrival + ttl_s, self._count, entry))
        if empty_s != inf:
            heappush(self._heaps[True], (entry.arrival + empty_s, self._count, entry))

    def ended(self) -> None:
        """Notes that one entry no longer waits. Cleans a heap when ended entries are the majority."""
        self._alive -= 1
        for heap in self._heaps:
            if len(heap) > 2 * self._alive + DEAD_MAX:
                heap[:] = [place for place in heap if place[2].waits]
                heapify(heap)

    def change(self, empty: bool, now: float) -> None:
        """Sets which TTL is in force from `now` on. `empty`: whether the pool has no endpoints."""
        if empty != self.empty:
            self.empty = empty
            self._since = now

    def end(self, entry: Entry) -> float:
        """Returns when the entry's TTL ends if the same TTL stays in force."""
        ttl_s = entry.empty_ttl_s if self.empty else entry.ttl_s
        if ttl_s == inf:
            return inf
        return min(max(entry.arrival, self._since) + ttl_s, entry.last_s)

    def expired(self, now: float) -> list[Entry]:
        """Returns entries past their TTL, found in at most STEPS_MAX steps. The entries still wait, and the caller must end them."""
        heap = self._heaps[self.empty]
        ended: list[Entry] = []
        for _ in range(STEPS_MAX):
            if not heap or heap[0][0] > now:
                break
            _, number, entry = heappop(heap)
            if entry.waits:
                end = self.end(entry)
                if end <= now:
                    ended.append(entry)
                else:
                    heappush(heap, (end, number, entry))
        return ended

    def next(self) -> float:
        """Returns the latest time for the next sweep; inf if no waiting request has a deadline."""
        heap = self._heaps[self.empty]
        while heap and not heap[0][2].waits:
            heappop(heap)
        return heap[0][0] if heap else inf
