"""Counts tokens in flight per endpoint, in this worker's lane, which all workers see. Subtracts what it has added exactly once.

The picker counts *requests* in flight in every configuration; this producer adds their tokens.
"""

from epp.candidates import Candidates, Endpoint
from epp.data import Datum
from epp.decision import Decision, Response
from epp.plugin import DataProducer, LoadCounts, PreRequest, ResponseComplete, ResponseStreaming, Services, plugin
from epp.plugins.producers._inflight_parameters import Parameters
from epp.prefix.deciding import FollowsDecisions
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request
from epp.tokens import TOKENS, token_count


class Held:
    """Holds what was counted for one request, as (endpoint, tokens). `tokens`: at the primary target.

    `secondary`: at targets of other profiles, whose work ends when the answer begins.
    """

    __slots__ = ("secondary", "tokens")

    def __init__(self) -> None:
        self.tokens: list[tuple[Endpoint, int]] = []
        self.secondary: list[tuple[Endpoint, int]] = []


@plugin("inflight-load-producer")
class InflightLoad(FollowsDecisions, DataProducer, PreRequest, ResponseStreaming, ResponseComplete):
    """Counts the tokens in flight of each endpoint, from the dispatch to the first response chunk.

    With `addEstimatedOutputTokens`, prompt and output tokens at the primary target count until the end of the response. Tokens at targets
    of other profiles, such as prefill, always count until the first chunk.
    """

    Params = Parameters
    first_chunk_only = True
    reads_answer = False

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._held = Datum(f"inflight_tokens_held/{name}", Held)
        self.optional = (self._match, TOKENS)
        self.keeps = (self._held,)
        self._load: LoadCounts

    def start(self, services: Services) -> None:
        self._load = services.load

    def produce(self, request: Request, candidates: Candidates) -> None:
        """Does nothing: plugins read the counts from the lanes."""

    def before_send(self, request: Request, decision: Decision) -> None:
        held = Held()
        prompt = token_count(request)
        output = self._output(request, prompt) if self.params.add_estimated_output_tokens else 0
        match = request[self._match]
        blocks = None if match is None else match.blocks
        for name, run in decision.runs.items():
            if run is None:
                continue
            row = run.row
            target = run.candidates.snapshot.endpoints[row]
            tokens = prompt
            if match is not None and blocks is not None:
                tokens = max(0, prompt - int(blocks[row]) * match.block_tokens)
            tokens += output
            (held.tokens if name == decision.primary else held.secondary).append((target, tokens))
            self._load.add_tokens(target, tokens)
        request[self._held] = held

    def response_streaming(self, request: Request, decision: Decision) -> None:
        self._release(request, everything=not self.params.add_estimated_output_tokens)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self._release(request, everything=True)

    def _release(self, request: Request, *, everything: bool) -> None:
        held = request[self._held]
        if held is None:
            return
        released, held.secondary = held.secondary, []
        if everything:
            released, held.tokens = released + held.tokens, []
        for endpoint, tokens in released:
            self._load.add_tokens(endpoint, -tokens)

    def _output(self, request: Request, prompt: int) -> int:
        output: int = round(prompt * self.params.output_ratio)
        for limit in (request.max_tokens, self.params.max_estimated_output_tokens):
            if limit is not None:
                output = min(output, limit)
        return output
