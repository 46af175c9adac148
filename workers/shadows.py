"""How often a shadow profile agrees with the decision that was taken: a worker's counts, by profile and outcome.

A shadow agrees when it picks the endpoint that the primary profile picked, or has it at the same total as its own pick: then the
lot decided between them, and two equal profiles over an idle pool agree always, not once in so many endpoints. One whose filters
left nobody differs. A run that failed is no decision (`shadow_failures_total`). Nothing here touches the request.
"""

from typing import Final

import numpy as np

from epp.decision import Decision, ProfileRun
from epp.metrics import SHADOW_DECISIONS
from shm.series import SeriesWriter

AGREED: Final = "agreed"
DIFFERED: Final = "differed"


class Agreements:
    """One worker's. Once per decision, where there are shadow profiles."""

    __slots__ = ("_at", "_blocks", "_series")

    def __init__(self, series: SeriesWriter) -> None:
        self._series = series
        self._at = series.counter_at[SHADOW_DECISIONS.name]
        self._blocks: dict[tuple[str, bool], int] = {}  # as many as profiles, twice

    def count(self, decision: Decision) -> None:
        """A request got an endpoint."""
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
    """Whether the shadow would have been as content with the real pick; both ran on one snapshot."""
    row = real.row
    if row == shadow.row:
        return True
    rows = shadow.candidates.rows
    at = np.array([row]) if rows is None else np.flatnonzero(rows == row)
    return len(at) == 1 and bool(shadow.totals[at[0]] == shadow.totals[shadow.picked[0]])
