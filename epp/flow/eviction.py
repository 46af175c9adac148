"""In-flight eviction: which requests that are being served are given up for more important ones that wait, when, and how many.

    Victims       the requests of one worker that may be given up, in the order of the policy
    Reclamation   when (stop and wait) and how many (deficit over mean footprint) one worker gives up
    demanded      the waiting band for which somebody may be given up

Every worker gives up its own requests only: who holds the best victim of all acts, the others wake it. What a worker shows of
itself (`Standing`) is enough for that: its best victim, and until when what was given up is still on its way. So there is
nothing to ask for and nothing to acknowledge, and a worker that dies takes its part of the waiting with it.

Stop and wait: nobody is given up while an earlier revocation of any worker is unconfirmed (its stream has not ended, for
`CONFIRM_S` at most) or has not yet had its time to show in the saturation (`grace_s`): who acts again on a reading that has
not taken in the last action gives up too much. Two workers may decide at the same moment, so at most REVOCATIONS_MAX for each
worker are under way at once.

What this does not do: read a clock, or speak to anybody. The worker passes time in, and `revoke` is the victim's own.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple

from epp.flows import FlowKey, rank

REVOCATIONS_MAX: Final = 2  # a decision: the footprint is a mean, and may be far off
CONFIRM_S: Final = 10.0
GRACE_COUNTED_S: Final = 0.010  # of a detector that counts what is in flight
GRACE_MARGIN_S: Final = 0.250  # of one that reads what servers say, beyond interval and staleness
IDLE_ENTRIES: Final = 64  # of the heap that may be void before it is made anew


class Victim:
    """One request that is being served and may be given up; its owner keeps it from the decision to the stream's end."""

    __slots__ = ("dispatched_at", "flow", "here", "revoke")

    def __init__(self, flow: FlowKey, dispatched_at: float, revoke: Callable[[], bool]) -> None:
        self.flow = flow
        self.dispatched_at = dispatched_at
        self.revoke = revoke  # answers the client and ends the stream; False: the answer is complete already
        self.here = True  # can still be given up


class Victims:
    """The requests of one worker that may be given up; the best victim in O(1), the others in O(log n)."""

    def __init__(self, evictable: Callable[[FlowKey], bool], key: Callable[[FlowKey, float], Any]) -> None:
        self._evictable = evictable
        self._key = key
        self._heap: list[tuple[Any, int, Victim]] = []  # entries of those that left are void, and few
        self._count = 0
        self._entered = 0

    def __len__(self) -> int:
        return self._count

    def track(self, flow: FlowKey, now: float, revoke: Callable[[], bool]) -> Victim | None:
        """The request was sent to a server; None: it is never given up."""
        if not self._evictable(flow):
            return None
        victim = Victim(flow, now, revoke)
        self._entered += 1
        heappush(self._heap, (self._key(flow, now), self._entered, victim))
        self._count += 1
        return victim

    def drop(self, victim: Victim) -> None:
        """It has ended, or is being given up; harmless the second time."""
        if not victim.here:
            return
        victim.here = False
        self._count -= 1
        heap = self._heap
        if len(heap) > IDLE_ENTRIES + 2 * self._count:
            self._heap = [entry for entry in heap if entry[2].here]
            heapify(self._heap)

    def best(self) -> Victim | None:
        """Who goes first."""
        heap = self._heap
        while heap and not heap[0][2].here:
            heappop(heap)
        return heap[0][2] if heap else None


class Standing(NamedTuple):
    """What one worker shows of itself. `priority` and `dispatched_at` are its best victim's."""

    evictable: int = 0
    priority: int = 0
    dispatched_at: float = 0.0
    busy_until: float = 0.0  # until then what it gave up is on its way, unless confirmed sooner


class Demand(NamedTuple):
    """A band that waits although it is more important than who is served."""

    priority: int
    ceiling: float


class Step(NamedTuple):
    """What came of a look: requests given up here, or the worker that should look instead (-1: nobody)."""

    revoked: int = 0
    wake: int = -1


NOTHING: Final = Step()


def demanded(saturation: float, bands: Iterable[tuple[int, float, bool]], victim: int) -> Demand | None:
    """The first band, from the most important on, that waits, is shut by the load, and stands above `victim`.

    `bands`: (priority, ceiling, whether anybody waits) from the band on at which dispatching stopped. A ceiling of 0 is a wish
    to serve nobody, which no eviction can fulfil.
    """
    for priority, ceiling, waiting in bands:
        if rank(priority) >= rank(victim):
            return None
        if waiting and 0 < ceiling <= saturation:
            return Demand(priority, ceiling)
    return None


