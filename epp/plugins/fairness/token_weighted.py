"""Equal shares of tokens, or shares by weight, over all workers: fair queueing by virtual time on what requests cost the model servers.

    cost = uncached prompt tokens + output tokens

When a request is dispatched its cost is estimated: its bytes times the flow's uncached prompt tokens per byte, plus the output
tokens that the flow's answers had (both moving averages of what servers reported, of all flows where nothing was reported of this
one), at most the request's own limit. When its answer has ended, the flow is credited or charged the difference to what was reported.
What a server does not say of its cache the prefix match at the endpoint says instead; an answer that failed, or never came, cost
nothing; one that was cut short without a report costs what was estimated.

Each flow has a position: the tokens that it got, by weight. Who is the furthest behind goes first; it is deficit round robin with
rounds as short as can be. The *time* of a band is the position from which the last one went. Of what each flow got all workers know, by
the ledger, and they go by the same order among each other. A flow that comes back is at least at time - Q, Q being a quantum: time
without requests is not saved up beyond that, and Q is what a small flow may be ahead of those that wait all the time.

Bound: let M be the largest cost in tokens of one request. From the first dispatch of each on, while two flows i and j have
something waiting all the time, the tokens served to each, by weight, differ over any stretch of time by at most

    | S_i / w_i - S_j / w_j |  <=  2 Q + M / w_i + M / w_j

as long as estimates are exact; a wrong one is made up for when the flow is served next, of a credit at most half of what that costs.
This is what a worker promises by itself. Over workers add the tolerance, what one dispatches before it sees the other's, and M / w of
the lightest flow that waits: who has waited in one worker may be fresh in another, and time moves on by as much while it is found out.
A flow that the ledger has lost has its share in each worker. A busy period of a band ends when nothing waits in it in any
worker, and debts end with it.

Waiting is short for who asks for little: a *fresh* flow, one that has got less than its share by Q, goes before all that are not
behind by as much, in order of coming. However many such flows come, each under a name of its own, the others keep their turns: for
each token that a fresh flow gets time moves by its part of one, there being so many others that wait, so that after the
first Q tokens fresh flows have no more than half of what there is.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Annotated, Any

import msgspec

from epp.data import Datum
from epp.decision import Decision, Response
from epp.flows import FlowKey, FlowView, Queued, original
from epp.plugin import FairnessPolicy, Ledger, ResponseComplete, plugin
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import BYTES_PER_TOKEN, Request

Weight = Annotated[float, msgspec.Meta(ge=0.001, le=1000)]

TOKENS_MAX = 1e7  # of one request: whatever a server reports
HABITS_MAX = 10_000  # flows of whose requests averages are kept, the least recently answered leaving first
IDLE_MAX = 10_000  # flows without anything waiting whose counters are kept
ADAPT = 0.125  # of a moving average: how much the latest counts
VOID_MIN = 64  # so many void entries the line may have, however few others there are
FAILED_FROM = 400
CREDIT_PART = 0.5  # of a cost: the most that a credit pays, so that who costs nothing does not go for ever
TOLERANCE = 0.1  # of a quantum: how far apart workers may be


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`weights`: by fairness id, the share of each flow against the others; those not named have `default_weight`.

    `quantum_tokens`: how far a flow that comes back may be behind, per weight 1. `expected_output_tokens`: where no answer is known yet.
    """

    weights: dict[str, Weight] = {}
    default_weight: Weight = 1.0
    quantum_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 512
    expected_output_tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 256
    prefix_match_info_producer_name: str = APPROXIMATE


