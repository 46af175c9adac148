"""Prefer, or keep only, the endpoint to which a client's session is pinned (`_affinity`)."""

import numpy as np

from epp.candidates import Candidates, Mask, Scores
from epp.plugin import Filter, Profile, Scorer, plugin
from epp.plugins.sessions._affinity import Pinning
from epp.request import Request


@plugin("session-affinity-scorer")
class SessionAffinityScorer(Pinning, Scorer):
    """Scores 1 for the endpoint that serves the client's session, 0 for all others. Without such an endpoint, all endpoints score 0."""

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        pinned = self.strategy.pinned(request, candidates, profile.name)
        if pinned < 0:
            return None
        scores: Scores = np.zeros(len(candidates))
        scores[pinned] = 1.0
        return scores


@plugin("session-affinity-filter")
class SessionAffinityFilter(Pinning, Filter):
    """Keeps only the endpoint that serves the client's session, if this endpoint is a candidate and not down; otherwise keeps all."""

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        pinned = self.strategy.pinned(request, candidates, profile.name)
        mask: Mask = np.full(len(candidates), pinned < 0)
        if pinned >= 0:
            mask[pinned] = True
        return mask


@plugin("multicluster-session-affinity-filter")
class MultiClusterSessionAffinityFilter(SessionAffinityFilter):
    """Does the same as session-affinity-filter for endpoints of several clusters. Discovery gives each endpoint a unique name."""
