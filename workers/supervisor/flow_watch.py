"""Warns if requests wait in flow control because metrics are missing.

Of an endpoint without metrics, the saturation detector knows only the requests in flight there, and lets only a few pass at a time.
This looks like a slow pool, but the cause is a wrong port, path or scrape interval. The supervisor checks every few seconds whether more
than half of the endpoints are without metrics while requests wait. It warns if this has been so for LONG_S. It warns again only after
the state has ended and AGAIN_S have passed since the last warning.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from shm.documents import DocumentReader
from shm.flow_lanes import WAITING
from workers.process.instance import Instance

LONG_S: Final = 30.0
AGAIN_S: Final = 600.0


class Unseen(NamedTuple):
    """`stale`: of how many endpoints the detector knows only the requests in flight. `endpoints`: the number of all endpoints."""

    stale: int
    endpoints: int


class BlindWatch:
    """Checks whether requests wait because metrics are missing."""

    def __init__(
        self, detector: str, waiting: Callable[[], int], unseen: Callable[[], Unseen], report: Callable[..., None]
    ) -> None:
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
    counter: list[Callable[[], Unseen]] = []  # created when the first request waits, because it takes memory

    def unseen() -> Unseen:
        if not counter:
            from workers.supervisor.pages.flow import pool_of

            pool = pool_of(instance, DocumentReader(instance.layout.documents, instance.memory.documents))

            def count() -> Unseen:
                candidates = pool.candidates(None)
                return Unseen(plan.detector.stale(candidates), len(candidates))

            counter.append(count)
        return counter[0]()

    return BlindWatch(plan.detector.name, lambda: flow.total(WAITING), unseen, report)
