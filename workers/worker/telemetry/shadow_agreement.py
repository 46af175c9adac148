"""Counts in one worker how often a shadow profile agrees with the real decision, by profile and outcome.

A shadow profile agrees if it picks the same endpoint as the primary profile, or if it gives that endpoint the same total as its own pick.
In the second case, only the random choice among equals differed. Without this rule, two equal profiles over an idle pool of n endpoints
would agree only once in n requests. A shadow profile that has no candidate left counts as different. A run that failed is not counted here
(`shadow_failures_total` counts it). Nothing here changes the request.
"""

from typing import Final

import numpy as np

from epp.decision.decision import Decision, ProfileRun
from epp.metrics.series import SHADOW_DECISIONS
from shm.series import SeriesWriter

AGREED: Final = "agreed"
DIFFERED: Final = "differed"


class Agreements:
    """Counts the agreements of one worker's shadow profiles."""

    __slots__ = ("_at", "_blocks", "_series")

    def __init__(self, series: SeriesWriter) -> None:
        self._series = series
        self._at = series.counter_at[SHADOW_DECISIONS.name]
        self._blocks: dict[tuple[str, bool], int] = {}  # (profile, whether it agreed) -> the block that counts this

    def count(self, decision: Decision) -> None:
        """Compares each shadow profile with the decision of a request that got an endpoint, and counts the result."""
        real = decision.runs.get(decision.primary)
        if real is None:
            return
        for profile, run in decision.shadows.items():
            key = (profile, run is not None and agrees(real, run))
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = self._series.block((profile, AGREED if key[1] else DIFFERED))
            self._series.words[block + self._at] += 1


def agrees(real: ProfileRun, shadow: ProfileRun) -> bool:
    """Whether the real pick is among the best endpoints of the shadow profile. Both must have run on the same snapshot."""
    row = real.row
    if row == shadow.row:
        return True
    rows = shadow.candidates.rows
    at = np.array([row]) if rows is None else np.flatnonzero(rows == row)
    return len(at) == 1 and bool(shadow.totals[at[0]] == shadow.totals[shadow.picked[0]])
