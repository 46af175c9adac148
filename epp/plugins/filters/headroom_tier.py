"""Keep the endpoints that are predicted to meet the request's latency objectives."""

import random
from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Candidates, Mask
from epp.learning.latency import latency_predictions
from epp.plugin import Filter, Profile, Services, plugin
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which predictions are read, and how often the other endpoints are tried.

    epsilon_explore_neg: The probability that the negative tier is kept instead, so that predictions for its endpoints stay accurate.
    latency_prediction_info_producer_name: The producer of the latency predictions to read.
    """

    epsilon_explore_neg: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    latency_prediction_info_producer_name: str = ""


@plugin("slo-headroom-tier-filter")
class HeadroomTier(Filter):
    """Keeps the endpoints that are predicted to meet both latency objectives.

    The positive tier has the endpoints with both headrooms (objective - prediction) >= 0. The negative tier has all others, including
    endpoints without a prediction. If both tiers have endpoints, the filter keeps the negative tier with the probability
    epsilonExploreNeg, else the positive tier. Without predictions, all endpoints stay.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._epsilon = params.epsilon_explore_neg
        self._predictions = latency_predictions(params.latency_prediction_info_producer_name)
        self.consumes = (self._predictions,)
        self._rng: random.Random

    def start(self, services: Services) -> None:
        self._rng = services.rng

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        predictions = request[self._predictions]
        if predictions is not None and len(candidates) > 1:
            first: Mask = predictions.kept()
            if candidates.rows is not None:
                first = first[candidates.rows]
            count = int(np.count_nonzero(first))
            if count == len(first):
                return first
            if count:
                return ~first if self._rng.random() < self._epsilon else first
        return np.ones(len(candidates), dtype=np.bool_)
