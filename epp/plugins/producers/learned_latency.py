"""Predict the time to the first token of this request at each endpoint, with a model that learns from the answers that pass through."""

import numpy as np

from epp.candidates import Candidates, Floats
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, RUNNING, WAITING, Datum
from epp.decision import Decision, Response
from epp.learning.choice import Situation, careful_costs, predicted_costs
from epp.learning.costs import LearnedCosts, learned_costs
from epp.learning.model import FirstToken, LatencyModel
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
from epp.plugins.producers._learned_latency_parameters import Parameters
from epp.prefix.match import APPROXIMATE, FollowsMatches, prefix_match
from epp.request import Request
from epp.tokens import TOKENS, token_count

FEW = "too few answers so far"
WORSE = "its predictions are worse than the pool's mean time"


class Sent:
    """Holds one request from its decision to its end: the state in which it found its endpoint, and what was predicted.

    `row`: the endpoint's row in the snapshot. Times are monotonic seconds; `first_at` is 0 before the first token.
    """

    __slots__ = (
        "ahead",
        "at",
        "candidates",
        "counts",
        "elapsed",
        "first_at",
        "generation",
        "load",
        "predicted",
        "situation",
        "slot",
        "tokens",
    )  # fmt: skip

    def __init__(self, candidates: Candidates, situation: Situation, at: float) -> None:
        self.candidates: Candidates | None = candidates  # until the request is sent
        self.situation: Situation | None = situation
        self.at = at
        self.counts = False
        self.slot = -1
        self.generation = 0
        self.tokens = self.ahead = self.elapsed = self.load = self.predicted = self.first_at = 0.0


@plugin("learned-latency-producer")
class LearnedLatency(FollowsMatches, DataProducer, PreRequest, ResponseReceived, ResponseStreaming, ResponseComplete):
    """Emits the predicted time to the first token of each candidate, and its cost: that time, plus the delay for later requests.

    All workers share one model (`epp.learning`). It learns from answers that are streamed and succeed. While it knows less than half
    of the candidates, or predicts worse than the pool's mean time, the costs follow a rule without a model.
    """

    Params = Parameters
    first_chunk_only = True

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._costs = learned_costs(name)
        self._sent = Datum(f"learned_sent/{name}", Sent)
        self.consumes = (self._match, INFLIGHT_REQUESTS, INFLIGHT_TOKENS, RUNNING, WAITING)
        self.optional = (TOKENS,)
        self.produces = (self._costs,)
        self.keeps = (self._sent,)
        self._learning: Learning

    def start(self, services: Services) -> None:
        self._learning = services.learning

    def produce(self, request: Request, candidates: Candidates) -> None:
        now, model = request.now, self._learning.model()
        at = self._situation(request, candidates)
        times, costs = predicted_costs(model, at, now)
        why_not = reason(model, at.slots)
        if why_not:
            costs = careful_costs(at, [model.limit(slot) for slot in at.slots])
        request[self._costs] = LearnedCosts(_widened(costs, candidates), _widened(times, candidates), model, why_not)
        request[self._sent] = Sent(candidates, at, now)

    def before_send(self, request: Request, decision: Decision) -> None:
        sent, run, costs = request[self._sent], decision.runs.get(decision.primary), request[self._costs]
        if sent is None or run is None or sent.candidates is None or sent.situation is None:
            return
        row, at, rows = run.row, sent.situation, sent.candidates.rows
        index = row if rows is None else int(np.searchsorted(rows, row))
        target = run.targets[0]
        sent.candidates = sent.situation = None  # drop the other endpoints, which are not needed any more
        sent.slot, sent.generation, sent.counts = target.slot, target.generation, request.streaming
        sent.tokens, sent.ahead, sent.elapsed = at.tokens[index], at.ahead[index], at.elapsed[index]
        sent.load, sent.predicted = at.load[index], float(costs.first_token_s[row])
        if sent.ahead <= 0.0:
            self._learning.begins(target.slot, request.now)

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        sent = request[self._sent]
        if sent is None:
            return
        here = not response.served or response.served == decision.targets[0].address
        sent.counts = 200 <= response.status < 300 and response.streaming and here

    def response_streaming(self, request: Request, decision: Decision) -> None:
        sent, now = request[self._sent], request.now
        if sent is None or sent.slot < 0:
            return
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
        sent = request[self._sent]
        if sent is None or not sent.counts or not sent.first_at or not response.whole or response.usage is None:
            return
        tokens = response.usage.completion
        if tokens is not None and tokens > 1:
            lasted = request.now - sent.first_at
            self._learning.learn_token(sent.slot, sent.generation, sent.load, lasted / (tokens - 1), lasted)

    def _situation(self, request: Request, candidates: Candidates) -> Situation:
        """Returns the features of all candidates."""
        prompt = float(token_count(request))
        match, size = request[self._match], len(candidates)
        tokens = [prompt] * size
        if match is not None and match.blocks is not None:
            held = candidates.narrow(match.blocks).tolist()
            tokens = [max(0.0, prompt - blocks * match.block_tokens) for blocks in held]
        snapshot = candidates.snapshot
        rows = candidates.rows
        slots = (snapshot.roster.slots if rows is None else snapshot.roster.slots[rows]).tolist()
        inflight, waiting = candidates[INFLIGHT_REQUESTS].tolist(), candidates[WAITING].tolist()
        running = candidates[RUNNING].tolist()
        ahead = [max(0.0, value) for value in candidates[INFLIGHT_TOKENS].tolist()]
        scraped = snapshot.settled(WAITING, rows).tolist()
        before = candidates.narrow(snapshot.inflight_at_scrape).tolist()
        load = [max(i, r + w + i - b) for i, r, w, b in zip(inflight, running, scraped, before, strict=True)]
        begun, now = self._learning.begun(slots), request.now
        elapsed = [max(0.0, now - t) if a > 0.0 and t > 0.0 else 0.0 for t, a in zip(begun, ahead, strict=True)]
        return Situation(slots, prompt, tokens, ahead, elapsed, load, waiting)


def reason(model: LatencyModel, slots: list[int]) -> str:
    """Says why the model is not used for these candidates; "" if it is."""
    if not model.knows(slots):
        return FEW
    return "" if model.trusted else WORSE


def _widened(values: list[float], candidates: Candidates) -> Floats:
    """Returns the candidates' values in the shape of the snapshot."""
    narrow = np.array(values)
    if candidates.rows is None:
        return narrow
    wide = np.full(len(candidates.snapshot.endpoints), np.inf)
    wide[candidates.rows] = narrow
    return wide
