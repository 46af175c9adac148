"""Pick the endpoints with the highest scores; break ties at random."""

from collections.abc import Sequence

import numpy as np

from compiled.calls import highest
from epp.candidates import Candidates, Scores
from epp.plugin import Profile, plugin
from epp.plugins.pickers import CountedPicker, Parameters, best
from epp.request import Request


@plugin("max-score-picker")
class MaxScore(CountedPicker):
    """Picks the `maxNumOfEndpoints` endpoints with the highest scores, best first. Breaks ties at random."""

    Params = Parameters

    def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: Profile) -> Sequence[int]:
        if self._count > 1:
            ties = np.array([self._rng.random() for _ in range(len(totals))])
            return best(totals, self._count, ties)
        tied = highest(totals)
        return (tied[0] if len(tied) == 1 else self._rng.choice(tied),)
