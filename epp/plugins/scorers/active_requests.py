"""Prefer the endpoint with the fewest requests in flight, as counted by the picker."""

import numpy as np

from epp.candidates import Candidates, Scores
from epp.data import INFLIGHT_REQUESTS
from epp.plugin import Profile, Scorer, plugin
from epp.plugins._parameters import ActiveRequestsParameters
from epp.points.parameters import named_load
from epp.request import Request


@plugin("active-request-scorer")
class ActiveRequests(Scorer):
    """Scores endpoints by their requests in flight, as counted by the picker: fewer is better.

    An idle endpoint scores 1. A busy endpoint scores (most - count) / most * maxBusyScore, where most is the largest count among the
    candidates.
    """

    Params = ActiveRequestsParameters
    consumes = (INFLIGHT_REQUESTS,)

    def __init__(self, name: str, params: ActiveRequestsParameters) -> None:
        super().__init__(name, params)
        self.needs = named_load(params.in_flight_load_producer_name)
        self._idle = max(0, params.idle_threshold)
        highest = params.max_busy_score
        in_range = highest is not None and 0.0 <= highest <= 1.0
        self._busy = highest if highest is not None and in_range else 1.0
        if highest is not None and not in_range:
            self.without_effect = [f"maxBusyScore: {highest} is not in 0 to 1; 1 is used"]

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        counts = candidates[INFLIGHT_REQUESTS]
        most = np.maximum.reduce(counts)
        if most <= self._idle:
            return candidates.ones()
        scores: Scores = (most - counts) * (self._busy / most)
        scores[counts <= self._idle] = 1.0
        return scores
