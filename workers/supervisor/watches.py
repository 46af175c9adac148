"""Lists the checks that the supervisor makes every few seconds. Each reports a problem that no other process can see alone."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from epp.metrics.request_series import PREDICTION
from shm.documents import DocumentReader
from shm.flow_areas import WAITING
from shm.table import TableReader
from workers.process.instance import Instance
from workers.shared.documents import EndpointsView
from workers.supervisor.index_keeper import IndexKeeper
from workers.worker.telemetry.cache_prediction import LOOK_S, PredictionWatch, match_name

if TYPE_CHECKING:
    from epp.config.effective import EffectiveConfig
    from workers.worker.extproc.pool import SharedPool

WATCH_EVERY_S = LOOK_S
# Of the warning about missing metrics:
LONG_S: Final = 30.0
AGAIN_S: Final = 600.0


class Unseen(NamedTuple):
    """`stale`: the number of endpoints of which the detector knows only the requests in flight. `endpoints`: the number of all
    endpoints.
    """

    stale: int
    endpoints: int


class BlindWatch:
    """Warns if requests wait in flow control because metrics are missing.

    Of an endpoint without metrics, the saturation detector knows only the requests in flight, and lets only a few pass at a time. This
    looks like a slow pool, but the cause is a wrong port, path or scrape interval. The watch warns if more than half of the endpoints have
    been without metrics for LONG_S while requests waited, and warns again only after this state has ended and AGAIN_S have passed.
    """

    def __init__(self, detector: str, waiting: Callable[[], int], unseen: Callable[[], Unseen], report: Callable[..., None]) -> None:
        """`detector`: the name of the saturation detector. `waiting`: returns the number of waiting requests in all workers.

        `unseen`: counts the endpoints without metrics; called only while requests wait.
        """
        self._detector = detector
        self._waiting = waiting
        self._unseen = unseen
        self._report = report
        self._since: float | None = None
        self._warned = False
        self._warned_at = float("-inf")

    def look(self, now: float) -> None:
        """Checks the present state, and warns if it has lasted for LONG_S."""
        waiting = self._waiting()
        unseen = self._unseen() if waiting else Unseen(0, 0)
        if 2 * unseen.stale <= unseen.endpoints:
            self._since, self._warned = None, False
            return
        if self._since is None:
            self._since = now
        if now - self._since >= LONG_S and not self._warned and now - self._warned_at >= AGAIN_S:
            self._warned, self._warned_at = True, now
            self._report(
                "requests wait because metrics are missing",
                seconds=round(now - self._since),
                waiting=waiting,
                endpoints=unseen.endpoints,
                without_metrics=unseen.stale,
                reason=f"{self._detector} counts endpoints with stale or unread metrics by their requests in flight alone, so only few "
                "requests pass at a time; let the picker read the metrics (`epp top` and the log lines 'endpoint stale' show the endpoints "
                "and the causes), or use concurrency-detector, which needs no metrics",
            )


def blind_watch(instance: Instance, report: Callable[..., None]) -> BlindWatch | None:
    """Returns the watch of this instance. Returns None if flow control is off."""
    plan, flow = instance.config.flow, instance.memory.flow
    if plan is None:
        return None

    @functools.cache  # created when the first request waits, because it takes memory
    def pool() -> "SharedPool":
        from workers.supervisor.pages.flow import pool_of

        return pool_of(instance, DocumentReader(instance.layout.documents, instance.memory.documents))

    def unseen() -> Unseen:
        candidates = pool().candidates(None)
        return Unseen(plan.detector.stale(candidates), len(candidates))

    return BlindWatch(plan.detector.name, lambda: flow.total(WAITING), unseen, report)


class Watches:
    """Knows the checks of a supervisor, and keeps each of them while other parts of the configuration change, because the checks remember
    what they have seen for minutes.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._names: NamesWatch | None = None
        self._prediction: PredictionWatch | None = None
        self._blind: dict[int, tuple[str, EffectiveConfig, BlindWatch]] = {}  # by the number of the pool: its name and configuration

    def of(self, instance: Instance, index: IndexKeeper) -> list[Callable[[float], None]]:
        """Returns the checks that the present configurations need. The supervisor calls them every WATCH_EVERY_S with the monotonic time.

        One check finds out whether names of shared memory were removed. If a pool has a prefix producer, another check compares the
        servers' cached tokens with the predictions. With flow control, a third check finds out whether requests wait because metrics are
        missing.
        """
        self._names = self._names or NamesWatch(instance, self._report)
        checks: list[Callable[[float], None]] = [self._names.look]
        if any(match_name(pool.config.pipeline.wiring) for pool in instance.every if pool.options.pool_name):
            self._prediction = self._prediction or _prediction_watch(instance, index, self._report)
            checks.append(self._prediction.look)
        before, self._blind = self._blind, {}
        for number, pool in enumerate(instance.every):
            if not (name := pool.options.pool_name):
                continue
            known = before.get(number)
            same = known is not None and known[0] == name and known[1] is pool.config
            watch = known[2] if known is not None and same else blind_watch(pool, self._report)
            if watch is not None:
                self._blind[number] = name, pool.config, watch
                checks.append(watch.look)
        return checks


def _prediction_watch(instance: Instance, index: IndexKeeper, report: Callable[..., None]) -> PredictionWatch:
    return PredictionWatch(
        instance.memory.series_reader(PREDICTION),
        TableReader(instance.layout.table, instance.memory.table),
        EndpointsView(DocumentReader(instance.layout.documents, instance.memory.documents)),
        lambda: index.lost,
        report,
    )


class NamesWatch:
    """Reports once that another program has removed names of shared memory, or the instance's file."""

    def __init__(self, instance: Instance, report: Callable[..., None]) -> None:
        self._segments = list(instance.memory.segments.values())
        self._lock = instance.lock
        self._report = report
        self._reported = False

    def look(self, _now: float) -> None:
        if self._reported:
            return
        gone = [segment.name for segment in self._segments if segment.is_removed()]
        gone += [self._lock.path] if self._lock.is_removed() else []
        if gone:
            self._reported = True
            self._report(
                "another program has removed names of this picker: it serves on, but commands such as epp top do not find it",
                names=gone,
                reason="find that program, then restart the picker, which makes new names",
            )
