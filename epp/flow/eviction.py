"""Decides about eviction: which requests in flight to end (*revoke*) for more important ones that wait, when, and how many.

    Victims       the requests of one worker that may be revoked, in the order of the policy
    Reclamation   when one worker revokes (stop and wait), and how many requests (saturation above the ceiling / mean share of a request)
    waiting_band  the waiting band that justifies a revocation

A worker revokes only its own requests. The worker that holds the best victim acts; the other workers wake it. Each worker shows a
`BestVictim`: its best victim, and until when its revocations are under way. So workers send each other no messages and no
acknowledgements, and a worker that dies does not block the others.

Stop and wait: while an earlier revocation of any worker is under way, no worker revokes. A revocation is under way until its stream has
ended (*confirmed*; at most `CONFIRM_S`), and then until the saturation shows its effect (`grace_s`). A second decision on a reading
without the effect of the first one would end too many requests. Two workers may decide at the same moment, but each revokes at most
REVOCATIONS_MAX requests.

This module reads no clock and does no I/O. The worker passes the time in, and each victim brings its own `revoke`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple

from epp.request.flows import FlowKey, rank

REVOCATIONS_MAX: Final = 2  # limit per decision; it is small, because the victim's share of the load may be far from the mean share
CONFIRM_S: Final = 10.0  # after this time a revocation is treated as done although its stream has not ended
GRACE_COUNTED_S: Final = 0.010  # how long after a revocation to wait if the detector counts requests in flight
GRACE_MARGIN_S: Final = 0.250  # added to scrape interval and scrape time if the detector reads scraped metrics
IDLE_ENTRIES: Final = 64  # void heap entries that may pile up before the heap is rebuilt


class Victim:
    """A request in flight that may be revoked. The request's stream keeps this object from the decision to its end."""

    __slots__ = ("dispatched_at", "flow", "here", "revoke")

    def __init__(self, flow: FlowKey, dispatched_at: float, revoke: Callable[[], bool]) -> None:
        self.flow = flow
        self.dispatched_at = dispatched_at
        self.revoke = revoke  # answers the client and ends the stream; returns False if the answer is already complete
        self.here = True  # whether the request can still be revoked


class Victims:
    """Orders the requests of one worker that may be revoked. `best` takes O(1) amortized, `track` O(log n)."""

    def __init__(self, evictable: Callable[[FlowKey], bool], key: Callable[[FlowKey, float], Any]) -> None:
        self._evictable = evictable
        self._key = key
        self._heap: list[tuple[Any, int, Victim]] = []  # victims that left keep void entries in the heap; there are few of them
        self._count = 0
        self._entered = 0

    def __len__(self) -> int:
        return self._count

    def track(self, flow: FlowKey, now: float, revoke: Callable[[], bool]) -> Victim | None:
        """Adds a request that was sent to a server. Returns None if the policy never evicts such a request."""
        if not self._evictable(flow):
            return None
        victim = Victim(flow, now, revoke)
        self._entered += 1
        heappush(self._heap, (self._key(flow, now), self._entered, victim))
        self._count += 1
        return victim

    def use(self, evictable: Callable[[FlowKey], bool], key: Callable[[FlowKey, float], Any]) -> None:
        """Replaces filter and order. Requests that the new filter rejects are not evicted any more."""
        self._evictable, self._key = evictable, key
        for _, _, victim in self._heap:
            if victim.here and not evictable(victim.flow):
                victim.here = False
                self._count -= 1
        self._heap = [(key(v.flow, v.dispatched_at), entered, v) for _, entered, v in self._heap if v.here]
        heapify(self._heap)

    def drop(self, victim: Victim) -> None:
        """Removes a victim that has ended or is being revoked. A second call has no effect."""
        if not victim.here:
            return
        victim.here = False
        self._count -= 1
        heap = self._heap
        if len(heap) > IDLE_ENTRIES + 2 * self._count:
            self._heap = [entry for entry in heap if entry[2].here]
            heapify(self._heap)

    def best(self) -> Victim | None:
        """Returns the victim to revoke first, or None if there is no victim."""
        heap = self._heap
        while heap and not heap[0][2].here:
            heappop(heap)
        return heap[0][2] if heap else None


class BestVictim(NamedTuple):
    """Holds what one worker shows to the others. `evictable`: number of its victims. `priority`, `dispatched_at`: the priority and the
    dispatch time of the best victim.
    """

    evictable: int = 0
    priority: int = 0
    dispatched_at: float = 0.0
    busy_until: float = 0.0  # until when this worker's revocations are under way, unless they are confirmed earlier


class WaitingBand(NamedTuple):
    """Describes a band that waits although a less important request is in flight: its priority and its saturation ceiling."""

    priority: int
    ceiling: float


class Step(NamedTuple):
    """The result of `Reclamation.look`: the number of requests that this worker revoked, or the ordinal of the worker to wake, or -1."""

    revoked: int = 0
    wake: int = -1


NOTHING: Final = Step()


def waiting_band(saturation: float, bands: Iterable[tuple[int, float, bool]], victim: int) -> WaitingBand | None:
    """Returns the most important band that waits, has a ceiling at or below the saturation, and is more important than `victim`.

    `bands`: (priority, ceiling, whether a request waits), the most important band first. `victim`: the priority of the best victim. Skips
    bands with the ceiling 0: they are never served, and no eviction can change that.
    """
    for priority, ceiling, waiting in bands:
        if rank(priority) >= rank(victim):
            return None
        if waiting and 0 < ceiling <= saturation:
            return WaitingBand(priority, ceiling)
    return None


