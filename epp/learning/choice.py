"""Turns costs into scores, and says what a request costs while the model does not know enough. `epp.learning.model` has the costs of a
model that does.
"""

from typing import Final

from compiled import calls
from epp.learning.model import Floats

POINT_TOKENS: Final = 1024.0  # the tokens to prefill that a point of the rule without a model is worth
POINTS: Final = 2.001  # costs are above 0, also where nothing waits and everything is cached
NEAR_MAX: Final = 0.1  # candidates are equal if their costs differ by less than this part
NEAR: Final = 1.0  # of the model's own error
NEAR_S: Final = 0.005  # or by less than this many seconds
LOAD_PART: Final = 0.001  # how much the load of equal candidates may take from their scores


def careful_costs(prompt: float, outlook: Floats, waiting: tuple[Floats, Floats, Floats], running: Floats, kv_usage: Floats) -> Floats:
    """Returns costs without a model, in tokens: to compute + ahead, and POINT_TOKENS for each point that an endpoint lacks.

    A point each: the shortest queue, the fewest running requests, a free KV cache, the prompt cached. `prompt`: all tokens of the prompt.
    `outlook`: of `LatencyModel.outlook`; its predictions do not count. `waiting`: the terms of the queue (`Candidates.waiting_terms`).
    `running`, `kv_usage`: of the candidates, by the columns of these names. The same order as by the weights of
    deploy/config/token-load.yaml.
    """
    inflight, before, scraped = waiting
    return calls.careful(POINT_TOKENS, POINTS, prompt, outlook, inflight, before, scraped, running, kv_usage)


def scores(costs: Floats, load: Floats, error: float) -> Floats:
    """Returns lowest cost / cost for each candidate, and almost 1 for those that the model cannot tell from the cheapest one.

    Among these, fewer requests (`load`) score higher. The picker draws among equal scores, so that workers and replicas do not all choose
    the same endpoint. `error`: the model's mean relative error; 0: the costs are not in seconds, and each counts as it is.
    """
    if error <= 0.0:
        return calls.cheapest(costs, load, 0.0, 0.0, 0.0)
    return calls.cheapest(costs, load, min(NEAR_MAX, NEAR * error), NEAR_S, LOAD_PART)
