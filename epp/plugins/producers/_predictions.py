"""Predicts the latencies of requests, and passes on the measured latencies: the work of a producer of learned latencies.

This code is not in the plugin's class, because mypyc makes no native class of a plugin, and these methods run for each request.
"""

from typing import Final

from compiled import calls
from compiled.outlook import AHEAD, COSTS, ELAPSED, LOAD, MEMORY, TIMES, UNCACHED
from epp.candidates import Candidates
from epp.data import CACHE_TOKENS, INFLIGHT_REQUESTS, INFLIGHT_TOKENS, KV_USAGE, RUNNING, WAITING, Datum
from epp.decision.decision import Decision, ProfileRun, Response
from epp.learning.choice import careful_costs
from epp.learning.costs import FEW, WORSE, LearnedCosts
from epp.learning.model import IN_TURN, FirstToken, Ints, LatencyModel
from epp.learning.waits import Wait, add_waits, without_waits
from epp.plugin import Learning
from epp.prefix.match import PrefixMatch
from epp.request import Request
from epp.request.tokens import token_count

TOGETHER_S: Final = 0.005  # a server begins at once with prompts that it gets within this time


class Sent:
    """Holds one request from its decision to its end.

    `index`: the candidate that computes the prompt; `slot`, `generation`: the endpoint of this candidate. `decode_index`, `decode_slot`,
    `decode_generation`: the same for the candidate that generates the answer; unless a prefill profile ran, it is the same candidate. `at`,
    `first_at`: when the request was sent and when the first token came, in monotonic seconds; `first_at` is 0 before. `counts`: whether the
    model learns from the answer. `waits`: whether the first token says nothing of the endpoint, because the request waits for a prefix that
    the endpoint computes for another prompt. Where prompts are known to wait for each other, the tokens ahead explain this wait.
    `outlook`: what was predicted.
    """

    __slots__ = (
        "at", "counts", "decode_generation", "decode_index", "decode_slot", "first_at", "generation", "index", "outlook", "slot", "waits",
    )  # fmt: skip

    def __init__(self, learned: LearnedCosts, computes: ProfileRun, answers: ProfileRun, at: float) -> None:
        candidates = learned.candidates
        self.outlook = learned.outlook
        self.at = at
        self.counts = False
        self.first_at = 0.0
        self.waits = False
        endpoint = computes.target
        self.index = self.decode_index = candidates.index_of(computes.row)
        self.slot = self.decode_slot = endpoint.slot
        self.generation = self.decode_generation = endpoint.generation
        if answers is not computes:
            endpoint = answers.target
            self.decode_index = candidates.index_of(answers.row)
            self.decode_slot, self.decode_generation = endpoint.slot, endpoint.generation


