"""In-flight eviction in one worker: what it shows the others in its lane, and what it does when dispatching has stopped.

    ExtProcStream  ── track, ended ──▶ Evictions ── VictimCell ──▶ flow lane   (one writer: this worker)
    flow control   ── blocked ──────▶     │ ◀────── VictimCells ── flow lanes  (of all serving workers)
                                          ├─ revoke: the victim's own stream answers its client and ends
                                          └─ wake: the worker with the best victim, by its eventfd

Who decides, and how many go, stands in `epp.flow.eviction`; this file joins that with lanes and clock. The words of a lane are not
changed together: a reader that sees half of a change wakes the wrong worker once, or waits for a cycle more.

Only requests that the configured filter accepts cost anything here; all others end at `track` with one call.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from epp.flow.eviction import NOTHING, Reclamation, Standing, Step, Told, Victim, Victims
from epp.flows import FlowKey
from epp.metrics import REVOCATIONS_ISSUED_TOTAL, REVOCATIONS_TOTAL
from epp.plugin import EvictionFilter, EvictionOrder
from epp.request import Request
from shm.flow_lanes import EVICTABLE, FlowLanes, VictimCell
from shm.series import SeriesWriter

CONFIRMED, TIMED_OUT = "confirmed", "timed_out"


class Shut(Protocol):
    """What is known of the load and of who waits, over all workers."""

    def saturation(self) -> float: ...
    def bands(self) -> Sequence[tuple[int, float, bool]]:
        """(priority, ceiling, whether anybody waits) of every band, the most important first."""

    def in_flight(self) -> int:
        """Requests at all model servers."""


class Evictions:
    """One worker's part of in-flight eviction."""

    def __init__(
        self,
        accepts: EvictionFilter,
        order: EvictionOrder,
        grace_s: float,
        *,
        shut: Shut,
        lanes: FlowLanes,
        worker: int,
        now: Callable[[], float],
        wake: Callable[[int], None],
        told: Told,
    ) -> None:
        """`wake` makes another worker call `blocked`."""
        self._victims = Victims(accepts.evictable, order.key)
        self._reclamation = Reclamation(self._victims, grace_s, told=told)
        self._shut = shut
        self._lanes = lanes
        self._lane = lanes.lane(worker)
        self._worker = worker
        self._now = now
        self._wake = wake
        self._shown = Standing()

    def track(self, request: Request, now: float, revoke: Callable[[], bool]) -> Victim | None:
        """The request was sent; None: it is never given up. `revoke` ends it with an answer to its client."""
        victim = self._victims.track(FlowKey(request.fairness_id, request.priority), now, revoke)
        if victim is not None:
            self._show()
        return victim

    def ended(self, victim: Victim) -> None:
        """The stream of a tracked request is over."""
        self._reclamation.ended(victim, self._now())
        self._show()

    def blocked(self) -> Step:
        """Somebody waits, here or elsewhere, and may not go: give up requests of this worker, or wake who holds better ones."""
        if not self._lanes.total(EVICTABLE):
            return NOTHING
        shut = self._shut
        step = self._reclamation.look(self._now(), shut.saturation(), shut.bands(), self._others(), shut.in_flight())
        if step.wake >= 0:
            self._wake(step.wake)
        self._show()
        return step

    def _others(self) -> Iterable[tuple[int, Standing]]:
        lanes = self._lanes
        for worker in lanes.serving():
            if worker != self._worker:
                yield worker, Standing(*lanes.victim(worker))

    def _show(self) -> None:
        reclamation = self._reclamation
        standing = reclamation.standing()
        if standing == self._shown:
            return
        self._shown = standing
        self._lane.show_reclaim(reclamation.pending, reclamation.target)
        self._lane.show_victim(VictimCell(*standing))


class RevocationMetrics(Told):
    """Counts them in this worker's series."""

    def __init__(self, pool: str, issued: SeriesWriter, ended: SeriesWriter, confirmations: SeriesWriter) -> None:
        """The writers are those of `epp.metrics.REVOKED`, in its order."""
        self._pool = pool
        self._issued, self._ended, self._confirmations = issued, ended, confirmations

    def issued(self, priority: int, count: int) -> None:
        series = self._issued
        block = series.block((str(priority), self._pool))
        series.words[block + series.counter_at[REVOCATIONS_ISSUED_TOTAL.name]] += count

    def confirmed(self, seconds: float) -> None:
        self._end(CONFIRMED)
        series = self._confirmations
        series.observe(series.block((self._pool,)), 0, seconds)

    def timed_out(self) -> None:
        self._end(TIMED_OUT)

    def _end(self, outcome: str) -> None:
        series = self._ended
        series.words[series.block((outcome, self._pool)) + series.counter_at[REVOCATIONS_TOTAL.name]] += 1


def reclaiming(lanes: FlowLanes, now: float) -> tuple[float, float]:
    """Over all serving workers: the saturation on its way to be freed, and the largest deficit of a last decision."""
    pending = target = 0.0
    for worker in lanes.serving():
        of_worker, wanted = lanes.reclaim(worker)
        if lanes.victim(worker).busy_until > now:
            pending += of_worker
        target = max(target, wanted)
    return pending, target
