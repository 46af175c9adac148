"""Prefer endpoints in the caller's zone: the request header `x-zone` must equal the endpoint's label `zone`."""

import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request


@plugin("same-zone-scorer")
class SameZone(Scorer):
    """Scores 1 for an endpoint in the zone that the request names, 0 for all others."""

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        return np.array([float(e.labels.get("zone") == request.headers.get("x-zone")) for e in candidates.endpoints])