class Predictions:
    """Predicts what requests cost at each candidate, and sends `learning` the measured latencies of their answers.

    `match`: the prefix matches to read; `costs`: what the scorer reads.
    """

    def __init__(self, learning: Learning, match: Datum[PrefixMatch], costs: Datum[LearnedCosts]) -> None:
        self._learning = learning
        self._match = match
        self._costs = costs
        self._asked_model: LatencyModel | None = None
        self._asked_slots: Ints | None = None
        self._asked_at = -1
        self._why_not = ""

    def predict(self, request: Request, candidates: Candidates) -> None:
        """Emits predictions and costs."""
        now, model = request.now, self._learning.model()
        snapshot, rows = candidates.snapshot, candidates.rows
        slots = snapshot.endpoint_list.slots if rows is None else snapshot.endpoint_list.slots[rows]
        prompt = float(token_count(request))
        match: PrefixMatch | None = request[self._match]
        running, usage = candidates[RUNNING], candidates[KV_USAGE]
        outlook = model.outlook(
            slots,
            self._learning.starts(),
            now,
            prompt,
            None if match is None or match.counted is None else candidates.narrow(match.counted),
            1.0,
            candidates[INFLIGHT_TOKENS],
            candidates[INFLIGHT_REQUESTS],
            candidates.narrow(snapshot.inflight_at_scrape),
            running,
            snapshot.settled(WAITING, rows),
            usage,
            candidates[CACHE_TOKENS],
        )
        waits = [] if match is None else _waits(match, candidates, now)
        if waits:
            add_waits(model, slots.tolist(), prompt, outlook, waits, now)
        why_not = self._reason(model, snapshot.endpoint_list.slots)
        if why_not:
            costs = careful_costs(
                prompt, without_waits(outlook, waits, now) if waits else outlook, candidates.waiting_terms(), running, usage
            )
        else:
            costs = outlook[COSTS]
        learned = request[self._costs] = LearnedCosts(costs, outlook, candidates, model, why_not)
        learned.waiting = [wait.at for wait in waits]

    def goes(self, request: Request, decision: Decision) -> None:
        """Takes a request that is sent to the endpoints of its decision."""
        learned: LearnedCosts | None = request[self._costs]
        answers = decision.run(decision.primary)
        if learned is None or answers is None:
            return
        sent = Sent(learned, decision.run(decision.prefill) or answers, answers, request.now)
        if sent.index < 0 or sent.decode_index < 0:
            return  # nothing was predicted for the endpoint: it was added after the prediction
        sent.counts = request.streaming
        sent.waits = sent.index in learned.waiting and not (learned.known and learned.model.share >= IN_TURN)
        learned.sent = sent
        found = calls.column(learned.outlook, sent.index)
        if found[AHEAD] <= 0.0:
            self._learning.begins(sent.slot, request.now)
        elif found[ELAPSED] > TOGETHER_S:
            self._learning.follows(sent.slot, found[UNCACHED])

    def answers(self, request: Request, decision: Decision, response: Response) -> None:
        """Takes the headers of an answer."""
        sent = self._sent(request)
        if sent is None:
            return
        here = not response.served or response.served == decision.targets[0].address
        sent.counts = 200 <= response.status < 300 and response.streaming and here

    def begins(self, request: Request) -> None:
        """Takes the first token of an answer."""
        sent, now = self._sent(request), request.now
        if sent is None:
            return
        if request.streaming:
            self._learning.begins(sent.slot, now)
        sent.first_at = now
        if sent.counts and not sent.waits:
            found = calls.column(sent.outlook, sent.index)
            took, predicted = now - (request.sent_at or sent.at), found[TIMES] - found[MEMORY]
            took -= min(found[MEMORY], max(0.0, took - predicted))
            self._learning.learn_first(
                FirstToken(now, sent.slot, sent.generation, found[UNCACHED], found[AHEAD], found[ELAPSED], found[LOAD], predicted, took)
            )

    def ends(self, request: Request, response: Response) -> None:
        """Takes the end of an answer."""
        sent = self._sent(request)
        if sent is None or not sent.counts or not sent.first_at or not response.whole or response.usage is None:
            return
        tokens = response.usage.completion
        if tokens is not None and tokens > 1:
            lasted = request.now - sent.first_at
            load = calls.cell(sent.outlook, LOAD, sent.decode_index)
            self._learning.learn_token(sent.decode_slot, sent.decode_generation, load, lasted / (tokens - 1), lasted)

    def _sent(self, request: Request) -> Sent | None:
        learned: LearnedCosts | None = request[self._costs]
        sent = None if learned is None else learned.sent
        return sent if isinstance(sent, Sent) else None

    def _reason(self, model: LatencyModel, slots: Ints) -> str:
        """Says why the model is not used for these endpoints; "" if it is used. Depends on the model and the endpoints only."""
        if model is not self._asked_model or slots is not self._asked_slots or model.changes != self._asked_at:
            self._asked_model, self._asked_slots, self._asked_at = model, slots, model.changes
            self._why_not = FEW if not model.knows(slots.tolist()) else "" if model.trusted else WORSE
        return self._why_not


def _waits(match: PrefixMatch, candidates: Candidates, now: float) -> list[Wait]:
    """Returns the prefills under way for which this prompt can wait, at most one per candidate: that with the longest shared prefix."""
    block_tokens = match.block_tokens
    row_of_owner = candidates.snapshot.endpoint_list.row_of_owner
    waits: dict[int, Wait] = {}
    for prefill in match.under_way:
        row = row_of_owner.get(prefill.owner)
        index = -1 if row is None else candidates.index_of(row)
        if index < 0:
            continue
        wait = Wait(index, float(prefill.blocks * block_tokens), prefill.since, prefill.tokens)
        if index not in waits or wait.shared > waits[index].shared:
            waits[index] = wait
    return list(waits.values())
