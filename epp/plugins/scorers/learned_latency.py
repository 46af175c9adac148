"""Prefer the endpoint at which the request costs least, by the learned latency model."""

import random
from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Candidates, Scores
from epp.learning.choice import scores
from epp.learning.costs import learned_costs
from epp.plugin import Profile, Scorer, Services, plugin
from epp.request import Request

EXPLORED = 1.5


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Whose predictions count, and how often other endpoints are tried.

    exploration_rate: The part of the requests for which all endpoints count as equal whose first token is expected within 1.5 times the
    shortest time.
    learned_latency_producer_name: The producer of the predictions to read.
    """

    exploration_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.005
    learned_latency_producer_name: str = ""


@plugin("learned-latency-scorer")
class LearnedLatency(Scorer):
    """Scores lowest cost / cost. Endpoints that the model cannot tell from the cheapest one score 1, and the picker draws among them."""

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._costs = learned_costs(params.learned_latency_producer_name)
        self.consumes = (self._costs,)
        self._rng: random.Random

    def start(self, services: Services) -> None:
        self._rng = services.rng

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        learned = request[self._costs]
        if learned is None:
            return None
        costs = candidates.narrow(learned.costs).tolist()
        if not learned.why_not and self._rng.random() < self.params.exploration_rate:
            times = candidates.narrow(learned.first_token_s)
            return np.where(times <= EXPLORED * times.min(), 1.0, 0.0)
        return np.array(scores(costs, 0.0 if learned.why_not else learned.model.error))
