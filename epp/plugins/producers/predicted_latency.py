"""Predicts latencies for every endpoint with a model, and compares predicted with measured latencies.

With the backend `sidecars`, the model runs in sidecars (`_predictor`). For each request, this plugin asks a sidecar about all candidates
at once. The decision waits for at most 0.4 s for the answer. Without an answer, the decision goes on, and plugins see no predictions. When
the response ends, the plugin sends samples: the measured latencies, with the state of the endpoint at the decision.

With the backend `built-in`, the predictions come from the picker's own model (`epp.learning`), and no decision waits. The learned latency
producer teaches this model. While that producer does not use the model, plugins see no predictions.

TTFT is the time to the first token, TPOT the time per further token. Objectives for both come from the request's headers. Each worker
knows only the objectives of its own running requests.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from epp.candidates import Candidates, EndpointList, Floats
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, KV_USAGE, WAITING, Datum
from epp.decision.decision import Decision, Response
from epp.learning.costs import LearnedCosts, learned_costs
from epp.learning.latency import TPOT_HEADERS, TTFT_HEADERS, LatencyPredictions, latency_predictions, objective_ms
from epp.metrics import buckets, counter, histogram
from epp.plugin import (
    Count,
    DataProducer,
    Measure,
    Plugin,
    PreRequest,
    ResponseComplete,
    ResponseStreaming,
    Services,
    Waiting,
    plugin,
)  # fmt: skip
from epp.plugins.producers._predictor import Prediction, Predictor, Row, Sample
from epp.prefix.match import APPROXIMATE, FollowsMatches, prefix_match
from epp.request import Request
from epp.request.tokens import TOKENS, media_match, token_count

PREFILL = "prefill"  # the value of the role label
MS = 1000.0
DURATION = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

PREDICTED_TTFT = histogram("request_predicted_ttft_seconds", "Predicted time to the first token.", buckets.LATENCY_S)
PREDICTED_TPOT = histogram("request_predicted_tpot_seconds", "Predicted time per token.", buckets.TOKEN_S)
TTFT_DURATION = histogram("request_ttft_prediction_duration_seconds", "How long the predictor took for TTFT.", DURATION)
TPOT_DURATION = histogram("request_tpot_prediction_duration_seconds", "How long the predictor took for TPOT.", DURATION)
VIOLATIONS = counter(
    "request_slo_violation_total", "Responses that missed the objective of their request.", "model_name", "target_model_name", "type"
)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What is predicted and measured. All but the first two parameters are those of the reference picker.

    backend: `sidecars` asks servers, `built-in` uses the model that learned-latency-producer teaches.
    learned_latency_producer_name: With `built-in`, the producer to read.
    slo_buffer_factor: Objectives for the time per token are multiplied by this number.
    context_ttl: Accepted, without effect.
    streaming_mode: Answers are streamed, so TTFT and TPOT can be measured.
    endpoint_role_label: The label with an endpoint's role in disaggregated serving.
    predict_in_produce: Predict for every candidate before the decision.
    use_encoder_cache_features: Tell the predictor which media are cached.
    prefix_match_info_producer_name: The producer of the prefix matches to read.
    in_flight_load_producer_name: Accepted, without effect: the picker counts the load in flight itself.
    encoder_cache_match_info_producer_name: The producer of the media matches to read.
    sampling_mean: Accepted, without effect.
    max_decode_token_samples_for_prediction: Accepted, without effect.
    """

    backend: Literal["sidecars", "built-in"] = "sidecars"
    learned_latency_producer_name: str = ""
    slo_buffer_factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    context_ttl: int = msgspec.field(default=300_000_000_000, name="contextTTL")
    streaming_mode: bool = False
    endpoint_role_label: str = ""
    predict_in_produce: bool = True
    use_encoder_cache_features: bool = False
    prefix_match_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""
    encoder_cache_match_info_producer_name: str = ""
    sampling_mean: float = 1000.0
    max_decode_token_samples_for_prediction: int = 0


class Roles:
    """Reads the role labels of one endpoint list."""

    __slots__ = ("endpoint_list", "names", "prefill")

    def __init__(self, endpoint_list: EndpointList, label: str) -> None:
        self.endpoint_list = endpoint_list
        self.names = [endpoint.labels.get(label, "") if label else "" for endpoint in endpoint_list.endpoints]
        self.prefill = np.array([name == PREFILL for name in self.names], dtype=bool)


