"""Equal shares of tokens, or shares by weight: deficit round robin on what requests cost the model servers.

    cost = uncached prompt tokens + output tokens

When a request is dispatched its cost is estimated: its bytes times the flow's uncached prompt tokens per byte, plus the output
tokens that the flow's answers had (both moving averages of what servers reported, of all flows where nothing was reported of this
one), at most the request's own limit. When its
answer has ended, the flow is credited or charged the difference to what was reported. What a server does not say of its cache the
prefix match at the endpoint says instead; an answer that failed, or never came, cost nothing; one that was cut short without a
report costs what was estimated.

Each flow has a quantum Q x w of tokens per round, w being its weight. On its turn it sends while its deficit counter is above 0; the
counter may so fall below 0, and the flow sits out as many rounds as pay for it. The number of these rounds is computed, not waited
for, so a quantum may be small and the order fine: a pick looks at one entry, a dispatch costs O(log flows).

Bound: let M be the largest cost in tokens of one request. From the first dispatch of each on, while two flows i and j have
something waiting all the time, the tokens served to each, by weight, differ over any stretch of time by at most

    | S_i / w_i - S_j / w_j |  <=  2 Q + M / w_i + M / w_j

as long as estimates are exact; a wrong one is made up for in the flow's next turn, of a credit at most a quantum per turn.
This is what one worker promises of one band; a busy period ends when nothing waits in it, and debts end with it.

Waiting is short for who asks for little: a flow that gets something to wait, and is not in debt, need not wait for a round: it goes
at the latest after one other dispatch and those who came likewise before it. It so enters the present round, with one quantum:
time without requests is not saved up. However many such flows come, each under a name of its own, the others keep their
rounds: who may send has every second dispatch, and while all others sit out their debts, a round passes with
as many newcomers as there are others.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Annotated, Any

import msgspec

from epp.data import Datum
from epp.decision import Decision, Response
from epp.flows import FlowKey, FlowView, Queued, original
from epp.plugin import FairnessPolicy, ResponseComplete, plugin
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import BYTES_PER_TOKEN, Request

Weight = Annotated[float, msgspec.Meta(ge=0.001, le=1000)]

TOKENS_MAX = 1e7  # of one request: whatever a server reports
HABITS_MAX = 10_000  # flows of whose requests averages are kept, the least recently answered leaving first
IDLE_MAX = 10_000  # flows without anything waiting whose counters are kept
ADAPT = 0.125  # of a moving average: how much the latest counts
VOID_MIN = 64  # so many void entries the ring may have, however few others there are
FAILED_FROM = 400


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`weights`: by fairness id, the share of each flow against the others; those not named have `default_weight`.

    `quantum_tokens`: per round and weight 1. `expected_output_tokens`: where no answer is known yet.
    """

    weights: dict[str, Weight] = {}
    default_weight: Weight = 1.0
    quantum_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 512
    expected_output_tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 256
    prefix_match_info_producer_name: str = APPROXIMATE


