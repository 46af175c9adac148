"""Learns by how much predictions have to be multiplied so that few answers come later than that. Pure code.

An answer counts as late as soon as it is overdue, not when it comes: under overload that may be many seconds later.
"""

import heapq
from math import exp
from math import log as ln
from typing import Final

KEPT: Final = 0.98  # the part of the answers that shall come within `ratio` times the predicted time
STEP: Final = 0.05  # of the logarithm; one late answer weighs as much as KEPT / (1 - KEPT) = 49 others
FIRST: Final = 1.3
RATIO_MAX: Final = 4.0
AT_RISK: Final = 0.4  # answers predicted to take less than this part of what their objective leaves say little


class Expected:
    """An answer that has not come yet. `due`: when it is late, in monotonic seconds. `over`: whether it counts no more."""

    __slots__ = ("due", "over")

    def __init__(self, due: float) -> None:
        self.due = due
        self.over = False

    def __lt__(self, other: "Expected") -> bool:
        return self.due < other.due


class Margin:
    """Follows the KEPT quantile of observed / predicted, by stochastic approximation (Robbins and Monro 1951), from 1 to RATIO_MAX."""

    def __init__(self) -> None:
        self._log = ln(FIRST)
        self._expected: list[Expected] = []  # a heap; as long as the requests that were sent and are not due

    @property
    def ratio(self) -> float:
        """By how much predictions are multiplied."""
        return exp(self._log)

    def sent(self, now: float, predicted_s: float, left_s: float) -> Expected | None:
        """Takes a request that is sent `now`. `left_s`: what its objective leaves. Returns what `came` needs; None if it says little."""
        if not 0.0 < AT_RISK * left_s <= predicted_s <= left_s:
            return None
        expected = Expected(now + self.ratio * predicted_s)
        heapq.heappush(self._expected, expected)
        return expected

    def look(self, now: float) -> None:
        """Counts the answers that are overdue."""
        expected = self._expected
        while expected and expected[0].due < now:
            overdue = heapq.heappop(expected)
            if not overdue.over:
                overdue.over = True
                self._move(KEPT)

    def came(self, expected: Expected, now: float) -> None:
        """Takes the first token of an answer."""
        self.look(now)
        if not expected.over:
            expected.over = True
            self._move(KEPT - 1.0)

    def _move(self, by: float) -> None:
        self._log = min(ln(RATIO_MAX), max(0.0, self._log + STEP * by))