class Features:
    """Holds the input of the model for one request: one array per feature, over the candidates at the time of `produce`."""

    __slots__ = ("held", "input_tokens", "kv", "media", "prefix", "requests", "roles", "tokens", "waiting", "within")

    def __init__(self, candidates: Candidates, input_tokens: int, roles: Roles) -> None:
        size = len(candidates)
        self.input_tokens = input_tokens
        self.within = candidates.rows
        self.kv: Floats = np.minimum(np.maximum(candidates[KV_USAGE], 0.0), 1.0)
        self.waiting: Floats = candidates[WAITING]
        self.requests: Floats = candidates[INFLIGHT_REQUESTS]
        self.tokens: Floats = candidates[INFLIGHT_TOKENS]
        self.prefix: Floats = np.zeros(size)
        self.held: Floats = np.zeros(size)
        self.media = 0
        self.roles = roles

    def rows(self) -> list[Row]:
        """Returns the features as rows for the predictor, one per candidate."""
        names = self.roles.names
        if self.within is not None:
            names = [names[row] for row in self.within.tolist()]
        columns = zip(
            self.kv.tolist(),
            _whole(self.waiting),
            _whole(self.requests),
            self.prefix.tolist(),
            _whole(self.held),
            _whole(self.tokens),
            names,
            strict=True,
        )
        tokens, media = self.input_tokens, self.media
        return [
            Row(kv, tokens, waiting, running, 1, prefix, media, held, load, 0, name)
            for kv, waiting, running, prefix, held, load, name in columns
        ]

    def at(self, row: int) -> "State":
        """Returns the features of the endpoint in this row of the snapshot."""
        at = row if self.within is None else int(np.searchsorted(self.within, row))
        return State(
            row,
            float(self.kv[at]),
            self.input_tokens,
            int(self.waiting[at]),
            int(self.requests[at]),
            float(self.prefix[at]),
            self.media,
            int(self.held[at]),
            max(0, int(self.tokens[at])),
            self.roles.names[row],
        )


class State(NamedTuple):
    """Holds the features of one endpoint for one request. `row` is the endpoint's row in the snapshot."""

    row: int
    kv: float
    input_tokens: int
    waiting: int
    requests: int
    prefix: float
    media: int
    held: int
    tokens: int
    role: str

    def first_token(self, ttft_ms: float) -> Sample:
        return Sample(
            self.kv, self.input_tokens, self.waiting, self.requests, 0, self.prefix, self.media, self.held, self.tokens, 0,
            self.role, actual_ttft_ms=ttft_ms, actual_tpot_ms=0.0,
        )  # fmt: skip

    def per_token(self, tpot_ms: float) -> Sample:
        """Returns a sample with this time per token. Its prefix is 0, because a cached prefix affects only the first token."""
        return Sample(
            self.kv, self.input_tokens, self.waiting, self.requests, 0, 0.0, 0, 0, self.tokens, 0,
            self.role, actual_ttft_ms=0.0, actual_tpot_ms=tpot_ms,
        )  # fmt: skip


class Measured:
    """Measures one request, from its decision to the end of its response."""

    __slots__ = ("features", "first_at", "prefill", "running_at", "target", "tpot_ms", "ttft_ms")

    def __init__(self, features: Features, ttft_ms: float, tpot_ms: float) -> None:
        self.features: Features | None = features  # set until the decision
        self.ttft_ms = ttft_ms  # the objectives of the request
        self.tpot_ms = tpot_ms
        self.target: State | None = None
        # The state of the endpoint that computes the prompt: the target, unless a prefill profile ran.
        self.prefill: State | None = None
        self.running_at = -1  # owner id of the endpoint at which the TPOT objective counts
        self.first_at = 0.0


