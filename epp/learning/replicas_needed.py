"""Says how many replicas the pool needs for the work that arrives, and how much more work the pool could take.

    work     = arrivals/s * cost + waiting * cost / DRAIN_S         in replicas that do nothing else
    cost     = max(places / finished per second, prompt seconds)    replica seconds per request
    needed   = work / TARGET, rounded up, with hysteresis
    headroom = 1 - work / (TARGET * ready replicas)

`places` is the share of its batch that a replica uses, summed over the replicas. By Little's law, `places / finished per second`
is the replica seconds that one request costs. The formula divides by finished requests, not by arrivals, so it also holds while more
requests arrive than finish. A share counts as if answers were as slow as at TARGET, because a larger batch is slower (`batch_share`). If
the prompt seconds are more than that, they are the cost.

Hysteresis: the number grows when the smoothed work exceeds it by a band (BAND, BAND_PART), and within CALM_S after it grew only when the
work exceeds it by RISES, too. The number falls when the most work of the last FALL_S is below the next lower number by the band, at most
once in FALL_S, and within CALM_S after it fell only when the work has fallen by FALLS in FALL_S. So the number does not follow the
variations of a steady load.
"""

from collections import deque
from math import ceil, exp, inf
from typing import Final, NamedTuple

from epp.learning.model import LatencyModel

TARGET: Final = 0.8  # used part of a replica, so that bursts and a lost replica do not fill the queues
SMOOTH_S: Final = 60.0
FALL_S: Final = 180.0
CALM_S: Final = 600.0
FALLS: Final = 0.5  # by how many replicas the work must fall in FALL_S for the number to fall again within CALM_S
RISES: Final = 0.4  # by how many replicas the work must exceed the number for it to grow again within CALM_S
PART_S: Final = 30.0  # FALL_S is divided into parts of this length; the most work in each is remembered
DRAIN_S: Final = 120.0  # the time in which the replicas shall work off a queue
BAND: Final = 0.1  # replicas by which the work has to exceed the number, or to fall below the next lower one
BAND_PART: Final = 0.01  # the same, as a part of the number
ENOUGH: Final = 50  # answers after which the cost is known
WEIGHT: Final = 0.8  # the smoothed values are used once the readings have this weight in them: after 97 s
REST: Final = 1e-9


class Reading(NamedTuple):
    """What the picker sees at the monotonic time `at`, in seconds.

    `ready`: replicas that get requests. `arrived`, `finished`: requests since the start. `arrived` includes requests refused for load.
    Neither includes requests with a failed answer: a failed answer is no work, and the client may ask again.
    `places`: the sum of `batch_share` over the replicas. `waiting`: requests that wait, at the replicas and in the picker.
    `prompt_s`: mean seconds that a replica computes one prompt; 0 if this time is not known.
    """

    at: float
    ready: int
    arrived: int
    finished: int
    places: float
    waiting: float
    prompt_s: float


class ReplicasNeeded:
    """Follows the readings of one pool. `needed`: replicas. `headroom`: 1 is idle, 0 is at the target. Both are None if not known yet."""

    def __init__(self) -> None:
        self.needed: int | None = None
        self.headroom: float | None = None
        self._last: Reading | None = None
        self._arriving = self._finishing = self._places = self._waiting = self._cost = 0.0
        self._weight = 0.0  # the weight of the readings in the smoothed values, which begin at 0
        self._finished = 0
        self._fell_at = self._grew_at = -inf
        # (begin of a part, most work in it)
        self._most: deque[tuple[float, float]] = deque(maxlen=ceil(FALL_S / PART_S))

    def read(self, now: Reading) -> None:
        """Takes a reading. One per second is enough, and one in ten seconds is too few for a steady number."""
        last, self._last = self._last, now
        if last is None or now.at <= last.at or now.arrived < last.arrived or now.finished < last.finished:
            return
        lasted = now.at - last.at
        part = 1.0 - exp(-lasted / SMOOTH_S)
        self._weight += part * (1.0 - self._weight)
        self._arriving += part * ((now.arrived - last.arrived) / lasted - self._arriving)
        self._finishing += part * ((now.finished - last.finished) / lasted - self._finishing)
        self._places += part * (now.places - self._places)
        self._waiting += part * (now.waiting - self._waiting)
        self._finished += now.finished - last.finished
        if self._finished < ENOUGH or self._weight < WEIGHT:
            return
        if self._finishing > REST:
            self._cost = max(self._places / self._finishing, now.prompt_s)
        work = (self._arriving + self._waiting / DRAIN_S) / self._weight * self._cost / TARGET
        self._decide(now.at, work)
        if now.ready:
            self.headroom = 1.0 - work / now.ready

    def _decide(self, at: float, work: float) -> None:
        """Changes `needed` if the work, in replicas at the target, requires it."""
        most = self._most
        if not most or at - most[-1][0] >= PART_S:
            most.append((at, work))
        elif work > most[-1][1]:
            most[-1] = (most[-1][0], work)
        if self.needed is None:
            self.needed = max(1, ceil(work))
            return
        band = max(BAND, BAND_PART * self.needed)
        if work > self.needed + (band if at - self._grew_at >= CALM_S else max(band, RISES)):
            self.needed = ceil(work)
            self._grew_at = at
        elif len(most) == most.maxlen:
            highest = max(value for _, value in most)
            falls = at - self._fell_at >= CALM_S or most[0][1] - most[-1][1] >= FALLS
            if falls and highest < self.needed - 1 - band:
                self.needed = max(1, ceil(highest))
                self._fell_at = at
                most.clear()


def batch_share(model: LatencyModel, slot: int, running: float, kv_usage: float) -> float:
    """Returns which share of its batch an endpoint uses, as if its answers were as slow as at TARGET.

    The batch is full at the learned limit, or at the number of requests that would fill the KV cache, if that is less or no limit is known.
    `kv_usage`: from 0 to 1.
    """
    if running <= 0.0:
        return 0.0
    limit = model.limit(slot)
    if limit <= 0.0 or (kv_usage > 0.0 and running / kv_usage < limit):
        if kv_usage <= 0.0:
            return 0.0
        limit = running / kv_usage
    return running / limit * model.per_token_s(slot, TARGET * limit) / model.per_token_s(slot, running)