class _Account:
    """One flow of one band. `turn` is the round in which it may send next; `owed` what answers have shown since (> 0: a credit)."""

    __slots__ = ("deficit", "flow", "number", "owed", "quantum", "turn")

    def __init__(self, quantum: float, turn: int) -> None:
        self.quantum = quantum
        self.deficit = quantum
        self.turn = turn
        self.owed = 0.0
        self.flow: FlowView | None = None  # None: nothing waits
        self.number = 0  # of its entry in the ring; 0: it has none

    def settle(self, turn: int) -> None:
        """Goes to that turn, or to the first later one in which the counter is above 0, by what is owed.

        Rounds that passed pay debts and give nothing beyond one quantum; what is left of a credit stays for the next turn.
        """
        quantum = self.quantum
        balance = min(quantum, self.deficit + (turn - self.turn) * quantum) + self.owed
        self.owed = max(0.0, balance - quantum)
        if balance > 0.0:
            self.turn, self.deficit = turn, min(balance, quantum)
        else:
            rounds = int(-balance // quantum) + 1
            self.turn, self.deficit = turn + rounds, balance + rounds * quantum


class _Habit:
    """What the requests of one fairness id usually cost, or those of all."""

    __slots__ = ("output", "prompt_per_byte")

    def __init__(self, output: float, prompt_per_byte: float = 1.0 / BYTES_PER_TOKEN) -> None:
        self.output = output
        self.prompt_per_byte = prompt_per_byte

    def learn(self, bytes: int, prompt: float | None, output: float | None) -> None:
        """From one answer; None: not reported."""
        if output is not None:
            self.output += ADAPT * (output - self.output)
        if prompt is not None and bytes > 0:
            self.prompt_per_byte += ADAPT * (prompt / bytes - self.prompt_per_byte)


class _Charge:
    """What a dispatched request was charged, and to whom."""

    __slots__ = ("account", "bytes", "fairness_id", "output", "prompt")

    def __init__(self, account: _Account, fairness_id: str, bytes: int, prompt: float, output: float) -> None:
        self.account = account
        self.fairness_id = fairness_id
        self.bytes = bytes
        self.prompt = prompt
        self.output = output


@plugin("token-weighted-fairness-policy")
class TokenWeighted(FairnessPolicy, ResponseComplete):
    """Deficit round robin on tokens: who waits all the time gets tokens in proportion to `weights`, whatever others send.

    cost = uncached prompt tokens + output tokens, estimated at dispatch, corrected by the usage that the server reports.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._charged = Datum(f"flow_tokens_charged/{name}", _Charge)
        self.optional = (self._match,)
        self.keeps = (self._charged,)
        self._habits: OrderedDict[str, _Habit] = OrderedDict()
        self._usual = _Habit(float(params.expected_output_tokens))

    def share(self, key: Callable[[Queued], Any]) -> "Rounds":
        return Rounds(self)

    def quantum(self, fairness_id: str) -> float:
        """Tokens per round."""
        params: Parameters = self.params
        return params.quantum_tokens * params.weights.get(fairness_id, params.default_weight)

    def charge(self, account: _Account, fairness_id: str, item: Queued) -> float:
        """The estimated cost of an item that is dispatched; its request keeps what it was charged."""
        habit = self._habits.get(fairness_id, self._usual)
        prompt, output = item.bytes * habit.prompt_per_byte, habit.output
        request = original(item)
        if isinstance(request, Request):
            limit = request.max_tokens
            if limit is not None and limit < output:
                output = float(max(0, limit))
            request[self._charged] = _Charge(account, fairness_id, item.bytes, prompt, output)
        return min(max(1.0, prompt + output), TOKENS_MAX)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        charge = request[self._charged]
        usage = response.usage
        if usage is None or (usage.prompt is None and usage.completion is None):
            if charge is not None and (response.status == 0 or response.status >= FAILED_FROM):
                charge.account.owed += min(max(1.0, charge.prompt + charge.output), TOKENS_MAX)
            return
        prompt = (
            None if usage.prompt is None else _bounded(usage.prompt - self._cached(request, decision, usage.cached))
        )
        output = None if usage.completion is None else _bounded(usage.completion)
        if charge is None:
            self._learn(request.fairness_id, request.body_bytes, prompt, output)
            return
        self._learn(charge.fairness_id, charge.bytes, prompt, output)
        charged = min(max(1.0, charge.prompt + charge.output), TOKENS_MAX)
        spent = (charge.prompt if prompt is None else prompt) + (charge.output if output is None else output)
        charge.account.owed += charged - min(max(1.0, spent), TOKENS_MAX)

    def _cached(self, request: Request, decision: Decision, reported: int | None) -> float:
        """Prompt tokens that the server did not compute."""
        if reported is not None:
            return reported
        match = request[self._match]
        run = decision.runs.get(decision.primary)
        if match is None or match.blocks is None or run is None:
            return 0.0
        row = run.picked[0] if run.candidates.rows is None else run.candidates.rows[run.picked[0]]
        return float(match.blocks[row]) * match.block_tokens

    def _learn(self, fairness_id: str, bytes: int, prompt: float | None, output: float | None) -> None:
        habits = self._habits
        habit = habits.get(fairness_id)
        if habit is None:
            usual = self._usual
            habit = habits[fairness_id] = _Habit(usual.output if output is None else output, usual.prompt_per_byte)
            if len(habits) > HABITS_MAX:
                habits.popitem(last=False)
        else:
            habits.move_to_end(fairness_id)
        habit.learn(bytes, prompt, output)
        self._usual.learn(bytes, prompt, output)


class Rounds:
    """The accounts of one band.

    `_fresh` are flows that have got something to wait and are not in debt, in order; `_ring` is a heap of (turn, number, account) of
    all others with something waiting. A flow with something waiting stands in exactly one of them; entries of the ring whose number is
    not their account's are void. `_round` is the present one: flows of the ring with a later turn sit out, unless nobody is fresh.
    """

    def __init__(self, policy: TokenWeighted) -> None:
        self._policy = policy
        self._accounts: dict[FlowKey, _Account] = {}
        self._idle: OrderedDict[FlowKey, None] = OrderedDict()  # accounts with nothing waiting, the longest idle first
        self._fresh: OrderedDict[FlowKey, _Account] = OrderedDict()
        self._ring: list[tuple[int, int, _Account]] = []
        self._ring_is_next = False
        self._round = 0
        self._sat_out = 0  # dispatches of fresh flows in this round, while the whole ring sat out
        self._number = 0

    def changed(self, flow: FlowView) -> None:
        key = flow.key
        account = self._accounts.get(key)
        if len(flow):
            if account is None or account.flow is None:
                self._enter(key, account).flow = flow
            else:
                account.flow = flow
        elif account is not None and account.flow is not None:
            self._leave(key, account)

    def pick(self, now: float) -> FlowView | None:
        first = self._first()
        if self._fresh and not (first is not None and self._ring_is_next and first.turn <= self._round):
            return next(iter(self._fresh.values())).flow
        return first.flow if first is not None else None

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        key = flow.key
        account = self._accounts.get(key)
        if account is None or account.flow is None:
            return
        account.deficit -= self._policy.charge(account, key.fairness_id, item)
        was_fresh = self._fresh.pop(key, None) is not None
        if was_fresh:
            account.turn = self._round
            self._pass_by()
        elif account.turn > self._round:
            self._round, self._sat_out = account.turn, 0
        self._ring_is_next = was_fresh
        if account.deficit <= 0.0:
            account.settle(account.turn + 1)
            self._join(account)
        elif was_fresh:
            self._join(account)

    def forget(self, key: FlowKey) -> None:
        if key in self._idle:
            del self._idle[key], self._accounts[key]

    def _enter(self, key: FlowKey, account: _Account | None) -> _Account:
        """A flow gets something to wait: it goes on where it was, and the rounds since have paid for what it owed."""
        if account is None:
            account = self._accounts[key] = _Account(self._policy.quantum(key.fairness_id), self._round)
        else:
            del self._idle[key]
            account.settle(self._round)
        if account.turn <= self._round:
            self._fresh[key] = account
        else:
            self._join(account)
        return account

    def _first(self) -> _Account | None:
        """Of the ring, void entries aside."""
        ring = self._ring
        while ring and ring[0][1] != ring[0][2].number:
            heappop(ring)
        return ring[0][2] if ring else None

    def _pass_by(self) -> None:
        """A fresh flow is served. If all others sit out, that passes time for them: a round for as many as they are."""
        first = self._first()
        if first is not None and first.turn > self._round:
            self._sat_out += 1
            if self._sat_out >= len(self._accounts) - len(self._idle) - len(self._fresh) - 1:
                self._round, self._sat_out = self._round + 1, 0

    def _leave(self, key: FlowKey, account: _Account) -> None:
        account.flow = None
        account.number = 0
        self._fresh.pop(key, None)
        self._idle[key] = None
        if len(self._idle) == len(self._accounts):  # nothing waits: the busy period is over
            self._accounts.clear()
            self._idle.clear()
            self._ring.clear()
            self._round = self._sat_out = 0
        elif len(self._idle) > IDLE_MAX:
            del self._accounts[self._idle.popitem(last=False)[0]]
        self._tidy()

    def _join(self, account: _Account) -> None:
        self._number += 1
        account.number = self._number
        heappush(self._ring, (account.turn, self._number, account))
        self._tidy()

    def _tidy(self) -> None:
        if len(self._ring) > 2 * (len(self._accounts) - len(self._idle)) + VOID_MIN:
            self._ring = [entry for entry in self._ring if entry[1] == entry[2].number]
            heapify(self._ring)


def _bounded(tokens: float) -> float:
    return min(max(0.0, tokens), TOKENS_MAX) if math.isfinite(tokens) else TOKENS_MAX