def goes_first(standing: Standing) -> tuple[int, float]:
    """The order of the workers' best victims, smallest first: the least important, then the newest."""
    return -rank(standing.priority), -standing.dispatched_at


class Reclamation:
    """When one worker gives up requests of its own, and how many."""

    def __init__(self, victims: Victims, grace_s: float, *, told: "Told") -> None:
        self.victims = victims
        self.grace_s = grace_s
        self._told = told
        self._unconfirmed: dict[Victim, tuple[float, float]] = {}  # credit, issued at; at most REVOCATIONS_MAX
        self._cooling: list[tuple[float, float]] = []  # credit, until; at most REVOCATIONS_MAX
        self.target = 0.0  # by how much the saturation was too high at the last decision

    @property
    def pending(self) -> float:
        """The saturation that is on its way to be freed."""
        return sum(credit for credit, _ in self._unconfirmed.values()) + sum(credit for credit, _ in self._cooling)

    def standing(self) -> Standing:
        """What the other workers are to know."""
        best = self.victims.best()
        until = max((until for _, until in self._cooling), default=0.0)
        for _, issued in self._unconfirmed.values():
            until = max(until, issued + CONFIRM_S)
        if best is None:
            return Standing(0, 0, 0.0, until)
        return Standing(len(self.victims), best.flow.priority, best.dispatched_at, until)

    def look(
        self,
        now: float,
        saturation: float,
        bands: Sequence[tuple[int, float, bool]],
        others: Iterable[tuple[int, Standing]],
        in_flight: int,
    ) -> Step:
        """Somebody waits and dispatching has stopped. `others`: the serving workers beside this one, by seat.

        `in_flight`: requests of all workers at all servers.
        """
        self._pass(now)
        if self._unconfirmed or self._cooling:
            return NOTHING
        best, wake = self.standing(), -1
        for seat, standing in others:
            if standing.busy_until > now:
                return NOTHING
            if standing.evictable and (not best.evictable or goes_first(standing) < goes_first(best)):
                best, wake = standing, seat
        if not best.evictable:
            return NOTHING
        demand = demanded(saturation, bands, best.priority)
        if demand is None:
            return NOTHING
        if wake >= 0:
            return Step(wake=wake)
        return Step(self._give_up(now, saturation, demand, in_flight))

    def ended(self, victim: Victim, now: float) -> None:
        """The stream of a tracked request is over, however that came; this confirms a revocation."""
        self.victims.drop(victim)
        issued = self._unconfirmed.pop(victim, None)
        if issued is not None:
            credit, at = issued
            self._cooling.append((credit, now + self.grace_s))
            self._told.confirmed(now - at)

    def _give_up(self, now: float, saturation: float, demand: Demand, in_flight: int) -> int:
        credit = saturation / max(1, in_flight)
        if not 0 < credit < math.inf:
            return 0
        self.target = saturation - demand.ceiling
        # Dispatching needs strictly more than the deficit, so at the ceiling itself one is given up.
        wanted = min(max(1, math.ceil(self.target / credit)), REVOCATIONS_MAX)
        revoked = 0
        while revoked < wanted:
            victim = self.victims.best()
            if victim is None or rank(victim.flow.priority) <= rank(demand.priority):
                break
            self.victims.drop(victim)
            self._unconfirmed[victim] = (credit, now)
            if victim.revoke():
                revoked += 1
            else:
                del self._unconfirmed[victim]
        if revoked:
            self._told.issued(demand.priority, revoked)
        return revoked

    def _pass(self, now: float) -> None:
        """Who was never confirmed counts as gone; what has had its time shows in the saturation."""
        if self._unconfirmed:
            late = [victim for victim, (_, at) in self._unconfirmed.items() if now - at >= CONFIRM_S]
            for victim in late:
                credit, _ = self._unconfirmed.pop(victim)
                self._cooling.append((credit, now + self.grace_s))
                self._told.timed_out()
        if self._cooling:
            self._cooling = [(credit, until) for credit, until in self._cooling if until > now]


class Told:
    """Who is told of revocations; this one tells nobody."""

    def issued(self, priority: int, count: int) -> None:
        """So many requests were given up for a band."""

    def confirmed(self, seconds: float) -> None:
        """The stream of one has ended, so long after."""

    def timed_out(self) -> None:
        """The stream of one has not ended in time."""


def grace_s(*, counted: bool, interval_s: float, staleness_s: float) -> float:
    """How long freed capacity takes to show: at once for a detector that counts, else a scrape and what counts as stale."""
    return GRACE_COUNTED_S if counted else interval_s + staleness_s + GRACE_MARGIN_S
