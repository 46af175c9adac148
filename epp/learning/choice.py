"""Turns costs into scores, and says what a request costs while the model does not know enough. `epp.learning.model` has the costs of a
model that does.
"""

from collections.abc import Sequence
from typing import Final

from compiled import calls
from compiled.kernels.latency_reference import AHEAD, LOAD, UNCACHED
from epp.learning.model import Floats

HOLDS: Final = 0.5  # an endpoint that holds this part of a prompt is its holder
NEAR_MAX: Final = 0.1  # candidates are equal if their costs differ by less than this part
NEAR: Final = 1.0  # of the model's own error
NEAR_S: Final = 0.005  # or by less than this many seconds
LOAD_PART: Final = 0.001  # how much the load of equal candidates may take from their scores


def careful_costs(prompt: float, outlook: Floats, waiting: Floats, limits: Sequence[float]) -> list[float]:
    """Returns costs without a model, in no unit: (tokens to compute + tokens ahead) * (requests + 1), and more where requests wait.

    `prompt`: all tokens of the prompt. `outlook`: of `LatencyModel.outlook`; its predictions do not count. `waiting`: requests that wait,
    with those sent since the scrape. `limits`: batch limits, 0 if not known. An endpoint that holds half of the prompt is the cheapest,
    unless the tokens ahead there exceed the fewest ones by more than the tokens that it saves.
    """
    tokens, ahead, load = outlook[UNCACHED].tolist(), outlook[AHEAD].tolist(), outlook[LOAD].tolist()
    count = len(tokens)
    costs = [(1.0 + tokens[i] + ahead[i]) * (load[i] + 1.0) for i in range(count)]
    most = max(costs)
    for i, waits in enumerate(waiting.tolist()):
        if waits > 0.0 or (0.0 < limits[i] <= load[i]):
            costs[i] += most
    holder = -1
    for i in range(count):
        if tokens[i] <= HOLDS * prompt and (holder < 0 or tokens[i] + ahead[i] < tokens[holder] + ahead[holder]):
            holder = i
    if holder >= 0 and ahead[holder] - min(ahead) <= prompt - tokens[holder]:
        costs[holder] = 0.5 * min(costs)
    return costs


def scores(costs: Floats, load: Floats, error: float) -> Floats:
    """Returns lowest cost / cost for each candidate, and almost 1 for those that the model cannot tell from the cheapest one.

    Among these, fewer requests (`load`) score higher. The picker draws among equal scores, so that workers and replicas do not all choose
    the same endpoint. `error`: the model's mean relative error; 0: the costs are not in seconds, and each counts as it is.
    """
    if error <= 0.0:
        return calls.cheapest(costs, load, 0.0, 0.0, 0.0)
    return calls.cheapest(costs, load, min(NEAR_MAX, NEAR * error), NEAR_S, LOAD_PART)