def goes_first(best: BestVictim) -> tuple[int, float]:
    """Returns a sort key of a worker's best victim. The victim with the smallest key goes first: the least important, then the newest."""
    return -rank(best.priority), -best.dispatched_at


class Reclamation:
    """Decides when one worker revokes its own requests, and how many."""

    def __init__(self, victims: Victims, grace_s: float, *, observer: "RevocationObserver") -> None:
        self.victims = victims
        self.grace_s = grace_s
        self._observer = observer
        # Victim -> (the saturation that its end frees, when it was revoked); at most REVOCATIONS_MAX.
        self._unconfirmed: dict[Victim, tuple[float, float]] = {}
        # (the saturation that the revocation frees, when it shows in readings); at most REVOCATIONS_MAX.
        self._cooling: list[tuple[float, float]] = []
        self.target = 0.0  # by how much the saturation exceeded the ceiling at the last decision

    @property
    def pending(self) -> float:
        """Returns the part of the saturation that revocations under way will free."""
        return sum(credit for credit, _ in self._unconfirmed.values()) + sum(credit for credit, _ in self._cooling)

    def best_victim(self) -> BestVictim:
        """Returns what this worker shows to the others."""
        best = self.victims.best()
        until = max((until for _, until in self._cooling), default=0.0)
        for _, issued in self._unconfirmed.values():
            until = max(until, issued + CONFIRM_S)
        if best is None:
            return BestVictim(0, 0, 0.0, until)
        return BestVictim(len(self.victims), best.flow.priority, best.dispatched_at, until)

    def look(
        self,
        now: float,
        saturation: float,
        bands: Sequence[tuple[int, float, bool]],
        others: Iterable[tuple[int, BestVictim]],
        in_flight: int,
    ) -> Step:
        """Revokes requests if that is this worker's turn. Call it when requests wait and dispatching has stopped.

        `others`: (ordinal, best victim) of the other serving workers. `in_flight`: how many requests all workers have at all servers.
        """
        self._expire(now)
        if self._unconfirmed or self._cooling:
            return NOTHING
        best, wake = self.best_victim(), -1
        for ordinal, other in others:
            if other.busy_until > now:
                return NOTHING
            if other.evictable and (not best.evictable or goes_first(other) < goes_first(best)):
                best, wake = other, ordinal
        if not best.evictable:
            return NOTHING
        band = waiting_band(saturation, bands, best.priority)
        if band is None:
            return NOTHING
        if wake >= 0:
            return Step(wake=wake)
        return Step(self._revoke(now, saturation, band, in_flight))

    def ended(self, victim: Victim, now: float) -> None:
        """Notes that the stream of a tracked request has ended for any reason. If the request was revoked, this confirms the revocation."""
        self.victims.drop(victim)
        issued = self._unconfirmed.pop(victim, None)
        if issued is not None:
            credit, at = issued
            self._cooling.append((credit, now + self.grace_s))
            self._observer.confirmed(now - at)

    def _revoke(self, now: float, saturation: float, band: WaitingBand, in_flight: int) -> int:
        credit = saturation / max(1, in_flight)
        if not 0 < credit < math.inf:
            return 0
        self.target = saturation - band.ceiling
        # A request is dispatched only while the saturation is strictly below the ceiling. So a saturation equal to the ceiling needs
        # one victim.
        wanted = min(max(1, math.ceil(self.target / credit)), REVOCATIONS_MAX)
        revoked = 0
        while revoked < wanted:
            victim = self.victims.best()
            if victim is None or rank(victim.flow.priority) <= rank(band.priority):
                break
            self.victims.drop(victim)
            self._unconfirmed[victim] = (credit, now)
            if victim.revoke():
                revoked += 1
            else:
                del self._unconfirmed[victim]
        if revoked:
            self._observer.issued(band.priority, revoked)
        return revoked

    def _expire(self, now: float) -> None:
        """Treats a revocation as done if it is unconfirmed for CONFIRM_S. Forgets revocations that show in the saturation by now."""
        if self._unconfirmed:
            late = [victim for victim, (_, at) in self._unconfirmed.items() if now - at >= CONFIRM_S]
            for victim in late:
                credit, _ = self._unconfirmed.pop(victim)
                self._cooling.append((credit, now + self.grace_s))
                self._observer.timed_out()
        if self._cooling:
            self._cooling = [(credit, until) for credit, until in self._cooling if until > now]


class RevocationObserver:
    """Receives what happens to revocations. This base class does nothing."""

    def issued(self, priority: int, count: int) -> None:
        """Reports that `count` requests were revoked for the band of this priority."""

    def confirmed(self, seconds: float) -> None:
        """Reports that the stream of a revoked request has ended, `seconds` after the revocation."""

    def timed_out(self) -> None:
        """Reports that the stream of a revoked request has not ended within CONFIRM_S."""


def grace_s(*, counted: bool, interval_s: float, scrape_s: float) -> float:
    """Returns the seconds until freed capacity shows in the saturation.

    `counted`: whether the detector counts requests in flight. If so, the saturation falls as soon as an evicted request has ended.
    Otherwise, it falls after a scrape interval plus `scrape_s`, the longest time of a scrape.
    """
    return GRACE_COUNTED_S if counted else interval_s + scrape_s + GRACE_MARGIN_S
