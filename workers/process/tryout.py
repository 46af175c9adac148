"""Follows, for the parent, the candidate that is tried beside the configuration in force, and says when it is worse.

    begin ─▶ all workers use it ─▶ counted, watched ─▶ promoted, rolled back by hand, or taken back because it is worse

The workers count (`workers.worker.telemetry.tryout_figures`). The parent reads the sums of all workers, and gives them to the
sequential test (`epp.decision.tryout`), which says when the candidate is worse.
"""

from typing import Final

import structlog

from epp.decision.tryout import CANDIDATE, IN_FORCE, Side, Watch
from epp.metrics.series import TRYOUT, TRYOUT_SHADOWS
from shm.series_reader import SeriesReader, Values
from workers.process.generations import Bundle
from workers.process.instance import Instance
from workers.shared.reload_status import TryoutStatus

LOOK_S: Final = 0.5
OUTCOMES: Final = ("agreed", "differed", "failed")

log = structlog.get_logger()


class Tryout:
    """Follows at most one candidate at a time. `bundle`: the candidate; None while none is tried."""

    def __init__(self, instance: Instance) -> None:
        """`instance`: as the pool with the followed candidate sees it."""
        self._pool = () if not instance.layout.pools else (instance.options.pool_name,)
        self._sides: SeriesReader = instance.memory.series_reader(TRYOUT)
        self._shadows: SeriesReader = instance.memory.series_reader(TRYOUT_SHADOWS)
        self.bundle: Bundle | None = None
        self._watch = Watch()
        self._before: tuple[Side, Side] = (Side(), Side())
        self._compared_before: tuple[int, ...] = ()
        self._next = 0.0

    def begin(self, bundle: Bundle, now: float) -> None:
        """Begins to count for this candidate."""
        self.bundle = bundle
        self._watch = Watch()
        self._before, self._compared_before = self._counted(), self._compared()
        self._next = now + LOOK_S

    def end(self) -> None:
        """Ends the counting: no candidate is tried any more."""
        self.bundle = None

    def next_deadline(self, now: float) -> float:
        """Returns the seconds until `look` has something to do; infinite if no candidate is tried."""
        return max(0.0, self._next - now) if self.bundle is not None else float("inf")

    def look(self, now: float) -> str | None:
        """Returns why the candidate is worse, or "" if nothing shows that. Returns None if it is too early to check again."""
        if self.bundle is None or now < self._next:
            return None
        self._next = now + LOOK_S
        in_force, candidate = self._since()
        return self._watch.look(in_force, candidate)

    def status(self) -> TryoutStatus | None:
        """Returns the candidate and what was counted since its tryout began. Returns None if no candidate is tried."""
        bundle = self.bundle
        if bundle is None:
            return None
        in_force, candidate = self._since()
        agreed, differed, failed = (now - then for now, then in zip(self._compared(), self._compared_before, strict=True))
        return TryoutStatus(
            bundle.number, bundle.hash, bundle.source, bundle.share, bundle.at, in_force, candidate, agreed, differed, failed
        )

    def _since(self) -> tuple[Side, Side]:
        in_force, candidate = self._counted()
        return in_force.since(self._before[0]), candidate.since(self._before[1])

    def _counted(self) -> tuple[Side, Side]:
        rows = self._sides.rows()
        return side(rows.get((IN_FORCE, *self._pool))), side(rows.get((CANDIDATE, *self._pool)))

    def _compared(self) -> tuple[int, ...]:
        rows = self._shadows.rows()
        found = (rows.get((outcome, *self._pool)) for outcome in OUTCOMES)
        return tuple(values.counters[0] if values is not None else 0 for values in found)


def side(values: Values | None) -> Side:
    """Returns the sums of one configuration over all workers."""
    if values is None:
        return Side()
    requests, errors, prompt, cached = values.counters
    (first_token, _), (decisions, seconds) = values.histograms
    return Side(requests, errors, prompt, cached, sum(decisions), seconds, tuple(first_token))
