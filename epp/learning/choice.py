"""Turns predictions into costs: what a request costs at each candidate, itself and for the requests that come after it.

    cost = first token + SHARE * own * arrivals * (ahead + own) + PLACE * own * full

`own` is the time that the endpoint spends on this prompt, `ahead` the time that it still spends on prompts before it, and `arrivals` the
requests that the endpoint gets per second. Those that come within the next `ahead` + `own` seconds wait for this prompt, too. Without the
second term, long prompts go where they are computed again although another server holds them, and every later request pays for that.

The third term counts where prompts do not wait for each other, but for a place in the batch. A prompt that is computed again keeps its
place for so much longer. `full` is the taken share of the batch, 0 to 1 (0 if its limit is not known): the fuller the batch, the more
later requests wait for this place.

Until the model knows enough, `careful_costs` decides instead.
"""

from collections.abc import Sequence
from typing import Final

from epp.learning.model import AHEAD, BASE, QUEUE, RUNNING, THOUSAND, UNCACHED, LatencyModel, bounded

SHARE: Final = 0.25
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
    base, uncached, ahead = theta[BASE], theta[UNCACHED], theta[AHEAD]
    queue, running = theta[QUEUE], theta[RUNNING]
    count = len(at.slots)
    arrivals = SHARE * model.rate / count
    times: list[float] = []
    costs: list[float] = []
    for i in range(count):
        slot, load = at.slots[i], at.load[i]
        speed = model.speed(slot, now)
        rate = speed * uncached  # seconds per 1000 tokens
        rest = at.ahead[i] / THOUSAND
        if rest > 0.0 and rate > 0.0:
            rest = max(0.0, rest - at.elapsed[i] / rate)
        limit = model.limit(slot)
        places = full = 0.0
        if limit > 0.0:
            places = max(0.0, load - limit + 1.0)
            load = min(load, limit)
            full = load / limit
        tokens = at.tokens[i] / THOUSAND
        seconds = bounded(speed * (base + uncached * tokens + ahead * rest + queue * places + running * load))
        own = tokens * rate
        times.append(seconds)
        costs.append(seconds + arrivals * speed * ahead * tokens * (rest * speed * ahead + own) + PLACE * own * full)
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
