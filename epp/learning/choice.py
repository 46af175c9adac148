"""Turns predictions into costs: what a request costs at each candidate, itself and for the requests that come after it.

    cost = first token + turn * (b / a) ** SHARP + PLACE * own * full ** SHARP_FULL

`turn` is the time until the endpoint begins with this prompt, if prompts wait for each other: then b = a, the coefficients of `rest` and
`uncached`. It counts twice: requests that come later join the same step and make it longer, and where many wait, a prefix is worth a
second copy.

`own` is the time that the endpoint spends on this prompt. A prompt that is computed again keeps its place in the batch for so much longer,
and where the batch is full, later requests wait for it. `full` is the taken share of the batch, 0 to 1 (0 if its limit is not known).

Until the model knows enough, `careful_costs` decides instead.
"""

from collections.abc import Sequence
from typing import Final

from epp.learning.model import BUSY, REST, RUNNING, UNCACHED, LatencyModel, bounded

SHARP: Final = 4.0
SHARP_FULL: Final = 8.0
PLACE: Final = 1.5
HOLDS: Final = 0.5  # an endpoint that holds this part of a prompt is its holder
NEAR_MAX: Final = 0.1  # candidates are equal if their costs differ by less than this part
NEAR: Final = 1.0  # of the model's own error
NEAR_S: Final = 0.005  # or by less than this many seconds
LOAD_PART: Final = 0.001  # how much the load of equal candidates may take from their scores


class Situation:
    """Describes the candidates for one request, one value per candidate.

    `slots`: their slots. `tokens`: prompt tokens to compute. `ahead`: tokens in flight without a first token. `elapsed`: seconds since
    the endpoint began with the prompt at the front. `load`: requests at the endpoint. `waiting`: requests that wait there. `prompt`: all
    tokens of the prompt.
    """

    __slots__ = ("ahead", "elapsed", "load", "prompt", "slots", "tokens", "waiting")

    def __init__(
        self,
        slots: list[int],
        prompt: float,
        tokens: list[float],
        ahead: list[float],
        elapsed: list[float],
        load: list[float],
        waiting: list[float],
    ) -> None:
        self.slots = slots
        self.prompt = prompt
        self.tokens = tokens
        self.ahead = ahead
        self.elapsed = elapsed
        self.load = load
        self.waiting = waiting


def predicted_costs(model: LatencyModel, at: Situation, now: float) -> tuple[list[float], list[float]]:
    """Returns the predicted times to the first token and the costs, in seconds, per candidate."""
    theta = model.first.theta
    in_turn = (theta[REST] / theta[UNCACHED]) ** SHARP if theta[UNCACHED] > 0.0 else 0.0
    times: list[float] = []
    costs: list[float] = []
    for i in range(len(at.slots)):
        slot, ahead, elapsed, load = at.slots[i], at.ahead[i], at.elapsed[i], at.load[i]
        limit = model.limit(slot)
        speed = model.present_speed(limit, model.speed(slot, now), ahead, elapsed, load)
        features = model.features(limit, speed, at.tokens[i], ahead, elapsed, load)
        seconds = bounded(speed * model.first.predict(features))
        turn = max(0.0, speed * (theta[REST] * features[REST] + theta[BUSY] * features[BUSY]))
        times.append(seconds)
        full = features[RUNNING] / limit if limit > 0.0 else 0.0
        own = speed * theta[UNCACHED] * features[UNCACHED]
        costs.append(seconds + in_turn * turn + PLACE * own * full**SHARP_FULL)
    return times, costs


def careful_costs(at: Situation, limits: Sequence[float]) -> list[float]:
    """Returns costs without a model, in no unit: (tokens to compute + tokens ahead) * (requests + 1), and more where requests wait.

    `limits`: batch limits, 0 if not known. An endpoint that holds half of the prompt is the cheapest, unless the tokens ahead there
    exceed the fewest ones by more than the tokens that it saves.
    """
    count = len(at.slots)
    costs = [(1.0 + at.tokens[i] + at.ahead[i]) * (at.load[i] + 1.0) for i in range(count)]
    most = max(costs)
    for i in range(count):
        if at.waiting[i] > 0.0 or (0.0 < limits[i] <= at.load[i]):
            costs[i] += most
    holder = -1
    for i in range(count):
        if at.tokens[i] <= HOLDS * at.prompt and (
            holder < 0 or at.tokens[i] + at.ahead[i] < at.tokens[holder] + at.ahead[holder]
        ):
            holder = i
    if holder >= 0 and at.ahead[holder] - min(at.ahead) <= at.prompt - at.tokens[holder]:
        costs[holder] = 0.5 * min(costs)
    return costs


def scores(costs: Sequence[float], load: Sequence[float], error: float) -> list[float]:
    """Returns lowest cost / cost for each candidate, and almost 1 for those that the model cannot tell from the cheapest one.

    Among these, fewer requests (`load`) score higher. The picker draws among equal scores, so that workers and replicas do not all choose
    the same endpoint. `error`: the model's mean relative error; 0: the costs are not in seconds, and each counts as it is.
    """
    lowest = min(costs)
    if error <= 0.0:
        return [lowest / cost for cost in costs]
    near = lowest + max(NEAR_S, lowest * min(NEAR_MAX, NEAR * error))
    part = LOAD_PART / (1.0 + max(load))
    return [
        1.0 - part * load[i] if costs[i] <= near else (1.0 - LOAD_PART) * lowest / costs[i] for i in range(len(costs))
    ]
