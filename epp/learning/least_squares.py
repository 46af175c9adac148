"""Fits y = θ · x with θ >= 0 to a stream of observations, and forgets old ones.

The fit minimises the sum over observations of w · (θ · x - y)² / T², where T is the prediction for x at that time, so that errors count
relative to what was expected. The weight w falls by a constant factor with each later observation. A few imagined observations keep every
coefficient near its prior as long as the data do not say otherwise (ridge regression). They also decide between features that always
move together.

The sums of products (the normal equations) hold everything that is needed, so an observation costs one pass over a small matrix. One
sweep of coordinate descent, in which no coefficient falls below 0, then improves θ. Repeated sweeps approach the non-negative least squares
solution, which hardly moves from one observation to the next (Franc, Hlaváč and Navara, "Sequential coordinate-wise algorithm for the
non-negative least squares problem", 2005).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from compiled import calls

PRIOR_WEIGHT: Final = 0.003  # weight of the imagined observations; a real one weighs 0.25 for a feature that is half of the prediction
MEMORY_FIRST: Final = 20.0  # observations that count at the beginning, when predictions are poor
MEMORY_GROWTH: Final = 0.25  # each observation lengthens the memory by so many observations
SURPRISE_MAX: Final = 3.0  # y counts as at most so many times its prediction
SURPRISE_MAX_FIRST: Final = 10.0  # the same for the first observations
FIRST: Final = 50.0
SHARE_MAX: Final = 8.0  # a feature counts as at most so many times the prediction


class LeastSquares:
    """Holds the coefficients, and the sums from which they are computed.

    `theta`: one coefficient per feature, >= 0. `sums`: float64; for n features, n coefficients in units of the prior, n moments and n * n
    products. `count`: observations.
    """

    __slots__ = ("_at_most", "_prior", "count", "memory_max", "prior", "sums", "theta")

    def __init__(self, prior: Sequence[float], memory_max: float, at_most: tuple[int, int] = (-1, -1)) -> None:
        """`prior`: the expected coefficients, above 0. `memory_max`: how many observations count in the long run. `at_most`: indices of two
        features; the coefficient of the first is at most that of the second, in units of their priors.
        """
        size = len(prior)
        self._at_most = at_most
        self._prior = np.array(prior)
        self.prior = list(prior)
        self.theta = list(prior)
        self.memory_max = memory_max
        self.count = 0.0
        self.sums = np.zeros(size * (size + 2))
        self.sums[:size] = 1.0

    def predict(self, features: Sequence[float]) -> float:
        """Returns θ · x."""
        total = 0.0
        for coefficient, value in zip(self.theta, features, strict=True):
            total += coefficient * value
        return total

    def learn(self, features: list[float], observed: float, floor: float) -> None:
        """Takes one observation. `floor`: predictions below it count as this large, so that tiny ones do not outweigh all others."""
        most = SURPRISE_MAX if self.count >= FIRST else SURPRISE_MAX_FIRST
        keep = 1.0 - 1.0 / min(self.memory_max, MEMORY_FIRST + MEMORY_GROWTH * self.count)
        bounded, bound = self._at_most
        self.theta = calls.fit(self.sums, self._prior, features, observed, floor, keep, most, SHARE_MAX, PRIOR_WEIGHT, bounded, bound)
        self.count += 1.0
