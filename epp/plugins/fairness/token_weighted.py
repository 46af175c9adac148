"""Weighted fair queueing on the tokens that requests cost the model servers, over all workers.

    cost of a request = uncached prompt tokens + output tokens

`_token_costs` says how costs are estimated at dispatch and corrected when the answer ends.

Order: Each flow has a position: the tokens that it was served, divided by its weight. The flow with the smallest position goes first,
as in deficit round robin with the shortest possible rounds. The virtual *time* of a band is the position of the flow served last, before
this flow was served. The ledger shows the positions to all workers, so that all use the same order. A flow that becomes non-empty again
starts at time - Q or later, where Q is the quantum. So a flow cannot save up more than Q while it sends nothing, and a small flow can be at
most Q ahead of flows that wait all the time.

Bound: Let S be the tokens that a flow was served, w its weight, and M the largest cost of one request in tokens. While two flows i and j
have requests waiting all the time, from the first dispatch of each on, they differ over any period by at most

    | S_i / w_i - S_j / w_j |  <=  2 Q + M / w_i + M / w_j

This holds while estimates are exact. A wrong estimate is corrected when the flow is served next; a credit pays at most half of a cost.
The bound is for one worker. For several workers it grows by three terms: the tolerance (TOLERANCE), the tokens that a worker dispatches
before it sees the others' positions, and M / w of the waiting flow with the smallest weight. The last term is necessary because a flow
that has waited in one worker may be fresh in another, and time advances by M / w before the other worker finds out. If the ledger has lost
a flow, the flow gets its full share in each worker. When no worker has a waiting request of a band, the busy period and all debts end.

Fresh flows: A flow that asks for little should wait only briefly. A flow is *fresh* if its position is at most time - Q, that is, if it got
at least Q less than its share. Fresh flows go in order of arrival, before all flows with a position above time - Q. Many fresh flows, for
example with invented names, cannot stop the others: for each token (by weight) of a fresh flow, virtual time advances by 1/n, where n is
the number of other backlogged flows. After the first Q tokens, fresh flows therefore get at most half of the capacity.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Final

from epp.data import Datum
from epp.decision.decision import Decision, Response
from epp.plugin import Plugin, ResponseComplete, plugin
from epp.plugins._parameters import TokenWeightedParameters
from epp.plugins.fairness._token_costs import Balance, Charge, TokenCosts
from epp.points.flow import FairnessPolicy, Ledger
from epp.prefix.deciding import FollowsDecisions
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request
from epp.request.flows import FlowKey, FlowView, Queued

IDLE_MAX: Final = 10_000  # empty flows that keep an account
VOID_MIN: Final = 64  # the line may have this many void entries, even if it has few valid ones
CREDIT_PART: Final = 0.5  # a credit pays at most this part of a cost, so that a flow with a credit cannot go for ever
TOLERANCE: Final = 0.1  # positions in different workers may differ by this share of a quantum


class _Account(Balance):
    """Holds the position of one flow of one band. `position`: tokens served, divided by weight."""

    __slots__ = ("flow", "flow_hash", "looked", "number", "position", "weight")

    def __init__(self, weight: float, flow_hash: int) -> None:
        super().__init__()
        self.weight = weight
        self.flow_hash = flow_hash
        self.position = -math.inf
        self.flow: FlowView | None = None  # None if no request of the flow waits
        self.number = 0  # the number of the flow's entry in the line; 0 if it has no entry
        self.looked = -1  # the value of `Ledger.served` when the position was last read from the ledger

    def pay(self, start: float, cost: float) -> float:
        """Moves the position to `start` + cost / weight, where `owed` corrects the cost. Returns position - start."""
        owed = self.owed
        if owed:
            used = min(owed, cost * CREDIT_PART)
            self.owed = owed - used
            cost -= used
        step = cost / self.weight
        self.position = start + step
        return step


@plugin("token-weighted-fairness-policy")
class TokenWeighted(FollowsDecisions, FairnessPolicy, ResponseComplete):
    """Shares tokens among flows in proportion to `weights`, over all workers, however much each flow sends.

    cost = uncached prompt tokens + output tokens, estimated at dispatch and corrected by the usage that the server reports.
    """

    Params = TokenWeightedParameters
    ranks = True

    def __init__(self, name: str, params: TokenWeightedParameters) -> None:
        super().__init__(name, params)
        self.tolerance = TOLERANCE * params.quantum_tokens
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        charged = Datum(f"flow_tokens_charged/{name}", Charge)
        self._costs = TokenCosts(float(params.expected_output_tokens), self._match, charged)
        self.optional = (self._match,)
        self.keeps = (charged,)

    def meet(self, plugins: Sequence[Plugin]) -> None:
        super().meet(plugins)
        self._costs.match = self._match

    def share(self, key: Callable[[Queued], Any]) -> "Turns":
        return Turns(self)

    def weight(self, fairness_id: str) -> float:
        params: TokenWeightedParameters = self.params
        return params.weights.get(fairness_id, params.default_weight)

    def charge(self, account: _Account, fairness_id: str, item: Queued) -> float:
        """Returns the estimated cost of a dispatched item, and keeps a record of the estimate in the item's request."""
        return self._costs.charge(account, fairness_id, item)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self._costs.answered(request, decision, response)


