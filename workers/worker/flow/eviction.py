"""In-flight eviction in one worker: shows the worker's best victim in its area, and ends victims while others cannot be dispatched.

    ExtProcStream  ── track, ended ──▶ Evictions ── VictimCell ──▶ flow area   (one writer: this worker)
    flow control   ── blocked ──────▶     │ ◀────── VictimCells ── flow areas  (of all serving workers)
                                          ├─ revoke: the victim's stream answers its client and ends
                                          └─ wake: the worker with the best victim, by its eventfd

`epp.flow.eviction` decides which worker acts and how many requests it ends. This module joins it with areas and clock. The words of an area
do not change together. A reader that sees half of a change wakes the wrong worker once, or waits one cycle longer.

A request that the configured filter rejects costs only the call of `track`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from epp.flow.eviction import NOTHING, BestVictim, Reclamation, RevocationObserver, Step, Victim, Victims
from epp.metrics.flow_control import REVOCATIONS_ISSUED_TOTAL, REVOCATIONS_TOTAL
from epp.plugin import EvictionFilter, EvictionOrder
from epp.request import Request
from epp.request.flows import FlowKey
from shm.flow_areas import EVICTABLE, FlowAreas, VictimCell
from shm.series import SeriesWriter

CONFIRMED, TIMED_OUT = "confirmed", "timed_out"


class PoolState(Protocol):
    """The load of the pool, and the bands that have waiting requests in any worker."""

    def saturation(self) -> float: ...
    def bands(self) -> Sequence[tuple[int, float, bool]]:
        """Returns (priority, ceiling, whether a request waits) for every band, the most important first."""

    def in_flight(self) -> int:
        """Returns the number of requests in flight at all model servers together."""


class Evictions:
    """Does one worker's part of in-flight eviction."""

    def __init__(
        self,
        accepts: EvictionFilter,
        order: EvictionOrder,
        grace_s: float,
        *,
        pool: PoolState,
        areas: FlowAreas,
        worker: int,
        now: Callable[[], float],
        wake: Callable[[int], None],
        observer: RevocationObserver,
    ) -> None:
        """`wake(worker)` makes another worker call its `blocked`. `grace_s`: how long a revocation may take, in seconds."""
        self._victims = Victims(accepts.evictable, order.key)
        self._reclamation = Reclamation(self._victims, grace_s, observer=observer)
        self._pool = pool
        self._areas = areas
        self._area = areas.area(worker)
        self._worker = worker
        self._now = now
        self._wake = wake
        self._published = BestVictim()

    def use(self, accepts: EvictionFilter, order: EvictionOrder, grace_s: float) -> None:
        """Continues with the policies of a later configuration."""
        self._victims.use(accepts.evictable, order.key)
        self._reclamation.grace_s = grace_s
        self._publish()

    def stop(self) -> None:
        """Stops evicting. Called when a later configuration has switched in-flight eviction off."""
        self._victims.use(lambda _flow: False, lambda _flow, at: at)
        self._publish()

    def track(self, request: Request, now: float, revoke: Callable[[], bool]) -> Victim | None:
        """Adds a request that was sent to a server. Returns None if the request cannot be evicted. `revoke` ends the request and answers
        its client.
        """
        victim = self._victims.track(FlowKey(request.fairness_id, request.priority), now, revoke)
        if victim is not None:
            try:
                self._publish()
            except BaseException:
                self._victims.drop(victim)
                raise
        return victim

    def ended(self, victim: Victim) -> None:
        """Removes a tracked request at the end of its stream."""
        self._reclamation.ended(victim, self._now())
        self._publish()

    def blocked(self) -> Step:
        """Makes room for requests that cannot be dispatched, in any worker: ends requests of this worker, or wakes a worker with better
        victims.
        """
        if not self._areas.total(EVICTABLE):
            return NOTHING
        pool = self._pool
        others = self._others()
        step = self._reclamation.look(self._now(), pool.saturation(), pool.bands(), others, pool.in_flight())
        if step.wake >= 0:
            self._wake(step.wake)
        self._publish()
        return step

    def _others(self) -> Iterable[tuple[int, BestVictim]]:
        areas = self._areas
        for worker in areas.serving():
            if worker != self._worker:
                yield worker, BestVictim(*areas.victim(worker))

    def _publish(self) -> None:
        reclamation = self._reclamation
        best = reclamation.best_victim()
        if best == self._published:
            return
        self._published = best
        self._area.show_reclaim(reclamation.pending, reclamation.target)
        self._area.show_victim(VictimCell(*best))


class RevocationMetrics(RevocationObserver):
    """Counts revocations in this worker's series."""

    def __init__(self, pool: str, issued: SeriesWriter, ended: SeriesWriter, confirmations: SeriesWriter) -> None:
        """Gets the writers of the groups in `epp.metrics.flow_control.REVOKED`, in that order."""
        self._pool = pool
        self._issued, self._ended, self._confirmations = issued, ended, confirmations

    def issued(self, priority: int, count: int) -> None:
        self._issued.count(REVOCATIONS_ISSUED_TOTAL.name, (str(priority), self._pool), count)

    def confirmed(self, seconds: float) -> None:
        self._end(CONFIRMED)
        series = self._confirmations
        series.observe(series.block((self._pool,)), 0, seconds)

    def timed_out(self) -> None:
        self._end(TIMED_OUT)

    def _end(self, outcome: str) -> None:
        self._ended.count(REVOCATIONS_TOTAL.name, (outcome, self._pool))


def reclaiming(areas: FlowAreas, now: float) -> tuple[float, float]:
    """Returns (pending, target) over all serving workers.

    `pending`: how much saturation the evictions under way have yet to free, summed over the workers. `target`: by how much the saturation
    exceeded the ceiling when a worker last decided about evictions; the largest value of any worker.
    """
    pending = target = 0.0
    for worker in areas.serving():
        unconfirmed, wanted = areas.reclaim(worker)
        if areas.victim(worker).busy_until > now:
            pending += unconfirmed
        target = max(target, wanted)
    return pending, target
