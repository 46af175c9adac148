"""Measures the rate at which a band dispatches requests, for `Retry-After`."""

from typing import Final

WINDOW_S: Final = 5.0
LONGEST_S: Final = 60


class DrainRate:
    """Counts the dispatches in the present window of WINDOW_S and in the window before it."""

    __slots__ = ("_before", "_count", "_since")

    def __init__(self) -> None:
        self._since = 0.0
        self._before = 0
        self._count = 0

    def count(self, now: float) -> None:
        self._turn(now)
        self._count += 1

    def retry_after_s(self, waiting: float, now: float) -> int:
        """Returns in how many seconds `waiting` requests will be dispatched at the present rate: 1 to 60."""
        self._turn(now)
        recent = self._before + self._count
        if not waiting:
            return 1
        if not recent:
            return LONGEST_S
        span = max(1.0, now - self._since + (WINDOW_S if self._before else 0.0))
        seconds = waiting * span / recent
        return max(1, min(LONGEST_S, int(seconds) + 1))

    def _turn(self, now: float) -> None:
        passed = now - self._since
        if passed >= WINDOW_S:
            self._before = self._count if passed < 2 * WINDOW_S else 0
            self._count = 0
            self._since = now