class Alone:
    """The `Ledger` if there is only one worker, so that no other worker has positions."""

    def served(self) -> int:
        return 0

    def flow_hash(self, flow: FlowKey) -> int:
        return 0

    def position(self, flow_hash: int) -> float:
        return -math.inf

    def time(self) -> float:
        return 0.0

    def end(self) -> float:
        return 0.0

    def backlogged(self) -> int:
        return 0

    def alone(self) -> bool:
        return True

    def move(self, flow_hash: int, position: float) -> None: ...
    def show(self, time: float, end: float, backlogged: int) -> None: ...


class Turns:
    """Orders the flows of one band by their accounts.

    A flow with waiting requests is in one of two places. A flow that was fresh when its first request came is in `_fresh`, in order of
    arrival, until it is served. Any other flow is in `_line`, a heap of (position, number, account). An entry of the heap is void if its
    number differs from that of its account. If another worker has served a flow, the flow's entry gets the new position only when the entry
    comes to the top of the heap. This is early enough because positions only grow.
    """

    def __init__(self, policy: TokenWeighted) -> None:
        self._policy = policy
        self._quantum = float(policy.params.quantum_tokens)
        self._ledger: Ledger = Alone()
        self._accounts: dict[FlowKey, _Account] = {}
        self._idle: OrderedDict[FlowKey, None] = OrderedDict()  # accounts of empty flows, the longest idle first
        self._fresh: OrderedDict[FlowKey, _Account] = OrderedDict()
        self._line: list[tuple[float, int, _Account]] = []
        self._in_line = 0
        self._time = self._end = 0.0
        self._served = -1  # the value of `Ledger.served` when the time was last read from the ledger
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
        """Returns the flow's position; for a fresh flow, time - Q, so that all fresh flows have the same claim."""
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
        """Returns time - Q, the floor: flows at or below it are fresh."""
        ledger = self._ledger
        served = ledger.served()
        if served != self._served:
            self._served = served
            self._time = max(self._time, ledger.time())
        return self._time - self._quantum

    def _elsewhere(self, account: _Account) -> float:
        """Returns the flow's position in other workers; -inf if no position has changed since the last read."""
        if account.looked == self._served:
            return -math.inf
        account.looked = self._served
        return self._ledger.position(account.flow_hash)

    def _enter(self, key: FlowKey, account: _Account | None) -> _Account:
        """Adds a flow that becomes non-empty. It continues at its position. It is fresh if the position is at or below the floor."""
        if len(self._idle) == len(self._accounts):
            if self._ledger.alone():
                return self._begin(key)
            self._served = -1  # another worker may have begun a new busy period
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
        """Begins a busy period with its first flow. All flows start anew at the highest position, because no worker has other requests."""
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
        return _Account(self._policy.weight(key.fairness_id), self._ledger.flow_hash(key))

    def _moved(self, account: _Account) -> None:
        """Shows the account's new position to the other workers."""
        position = account.position
        if position > self._end:
            self._end = position
        self._ledger.move(account.flow_hash, position)
        self._ledger.show(self._time, self._end, self._in_line)

    def _first_fresh(self, floor: float) -> _Account | None:
        """Returns the first fresh flow, or None if no flow is fresh. Moves flows to the line if other workers have served them."""
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
        """Returns the first flow of the line, or None if it is empty. Drops void entries, and moves flows that other workers served."""
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
            self._ledger.show(self._time, self._end, self._in_line)
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
