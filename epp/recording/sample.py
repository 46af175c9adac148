"""Chooses which requests a small recording keeps: some per second, and also requests that failed or were slow.

A request is chosen when it is decided, or when it has ended. A request is slow if its time to the first token is above the 95th percentile
of the latest requests. Stochastic approximation (Robbins and Monro, 1951) follows the percentile: each time above the percentile raises
it by a step, and each other time lowers it by a nineteenth of this step.
"""

from typing import Final

PER_S: Final = 100.0  # requests of each of the two kinds that a worker records in a second: both take at most 0.1 % of a core
SLOW_SHARE: Final = 0.05
STEP: Final = 0.05  # the share of itself by which one time can move the percentile
ERROR: Final = 400


class Bucket:
    """A token bucket of one second. Times are in seconds."""

    def __init__(self, per_s: float) -> None:
        self._per_s = self._left = per_s
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Takes one token. Returns False if the bucket is empty."""
        left = min(self._left + (now - self._at) * self._per_s, self._per_s)
        self._at = now
        self._left = left - 1.0 if left >= 1.0 else left
        return left >= 1.0


class Sample:
    """Chooses requests for one worker. Times are in seconds."""

    def __init__(self) -> None:
        self._usual = Bucket(PER_S)
        self._notable = Bucket(PER_S)
        self._slow_s = 0.0

    def decided(self, now: float) -> bool:
        """Returns whether a request that was decided now is kept."""
        return self._usual.take(now)

    def refused(self, now: float) -> bool:
        """Returns whether a request that the picker refused is kept."""
        return self._usual.take(now) or self._notable.take(now)

    def ended(self, status: int, first_s: float, now: float) -> bool:
        """Returns whether a request that was not kept before is kept after all, because its end is notable. `status`: the status of the
        answer, or 0. `first_s`: the time to the first token; NaN without a token.
        """
        slow = first_s > self._slow_s
        if first_s == first_s:
            self._slow_s = self._slow_s * (1.0 + STEP * (slow - SLOW_SHARE)) if self._slow_s else first_s
        return (slow or status >= ERROR or not status) and self._notable.take(now)
