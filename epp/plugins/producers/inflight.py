"""Counts tokens in flight per endpoint, in this worker's area, which all workers see. Subtracts added tokens exactly once.

The picker counts *requests* in flight in every configuration; this producer adds their tokens.
"""

import contextlib

from epp.candidates import Candidates
from epp.data import Datum
from epp.decision.decision import Decision, Response
from epp.errors import ProducerFailed
from epp.learning.costs import learned_costs
from epp.plugin import DataProducer, PreRequest, ResponseComplete, ResponseStreaming, Services, plugin
from epp.plugins._parameters import INFLIGHT_COUNTS_WITH, InflightParameters
from epp.plugins.producers._held_tokens import LOOK_S, Held, HeldTokens, Output
from epp.prefix.deciding import FollowsDecisions
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request
from epp.request.tokens import TOKENS


@plugin("inflight-load-producer")
class InflightLoad(FollowsDecisions, DataProducer, PreRequest, ResponseStreaming, ResponseComplete):
    """Counts the tokens in flight of each endpoint, from the dispatch to the first response chunk.

    The first chunk of an answer that is not streamed comes at the end of the answer. With learned-latency-producer, the tokens of such a
    request count until the predicted time of the first token, even before the producer has learned anything.

    With `addEstimatedOutputTokens`, prompt and output tokens at the primary target count until the end of the response. Tokens at targets
    of other profiles, such as prefill, always count until the first chunk.
    """

    Params = InflightParameters
    counts_with = INFLIGHT_COUNTS_WITH
    first_chunk_only = True
    reads_answer = False

    def __init__(self, name: str, params: InflightParameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._held = Datum(f"inflight_tokens_held/{name}", Held)
        self._learned = learned_costs("")
        self.optional = (self._match, TOKENS, self._learned)
        self.keeps = (self._held,)
        self._services: Services
        self._tokens: HeldTokens

    def start(self, services: Services) -> None:
        params: InflightParameters = self.params
        counted = params.add_estimated_output_tokens
        self._services = services
        self._tokens = HeldTokens(
            services.load,
            services.learning,
            match=self._match,
            learned=self._learned,
            held=self._held,
            output=Output(params.output_ratio, params.max_estimated_output_tokens) if counted else None,
            look_later=self._look_later,
        )

    def produce(self, request: Request, candidates: Candidates) -> None:
        """Does nothing: plugins read the counts from the areas."""

    def before_send(self, request: Request, decision: Decision) -> None:
        self._tokens.sent(request, decision)

    def response_streaming(self, request: Request, decision: Decision) -> None:
        self._tokens.begun(request)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self._tokens.ended(request)

    def _look_later(self) -> bool:
        with contextlib.suppress(ProducerFailed):  # the worker is busy: the next request of this kind tries again
            self._services.after(LOOK_S).add_done_callback(self._look)
            return True
        return False

    def _look(self, _done: object) -> None:
        self._tokens.look()
