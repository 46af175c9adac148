"""How full each endpoint is, by what its server reports: the one formula that saturation detectors and admitters share.

    pressure = max(waiting / queue threshold, KV usage / KV threshold)

`waiting` counts what was sent since the scrape. A value that is not known counts by what the picker itself has in flight there:
of an endpoint that is stale or was never scraped, and of a value that its engine does not report, `waiting` is what is in flight now
and the KV cache does not count. So whatever becomes of scraping, the figure slows down and never stops.
"""

import numpy as np

from epp.candidates import Candidates, Floats, Mask, Snapshot
from epp.data import INFLIGHT_REQUESTS, KV_USAGE, WAITING


class _Known:
    """What a snapshot says before the load of the moment is added; all of the snapshot's shape."""

    __slots__ = ("before", "fresh", "kv", "least", "scraped", "snapshot")

    def __init__(self, snapshot: Snapshot, fresh: Mask, waiting_full: float, kv_full: float) -> None:
        self.snapshot = snapshot
        self.fresh = fresh
        nothing = np.zeros(len(snapshot.endpoints))
        waiting = snapshot.values.get(WAITING.name, np.full_like(nothing, np.nan))
        reported = fresh & np.isfinite(waiting)
        self.scraped: Floats = np.maximum(np.where(reported, waiting, 0.0), 0.0)
        self.before: Floats = np.where(
            reported, snapshot.counted_at_scrape - self.scraped, 0.0
        )  # in flight, and not waiting
        kv = snapshot.values.get(KV_USAGE.name, nothing)
        self.kv: Floats = np.maximum(np.where(fresh & np.isfinite(kv), kv, 0.0), 0.0)
        self.least: Floats = np.maximum(self.scraped / waiting_full, self.kv / kv_full)


class Pressure:
    """The pressure on endpoints; `stale_after_s` replaces the picker's own limit for what is fresh."""

    reads = (WAITING, KV_USAGE, INFLIGHT_REQUESTS)

    def __init__(self, waiting_full: float, kv_full: float, stale_after_s: float | None = None) -> None:
        self.waiting_full = waiting_full
        self.kv_full = kv_full
        self.stale_after_s = stale_after_s
        self._known: _Known | None = None  # of the last snapshot: it serves many calls

    def of(self, candidates: Candidates) -> Floats:
        """0: idle; 1: at a threshold. One value per candidate, new."""
        known = self._of(candidates.snapshot)
        pressure: Floats = candidates[INFLIGHT_REQUESTS] - candidates.narrow(known.before)
        pressure /= self.waiting_full
        return np.maximum(pressure, candidates.narrow(known.least), out=pressure)

    def mean(self, candidates: Candidates) -> float:
        """Of all candidates, each counting the same however large it is; 1 for none."""
        size = len(candidates)
        return float(np.add.reduce(self.of(candidates))) / size if size else 1.0

    def below(self, candidates: Candidates, waiting: float, kv: float) -> Mask:
        """Who is below both of these."""
        known = self._of(candidates.snapshot)
        counted = candidates[INFLIGHT_REQUESTS] - candidates.narrow(known.before)
        mask: Mask = np.maximum(counted, candidates.narrow(known.scraped)) < waiting
        mask &= candidates.narrow(known.kv) < kv
        return mask

    def fresh(self, candidates: Candidates) -> Mask:
        """Who counts by what it reports."""
        mask = self._of(candidates.snapshot).fresh
        return mask if candidates.rows is None else mask[candidates.rows]

    def _of(self, snapshot: Snapshot) -> _Known:
        known = self._known
        if known is None or known.snapshot is not snapshot:
            fresh = snapshot.fresh
            if self.stale_after_s is not None and snapshot.ages is not None:
                fresh = snapshot.known & (snapshot.ages <= self.stale_after_s)
            known = self._known = _Known(snapshot, fresh, self.waiting_full, self.kv_full)
        return known
