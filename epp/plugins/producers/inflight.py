"""Tokens in flight per endpoint, counted in this worker's lane and visible to all; each released exactly once.

The number of *requests* in flight is counted for every configuration by the runtime; this producer adds their tokens.
"""

from typing import Annotated

import msgspec

from epp.candidates import Candidates, Endpoint
from epp.data import Datum
from epp.decision import Decision, Response
from epp.plugin import DataProducer, Load, PreRequest, ResponseComplete, ResponseStreaming, Services, plugin
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request
from epp.tokens import TOKENS, token_count


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """As in the field. `sync_cross_replica_state` has no effect with a single replica."""

    add_estimated_output_tokens: bool = False
    output_ratio: Annotated[float, msgspec.Meta(ge=0)] = 1.5
    max_estimated_output_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prefix_match_info_producer_name: str = APPROXIMATE
    sync_cross_replica_state: bool = True


class Held:
    """What one request holds: (endpoint, tokens) pairs. `others` are at servers that are done when the answer begins."""

    __slots__ = ("others", "tokens")

    def __init__(self) -> None:
        self.tokens: list[tuple[Endpoint, int]] = []
        self.others: list[tuple[Endpoint, int]] = []


@plugin("inflight-load-producer")
class InflightLoad(DataProducer, PreRequest, ResponseStreaming, ResponseComplete):
    """+ tokens when the request is sent; - at the first response chunk, or at the end when output tokens are estimated too.

    What profiles beside the primary one hold, such as prefill, always goes at the first chunk.
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
        self._load: Load

    def start(self, services: Services) -> None:
        self._load = services.load

    def produce(self, request: Request, candidates: Candidates) -> None:
        """Nothing to find out beforehand: the counts stand in the lanes."""

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
            (held.tokens if name == decision.primary else held.others).append((target, tokens))
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
        released, held.others = held.others, []
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