class _Account:
    """One flow of one band. `position`: tokens by weight; `owed` tokens that answers have shown since (> 0: a credit)."""

    __slots__ = ("flow", "looked", "mark", "number", "owed", "position", "weight")

    def __init__(self, weight: float, mark: int) -> None:
        self.weight = weight
        self.mark = mark
        self.position = -math.inf
        self.owed = 0.0
        self.flow: FlowView | None = None  # None: nothing waits
        self.number = 0  # of its entry in the line; 0: it has none
        self.looked = -1  # `Ledger.served` when it was looked up

    def pay(self, start: float, cost: float) -> float:
        """Goes on from `start` by what a request costs, and by what is owed; returns by how much."""
        owed = self.owed
        if owed:
            used = min(owed, cost * CREDIT_PART)
            self.owed = owed - used
            cost -= used
        step = cost / self.weight
        self.position = start + step
        return step


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
    """Fair queueing on tokens, over all workers: who waits all the time gets tokens in proportion to `weights`, whatever others send.

    cost = uncached prompt tokens + output tokens, estimated at dispatch, corrected by the usage that the server reports.
    """

    Params = Parameters
    ranks = True

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self.tolerance = TOLERANCE * params.quantum_tokens
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._charged = Datum(f"flow_tokens_charged/{name}", _Charge)
        self.optional = (self._match,)
        self.keeps = (self._charged,)
        self._habits: OrderedDict[str, _Habit] = OrderedDict()
        self._usual = _Habit(float(params.expected_output_tokens))

    def share(self, key: Callable[[Queued], Any]) -> "Turns":
        return Turns(self)

    def weight(self, fairness_id: str) -> float:
        params: Parameters = self.params
        return params.weights.get(fairness_id, params.default_weight)

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
        return _cost(prompt + output)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        charge = request[self._charged]
        usage = response.usage
        if usage is None or (usage.prompt is None and usage.completion is None):
            if charge is not None and (response.status == 0 or response.status >= FAILED_FROM):
                charge.account.owed += _cost(charge.prompt + charge.output)
            return
        prompt = (
            None if usage.prompt is None else _bounded(usage.prompt - self._cached(request, decision, usage.cached))
        )
        output = None if usage.completion is None else _bounded(usage.completion)
        if charge is None:
            self._learn(request.fairness_id, request.body_bytes, prompt, output)
            return
        self._learn(charge.fairness_id, charge.bytes, prompt, output)
        spent = (charge.prompt if prompt is None else prompt) + (charge.output if output is None else output)
        charge.account.owed += _cost(charge.prompt + charge.output) - _cost(spent)

    def _cached(self, request: Request, decision: Decision, reported: int | None) -> float:
        """Prompt tokens that the server did not compute."""
        if reported is not None:
            return reported
        match = request[self._match]
        run = decision.runs.get(decision.primary)
        if match is None or match.blocks is None or run is None:
            return 0.0
        return float(match.blocks[run.row]) * match.block_tokens

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


class Alone:
    """`Ledger` of a worker without others."""

    def served(self) -> int:
        return 0

    def mark(self, flow: FlowKey) -> int:
        return 0

    def position(self, mark: int) -> float:
        return -math.inf

    def time(self) -> float:
        return 0.0

    def end(self) -> float:
        return 0.0

    def backlogged(self) -> int:
        return 0

    def alone(self) -> bool:
        return True

    def move(self, mark: int, position: float) -> None: ...
    def show(self, time: float, end: float, backlogged: int) -> None: ...


