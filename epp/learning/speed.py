"""Follows how many times slower than the pool's mean one endpoint is, from observed / predicted times.

The logarithm of the speed moves by a part of the clipped logarithm of observed / predicted, so one strange answer moves it little. The
part adapts (after Trigg and Leach, "Exponential smoothing with an adaptive response rate", 1967): it grows where |mean error| / mean
|error| of the last answers is near 1, that is, after some errors of one sign. An endpoint that became three times slower is followed within
about 15 answers. A ratio below STEADY comes by chance too often: where times vary much, speeds would follow the noise.
"""

from typing import Final

STEP: Final = 0.03
STEP_MAX: Final = 0.7
STEP_FIRST: Final = 1.0  # the n-th observation moves the speed by a part of at least 1 / (n + STEP_FIRST)
STEADY: Final = 0.9
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
        steady = min(1.0, abs(self.bias) / max(SPREAD_MIN, self.spread))
        step = max(STEP, STEP_MAX * (steady - STEADY) / (1.0 - STEADY), 1.0 / (self.samples + STEP_FIRST))
        before = self.log
        self.log = max(-LOG_MAX, min(LOG_MAX, before + step * error))
        moved = self.log - before
        self.bias -= moved  # the next errors are smaller by this much
        self.spread = max(abs(self.bias), self.spread - abs(moved))
        self.samples += 1
        return moved
