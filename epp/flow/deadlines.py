"""Who has waited for as long as it may: the effective time to live of each request, and when it ends.

While the pool has endpoints a request's own TTL is in force, while it is empty the no-endpoint TTL. The budget counts from the
later of arrival and the last change between the two (the *regime*), so that a pool that comes back gives everybody a full turn; the
total is bounded by the longer TTL and `GRACE_S`. TTLs, the first that is set: the caller's wish, the band's, the global one. A wish
shortens what the next level allows and never lengthens it, in both regimes.

Per regime a heap of (earliest possible end, number, entry): an end only ever moves back, so an entry that comes up early is put
back with its present end. A regime change touches nothing; a sweep does a bounded number of steps.
"""

from heapq import heapify, heappop, heappush
from math import inf

from epp.flow.bands import DEAD_MAX, Entry
from epp.flow.plan import FlowPlan

GRACE_S = 2.0  # beyond the longer of both TTLs, however often the regime changes
STEPS_MAX = 1_000  # per sweep

Heap = list[tuple[float, int, Entry]]


class Deadlines:
    """The ends of all that wait in this worker."""

    def __init__(self, plan: FlowPlan) -> None:
        self._global_s = plan.request_ttl_s
        self._empty_s = plan.no_endpoint_ttl_s
        self._heaps: tuple[Heap, Heap] = ([], [])  # by `empty`
        self._count = 0
        self._alive = 0
        self.empty = False
        self._since = -inf  # of the regime

    def add(self, entry: Entry, wish_s: float | None) -> None:
        """Grants an entry its TTLs."""
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
        """One entry waits no more; those that are gone are dropped before they are the most."""
        self._alive -= 1
        for heap in self._heaps:
            if len(heap) > 2 * self._alive + DEAD_MAX:
                heap[:] = [place for place in heap if place[2].waits]
                heapify(heap)

    def regime(self, empty: bool, now: float) -> None:
        """Whether the pool is empty, as far as is known now."""
        if empty != self.empty:
            self.empty = empty
            self._since = now

    def end(self, entry: Entry) -> float:
        """When this entry's wait ends if the regime stays."""
        ttl_s = entry.empty_ttl_s if self.empty else entry.ttl_s
        if ttl_s == inf:
            return inf
        return min(max(entry.arrival, self._since) + ttl_s, entry.last_s)

    def expired(self, now: float) -> list[Entry]:
        """Whose wait has ended: at most so many that a sweep stays short. They still wait; the caller ends them."""
        heap = self._heaps[self.empty]
        found: list[Entry] = []
        for _ in range(STEPS_MAX):
            if not heap or heap[0][0] > now:
                break
            _, number, entry = heappop(heap)
            if entry.waits:
                end = self.end(entry)
                if end <= now:
                    found.append(entry)
                else:
                    heappush(heap, (end, number, entry))
        return found

    def next(self) -> float:
        """When to look again at the latest; inf: nothing ends."""
        heap = self._heaps[self.empty]
        while heap and not heap[0][2].waits:
            heappop(heap)
        return heap[0][0] if heap else inf