class Turns:
    """The accounts of one band.

    A flow with something waiting stands in one of two: in `_fresh`, in order of coming, while its position is not above time - Q; else in
    `_line`, a heap of (position, number, account). Entries of the line whose number is not their account's are void; one whose flow
    another worker has served since is put where it belongs when it is looked at, which is late enough: positions only grow.
    """

    def __init__(self, policy: TokenWeighted) -> None:
        self._policy = policy
        self._quantum = float(policy.params.quantum_tokens)
        self._ledger: Ledger = Alone()
        self._accounts: dict[FlowKey, _Account] = {}
        self._idle: OrderedDict[FlowKey, None] = OrderedDict()  # accounts with nothing waiting, the longest idle first
        self._fresh: OrderedDict[FlowKey, _Account] = OrderedDict()
        self._line: list[tuple[float, int, _Account]] = []
        self._in_line = 0
        self._time = self._end = 0.0
        self._served = -1  # `Ledger.served` when the time was looked up
        self._number = 0

    def meet(self, ledger: Ledger) -> None:
        self._ledger = ledger

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
        floor = self._floor()
        fresh, first = self._first_fresh(floor), self._first()
        if fresh is not None and (first is None or first.position > floor):
            return fresh.flow
        return first.flow if first is not None else None

    def claim(self, flow: FlowView) -> float:
        """Its position; of a fresh flow, where those go from."""
        account = self._accounts[flow.key]
        return account.position if account.number else self._floor()

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        key = flow.key
        account = self._accounts.get(key)
        if account is None or account.flow is None:
            return
        fresh = self._fresh.pop(key, None) is not None
        start = self._time - self._quantum if fresh else account.position
        step = account.pay(start, self._policy.charge(account, key.fairness_id, item))
        if fresh:
            others = max(self._in_line, self._ledger.backlogged())
            if others:
                self._time += step / others
        elif start > self._time:
            self._time = start
        self._join(account)
        self._moved(account)

    def forget(self, key: FlowKey) -> None:
        if key in self._idle:
            del self._idle[key], self._accounts[key]

    def _floor(self) -> float:
        """Where fresh flows go from."""
        ledger = self._ledger
        served = ledger.served()
        if served != self._served:
            self._served = served
            self._time = max(self._time, ledger.time())
        return self._time - self._quantum

    def _elsewhere(self, account: _Account) -> float:
        """Where other workers have taken a flow since it was looked up; -inf: no further, as far as one knows."""
        if account.looked == self._served:
            return -math.inf
        account.looked = self._served
        return self._ledger.position(account.mark)

    def _enter(self, key: FlowKey, account: _Account | None) -> _Account:
        """A flow gets something to wait: it goes on where it was."""
        if len(self._idle) == len(self._accounts):
            if self._ledger.alone():
                return self._begin(key)
            self._served = -1  # another worker may have begun anew
        if account is None:
            account = self._accounts[key] = self._account(key)
        else:
            del self._idle[key]
            if account.owed < 0.0:
                account.pay(account.position, 0.0)
                self._moved(account)
        floor = self._floor()
        account.position = max(account.position, self._elsewhere(account))
        if account.position <= floor:
            self._fresh[key] = account
        else:
            self._join(account)
        return account

    def _begin(self, key: FlowKey) -> _Account:
        """Nothing waits anywhere: the busy period is over, and all begin anew where the furthest is."""
        self._accounts.clear()
        self._idle.clear()
        self._line.clear()
        self._floor()
        self._end = max(self._end, self._ledger.end())
        self._time = max(self._time, self._end + self._quantum)
        self._ledger.show(self._time, self._end, 0)
        account = self._accounts[key] = self._fresh[key] = self._account(key)
        account.looked = self._served
        return account

    def _account(self, key: FlowKey) -> _Account:
        return _Account(self._policy.weight(key.fairness_id), self._ledger.mark(key))

    def _moved(self, account: _Account) -> None:
        """Tells the others."""
        position = account.position
        if position > self._end:
            self._end = position
        self._ledger.move(account.mark, position)
        self._ledger.show(self._time, self._end, self._in_line)

    def _first_fresh(self, floor: float) -> _Account | None:
        """Who other workers have served since is fresh no more."""
        fresh = self._fresh
        while fresh:
            key, account = next(iter(fresh.items()))
            position = self._elsewhere(account)
            if position <= floor:
                return account
            del fresh[key]
            account.position = max(account.position, position)
            self._join(account)
        return None

    def _first(self) -> _Account | None:
        """Of the line; void entries are dropped, and those that were served elsewhere since put where they belong."""
        line = self._line
        while line:
            stood, number, account = line[0]
            if number != account.number:
                heappop(line)
                continue
            position = self._elsewhere(account)
            if position <= stood:
                return account
            account.position = position
            heapreplace(line, (position, number, account))
        return None

    def _leave(self, key: FlowKey, account: _Account) -> None:
        account.flow = None
        if account.number:
            account.number = 0
            self._in_line -= 1
        self._fresh.pop(key, None)
        self._idle[key] = None
        if len(self._idle) > IDLE_MAX:
            del self._accounts[self._idle.popitem(last=False)[0]]
        self._tidy()

    def _join(self, account: _Account) -> None:
        if not account.number:
            self._in_line += 1
        self._number += 1
        account.number = self._number
        heappush(self._line, (account.position, self._number, account))
        self._tidy()

    def _tidy(self) -> None:
        if len(self._line) > 2 * self._in_line + VOID_MIN:
            self._line = [entry for entry in self._line if entry[1] == entry[2].number]
            heapify(self._line)


def _cost(tokens: float) -> float:
    """Of one request: no less than a token, so that everybody's turns cost something."""
    return min(max(1.0, tokens), TOKENS_MAX)


def _bounded(tokens: float) -> float:
    return min(max(0.0, tokens), TOKENS_MAX) if math.isfinite(tokens) else TOKENS_MAX