@plugin("predicted-latency-producer")
class PredictedLatency(FollowsMatches, DataProducer, PreRequest, ResponseStreaming, ResponseComplete):
    """Emits the predicted TTFT and TPOT of each endpoint and their headrooms: objective - prediction, in ms.

    TTFT is the time to the first token, TPOT the time per further token. A missing objective counts as 0 ms. The TPOT objective at an
    endpoint is the smallest among this request and the requests that run at the endpoint, multiplied by sloBufferFactor. Without
    `streamingMode`, and on endpoints with the role `prefill`, the TPOT headroom is 0.
    """

    Params = Parameters
    counts_with: ClassVar = {
        "learnedLatencyProducerName": ("backend", ("built-in",)),
        "encoderCacheMatchInfoProducerName": ("useEncoderCacheFeatures", (True,)),
    }
    first_chunk_only = True
    metrics = (PREDICTED_TTFT, PREDICTED_TPOT, TTFT_DURATION, TPOT_DURATION, VIOLATIONS)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._predictions = latency_predictions(name)
        self._measured = Datum(f"latency_measured/{name}", Measured)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._media = media_match(params.encoder_cache_match_info_producer_name)
        media = (self._media,) if params.use_encoder_cache_features else ()
        self._learned = learned_costs(params.learned_latency_producer_name)
        self._built_in = params.backend == "built-in"
        learned = (self._learned,) if self._built_in else ()
        self.consumes = (self._match, *media, *learned, KV_USAGE, WAITING, INFLIGHT_REQUESTS, INFLIGHT_TOKENS)
        self.optional = (TOKENS,)
        self.produces = (self._predictions,)
        self.keeps = (self._measured,)
        self._roles = Roles(EndpointList(()), params.endpoint_role_label)
        self._running: dict[int, list[float]] = {}  # owner -> sorted TPOT objectives of this worker's requests
        self._predictor: Predictor | None = None
        self._predicted_ttft: Measure
        self._predicted_tpot: Measure
        self._ttft_duration: Measure
        self._tpot_duration: Measure
        self._violations: Count

    def start(self, services: Services) -> None:
        self._predicted_ttft = services.measure(self, PREDICTED_TTFT)
        self._predicted_tpot = services.measure(self, PREDICTED_TPOT)
        self._ttft_duration = services.measure(self, TTFT_DURATION)
        self._tpot_duration = services.measure(self, TPOT_DURATION)
        self._violations = services.count(self, VIOLATIONS)
        if not self._built_in:
            self._predictor = Predictor(services, self)
            self._predictor.start()

    def take_over(self, predecessor: Plugin) -> None:
        if isinstance(predecessor, type(self)):
            # The same dict, because the predecessor still removes the objectives of its own requests from it.
            self._running = predecessor._running

    def produce(self, request: Request, candidates: Candidates) -> Waiting | None:
        features = self._features(request, candidates)
        ttft_ms, tpot_ms = objective_ms(request, TTFT_HEADERS), objective_ms(request, TPOT_HEADERS)
        request[self._measured] = Measured(features, ttft_ms, tpot_ms)
        if not self.params.predict_in_produce:
            return None
        endpoint_list = candidates.snapshot.endpoint_list
        if self._predictor is None:
            learned = request[self._learned]
            if learned is not None and not learned.why_not:
                predictions = _learned_predictions(learned, candidates)
                request[self._predictions] = self._with_headrooms(predictions, features, endpoint_list, ttft_ms, tpot_ms)
            return None

        def deliver(predictions: Sequence[Prediction], seconds: float) -> None:
            self._ttft_duration.observe(seconds)
            self._tpot_duration.observe(seconds)
            request[self._predictions] = self._with_headrooms(predictions, features, endpoint_list, ttft_ms, tpot_ms)

        return self._predictor.ask(features.rows(), request.now, deliver)

    def before_send(self, request: Request, decision: Decision) -> None:
        measured = request[self._measured]
        primary = decision.runs.get(decision.primary)
        if measured is None or measured.features is None or primary is None:
            return
        features, measured.features = measured.features, None  # keep only one or two rows during the response
        measured.target = measured.prefill = features.at(primary.row)
        prefill = decision.runs.get(decision.prefill)
        if prefill is not None and prefill is not primary:
            measured.prefill = features.at(prefill.row)
        if self.params.streaming_mode and measured.tpot_ms > 0.0:
            owner = measured.running_at = primary.target.owner
            insort(self._running.setdefault(owner, []), measured.tpot_ms)

    def response_streaming(self, request: Request, decision: Decision) -> None:
        measured = request[self._measured]
        if measured is not None:
            measured.first_at = request.now

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        measured = request[self._measured]
        if measured is None:
            return
        self._leave(measured)
        if not response.whole or response.failed or not 200 <= response.status < 300:
            return  # such a response says nothing about the endpoint's latency
        ttft_ms = ((measured.first_at if self.params.streaming_mode else request.now) - request.sent_at) * MS
        if ttft_ms <= 0.0 or measured.prefill is None or measured.target is None:
            return  # in streaming mode, an answer that was not streamed does not count
        predicted = request[self._predictions]
        self._teach(measured.prefill.first_token(ttft_ms))
        self._compare(request, "ttft", ttft_ms, measured.ttft_ms)
        if predicted is not None:
            self._predicted_ttft.observe(predicted.ttft_ms[measured.prefill.row] / MS)
        tokens = response.usage.completion if response.usage is not None else None
        if not self.params.streaming_mode or tokens is None or tokens < 2:
            return
        tpot_ms = (request.now - measured.first_at) * MS / (tokens - 1)
        if tpot_ms > 0.0:
            self._teach(measured.target.per_token(tpot_ms))
            self._compare(request, "tpot", tpot_ms, measured.tpot_ms)
            if predicted is not None:
                self._predicted_tpot.observe(predicted.tpot_ms[measured.target.row] / MS)

    def _teach(self, sample: Sample) -> None:
        if self._predictor is not None:
            self._predictor.learn(sample)

    def _features(self, request: Request, candidates: Candidates) -> Features:
        endpoint_list = candidates.snapshot.endpoint_list
        if endpoint_list is not self._roles.endpoint_list:
            self._roles = Roles(endpoint_list, self.params.endpoint_role_label)
        features = Features(candidates, token_count(request), self._roles)
        match = request[self._match]
        shares = None if match is None else match.share(candidates)
        if shares is not None:
            features.prefix = shares
        if self.params.use_encoder_cache_features and (media := request[self._media]) is not None:
            features.media = media.total
            if media.held is not None:
                features.held = np.minimum(candidates.narrow(media.held), media.total)
        return features

    def _with_headrooms(
        self,
        predictions: Sequence[Prediction],
        features: Features,
        endpoint_list: EndpointList,
        ttft_objective: float,
        tpot_objective: float,
    ) -> LatencyPredictions:
        """Returns predictions and headrooms, one per endpoint of the snapshot; NaN for endpoints that are not candidates."""
        rows = slice(None) if features.within is None else features.within
        ttft, tpot = np.full((2, len(endpoint_list.endpoints)), np.nan)
        ttft[rows] = [prediction.ttft_ms for prediction in predictions]
        tpot[rows] = [prediction.tpot_ms for prediction in predictions]
        headroom = np.where(np.isnan(tpot), np.nan, 0.0)
        if self.params.streaming_mode:
            limited = self._tpot_limits(endpoint_list, tpot_objective) - tpot
            headroom = np.where(features.roles.prefill, headroom, limited)
        return LatencyPredictions(ttft_ms=ttft, tpot_ms=tpot, ttft_headroom=ttft_objective - ttft, tpot_headroom=headroom)

    def _tpot_limits(self, endpoint_list: EndpointList, objective: float) -> Floats:
        factor = self.params.slo_buffer_factor
        limits = np.full(len(endpoint_list.endpoints), objective * factor)
        for owner, objectives in self._running.items():
            row = endpoint_list.row_of_owner.get(owner)
            if row is not None:
                limits[row] = min(limits[row], objectives[0] * factor)
        return limits

    def _leave(self, measured: Measured) -> None:
        """Removes the request's TPOT objective from its endpoint."""
        owner, measured.running_at = measured.running_at, -1
        objectives = self._running.get(owner)
        if objectives is not None:
            del objectives[bisect_left(objectives, measured.tpot_ms)]
            if not objectives:
                del self._running[owner]

    def _compare(self, request: Request, what: str, actual_ms: float, objective: float) -> None:
        if 0.0 < objective < actual_ms:
            self._violations.add(request.model, request.target_model, what)


def _learned_predictions(learned: LearnedCosts, candidates: Candidates) -> list[Prediction]:
    """Returns what the built-in model predicts for the candidates, in their order."""
    model, first = learned.model, candidates.narrow(learned.first_token_s).tolist()
    load = candidates[INFLIGHT_REQUESTS].tolist()
    return [
        Prediction(seconds * MS, model.per_token_s(endpoint.slot, requests) * MS)
        for endpoint, seconds, requests in zip(candidates.endpoints, first, load, strict=True)
    ]


def _whole(values: Floats) -> list[int]:
    counts: list[int] = np.maximum(values, 0.0).astype(np.int64).tolist()
    return counts
