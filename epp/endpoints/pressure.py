"""Measures pressure: how full each endpoint is, by the values that it reports. Saturation detectors and admitters share this formula.

    pressure = max(waiting / queue threshold, KV usage / KV threshold)

`waiting` includes the requests sent since the scrape. If the endpoint is stale or was never scraped, or its engine does not report
`waiting`, its requests in flight are used instead. An unknown KV usage is taken as 0. So if scrapes fail, pressure still follows the load
in flight: dispatch slows down but never stops.
"""

from typing import ClassVar

import numpy as np

from compiled import calls
from epp.candidates import Candidates, Floats, Mask, Snapshot
from epp.data import INFLIGHT_REQUESTS, KV_USAGE, WAITING


class _Known:
    """Holds the part of the formula that depends on the snapshot alone. All arrays have the snapshot's shape (endpoints,)."""

    __slots__ = ("before", "fresh", "kv", "least", "scraped", "snapshot")

    def __init__(self, snapshot: Snapshot, fresh: Mask, waiting_full: float, kv_full: float) -> None:
        self.snapshot = snapshot
        self.fresh = fresh
        nothing = np.zeros(len(snapshot.endpoints))
        waiting = snapshot.values.get(WAITING.name, np.full_like(nothing, np.nan))
        reported = fresh & np.isfinite(waiting)
        self.scraped: Floats = np.maximum(np.where(reported, waiting, 0.0), 0.0)
        # requests that were in flight at the scrape but were not waiting
        self.before: Floats = np.where(reported, snapshot.counted_at_scrape - self.scraped, 0.0)
        kv = snapshot.values.get(KV_USAGE.name, nothing)
        self.kv: Floats = np.maximum(np.where(fresh & np.isfinite(kv), kv, 0.0), 0.0)
        self.least: Floats = np.maximum(self.scraped / waiting_full, self.kv / kv_full)


class Pressure:
    """Computes the pressure on endpoints.

    `waiting_full`, `kv_full`: the thresholds, in requests and as a ratio. `stale_after_s`: the age in seconds above which a scrape is
    stale; None for the picker's own limit. A plugin that uses this class declares the columns in `reads`.
    """

    reads: ClassVar = (WAITING, KV_USAGE, INFLIGHT_REQUESTS)

    def __init__(self, waiting_full: float, kv_full: float, stale_after_s: float | None = None) -> None:
        self.waiting_full = waiting_full
        self.kv_full = kv_full
        self.stale_after_s = stale_after_s
        self._known: _Known | None = None  # computed once per snapshot, because many calls use the same snapshot

    def of(self, candidates: Candidates) -> Floats:
        """Returns a new float64 array of shape (candidates,): 0 is idle, 1 is at a threshold, more is above it."""
        known = self._of(candidates.snapshot)
        pressure: Floats = candidates[INFLIGHT_REQUESTS] - candidates.narrow(known.before)
        pressure /= self.waiting_full
        return np.maximum(pressure, candidates.narrow(known.least), out=pressure)

    def mean(self, candidates: Candidates) -> float:
        """Returns the unweighted mean over all candidates; 1 if there is no candidate."""
        if not len(candidates):
            return 1.0
        known = self._of(candidates.snapshot)
        before, least = candidates.narrow(known.before), candidates.narrow(known.least)
        return calls.mean_pressure(candidates[INFLIGHT_REQUESTS], before, least, self.waiting_full)

    def below(self, candidates: Candidates, waiting: float, kv: float) -> Mask:
        """Returns bool, shape (candidates,): whether waiting requests and KV usage are both below these limits."""
        known = self._of(candidates.snapshot)
        counted = candidates[INFLIGHT_REQUESTS] - candidates.narrow(known.before)
        mask: Mask = np.maximum(counted, candidates.narrow(known.scraped)) < waiting
        mask &= candidates.narrow(known.kv) < kv
        return mask

    def fresh(self, candidates: Candidates) -> Mask:
        """Returns bool, shape (candidates,): whether the pressure of the candidate comes from its reported values."""
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
