"""Predict the time to the first token of this request at each endpoint, with a model that learns from the answers that pass through."""

from typing import Final

import msgspec
import numpy as np

from compiled import calls
from compiled.kernels.latency_reference import AHEAD, COSTS, ELAPSED, LOAD, TIMES, UNCACHED
from epp.candidates import Candidates, Floats
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, KV_USAGE, RUNNING, WAITING, Datum
from epp.decision import Decision, ProfileRun, Response
from epp.learning.choice import careful_costs
from epp.learning.costs import FEW, WORSE, LearnedCosts, learned_costs
from epp.learning.model import FirstToken, Ints, LatencyModel
from epp.learning.waits import Wait, add_waits, without_waits
from epp.plugin import (
    DataProducer,
    Learning,
    PreRequest,
    ResponseComplete,
    ResponseReceived,
    ResponseStreaming,
    Services,
    plugin,
)
from epp.plugins.producers._learned_latency_parameters import ObserverParameters, Parameters
from epp.prefix.match import APPROXIMATE, FollowsMatches, PrefixMatch, prefix_match
from epp.request import Request
from epp.tokens import TOKENS, token_count

WITH_EFFECT: Final = ("min_requests", "prefix_match_info_producer_name")


class Sent:
    """Holds one request from its decision to its end: the state in which it found its endpoint, and what was predicted.

    `slot`, `generation`, `load`: of the endpoint that computes the prompt. `decode_slot` and so on: of the one that generates the answer,
    which is the same unless a prefill profile ran. Times are monotonic seconds; `first_at` is 0 before the first token.
    """

    __slots__ = (
        "ahead", "at", "candidates", "counts", "decode_generation", "decode_load", "decode_slot", "elapsed", "first_at", "generation",
        "load", "outlook", "predicted", "slot", "tokens",
    )  # fmt: skip

    def __init__(self, candidates: Candidates, outlook: Floats, at: float) -> None:
        self.candidates: Candidates | None = candidates  # until the request is sent
        self.outlook: Floats | None = outlook
        self.at = at
        self.counts = False
        self.slot = self.decode_slot = -1
        self.generation = self.decode_generation = 0
        self.decode_load = 0.0
        self.tokens = self.ahead = self.elapsed = self.load = self.predicted = self.first_at = 0.0

    def goes(self, computes: ProfileRun, answers: ProfileRun) -> None:
        """Takes the endpoints that compute the prompt and generate the answer, and drops the others, which are not needed any more."""
        candidates, outlook = self.candidates, self.outlook
        if candidates is None or outlook is None:
            return
        self.candidates = self.outlook = None
        found, endpoint = _found(outlook, candidates, computes), computes.target
        self.slot, self.generation = endpoint.slot, endpoint.generation
        self.predicted, self.tokens, self.ahead = found[TIMES], found[UNCACHED], found[AHEAD]
        self.elapsed, self.load = found[ELAPSED], found[LOAD]
        if answers is not computes:
            found, endpoint = _found(outlook, candidates, answers), answers.target
        self.decode_slot, self.decode_generation, self.decode_load = endpoint.slot, endpoint.generation, found[LOAD]


