"""Learns a factor for predictions: few answers come later than the predicted time multiplied by this factor.

An answer counts as late as soon as it is overdue, not when it comes: under overload, it may come many seconds later.
"""

import heapq
from math import exp
from math import log as ln
from typing import Final

KEPT: Final = 0.98  # the part of the answers that shall come within `ratio` times the predicted time
# A late answer raises the factor's logarithm by STEP * KEPT. Every other answer lowers it by STEP * (1 - KEPT), which is 1/49 of that.
STEP: Final = 0.05
FIRST: Final = 1.3
RATIO_MAX: Final = 4.0
AT_RISK: Final = 0.4  # an answer says little if its prediction is below this part of the time that its objective leaves


class Expected:
    """An expected answer. `due`: from when on it is late, in monotonic seconds. `over`: whether it has come or was counted as late."""

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
        self._expected: list[Expected] = []  # a heap with the answers that are not due yet

    @property
    def ratio(self) -> float:
        """Returns the factor by which predictions are multiplied."""
        return exp(self._log)

    def sent(self, now: float, predicted_s: float, left_s: float) -> Expected | None:
        """Takes a request that is sent `now`. `left_s`: the time that the request's objective leaves. Returns what `came` needs; None if
        the answer does not count, because the prediction is above `left_s`, or below the part AT_RISK of it.
        """
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
