"""Prefer the endpoint that serves the client's session."""

import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, Scorer, plugin
from epp.plugins.sessions._affinity import Pinning
from epp.request import Request


@plugin("session-affinity-scorer")
class SessionAffinityScorer(Pinning, Scorer):
    """Scores 1 for the endpoint that serves the client's session, 0 for others. Without such an endpoint all score 0."""

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        pinned = self.strategy.pinned(request, candidates, profile.name)
        if pinned < 0:
            return None
        scores: Scores = np.zeros(len(candidates))
        scores[pinned] = 1.0
        return scores
