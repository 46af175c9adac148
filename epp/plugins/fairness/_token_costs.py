"""Says how many tokens requests cost model servers. The cost is estimated at dispatch, and corrected when the answer ends.

    cost of a request = uncached prompt tokens + output tokens

At dispatch, the cost of the prompt is its bytes times the fairness id's average of uncached prompt tokens per byte. The cost of the output
is the fairness id's average of output tokens, but at most the request's own limit. Both averages follow what servers report, within the
bounds of `epp.protocol.usage_bounds`. Before the first report for an id, the averages over all ids are used. When the answer ends, the
charged account is credited or charged the difference to the reported cost. If the server does not report cached tokens, the prefix match at
the endpoint is used. An answer that failed or never came costs nothing. An answer that was cut short without a report costs the estimate.

This code is not in the plugin's class, because mypyc makes no native class of a plugin, and these methods run for each request.
"""

from collections import OrderedDict
from math import isinf, isnan
from typing import Final

from epp.data import Datum
from epp.decision.decision import Decision, Response
from epp.prefix.match import PrefixMatch
from epp.request import BYTES_PER_TOKEN, Request
from epp.request.flows import Queued, original

TOKENS_MAX: Final = 1e7  # a request costs at most this; servers may report anything
# The most fairness ids with averages of their own. If there are more, the id with the oldest last answer is dropped.
AVERAGES_MAX: Final = 10_000
ADAPT: Final = 0.125  # weight of the latest value in a moving average


class Balance:
    """Holds the corrections that an account has not taken over yet. `owed`: a number of tokens; above 0 it is a credit, below 0 a debt."""

    def __init__(self) -> None:
        self.owed = 0.0


class _Averages:
    """Averages the costs of the requests of one fairness id, or of all requests."""

    __slots__ = ("output", "prompt_per_byte")

    def __init__(self, output: float, prompt_per_byte: float = 1.0 / BYTES_PER_TOKEN) -> None:
        self.output = output
        self.prompt_per_byte = prompt_per_byte

    def learn(self, bytes: int, prompt: float | None, output: float | None) -> None:
        """Updates the averages by one answer: uncached prompt tokens and output tokens; None for a number that the server did not report.

        `bytes`: the size of the request.
        """
        if output is not None:
            self.output += ADAPT * (output - self.output)
        if prompt is not None and bytes > 0:
            self.prompt_per_byte += ADAPT * (min(prompt / bytes, 1.0) - self.prompt_per_byte)


class Charge:
    """Remembers what a dispatched request was charged, and the account that was charged."""

    __slots__ = ("account", "bytes", "fairness_id", "output", "prompt")

    def __init__(self, account: Balance, fairness_id: str, bytes: int, prompt: float, output: float) -> None:
        self.account = account
        self.fairness_id = fairness_id
        self.bytes = bytes
        self.prompt = prompt
        self.output = output


class TokenCosts:
    """Charges requests and learns what they cost. `match`: the prefix matches to use. `charged`: where a request keeps its charge."""

    def __init__(self, expected_output: float, match: Datum[PrefixMatch], charged: Datum[Charge]) -> None:
        self.match = match
        self._charged = charged
        self._averages: OrderedDict[str, _Averages] = OrderedDict()
        self._overall = _Averages(expected_output)

    def charge(self, account: Balance, fairness_id: str, item: Queued) -> float:
        """Returns the estimated cost of a dispatched item, and keeps a record of the estimate in the item's request."""
        averages = self._averages.get(fairness_id, self._overall)
        prompt, output = item.bytes * averages.prompt_per_byte, averages.output
        request = original(item)
        if isinstance(request, Request):
            limit = request.max_tokens
            if limit is not None and limit < output:
                output = float(max(0, limit))
            request[self._charged] = Charge(account, fairness_id, item.bytes, prompt, output)
        return _cost(prompt + output)

    def answered(self, request: Request, decision: Decision, response: Response) -> None:
        """Learns from the end of an answer, and corrects what the request was charged."""
        charge: Charge | None = request[self._charged]
        usage = response.usage
        if usage is None or (usage.prompt is None and usage.completion is None):
            if charge is not None and (response.failed or response.status == 0):
                charge.account.owed += _cost(charge.prompt + charge.output)
            return
        prompt = None if usage.prompt is None else _bounded(usage.prompt - self._cached(request, decision, usage.cached))
        output = None if usage.completion is None else _bounded(float(usage.completion))
        if charge is None:
            self._learn(request.fairness_id, request.body_bytes, prompt, output)
            return
        self._learn(charge.fairness_id, charge.bytes, prompt, output)
        spent = (charge.prompt if prompt is None else prompt) + (charge.output if output is None else output)
        charge.account.owed += _cost(charge.prompt + charge.output) - _cost(spent)

    def _cached(self, request: Request, decision: Decision, reported: int | None) -> float:
        """Returns how many prompt tokens the server took from its cache."""
        if reported is not None:
            return float(reported)
        match: PrefixMatch | None = request[self.match]
        run = decision.run(decision.primary)
        if match is None or match.cached is None or run is None:
            return 0.0
        return float(match.cached.item(run.row))  # a server does not compute a block again that it has in a slower tier

    def _learn(self, fairness_id: str, bytes: int, prompt: float | None, output: float | None) -> None:
        known, overall = self._averages, self._overall
        averages = known.get(fairness_id)
        if averages is None:
            averages = known[fairness_id] = _Averages(overall.output if output is None else output, overall.prompt_per_byte)
            if len(known) > AVERAGES_MAX:
                known.popitem(last=False)
        else:
            known.move_to_end(fairness_id)
        averages.learn(bytes, prompt, output)
        overall.learn(bytes, prompt, output)


def _cost(tokens: float) -> float:
    """Returns the cost of one request: at least one token, so that every turn costs something."""
    return min(max(1.0, tokens), TOKENS_MAX)


def _bounded(tokens: float) -> float:
    return TOKENS_MAX if isnan(tokens) or isinf(tokens) else min(max(0.0, tokens), TOKENS_MAX)
