"""Pick at random: with equal probability, or in proportion to scores.

The algorithm for proportions is A-Res (Efraimidis and Spirakis, 2006): each candidate gets the key U^(1/score), where U is a random number
between 0 and 1, and the candidates with the largest keys are picked.
"""

from collections.abc import Sequence

import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, plugin
from epp.plugins.pickers import DrawingPicker, DrawParameters, best
from epp.request import Request


@plugin("random-picker")
class RandomChoice(DrawingPicker):
    """Picks endpoints at random with equal probability; with `topK`, only among the k candidates with the highest scores."""

    Params = DrawParameters

    def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: Profile) -> Sequence[int]:
        if not self._top:
            return self._rng.sample(range(len(totals)), min(self._count, len(totals)))
        ties = np.array([self._rng.random() for _ in range(len(totals))])
        drawn = best(totals, self._top, ties)
        return self._rng.sample(drawn, min(self._count, len(drawn)))


@plugin("weighted-random-picker")
class WeightedRandom(DrawingPicker):
    """Picks endpoints at random in proportion to their scores.

    Endpoints with scores of 0 or less are picked only after all others. If no score is above 0, all endpoints have equal chances.
    """

    Params = DrawParameters

    def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: Profile) -> Sequence[int]:
        uniform = np.array([self._rng.random() for _ in range(len(totals))])
        drawn = np.array(best(totals, self._top or len(totals), uniform))
        scores = totals[drawn]
        if not (scores > 0).any():
            return self._rng.sample(drawn.tolist(), min(self._count, len(drawn)))
        uniform = np.array([self._rng.random() for _ in range(len(drawn))])
        with np.errstate(divide="ignore", over="ignore"):
            keys = np.where(scores > 0, np.log(uniform) / np.where(scores > 0, scores, 1.0), -np.inf)
        picked: list[int] = drawn[best(keys, self._count, uniform)].tolist()
        return picked
