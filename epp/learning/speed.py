"""Follows how many times slower than the pool's mean one endpoint is, from observed / predicted times.

The logarithm of the speed moves by a part of the clipped logarithm of observed / predicted, so one strange answer moves it little. The
part adapts: it is |mean error| / mean |error| of the last answers, squared (after Trigg and Leach, "Exponential smoothing with an adaptive
response rate", 1967). This is near 0 while errors of both signs alternate, and 1 after some errors of one sign: an endpoint that became
three times slower is followed within about 15 answers.
"""

from typing import Final

STEP: Final = 0.03
STEP_MAX: Final = 0.7
STEP_FIRST: Final = 3.0  # the n-th observation moves the speed by a part of at least 1 / (n + STEP_FIRST)
RECENT: Final = 0.3  # the errors' means follow the last three or so
CLIP: Final = 0.7
SPREAD_FIRST: Final = 0.3
SPREAD_MIN: Final = 1e-3
LOG_MAX: Final = 3.5


class Speed:
    """Holds one speed. `log`: its logarithm. `bias`, `spread`: the mean of recent errors and of their sizes. `samples`: observations."""

    __slots__ = ("bias", "log", "samples", "spread")

    def __init__(self) -> None:
        self.log = 0.0
        self.bias = 0.0
        self.spread = SPREAD_FIRST
        self.samples = 0

    def learn(self, surprise: float) -> float:
        """Takes the logarithm of observed / predicted. Returns by how much `log` has moved."""
        error = max(-CLIP, min(CLIP, surprise))
        self.bias += RECENT * (error - self.bias)
        self.spread += RECENT * (abs(error) - self.spread)
        part = min(1.0, abs(self.bias) / max(SPREAD_MIN, self.spread))
        step = max(STEP, STEP_MAX * part * part, 1.0 / (self.samples + STEP_FIRST))
        before = self.log
        self.log = max(-LOG_MAX, min(LOG_MAX, before + step * error))
        self.bias -= self.log - before  # the next errors are smaller by this much
        self.samples += 1
        return self.log - before
