"""Pick the best score; ties at random."""

from collections.abc import Sequence

import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, plugin
from epp.plugins.pickers import CountedPicker, Parameters, best
from epp.request import Request

FEW = 32


@plugin("max-score-picker")
class MaxScore(CountedPicker):
    """The `maxNumOfEndpoints` best, best first."""

    Params = Parameters

    def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: Profile) -> Sequence[int]:
        if self._count > 1:
            ties = np.array([self._rng.random() for _ in range(len(totals))])
            return best(totals, self._count, ties)
        if len(totals) > FEW:  # from here on NumPy is faster: 6 us at 1,000 instead of 30
            tied = np.flatnonzero(totals == np.maximum.reduce(totals))
            return (int(tied[0] if len(tied) == 1 else self._rng.choice(tied.tolist())),)
        values = totals.tolist()
        highest = max(values)
        if values.count(highest) == 1:
            return (values.index(highest),)
        return (self._rng.choice([index for index, value in enumerate(values) if value == highest]),)
