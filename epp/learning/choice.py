"""Turns costs into scores, and says what a request costs while the model does not know enough. `epp.learning.model` computes the costs
once the model knows enough.
"""

from typing import Final

from compiled import calls
from epp.learning.model import Floats

POINT_TOKENS: Final = 1024.0  # in `careful_costs`, a point costs as much as this many tokens to prefill
POINTS: Final = 2.001  # keeps costs above 0 if no request waits and the whole prompt is cached
NEAR_MAX: Final = 0.1  # a cost counts as equal to the lowest if it is higher by at most this part
NEAR: Final = 1.0  # the same part, as a multiple of the model's error; the smaller one of both counts
NEAR_S: Final = 0.005  # a cost also counts as equal if it is higher by at most this many seconds
LOAD_PART: Final = 0.001  # how much the load of equal candidates may take from their scores


def careful_costs(prompt: float, outlook: Floats, waiting: tuple[Floats, Floats, Floats], running: Floats, kv_usage: Floats) -> Floats:
    """Returns costs without a model, in tokens: tokens to compute, tokens ahead, and POINT_TOKENS for each point that an endpoint lacks.

    An endpoint gets up to one point each for the shortest queue, the fewest running requests, a free KV cache, and a cached prompt. It
    loses one for every eight requests that wait there, so that requests do not pile up where their prefix is cached.
    `prompt`: all tokens of the prompt.
    `outlook`: from `LatencyModel.outlook`; its predictions are not used. `waiting`: the terms of the queue (`Candidates.waiting_terms`).
    `running`, `kv_usage`: the candidates' values of these columns. Apart from the requests that wait, the costs rank endpoints
    as the weights of deploy/config/token-load.yaml do.
    """
    inflight, before, scraped = waiting
    return calls.careful(POINT_TOKENS, POINTS, prompt, outlook, inflight, before, scraped, running, kv_usage)


def scores(costs: Floats, load: Floats, error: float) -> Floats:
    """Returns lowest cost / cost for each candidate, and almost 1 for those that the model cannot tell from the cheapest one.

    Among these, fewer requests (`load`) score higher. The picker draws among equal scores, so that workers and replicas do not all choose
    the same endpoint. `error`: the model's mean relative error; 0 if the costs are not in seconds; then only equal costs count as equal.
    """
    if error <= 0.0:
        return calls.cheapest(costs, load, 0.0, 0.0, 0.0)
    return calls.cheapest(costs, load, min(NEAR_MAX, NEAR * error), NEAR_S, LOAD_PART)
