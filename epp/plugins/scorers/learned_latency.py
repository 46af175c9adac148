"""Prefer the endpoint at which the request costs least, by the learned latency model."""

import random

import numpy as np

from epp.candidates import Candidates, Scores
from epp.data import INFLIGHT_REQUESTS
from epp.learning.choice import scores
from epp.learning.costs import LearnedCosts, learned_costs
from epp.plugin import Profile, Scorer, Services, plugin
from epp.plugins._parameters import LearnedLatencyScorerParameters
from epp.request import Request

EXPLORED = 1.5


@plugin("learned-latency-scorer")
class LearnedLatency(Scorer):
    """Scores endpoints by lowest cost / cost. Endpoints that the model cannot tell from the cheapest one score almost 1.

    Among these, the endpoint with the fewest requests in flight scores most.
    """

    Params = LearnedLatencyScorerParameters

    def __init__(self, name: str, params: LearnedLatencyScorerParameters) -> None:
        super().__init__(name, params)
        self._costs = learned_costs(params.learned_latency_producer_name)
        self.consumes = (self._costs, INFLIGHT_REQUESTS)
        self._rng: random.Random

    def start(self, services: Services) -> None:
        self._rng = services.rng

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        learned: LearnedCosts | None = request[self._costs]
        if learned is None:
            return None
        if not learned.why_not and self._rng.random() < self.params.exploration_rate:
            times = candidates.narrow(learned.first_token_s)
            return np.where(times <= EXPLORED * times.min(), 1.0, 0.0)
        costs = candidates.narrow(learned.costs)
        return scores(costs, candidates[INFLIGHT_REQUESTS], 0.0 if learned.why_not else learned.model.error)
