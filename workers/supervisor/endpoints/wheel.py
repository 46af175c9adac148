"""A wheel of buckets that turns once per interval. Each tick is the turn of one bucket, so the scrapes of many endpoints are spread."""

import math
from typing import Final

from workers.supervisor.endpoints.target import Target

TICK_S_MIN: Final = 0.005
TICK_S_MAX: Final = 0.025
TICKS_PER_INTERVAL: Final = 10
TOGETHER: Final = 8  # endpoints per bucket; with a page of 32 KB each, they keep the loop busy for half a millisecond
SPREAD: Final = 0.618  # distance between a bucket and the next one to be filled, as a share of all buckets


class Wheel:
    """Says which endpoints have their turn. `tick_s`, `round_s`: the time of one tick and of all. `turns`: the ticks until now."""

    def __init__(self, interval_s: float) -> None:
        self.tick_s = min(max(interval_s / TICKS_PER_INTERVAL, TICK_S_MIN), TICK_S_MAX)
        count = max(1, round(interval_s / self.tick_s))
        self.round_s = count * self.tick_s
        self.turns = 0
        self._buckets: list[dict[Target, None]] = [{} for _ in range(count)]
        self._order = _spread(count)

    def targets(self) -> list[Target]:
        """Returns all endpoints."""
        return [target for bucket in self._buckets for target in bucket]

    def costs(self) -> list[float]:
        """Returns what a page costs each server, in seconds, without servers of which no page was read."""
        return [target.pace.cost_s for target in self.targets() if target.pace.cost_s]

    def add(self, target: Target) -> None:
        """Puts a new endpoint into its bucket."""
        buckets = self._buckets
        free = [buckets[place] for place in self._order if len(buckets[place]) < TOGETHER]
        target.bucket = free[0] if free else min(buckets, key=len)
        target.bucket[target] = None

    def turn(self, turns: int) -> list[Target]:
        """Turns up to tick number `turns`. Returns the endpoints that have their turn then: each once, even if it has missed turns."""
        buckets = self._buckets
        numbers = range(max(self.turns, turns - len(buckets)), turns)
        self.turns = max(turns, self.turns)
        return [target for number in numbers for target in buckets[number % len(buckets)]]

    def ticks_to_wait(self, most: int) -> int:
        """Returns the number of ticks until the next turn of a bucket with a busy endpoint, at most `most`.

        Endpoints that rest have time: a few ticks late are little against the time between their pages. So an idle pool seldom wakes up.
        """
        for ticks in range(1, most):
            if not all(target.pace.rests for target in self._buckets[(self.turns + ticks - 1) % len(self._buckets)]):
                return ticks
        return most

    def next_try_s(self, target: Target, started_at: float, now: float) -> float:
        """Returns the time until the endpoint's next scrape, in seconds. Includes the pause after failures.

        `started_at`: the time at which the wheel started to turn.
        """
        place = next(number for number, bucket in enumerate(self._buckets) if bucket is target.bucket)
        due = started_at + (self.turns + (place - self.turns) % len(self._buckets) + 1) * self.tick_s
        pauses = math.ceil(max(target.not_before - due, 0.0) / self.round_s)
        return max(due + pauses * self.round_s - now, 0.0)


def _spread(buckets: int) -> list[int]:
    """Returns the numbers of all buckets, in an order in which the first few are far from each other."""
    step = next(n for n in range(max(round(SPREAD * buckets), 1), 2 * buckets) if math.gcd(n, buckets) == 1)
    return [place * step % buckets for place in range(buckets)]
