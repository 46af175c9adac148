"""Prefer endpoints that are predicted to just meet the latency objectives or, if no endpoint meets them, to miss them by the least."""

from typing import Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats, Mask, Scores
from epp.data import INFLIGHT_REQUESTS, KV_USAGE, WAITING
from epp.learning.latency import latency_predictions
from epp.plugin import Profile, Scorer, plugin
from epp.prefix.match import APPROXIMATE, FollowsMatches, prefix_match
from epp.request import Request

EPSILON = 1e-9  # headrooms that differ by at most this are equal
STEPS = 100.0  # scores are hundredths
MIDDLE = 0.5  # the normalised headroom in a bucket where all headrooms are equal


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The weights of a score are proportions. If the two weights add up to 0 or less, only the first one has an effect.

    ttft_weight: The weight of the time to the first token.
    tpot_weight: The weight of the time per further token.
    headroom_selection_strategy: Prefer the endpoint with the least, or with the most, time to spare.
    composite_kv_weight: Without predictions: the weight of free KV cache.
    composite_queue_weight: Without predictions: the weight of a short queue.
    composite_prefix_weight: Without predictions: the weight of the prefix match.
    latency_prediction_info_producer_name: The producer of the latency predictions to read.
    prefix_match_info_producer_name: The producer of the prefix matches to read.
    """

    ttft_weight: float = 0.8
    tpot_weight: float = 0.2
    headroom_selection_strategy: Literal["least", "most"] = "least"
    composite_kv_weight: float = msgspec.field(default=1.0, name="compositeKVWeight")
    composite_queue_weight: float = 1.0
    composite_prefix_weight: float = 1.0
    latency_prediction_info_producer_name: str = ""
    prefix_match_info_producer_name: str = ""


@plugin("latency-scorer")
class Latency(FollowsMatches, Scorer):
    """Scores the endpoints with the best predicted latencies by |headroom|; all other endpoints score 0.

    The headrooms of an endpoint are objective - prediction, for TTFT (time to first token) and TPOT (time per further token). Only one
    group (*bucket*) of endpoints gets scores above 0:

    1. the endpoints that meet both objectives or have no prediction; they are scored by the configured strategy;
    2. without such endpoints: endpoints without requests in flight at this decision, else those that miss TPOT only, else TTFT only, else
       both; they are scored by the strategy `least`.

    Within the bucket, n_ttft and n_tpot are the |headrooms|, scaled from 0 for the smallest to 1 for the largest (min-max). With the
    weights a and b of TTFT and TPOT, c is a * n_ttft + b * n_tpot. If all TTFT headrooms are equal, c is n_tpot, and conversely; if all of
    both are equal, both n are 0.5. The score in hundredths is floor((1 - c) * 100) + 1 for `least` and floor(c * 100) + 1 for `most`, at
    most 100.

    If no endpoint has a prediction, the score is the weighted mean of free KV cache, (longest queue - queue) / longest queue and
    matched / total of the prefix, rounded to hundredths.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._predictions = latency_predictions(params.latency_prediction_info_producer_name)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self.consumes = (self._predictions, self._match, KV_USAGE, WAITING, INFLIGHT_REQUESTS)
        self._ttft, self._tpot = proportions(params.ttft_weight, params.tpot_weight)
        composite = (params.composite_kv_weight, params.composite_queue_weight, params.composite_prefix_weight)
        self._kv, self._queue, self._prefix = proportions(*composite)
        self._most = params.headroom_selection_strategy == "most"

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        predictions = request[self._predictions]
        if predictions is None:
            return self._composite(request, candidates)
        ttft, tpot = candidates.narrow(predictions.ttft_headroom), candidates.narrow(predictions.tpot_headroom)
        worst = lowest(ttft)
        if worst != worst:  # NaN: some endpoints have no prediction
            unknown = np.isnan(ttft)
            if unknown.all():
                return self._composite(request, candidates)
            ttft, tpot = np.where(unknown, 0.0, ttft), np.where(unknown, 0.0, tpot)
            worst = lowest(ttft)
        if worst >= 0.0 and lowest(tpot) >= 0.0:
            return self._compared(ttft, tpot, most=self._most)
        kept: Mask = (ttft >= 0.0) & (tpot >= 0.0)
        some = bool(kept.any())
        bucket = kept if some else least_bad(ttft, tpot, candidates)
        scores: Scores = np.zeros(len(ttft))
        scores[bucket] = self._compared(np.abs(ttft[bucket]), np.abs(tpot[bucket]), most=self._most and some)
        return scores

    def _compared(self, ttft: Floats, tpot: Floats, *, most: bool) -> Scores:
        """Returns the scores of one bucket from its headrooms, which must not be negative."""
        n_ttft, n_tpot = spread(ttft), spread(tpot)
        if n_ttft is None and n_tpot is None:
            combined: Floats = np.full(len(ttft), (self._ttft + self._tpot) * MIDDLE)
        elif n_ttft is None or n_tpot is None:
            combined = n_ttft if n_ttft is not None else n_tpot  # type: ignore[assignment]  # one of them is not None
        else:
            combined = self._ttft * n_ttft + self._tpot * n_tpot
        steps = np.floor((combined if most else 1.0 - combined) * STEPS)
        steps += 1.0
        return bounded(steps / STEPS)

    def _composite(self, request: Request, candidates: Candidates) -> Scores:
        waiting: Floats = candidates[WAITING]
        total: Floats = (1.0 - candidates[KV_USAGE]) * self._kv
        longest = highest(waiting)
        total += self._queue if longest <= 0.0 else (longest - waiting) / longest * self._queue
        match = request[self._match]
        shares = None if match is None else match.share(candidates)
        if shares is not None:
            total += shares * self._prefix
        return bounded(np.floor(total * STEPS + 0.5) / STEPS)


def proportions(*weights: float) -> tuple[float, ...]:
    """Returns the weights scaled to a sum of 1."""
    total = sum(weights)
    if total <= 0.0:
        return (1.0, *(0.0 for _ in weights[1:]))
    return tuple(weight / total for weight in weights)


def least_bad(ttft: Floats, tpot: Floats, candidates: Candidates) -> Mask:
    """Returns the bucket of endpoints to score if every endpoint misses an objective."""
    late, slow = ttft < 0.0, tpot < 0.0
    idle: Mask = candidates[INFLIGHT_REQUESTS] <= 0.0
    for bucket in (idle, ~late, ~slow):
        if bucket.any():
            return bucket
    return late


def spread(sizes: Floats) -> Floats | None:
    """Returns the values scaled from 0 for the smallest to 1 for the largest; None if they do not differ."""
    low, high = lowest(sizes), highest(sizes)
    return (sizes - low) / (high - low) if high - low > EPSILON else None


def lowest(values: Floats) -> float:
    """Returns the minimum; NaN if any value is NaN."""
    return float(np.minimum.reduce(values))


def highest(values: Floats) -> float:
    """Returns the maximum; NaN if any value is NaN."""
    return float(np.maximum.reduce(values))


def bounded(scores: Scores) -> Scores:
    """Clips scores to [0, 1]: weights may be negative, and servers may report a usage above 1."""
    return np.minimum(np.maximum(scores, 0.0), 1.0)
