"""Prefer endpoints whose first token is expected soonest at their present load, from observed responses alone."""

import random
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats, Mask, Scores
from epp.data import INFLIGHT_REQUESTS
from epp.learning.costs import learned_costs
from epp.learning.ttft import ttft_percentiles
from epp.plugin import Plugin, Profile, Scorer, Services, plugin
from epp.request import Request

GAP = 2.0
LEARNED_OBSERVER = "latency-observer-producer"
ENOUGH = 10  # answers after which an endpoint is known, unless the observer sets another number


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How far the curve is trusted, and how often other endpoints are tried. As in the reference picker.

    exploration_rate: The probability that an endpoint with too few observations gets the best score.
    min_inflight_gap: The point of low load is used only if the point of typical load has at least this many more requests in flight.
    round_ttft_step: Predictions are rounded to multiples of so many seconds. With 0, they are not rounded.
    ttft_percentiles_producer_name: The producer of the percentiles to read.
    in_flight_load_producer_name: Accepted, without effect: the picker counts the load in flight itself.
    """

    exploration_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    min_inflight_gap: Annotated[float, msgspec.Meta(gt=0)] = GAP
    round_ttft_step: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(default=0.0, name="roundTTFTStep")
    ttft_percentiles_producer_name: str = ""
    in_flight_load_producer_name: str = ""


@plugin("latency-observation-scorer-hub")
class LatencyObservation(Scorer):
    """Scores endpoints by their predicted times to the first token: (longest - predicted) / (longest - shortest).

    The prediction for the current load is read from a curve through observed points: from the floor at load 0 to the point of low load,
    from there to the point of typical load, and on. If the point of low load is too close to that of typical load, or its time is not
    between floor and typical time, the curve goes straight from the floor to the point of typical load. With too few recent requests, there
    is no curve and the prediction is the floor. An endpoint with too few observations for a floor (a cold endpoint) is treated as the
    fastest. If all endpoints are cold, all score 1.

    Endpoints without a curve are explored: each scores 1 with probability `explorationRate`, else 0 if another endpoint has a curve.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._percentiles = ttft_percentiles(params.ttft_percentiles_producer_name)
        self.consumes = (self._percentiles, INFLIGHT_REQUESTS)
        self._rng: random.Random

    def start(self, services: Services) -> None:
        self._rng = services.rng

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        observed = request[self._percentiles]
        if observed is None:
            return candidates.ones()
        floor: Floats = candidates.narrow(observed.floor_s)
        warm = floor > 0.0
        if not warm.any():
            return candidates.ones()
        low, typical = candidates.narrow(observed.low_s), candidates.narrow(observed.typical_s)
        low_load, typical_load = candidates.narrow(observed.low_load), candidates.narrow(observed.typical_load)
        recent = observed.recent if candidates.rows is None else observed.recent[candidates.rows]
        trusted: Mask = warm & recent & (typical_load > 0.0) & (typical > floor)
        bends = (typical_load - low_load >= self.params.min_inflight_gap) & (typical > low) & (low > floor) & (low_load > 0.0)
        load: Floats = candidates[INFLIGHT_REQUESTS]
        with np.errstate(divide="ignore", invalid="ignore"):  # rows with a 0 are not selected
            below = floor + load * (low - floor) / low_load
            above = low + (load - low_load) * (typical - low) / (typical_load - low_load)
            straight = floor + load * (typical - floor) / typical_load
        curve = np.where(bends, np.where(load < low_load, below, above), straight)
        return self._scored(np.where(trusted, np.maximum(curve, floor), floor), warm, trusted)

    def _scored(self, predicted: Floats, warm: Mask, trusted: Mask) -> Scores:
        step: float = self.params.round_ttft_step
        if step > 0.0:
            predicted = np.floor(predicted / step + 0.5) * step
        shortest, longest = predicted[warm].min(), predicted[warm].max()
        if longest > shortest:
            scores: Scores = (longest - np.where(warm, predicted, shortest)) / (longest - shortest)
        else:
            scores = np.ones(len(predicted))
        if self.params.exploration_rate > 0.0 and not trusted.all():
            self._explore(scores, trusted)
        return scores

    def _explore(self, scores: Scores, trusted: Mask) -> None:
        others = bool(trusted.any())
        for row in np.flatnonzero(~trusted).tolist():
            if self._rng.random() < self.params.exploration_rate:
                scores[row] = 1.0
            elif others:
                scores[row] = 0.0


@plugin("latency-observation-scorer")
class LearnedObservation(LatencyObservation):
    """Scores endpoints by their predicted times to the first token: (longest - predicted) / (longest - shortest).

    The predictions are those of the learned latency model, from `latency-observer-producer`. An endpoint with fewer answers than the
    producer's `minRequests` is cold: it scores 1 with probability `explorationRate`, else 0 if another endpoint is known. While the model
    knows too few endpoints, or predicts worse than the pool's mean, the times are replaced by the costs of the rule that needs no model.
    """

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._producer = params.ttft_percentiles_producer_name or LEARNED_OBSERVER
        self._costs = learned_costs(self._producer)
        self.consumes = (self._costs,)
        self._enough = ENOUGH
        if params.min_inflight_gap != GAP:
            self.without_effect = ["minInflightGap: has no effect here"]

    def meet(self, plugins: Sequence[Plugin]) -> None:
        for each in plugins:
            if each.name == self._producer:
                self._enough = getattr(each.params, "min_requests", ENOUGH)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        learned = request[self._costs]
        if learned is None:
            return candidates.ones()
        if learned.why_not:
            known: Mask = np.ones(len(candidates), dtype=bool)
            return self._scored(candidates.narrow(learned.costs), known, known)
        found = [learned.model.endpoints.get(endpoint.slot) for endpoint in candidates.endpoints]
        warm: Mask = np.array([each is not None and each.samples >= self._enough for each in found], dtype=bool)
        if not warm.any():
            return candidates.ones()
        return self._scored(candidates.narrow(learned.first_token_s), warm, warm)
