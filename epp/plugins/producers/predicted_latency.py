"""Latencies that a trained model predicts for every endpoint, and what came of them, to train it by.

The model lives in sidecars (`_predictor`). For each request they are asked about all candidates at once, and the decision waits
for the answer, for 0.4 s at most; without one it goes on, and readers see no predictions. When the response is over, what was
measured goes back with the state that the request found.

Objectives come with the request's headers. Which objectives run on an endpoint each worker knows of its own requests only.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from epp.candidates import Candidates, Floats, Roster
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, KV_USAGE, WAITING, Datum
from epp.decision import Decision, Response
from epp.latency import TPOT_HEADERS, TTFT_HEADERS, LatencyPredictions, latency_predictions, objective_ms
from epp.metrics import LAT, TPOT, Metric
from epp.multimodal import media_match
from epp.plugin import (
    Count,
    DataProducer,
    Measure,
    PreRequest,
    ResponseComplete,
    ResponseStreaming,
    Services,
    Waiting,
    plugin,
)  # fmt: skip
from epp.plugins.producers._predictor import Prediction, Predictor, Row, Sample
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request
from epp.tokens import TOKENS, token_count

PREFILL = "prefill"  # the label's value
CONTEXT_TTL_NS = 300_000_000_000
SAMPLING_MEAN = 1000.0
MS = 1000.0
DURATION = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

PREDICTED_TTFT = Metric("request_predicted_ttft_seconds", "histogram", "Predicted time to the first token.", LAT)
PREDICTED_TPOT = Metric("request_predicted_tpot_seconds", "histogram", "Predicted time per token.", TPOT)
TTFT_DURATION = Metric(
    "request_ttft_prediction_duration_seconds", "histogram", "How long the predictor took for TTFT.", DURATION
)
TPOT_DURATION = Metric(
    "request_tpot_prediction_duration_seconds", "histogram", "How long the predictor took for TPOT.", DURATION
)
VIOLATIONS = Metric(
    "request_slo_violation_total",
    "counter",
    "Responses that missed the objective of their request.",
    labels=("model_name", "target_model_name", "type"),
)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """As in the field. `streamingMode`: answers are streamed, so that a first token and a time per token can be told."""

    slo_buffer_factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    context_ttl: int = msgspec.field(default=CONTEXT_TTL_NS, name="contextTTL")
    streaming_mode: bool = False
    endpoint_role_label: str = ""
    predict_in_produce: bool = True
    use_encoder_cache_features: bool = False
    prefix_match_info_producer_name: str = ""
    in_flight_load_producer_name: str = ""
    encoder_cache_match_info_producer_name: str = ""
    sampling_mean: float = SAMPLING_MEAN
    max_decode_token_samples_for_prediction: int = 0


class Roles:
    """The role labels of one roster."""

    __slots__ = ("names", "prefill", "roster")

    def __init__(self, roster: Roster, label: str) -> None:
        self.roster = roster
        self.names = [endpoint.labels.get(label, "") if label else "" for endpoint in roster.endpoints]
        self.prefill = np.array([name == PREFILL for name in self.names], dtype=bool)


class Found:
    """What one request finds: a column per feature, over the candidates of its producers."""

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
        """One per candidate."""
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
        """Of the endpoint in this row of the snapshot."""
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
    """What one request finds at one endpoint, in this row of the snapshot."""

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
        """What was cached of the prompt counts for the first token alone."""
        return Sample(
            self.kv, self.input_tokens, self.waiting, self.requests, 0, 0.0, 0, 0, self.tokens, 0,
            self.role, actual_ttft_ms=0.0, actual_tpot_ms=tpot_ms,
        )  # fmt: skip


class Measured:
    """One request from its decision to the end of its response."""

    __slots__ = ("first_at", "found", "prefill", "running_at", "target", "tpot_ms", "ttft_ms")

    def __init__(self, found: Found, ttft_ms: float, tpot_ms: float) -> None:
        self.found: Found | None = found  # until the decision
        self.ttft_ms = ttft_ms  # the objectives
        self.tpot_ms = tpot_ms
        self.target: State | None = None
        self.prefill: State | None = None  # of who computes the prompt: the target, unless a prefill profile ran
        self.running_at = -1  # owner of the endpoint where the objective per token counts
        self.first_at = 0.0


@plugin("predicted-latency-producer")
class PredictedLatency(DataProducer, PreRequest, ResponseStreaming, ResponseComplete):
    """Emits `LatencyPredictions`; headroom = objective - prediction, an objective that is missing is 0 ms.

    The objective per token counts sloBufferFactor times, and no more than the smallest that runs on the endpoint. Without
    `streamingMode`, and on endpoints whose role is `prefill`, the time per token says nothing and its headroom is 0.
    """

    Params = Parameters
    first_chunk_only = True
    metrics = (PREDICTED_TTFT, PREDICTED_TPOT, TTFT_DURATION, TPOT_DURATION, VIOLATIONS)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._predictions = latency_predictions(name)
        self._measured = Datum(f"latency_measured/{name}", Measured)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._media = media_match(params.encoder_cache_match_info_producer_name)
        media = (self._media,) if params.use_encoder_cache_features else ()
        self.consumes = (self._match, *media, KV_USAGE, WAITING, INFLIGHT_REQUESTS, INFLIGHT_TOKENS)
        self.optional = (TOKENS,)
        self.produces = (self._predictions,)
        self.keeps = (self._measured,)
        ignored = {
            "contextTTL": params.context_ttl != CONTEXT_TTL_NS,
            "samplingMean": params.sampling_mean != SAMPLING_MEAN,
            "maxDecodeTokenSamplesForPrediction": params.max_decode_token_samples_for_prediction != 0,
            "inFlightLoadProducerName": bool(params.in_flight_load_producer_name),
        }
        self.without_effect = [f"{what}: has no effect here" for what, given in ignored.items() if given]
        self._roles = Roles(Roster(()), params.endpoint_role_label)
        self._running: dict[int, list[float]] = {}  # owner -> objectives per token of this worker's requests, in order
        self._predictor: Predictor
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
        self._predictor = Predictor(services, self)
        self._predictor.start()

    def produce(self, request: Request, candidates: Candidates) -> Waiting | None:
        found = self._find(request, candidates)
        ttft_ms, tpot_ms = objective_ms(request, TTFT_HEADERS), objective_ms(request, TPOT_HEADERS)
        request[self._measured] = Measured(found, ttft_ms, tpot_ms)
        if not self.params.predict_in_produce:
            return None
        roster = candidates.snapshot.roster

        def give(predictions: Sequence[Prediction], seconds: float) -> None:
            self._ttft_duration.observe(seconds)
            self._tpot_duration.observe(seconds)
            request[self._predictions] = self._judge(predictions, found, roster, ttft_ms, tpot_ms)

        return self._predictor.ask(found.rows(), request.now, give)

    def before_send(self, request: Request, decision: Decision) -> None:
        measured = request[self._measured]
        primary = decision.runs.get(decision.primary)
        if measured is None or measured.found is None or primary is None:
            return
        found, measured.found = measured.found, None  # a row or two of it are kept while the response is under way
        measured.target = measured.prefill = found.at(primary.row)
        prefill = decision.runs.get(decision.prefill)
        if prefill is not None and prefill is not primary:
            measured.prefill = found.at(prefill.row)
        if self.params.streaming_mode and measured.tpot_ms > 0.0:
            owner = measured.running_at = primary.targets[0].owner
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
        if not response.whole or not 200 <= response.status < 300:
            return  # it says nothing of how fast the endpoint is
        ttft_ms = ((measured.first_at if self.params.streaming_mode else request.now) - request.sent_at) * MS
        if ttft_ms <= 0.0 or measured.prefill is None or measured.target is None:
            return  # in streaming mode: it came in one piece
        predicted = request[self._predictions]
        self._predictor.learn(measured.prefill.first_token(ttft_ms))
        self._compare(request, "ttft", ttft_ms, measured.ttft_ms)
        if predicted is not None:
            self._predicted_ttft.observe(predicted.ttft_ms[measured.prefill.row] / MS)
        tokens = response.usage.completion if response.usage is not None else None
        if not self.params.streaming_mode or tokens is None or tokens < 2:
            return
        tpot_ms = (request.now - measured.first_at) * MS / (tokens - 1)
        if tpot_ms > 0.0:
            self._predictor.learn(measured.target.per_token(tpot_ms))
            self._compare(request, "tpot", tpot_ms, measured.tpot_ms)
            if predicted is not None:
                self._predicted_tpot.observe(predicted.tpot_ms[measured.target.row] / MS)

    def _find(self, request: Request, candidates: Candidates) -> Found:
        roster = candidates.snapshot.roster
        if roster is not self._roles.roster:
            self._roles = Roles(roster, self.params.endpoint_role_label)
        found = Found(candidates, token_count(request), self._roles)
        match = request[self._match]
        if match is not None and match.blocks is not None and match.total:
            found.prefix = np.minimum(candidates.narrow(match.blocks) / match.total, 1.0)
        if self.params.use_encoder_cache_features and (media := request[self._media]) is not None:
            found.media = media.total
            if media.held is not None:
                found.held = np.minimum(candidates.narrow(media.held), media.total)
        return found

    def _judge(
        self,
        predictions: Sequence[Prediction],
        found: Found,
        roster: Roster,
        ttft_objective: float,
        tpot_objective: float,
    ) -> LatencyPredictions:
        """Predictions and headrooms of the snapshot's shape."""
        rows = slice(None) if found.within is None else found.within
        ttft, tpot = np.full((2, len(roster.endpoints)), np.nan)
        ttft[rows] = [prediction.ttft_ms for prediction in predictions]
        tpot[rows] = [prediction.tpot_ms for prediction in predictions]
        headroom = np.where(np.isnan(tpot), np.nan, 0.0)
        if self.params.streaming_mode:
            limited = self._tpot_limits(roster, tpot_objective) - tpot
            headroom = np.where(found.roles.prefill, headroom, limited)
        return LatencyPredictions(
            ttft_ms=ttft, tpot_ms=tpot, ttft_headroom=ttft_objective - ttft, tpot_headroom=headroom
        )

    def _tpot_limits(self, roster: Roster, objective: float) -> Floats:
        factor = self.params.slo_buffer_factor
        limits = np.full(len(roster.endpoints), objective * factor)
        for owner, objectives in self._running.items():
            row = roster.row_of_owner.get(owner)
            if row is not None:
                limits[row] = min(limits[row], objectives[0] * factor)
        return limits

    def _leave(self, measured: Measured) -> None:
        """The request no longer runs where it ran."""
        owner, measured.running_at = measured.running_at, -1
        objectives = self._running.get(owner)
        if objectives is not None:
            del objectives[bisect_left(objectives, measured.tpot_ms)]
            if not objectives:
                del self._running[owner]

    def _compare(self, request: Request, what: str, actual_ms: float, objective: float) -> None:
        if 0.0 < objective < actual_ms:
            self._violations.add(request.model, request.target_model, what)


def _whole(values: Floats) -> list[int]:
    counts: list[int] = np.maximum(values, 0.0).astype(np.int64).tolist()
    return counts
