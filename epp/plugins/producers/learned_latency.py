"""Predicts the time to the first token of a request at each endpoint, with a model that learns from the answers that pass through."""

from epp.candidates import Candidates
from epp.data import CACHE_TOKENS, INFLIGHT_REQUESTS, INFLIGHT_TOKENS, KV_USAGE, RUNNING, WAITING
from epp.decision.decision import Decision, Response
from epp.learning.costs import learned_costs
from epp.plugin import DataProducer, PreRequest, ResponseComplete, ResponseReceived, ResponseStreaming, Services, plugin
from epp.plugins._parameters import LearnedLatencyParameters, ObserverParameters
from epp.plugins.producers._predictions import Predictions
from epp.prefix.match import APPROXIMATE, FollowsMatches, prefix_match
from epp.request import Request
from epp.request.tokens import TOKENS


@plugin("learned-latency-producer")
class LearnedLatency(FollowsMatches, DataProducer, PreRequest, ResponseReceived, ResponseStreaming, ResponseComplete):
    """Emits for each candidate the predicted time to the first token, and the cost: this time, plus the delay for later requests.

    All workers share one model (`epp.learning`). From a disaggregated request, the model learns the time to the first token at the prefill
    endpoint, and the time per token at the decode endpoint. The model learns from answers that are streamed and succeed. While it knows
    less than half of the pool's endpoints, or predicts worse than the pool's mean time would, the costs follow a rule without a model. If
    prompts do not wait for each other, the model is used after ten answers.
    """

    Params = LearnedLatencyParameters
    first_chunk_only = True

    def __init__(self, name: str, params: LearnedLatencyParameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._costs = learned_costs(name)
        self.consumes = (self._match, INFLIGHT_REQUESTS, INFLIGHT_TOKENS, KV_USAGE, CACHE_TOKENS, RUNNING, WAITING)
        self.optional = (TOKENS,)
        self.produces = (self._costs,)
        self._predictions: Predictions

    def start(self, services: Services) -> None:
        self._predictions = Predictions(services.learning, self._match, self._costs)

    def produce(self, request: Request, candidates: Candidates) -> None:
        self._predictions.predict(request, candidates)

    def before_send(self, request: Request, decision: Decision) -> None:
        self._predictions.goes(request, decision)

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        self._predictions.answers(request, decision, response)

    def response_streaming(self, request: Request, decision: Decision) -> None:
        self._predictions.begins(request)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self._predictions.ends(request, response)


@plugin("latency-observer-producer")
class LearnedObserver(LearnedLatency):
    """Does the same as learned-latency-producer, under the name and with the parameters of the reference picker's observer.

    Like the observer, it measures streamed answers that succeed, from dispatch to first chunk, with the load at dispatch. Unlike the
    observer, all workers share their observations, the uncached tokens of a prompt count, and a restart with `--state-dir` forgets nothing.
    """

    Params = ObserverParameters  # type: ignore[assignment]

    def __init__(self, name: str, params: ObserverParameters) -> None:
        learned = LearnedLatencyParameters(prefix_match_info_producer_name=params.prefix_match_info_producer_name)
        super().__init__(name, learned)
        self.params = params
