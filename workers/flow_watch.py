"""A warning for who waits for want of metrics: requests go on waiting while most endpoints count by what is in flight alone.

Nothing stops then, but a pool whose metrics nobody can read is held at a few requests per endpoint, which looks like a slow pool and
is a wrong port, path or interval. The supervisor looks every few seconds; when it was so at every look of LONG_S, that is told once, and
again only after it was over and AGAIN_S have passed.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from shm.documents import DocumentReader
from shm.flow_lanes import WAITING
from workers.instance import Instance

LONG_S: Final = 30.0
AGAIN_S: Final = 600.0


class Unseen(NamedTuple):
    """So many of so many endpoints count by what is in flight alone."""

    stale: int
    endpoints: int


class BlindWatch:
    """The supervisor's. `waiting`: requests in all workers; `unseen` is asked only while some wait."""

    def __init__(
        self, detector: str, waiting: Callable[[], int], unseen: Callable[[], Unseen], report: Callable[[str], None]
    ) -> None:
        self._detector = detector
        self._waiting = waiting
        self._unseen = unseen
        self._report = report
        self._since: float | None = None
        self._told = False
        self._told_at = float("-inf")

    def look(self, now: float) -> None:
        """How it is now."""
        waiting = self._waiting()
        unseen = self._unseen() if waiting else Unseen(0, 0)
        if 2 * unseen.stale <= unseen.endpoints:
            self._since, self._told = None, False
            return
        if self._since is None:
            self._since = now
        if now - self._since >= LONG_S and not self._told and now - self._told_at >= AGAIN_S:
            self._told, self._told_at = True, now
            self._report(
                f"flow control: requests have been waiting for {LONG_S:.0f} s, {waiting} now, while the metrics of {unseen.stale} of "
                f"{unseen.endpoints} endpoints are stale or were never read: {self._detector} counts those by what is in flight alone, "
                "which lets few requests through at once. Let the picker read their metrics (`epp top` and the lines 'endpoint stale' say "
                "which and why), or use concurrency-detector, which reads none"
            )


def blind_watch(instance: Instance, report: Callable[[str], None]) -> BlindWatch | None:
    """None: flow control is off."""
    plan, flow = instance.config.flow, instance.flow_lanes
    if plan is None or flow is None:
        return None
    seen: list[Callable[[], Unseen]] = []  # made when the first request waits: until then it would only cost memory

    def unseen() -> Unseen:
        if not seen:
            from workers.flow_page import pool_of

            pool = pool_of(instance, DocumentReader(instance.document_schema, instance.documents))

            def count() -> Unseen:
                candidates = pool.candidates(None)
                return Unseen(plan.detector.stale(candidates), len(candidates))

            seen.append(count)
        return seen[0]()

    return BlindWatch(plan.detector.name, lambda: flow.total(WAITING), unseen, report)
