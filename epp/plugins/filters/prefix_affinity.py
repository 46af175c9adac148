"""Keep the endpoints that have most of the prompt in their cache, unless waiting for them costs too much."""

import random
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats, Mask
from epp.data import INFLIGHT_TOKENS
from epp.learning.latency import latency_predictions
from epp.metrics import counter
from epp.plugin import Count, Filter, Profile, Services, plugin
from epp.points.parameters import tuned
from epp.prefix.match import APPROXIMATE, FollowsMatches, prefix_match
from epp.request import Request

PREFILL_THROUGHPUT: Literal["prefillThroughput"] = "prefillThroughput"
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """From which share of a prompt affinity applies, and when it costs too much.

    affinity_threshold: The share of a prompt that must be cached; 0 or less switches the filter off.
    exploration_probability: The probability that the filter keeps all endpoints of a request.
    max_ttft_penalty_ms: How much later than at other endpoints the first token may come; 0 means any time.
    ttft_source: How the time to the first token is estimated.
    peak_prefill_throughput: Tokens per second that a server prefills.
    prefix_match_info_producer_name: The producer of the prefix matches to read.
    latency_prediction_info_producer_name: The producer of the latency predictions to read.
    in_flight_load_producer_name: Accepted, without effect: the picker counts the load in flight itself.
    """

    affinity_threshold: Annotated[float, msgspec.Meta(le=1), tuned(0.1, 1)] = 0.80
    exploration_probability: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    max_ttft_penalty_ms: NotNegative = msgspec.field(default=18000.0, name="maxTTFTPenaltyMs")
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = PREFILL_THROUGHPUT
    peak_prefill_throughput: NotNegative = 15928.0
    prefix_match_info_producer_name: str = ""
    latency_prediction_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""


DECISIONS = counter(
    "prefix_cache_affinity_filter_decisions_total",
    "Decisions: sticky, or why all endpoints stayed (no_match, load_override, exploration, not_applicable).",
    "outcome",
)


@plugin("prefix-cache-affinity-filter")
class PrefixCacheAffinity(FollowsMatches, Filter):
    """Keeps the endpoints that have at least the threshold's share of the prompt cached (matched / total): the sticky ones.

    All endpoints stay in three cases: no endpoint is sticky; a draw with the exploration probability decides so; or the best TTFT (time to
    first token) of the sticky endpoints exceeds the best TTFT of the others by more than the penalty. The TTFT is predicted (infinite
    without a prediction), or it is the tokens in flight at this decision divided by the throughput.
    """

    Params = Parameters
    counts_with: ClassVar = {
        "peakPrefillThroughput": ("ttftSource", (PREFILL_THROUGHPUT,)),
        "latencyPredictionInfoProducerName": ("ttftSource", ("latencyPredictor",)),
    }
    metrics = (DECISIONS,)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._predicted = params.ttft_source != PREFILL_THROUGHPUT
        self._penalty = params.max_ttft_penalty_ms
        if self._penalty and not self._predicted and not params.peak_prefill_throughput:
            raise ValueError("peakPrefillThroughput: must be above 0 while ttftSource is prefillThroughput")
        self._threshold = params.affinity_threshold
        self._exploration = params.exploration_probability
        if not self._predicted:
            self._penalty *= params.peak_prefill_throughput / 1000.0  # converts milliseconds to tokens
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._predictions = latency_predictions(params.latency_prediction_info_producer_name)
        gate = (self._predictions if self._predicted else INFLIGHT_TOKENS,) if self._penalty else ()
        self.consumes = (self._match, *gate)
        self._rng: random.Random
        self._decisions: Count

    def start(self, services: Services) -> None:
        self._rng = services.rng
        self._decisions = services.count(self, DECISIONS)

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        sticky, outcome = self._decide(request, candidates)
        self._decisions.add(outcome)
        return np.ones(len(candidates), dtype=np.bool_) if sticky is None else sticky

    def _decide(self, request: Request, candidates: Candidates) -> tuple[Mask | None, str]:
        """Returns the sticky endpoints, or None if all endpoints stay, and the outcome for the metric."""
        size = len(candidates)
        match = request[self._match]
        if size < 2 or self._threshold <= 0:
            return None, "not_applicable"
        shares = None if match is None else match.share(candidates)
        if shares is None:
            return None, "no_match"
        if self._explores():
            return None, "exploration"
        sticky: Mask = shares >= self._threshold
        count = int(np.count_nonzero(sticky))
        if not count:
            return None, "no_match"
        if count < size and self._costs_too_much(request, candidates, sticky):
            return None, "load_override"
        return sticky, "sticky"

    def _explores(self) -> bool:
        return self._exploration > 0 and self._rng.random() < self._exploration

    def _costs_too_much(self, request: Request, candidates: Candidates, sticky: Mask) -> bool:
        if not self._penalty:
            return False
        waits = self._waits(request, candidates)
        return float(np.minimum.reduce(waits[sticky])) - float(np.minimum.reduce(waits[~sticky])) > self._penalty

    def _waits(self, request: Request, candidates: Candidates) -> Floats:
        """Returns the TTFT per candidate, in the unit of `_penalty`: milliseconds if predicted, else tokens in flight."""
        if not self._predicted:
            tokens: Floats = candidates[INFLIGHT_TOKENS]
            return tokens
        predictions = request[self._predictions]
        if predictions is None:
            return np.full(len(candidates), np.inf)
        ttft = candidates.narrow(predictions.ttft_ms)
        return np.where(np.isnan(ttft), np.inf, ttft)
