"""What is wrapped around a plugin when the configuration is compiled; identity for our own scorers.

Scores are promised in [0, 1]. Our own plugins are held to it by the contract tests; a foreign one is clipped here.
"""

import numpy as np

from epp.candidates import Candidates, Scores
from epp.errors import PluginFault
from epp.plugin import Profile, Scorer, ScorerCall
from epp.request import Request

OWN_PACKAGE = "epp.plugins."


def scorer(instance: Scorer) -> ScorerCall:
    """The bound `score`, clipped to [0, 1] with NaN as 0 and its shape checked unless it is one of ours."""
    score = instance.score
    if type(instance).__module__.startswith(OWN_PACKAGE):
        return score

    def clipped(request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        given = score(request, candidates, profile)
        if given is None:
            return None
        scores = np.asarray(given, dtype=np.float64)
        if scores.shape != (len(candidates),):
            raise PluginFault(
                f"scorer '{instance.name}' returned shape {scores.shape} for {len(candidates)} candidates; return one score per candidate"
            )
        return np.minimum(np.fmax(scores, 0.0), 1.0)

    return clipped
