"""Follows how many times slower than the pool's mean one endpoint is, from observed / predicted times.

At first, the logarithm of the speed is a mean over the answers, in which later answers count more, because the pool's coefficients are
poor at first. Further answers move the logarithm by a part STEP of their error, log(observed / predicted). Errors are clipped, so one
strange answer moves the speed little.

A change shows in a cumulative sum (Page, "Continuous inspection schemes", 1954). Each answer adds its error divided by the usual size of
the endpoint's errors, at most FAR, less ALLOWED; an error in the other direction lowers the sum. If the sum reaches CHANGED, the speed
jumps, and is then a mean of the next answers, as at first. So two answers in a row that are wrong by three times the usual error suffice.
Where times vary much, larger errors are necessary, so the speeds of equal endpoints do not follow the noise.
"""

from typing import Final

STEP: Final = 0.03
JUMP: Final = 0.7
FAR: Final = 3.0
ALLOWED: Final = 1.5
CHANGED: Final = 3.0
USUAL: Final = 0.05  # the weight of each new error in `spread`
CLIP: Final = 0.7
SPREAD_FIRST: Final = 0.3
SPREAD_MIN: Final = 0.05
LOG_MAX: Final = 3.5


class Speed:
    """Holds one speed. `log`: its logarithm. `shift`: the cumulative sum, below 0 if answers come early.

    `spread`: the usual size of errors. `samples`: observations. `since`: observations since the last change.
    """

    __slots__ = ("log", "samples", "shift", "since", "spread")

    def __init__(self) -> None:
        self.log = 0.0
        self.shift = 0.0
        self.spread = SPREAD_FIRST
        self.since = 0.0
        self.samples = 0

    def learn(self, surprise: float) -> float:
        """Takes the logarithm of observed / predicted. Returns by how much `log` has moved."""
        error = max(-CLIP, min(CLIP, surprise))
        self.shift = _shifted(self.shift, max(-FAR, min(FAR, error / max(SPREAD_MIN, self.spread))))
        step = max(STEP, 2.0 / (self.since + 3.0))
        if abs(self.shift) >= CHANGED:
            step = max(step, JUMP)
            self.shift, self.since = 0.0, 0.0
        else:
            self.spread += max(USUAL, 1.0 / (self.samples + 2.0)) * (abs(error) - self.spread)
        before = self.log
        self.log = max(-LOG_MAX, min(LOG_MAX, before + step * error))
        self.samples += 1
        self.since += 1.0
        return self.log - before


def _shifted(shift: float, error: float) -> float:
    """Adds an error, less ALLOWED, to the sum. If the sum would change its sign, it begins anew with this error."""
    if shift < 0.0:
        return -_shifted(-shift, -error)
    grown = shift + error - ALLOWED
    return grown if grown >= 0.0 else min(0.0, error + ALLOWED)
