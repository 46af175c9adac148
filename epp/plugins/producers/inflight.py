"""Counts tokens in flight per endpoint, in this worker's lane, which all workers see. Subtracts what it has added exactly once.

The picker counts *requests* in flight in every configuration; this producer adds their tokens.
"""

import contextlib
import heapq
from collections.abc import Iterator
from typing import Final

from epp.candidates import Candidates, Endpoint
from epp.data import Datum
from epp.decision import Decision, ProfileRun, Response
from epp.errors import ProducerFailed
from epp.learning.costs import LearnedCosts, learned_costs
from epp.plugin import (
    DataProducer,
    Learning,
    LoadCounts,
    PreRequest,
    ResponseComplete,
    ResponseStreaming,
    Services,
    plugin,
)
from epp.plugins.producers._inflight_parameters import Parameters
from epp.prefix.deciding import FollowsDecisions
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from epp.tokens import TOKENS, token_count

LOOK_S: Final = 0.01  # how often requests are looked at, while some wait to be due
LONGEST_S: Final = 60.0  # first tokens that are predicted later than this are waited for


class Held:
    """Holds what was counted for one request, as (endpoint, tokens). `tokens`: at the primary target.

    `secondary`: at targets of other profiles, whose work ends when the answer begins.
    """

    __slots__ = ("secondary", "tokens")

    def __init__(self) -> None:
        self.tokens: list[tuple[Endpoint, int]] = []
        self.secondary: list[tuple[Endpoint, int]] = []


class Dues:
    """Holds requests that are not streamed, by when their first token is predicted. Times are monotonic seconds.

    `now`: about the time, while requests wait to be due: it grows by LOOK_S with each look.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Held]] = []  # when, a number, the slot that computes the prompt
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, now: float, in_s: float, slot: int, held: Held) -> None:
        """Takes a request that is sent `now`."""
        self.now = max(self.now, now)
        self._count += 1
        heapq.heappush(self._heap, (now + in_s, self._count, slot, held))

    def due(self) -> Iterator[tuple[float, int, Held]]:
        """Passes LOOK_S. Yields when, slot and tokens of the requests that are due."""
        self.now += LOOK_S
        heap = self._heap
        while heap and heap[0][0] <= self.now:
            at, _, slot, held = heapq.heappop(heap)
            yield at, slot, held


@plugin("inflight-load-producer")
class InflightLoad(FollowsDecisions, DataProducer, PreRequest, ResponseStreaming, ResponseComplete):
    """Counts the tokens in flight of each endpoint, from the dispatch to the first response chunk.

    The first chunk of an answer that is not streamed comes at its end. With learned-latency-producer, tokens of such requests count until
    it predicts the first token, even from its prior alone: a rough time is nearer than the end of the answer.

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
        self._learned = learned_costs("")
        self.optional = (self._match, TOKENS, self._learned)
        self.keeps = (self._held,)
        self._dues = Dues()
        self._looking = False
        self._load: LoadCounts
        self._services: Services
        self._learning: Learning

    def start(self, services: Services) -> None:
        self._load = services.load
        self._learning, self._services = services.learning, services

    def produce(self, request: Request, candidates: Candidates) -> None:
        """Does nothing: plugins read the counts from the lanes."""

    def before_send(self, request: Request, decision: Decision) -> None:
        held = Held()
        prompt = token_count(request)
        output = self._output(request, prompt) if self.params.add_estimated_output_tokens else 0
        match: PrefixMatch | None = request[self._match]
        run: ProfileRun | None
        for name, run in decision.runs.items():
            if run is None:
                continue
            target = run.target
            tokens = (prompt if match is None else _uncached(prompt, match, run)) + output
            (held.tokens if name == decision.primary else held.secondary).append((target, tokens))
            self._load.add_tokens(target, tokens)
        request[self._held] = held
        if not request.streaming:
            self._release_when_due(request, decision, held)

    def response_streaming(self, request: Request, decision: Decision) -> None:
        held: Held | None = request[self._held]
        if held is not None:
            self._release(held, everything=not self.params.add_estimated_output_tokens)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        held: Held | None = request[self._held]
        if held is not None:
            self._release(held, everything=True)

    def _release_when_due(self, request: Request, decision: Decision, held: Held) -> None:
        learned: LearnedCosts | None = request[self._learned]
        computes: ProfileRun | None = decision.runs.get(decision.prefill) or decision.runs[decision.primary]
        if learned is None or computes is None:
            return
        predicted = learned.predicted_s(computes.row)
        if predicted < LONGEST_S:
            self._dues.add(request.now, predicted, computes.target.slot, held)
            if not self._looking:
                self._look_later()

    def _look_later(self) -> None:
        if len(self._dues):
            with contextlib.suppress(ProducerFailed):  # the worker is busy: the next request of this kind tries again
                self._services.after(LOOK_S).add_done_callback(self._look)
                self._looking = True

    def _look(self, _done: object) -> None:
        """Releases the tokens of requests that are due."""
        self._looking = False
        for at, slot, held in self._dues.due():
            if held.tokens or held.secondary:
                self._learning.begins(slot, at)
                self._release(held, everything=not self.params.add_estimated_output_tokens)
        self._look_later()

    def _release(self, held: Held, *, everything: bool) -> None:
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


def _uncached(prompt: int, match: PrefixMatch, run: ProfileRun) -> int:
    """Returns how many of the tokens of a prompt the picked endpoint has to compute."""
    return prompt if match.blocks is None else max(0, prompt - int(match.blocks[run.row]) * match.block_tokens)
