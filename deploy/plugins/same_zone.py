"""Prefer servers in the caller's zone: `x-zone` of the request against the label `zone` of the endpoint."""

import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request


@plugin("same-zone-scorer")
class SameZone(Scorer):
    """1 in the zone that the request names, 0 elsewhere."""

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        return np.array([float(e.labels.get("zone") == request.headers.get("x-zone")) for e in candidates.endpoints])
