"""Keep the endpoints that hold most of the prompt in their cache, unless waiting for them costs too much."""

import random
from typing import Annotated, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats, Mask
from epp.data import INFLIGHT_TOKENS
from epp.latency import latency_predictions
from epp.plugin import Filter, Profile, Services, plugin
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request

PREFILL_THROUGHPUT: Literal["prefillThroughput"] = "prefillThroughput"
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`affinity_threshold` of 0 and less switches the filter off, a `maxTTFTPenaltyMs` of 0 the gate.

    `inFlightLoadProducerName` names nothing here: tokens in flight are counted once, for all.
    """

    affinity_threshold: Annotated[float, msgspec.Meta(le=1)] = 0.80
    exploration_probability: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    max_ttft_penalty_ms: NotNegative = msgspec.field(default=18000.0, name="maxTTFTPenaltyMs")
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = PREFILL_THROUGHPUT
    peak_prefill_throughput: NotNegative = 15928.0
    prefix_match_info_producer_name: str = ""
    latency_prediction_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""


@plugin("prefix-cache-affinity-filter")
class PrefixCacheAffinity(Filter):
    """Sticky endpoints have matched / total >= threshold; they alone stay, if there are any.

    The gate keeps all when best TTFT of the sticky ones - best TTFT of the others > penalty. TTFT is the predicted one (none:
    endless), or tokens in flight as of this decision / throughput. So does, at random, exploration.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._predicted = params.ttft_source != PREFILL_THROUGHPUT
        self._penalty = params.max_ttft_penalty_ms
        if self._penalty and not self._predicted and not params.peak_prefill_throughput:
            raise ValueError("peakPrefillThroughput: must be above 0 while ttftSource is prefillThroughput")
        self._threshold = params.affinity_threshold
        self._exploration = params.exploration_probability
        if not self._predicted:
            self._penalty *= params.peak_prefill_throughput / 1000.0  # in tokens
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._predictions = latency_predictions(params.latency_prediction_info_producer_name)
        gate = (self._predictions if self._predicted else INFLIGHT_TOKENS,) if self._penalty else ()
        self.consumes = (self._match, *gate)
        self._rng: random.Random

    def start(self, services: Services) -> None:
        self._rng = services.rng

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        size = len(candidates)
        match = request[self._match]
        if size > 1 and self._threshold > 0 and match is not None and match.blocks is not None and not self._explores():
            sticky: Mask = candidates.narrow(match.blocks) / match.total >= self._threshold
            count = int(np.count_nonzero(sticky))
            if count == size or (count and not self._costs_too_much(request, candidates, sticky)):
                return sticky
        return np.ones(size, dtype=np.bool_)

    def _explores(self) -> bool:
        return self._exploration > 0 and self._rng.random() < self._exploration

    def _costs_too_much(self, request: Request, candidates: Candidates, sticky: Mask) -> bool:
        if not self._penalty:
            return False
        waits = self._waits(request, candidates)
        return float(np.minimum.reduce(waits[sticky])) - float(np.minimum.reduce(waits[~sticky])) > self._penalty

    def _waits(self, request: Request, candidates: Candidates) -> Floats:
        """TTFT per candidate, in the unit of the penalty."""
        if not self._predicted:
            tokens: Floats = candidates[INFLIGHT_TOKENS]
            return tokens
        predictions = request[self._predictions]
        if predictions is None:
            return np.full(len(candidates), np.inf)
        ttft = candidates.narrow(predictions.ttft_ms)
        return np.where(np.isnan(ttft), np.inf, ttft)
