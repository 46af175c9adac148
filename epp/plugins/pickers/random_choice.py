"""Pick endpoints at random: among all candidates whatever their scores, or with `topK` among the k best."""

from collections.abc import Sequence

import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, plugin
from epp.plugins.pickers import DrawingPicker, DrawParameters, best
from epp.request import Request


@plugin("random-picker")
class RandomChoice(DrawingPicker):
    """Picks endpoints at random with equal probability; with `topK` only among the k best."""

    Params = DrawParameters

    def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: Profile) -> Sequence[int]:
        if not self._top:
            return self._rng.sample(range(len(totals)), min(self._count, len(totals)))
        ties = np.array([self._rng.random() for _ in range(len(totals))])
        drawn = best(totals, self._top, ties)
        return self._rng.sample(drawn, min(self._count, len(drawn)))
