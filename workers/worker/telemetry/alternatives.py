"""Counts in one worker the decisions of alternatives to the configuration in force: shadow profiles, and a candidate configuration.

A shadow profile agrees if it picks the same endpoint as the primary profile, or if it gives that endpoint the same total as its own pick.
In the second case, only the random choice among equals differed. Without this rule, two equal profiles over an idle pool of n endpoints
would agree only once in n requests. A shadow profile without a remaining candidate is counted as different. This module does not count
failed runs (`shadow_failures_total` counts them). It never changes the request.
"""

from math import isnan
from typing import Final

import numpy as np

from epp.decision.decision import Decision, ProfileRun, Usage
from epp.decision.tryout import CANDIDATE, IN_FORCE
from epp.metrics.request_series import (
    SHADOW_DECISIONS,
    TRYOUT_CACHED_TOKENS,
    TRYOUT_COMPARED,
    TRYOUT_DECISION,
    TRYOUT_ERRORS,
    TRYOUT_FIRST_TOKEN,
    TRYOUT_PROMPT_TOKENS,
    TRYOUT_REQUESTS,
)
from shm.series import SeriesWriter

AGREED: Final = "agreed"
DIFFERED: Final = "differed"
PROMPT_TOKENS_MAX: Final = 1 << 32  # a server that reports more tokens is wrong


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
    """Returns whether the real pick is among the best endpoints of the shadow profile. Both must have run on the same snapshot."""
    row = real.row
    if row == shadow.row:
        return True
    rows = shadow.candidates.rows
    at = np.array([row]) if rows is None else np.flatnonzero(rows == row)
    return len(at) == 1 and bool(shadow.totals[at[0]] == shadow.totals[shadow.picked[0]])


class TryoutFigures:
    """Counts requests by configuration. Its methods take `tried`: whether the candidate made the decision."""

    def __init__(self, sides: SeriesWriter, shadows: SeriesWriter) -> None:
        self._sides = sides
        self._shadows = shadows
        self._blocks = sides.block((IN_FORCE,)), sides.block((CANDIDATE,))
        at = sides.counter_at
        self._requests, self._errors = at[TRYOUT_REQUESTS.name], at[TRYOUT_ERRORS.name]
        self._prompt, self._cached = at[TRYOUT_PROMPT_TOKENS.name], at[TRYOUT_CACHED_TOKENS.name]

    def ended(self, tried: bool, *, failed: bool, first_token_s: float, usage: Usage | None) -> None:
        """Counts a request that has ended. `first_token_s`: the seconds to the first token, or NaN without a token."""
        words, block = self._sides.words, self._blocks[tried]
        words[block + self._requests] += 1
        if failed:
            words[block + self._errors] += 1
        elif not isnan(first_token_s):
            self._sides.observe(block, TRYOUT_FIRST_TOKEN, first_token_s)
        if usage is not None and usage.prompt and 0 < usage.prompt <= PROMPT_TOKENS_MAX:
            words[block + self._prompt] += usage.prompt
            words[block + self._cached] += min(max(usage.cached or 0, 0), usage.prompt)

    def decided(self, tried: bool, seconds: float) -> None:
        """Adds the duration in seconds of the decision for a request, or of a shadow decision."""
        self._sides.observe(self._blocks[tried], TRYOUT_DECISION, seconds)

    def compared(self, outcome: str) -> None:
        """Counts a shadow decision. `outcome`: agreed, differed or failed."""
        self._shadows.count(TRYOUT_COMPARED.name, (outcome,))