@plugin("learned-latency-producer")
class LearnedLatency(FollowsMatches, DataProducer, PreRequest, ResponseReceived, ResponseStreaming, ResponseComplete):
    """Emits the predicted time to the first token of each candidate, and its cost: that time, plus the delay for later requests.

    All workers share one model (`epp.learning`). Of a disaggregated request, the prefill endpoint learns the time to the first token,
    and the decode endpoint the time per token. It learns from answers that are streamed and succeed. While it knows less than half
    of the candidates, or predicts worse than the pool's mean time, the costs follow a rule without a model.
    """

    Params = Parameters
    first_chunk_only = True

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._costs = learned_costs(name)
        self._sent = Datum(f"learned_sent/{name}", Sent)
        self.consumes = (self._match, INFLIGHT_REQUESTS, INFLIGHT_TOKENS, KV_USAGE, RUNNING, WAITING)
        self.optional = (TOKENS,)
        self.produces = (self._costs,)
        self.keeps = (self._sent,)
        self._learning: Learning
        self._asked: tuple[LatencyModel | None, Ints | None] = (None, None)
        self._asked_at = -1
        self._why_not = ""

    def start(self, services: Services) -> None:
        self._learning = services.learning

    def produce(self, request: Request, candidates: Candidates) -> None:
        now, model = request.now, self._learning.model()
        snapshot, rows = candidates.snapshot, candidates.rows
        slots = snapshot.roster.slots if rows is None else snapshot.roster.slots[rows]
        prompt = float(token_count(request))
        match: PrefixMatch | None = request[self._match]
        held = None if match is None or match.blocks is None else candidates.narrow(match.blocks)
        outlook = model.outlook(
            slots,
            self._learning.starts(),
            now,
            prompt,
            held,
            0.0 if match is None else float(match.block_tokens),
            candidates[INFLIGHT_TOKENS],
            candidates[INFLIGHT_REQUESTS],
            candidates.narrow(snapshot.inflight_at_scrape),
            candidates[RUNNING],
            snapshot.settled(WAITING, rows),
        )
        waits = [] if match is None else self._waits(match, candidates)
        if waits:
            add_waits(model, slots.tolist(), prompt, outlook, waits, now)
        why_not = self._reason(model, snapshot.roster.slots)
        if why_not:
            costs = careful_costs(
                prompt,
                without_waits(outlook, waits, now),
                candidates[WAITING],
                candidates[RUNNING],
                candidates[KV_USAGE],
            )
        else:
            costs = outlook[COSTS]
        request[self._costs] = LearnedCosts(costs, outlook, candidates, model, why_not)
        request[self._sent] = Sent(candidates, outlook, now)

    def before_send(self, request: Request, decision: Decision) -> None:
        sent: Sent | None = request[self._sent]
        answers: ProfileRun | None = decision.runs.get(decision.primary)
        if sent is None or answers is None:
            return
        sent.goes(decision.runs.get(decision.prefill) or answers, answers)
        sent.counts = request.streaming
        if sent.ahead <= 0.0:
            self._learning.begins(sent.slot, request.now)

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        sent: Sent | None = request[self._sent]
        if sent is None:
            return
        here = not response.served or response.served == decision.targets[0].address
        sent.counts = 200 <= response.status < 300 and response.streaming and here

    def response_streaming(self, request: Request, decision: Decision) -> None:
        sent: Sent | None = request[self._sent]
        now = request.now
        if sent is None or sent.slot < 0:
            return
        if request.streaming:
            self._learning.begins(sent.slot, now)
        sent.first_at = now
        if sent.counts:
            took = now - (request.sent_at or sent.at)
            self._learning.learn_first(
                FirstToken(
                    now,
                    sent.slot,
                    sent.generation,
                    sent.tokens,
                    sent.ahead,
                    sent.elapsed,
                    sent.load,
                    sent.predicted,
                    took,
                )
            )

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        sent: Sent | None = request[self._sent]
        if sent is None or not sent.counts or not sent.first_at or not response.whole or response.usage is None:
            return
        tokens = response.usage.completion
        if tokens is not None and tokens > 1:
            lasted = request.now - sent.first_at
            self._learning.learn_token(
                sent.decode_slot, sent.decode_generation, sent.decode_load, lasted / (tokens - 1), lasted
            )

    def _waits(self, match: PrefixMatch, candidates: Candidates) -> list[Wait]:
        """Returns the prefills under way that this prompt can wait for, at most one per candidate: the one that shares most."""
        if not match.under_way:
            return []
        rows, row_of_owner = candidates.rows, candidates.snapshot.roster.row_of_owner
        index_of = None if rows is None else {row: index for index, row in enumerate(rows.tolist())}
        waits: dict[int, Wait] = {}
        for prefill in match.under_way:
            row = row_of_owner.get(prefill.owner)
            index = row if index_of is None or row is None else index_of.get(row)
            if index is None:
                continue
            wait = Wait(index, float(prefill.blocks * match.block_tokens), prefill.since, prefill.tokens)
            if index not in waits or wait.shared > waits[index].shared:
                waits[index] = wait
        return list(waits.values())

    def _reason(self, model: LatencyModel, slots: Ints) -> str:
        """Says why the model is not used for these endpoints; "" if it is. It changes with the model or the endpoints only."""
        if model is not self._asked[0] or slots is not self._asked[1] or model.changes != self._asked_at:
            self._asked, self._asked_at = (model, slots), model.changes
            self._why_not = FEW if not model.knows(slots.tolist()) else "" if model.trusted else WORSE
        return self._why_not


@plugin("latency-observer-producer")
class LearnedObserver(LearnedLatency):
    """Does the same as learned-latency-producer, under the name and with the parameters of the reference picker's observer.

    It measures the same: streamed answers that succeed, from their dispatch to their first chunk, with the load at dispatch. But all
    workers share what they observe, the uncached tokens of a prompt count, and a restart with `--state-dir` forgets nothing.
    """

    Params = ObserverParameters  # type: ignore[assignment]

    def __init__(self, name: str, params: ObserverParameters) -> None:
        learned = Parameters(prefix_match_info_producer_name=params.prefix_match_info_producer_name)
        super().__init__(name, learned)
        self.params = params
        self.without_effect = [
            f"{field.encode_name}: has no effect here"
            for field in msgspec.structs.fields(params)
            if field.name not in WITH_EFFECT and getattr(params, field.name) != field.default
        ]


def _found(outlook: Floats, candidates: Candidates, run: ProfileRun) -> list[float]:
    """Returns what the outlook says of the endpoint that a profile picked."""
    row, rows = run.row, candidates.rows
    return calls.column(outlook, row if rows is None else int(np.searchsorted(rows, row)))
