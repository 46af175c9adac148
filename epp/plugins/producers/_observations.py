"""Keeps the observations of one endpoint: a window of recent requests, and a history of the best times to first token.

Formulas, names and defaults are those of the reference picker. A percentile interpolates linearly between two values. The load at a
percentile is the mean load of the observations with a rank that differs from this percentile by at most a tenth of all observations. The
time is divided into *buckets*. At the end of a bucket, the 10th percentile of the bucket's times to first token is added to the history. A
full history drops its largest value. The *floor* is the 10th percentile of the history.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

FLOOR = 0.10
BAND = 0.10


class Rules(NamedTuple):
    """Holds the parameters of the producer. Percentiles are fractions, ages are in seconds."""

    window: int  # the most observations that are kept
    age_max_s: float  # up to this age, an observation is recent
    recent_max: int  # the most observations that count as recent, the newest ones
    enough: int  # the least number of observations to trust
    low: float  # the percentile of the point of low load
    typical: float  # the percentile of the point of typical load
    bucket_s: float
    buckets_max: int  # the most values of the history


class Observation(NamedTuple):
    """Holds one request: when the first token came, how long that took, and how many requests were in flight at the dispatch."""

    at: float
    ttft_s: float
    load: float


class Point(NamedTuple):
    """Holds the percentiles of one endpoint, as in `epp.learning.ttft.TtftPercentiles`."""

    floor_s: float = 0.0
    low_s: float = 0.0
    low_load: float = 0.0
    typical_s: float = 0.0
    typical_load: float = 0.0
    recent: bool = False


class Observations:
    """Keeps the observations of one endpoint, at most `Rules.window`. Times are monotonic seconds."""

    __slots__ = ("_best", "_bucket_since", "_count", "_floor_s", "_rules", "_window")

    def __init__(self, rules: Rules, now: float) -> None:
        self._rules = rules
        self._window: deque[Observation] = deque(maxlen=rules.window)
        self._count = 0  # observations ever added
        self._best: list[float] = []  # the history, sorted
        self._floor_s = 0.0
        self._bucket_since = now

    def add(self, at: float, ttft_s: float, load: float) -> None:
        """Adds the observation of one request. `at` must not be less than in earlier calls."""
        self._window.append(Observation(at, ttft_s, load))
        self._count += 1

    def point(self, now: float) -> Point:
        """Returns the percentiles at the time `now`. Ends the current bucket if its time is over."""
        rules, window = self._rules, self._window
        if now - self._bucket_since >= rules.bucket_s:
            self._close_bucket(now)
        kept = now - max(rules.age_max_s, rules.bucket_s)
        while window and window[0].at < kept:
            window.popleft()
        since = now - rules.age_max_s
        newest = takewhile(lambda each: each.at >= since, reversed(window))
        short = sorted((each for each, _ in zip(newest, range(rules.recent_max), strict=False)), key=lambda o: o.ttft_s)
        if not short:
            return Point(self._floor_s if self._count >= rules.enough else 0.0)
        times = [each.ttft_s for each in short]
        floor = self._floor_s or percentile(times, FLOOR)
        return Point(
            floor if self._count >= rules.enough else 0.0,
            percentile(times, rules.low),
            _load_around(short, rules.low),
            percentile(times, rules.typical),
            _load_around(short, rules.typical),
            len(short) >= rules.enough,
        )

    def _close_bucket(self, now: float) -> None:
        since = self._bucket_since
        times = sorted(each.ttft_s for each in takewhile(lambda each: each.at >= since, reversed(self._window)))
        if times:
            insort(self._best, percentile(times, FLOOR))
            del self._best[self._rules.buckets_max :]
            self._floor_s = percentile(self._best, FLOOR)
        self._bucket_since = now


def percentile(ascending: Sequence[float], fraction: float) -> float:
    """Returns the value at `fraction` of the ascending values, by linear interpolation. There must be at least one value."""
    at = fraction * (len(ascending) - 1)
    low = int(at)
    if low + 1 >= len(ascending):
        return ascending[low]
    return ascending[low] + (at - low) * (ascending[low + 1] - ascending[low])


def _load_around(by_time: Sequence[Observation], fraction: float) -> float:
    last = len(by_time) - 1
    first, end = max(int((fraction - BAND) * last), 0), min(int((fraction + BAND) * last), last) + 1
    return sum(each.load for each in by_time[first:end]) / (end - first)
