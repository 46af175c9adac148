"""The kernels of the latency model in plain Python. They define what `latency.c` computes, and run where it is not built.

`first_tokens` gets arrays with a value per slot, in which slots beyond the end have the usual value (`computed`: 0), and arrays with a
value per candidate:

    per slot        speeds: relative to the coefficients           computed: tokens that the endpoint has computed
                    limits: of a batch, in requests; 0: unknown
    per candidate   slots: of the endpoint                         held: blocks of the prompt that it has cached; None: nowhere
                    ahead: tokens in flight, no first token yet    inflight, before: requests in flight now, and at the last scrape
                    running, waiting: requests, by that scrape     usage: the taken share of the KV cache, by that scrape
                    room: tokens that the KV cache holds; 0: unknown

`starts`, of shape (workers, CELLS, slots), says since when each endpoint works on the prompt at its front: the newest START of all workers,
0 if unknown. From it follow the seconds that the endpoint has spent on the tokens ahead. These seconds count only for prompts that were
there at that time, unless the share `crowded` of the KV cache is taken: then prompts may wait for memory, and the order is unknown. They
count as none while the new prompt would wait for memory. PROMPTS says which share of the tokens ahead belongs to prompts that wait.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiled.kernels.reference import fewest, waiting
from compiled.outlook import AHEAD, CELLS, COSTS, LATE, PROMPTS, SEEN, START, UNCACHED

Floats = NDArray[np.float64]

THOUSAND: Final = 1000.0
INSTANT: Final = 1e-12  # seconds per 1000 tokens; a faster endpoint is taken to compute at once, so that nothing is divided by its time
QUEUE_PER_POINT: Final = 8.0  # in `careful`, so many waiting requests cost a point
NEARLY: Final = 0.01  # so that no time divides by the free share of endpoints that are all busy
# What `first_tokens` gets, in this order: coefficients, and what else is the same for all endpoints.
PARAMETERS: Final = (
    "base", "uncached", "rest", "busy", "queue", "running", "place_s", "overdue_s", "serial", "in_turn", "place", "sharp", "usual_speed",
    "usual_limit", "least_s", "most_s", "burst", "apart", "later", "long", "displaced",
    "crowded", "filled",
)  # fmt: skip


def features(
    uncached: float, place_s: float, overdue_s: float, limit: float, speed: float,
    tokens: float, ahead: float, elapsed: float, load: float,
) -> list[float]:  # fmt: skip
    """Returns the features for the time to the first token at one endpoint: 1, uncached, rest, busy, queue, running (`epp.learning.model`).

    `uncached`: seconds per 1000 tokens to compute. `place_s`: how long an answer lasts. `overdue_s`: the most seconds by which a first
    token is taken to be overdue. `limit`: the batch limit; 0 if it is not known. `tokens`: the tokens to compute; `ahead`: the tokens in
    flight without a first token. `elapsed`: seconds spent on the tokens `ahead`. `load`: requests there.
    """
    rest = busy = queue = 0.0
    if ahead > 0.0:
        rest, busy = ahead / THOUSAND, 1.0
        own = speed * uncached
        if own > INSTANT:
            rest = max(-overdue_s / uncached, rest - elapsed / own)
    if limit > 0.0:
        queue, load = max(0.0, load - limit + 1.0) * place_s / limit, min(load, limit)
    return [1.0, tokens / THOUSAND, rest, busy, queue, load]


def first_tokens(
    parameters: Floats, speeds: Floats, limits: Floats, computed: Floats, starts: Floats, now: float, slots: NDArray[np.intp],
    prompt: float, held: Floats | None, block_tokens: float, ahead: NDArray[Any], inflight: NDArray[Any], before: Floats,
    running: Floats, waiting: Floats, usage: Floats, room: Floats,
) -> Floats:  # fmt: skip
    """Predicts what one request meets at each candidate.

    Returns float64 of shape (7, candidates), with the rows that `compiled.outlook` names: predicted time to the first token and cost in
    seconds (`epp.learning.choice`), tokens to compute, tokens ahead, seconds spent on these, requests there, seconds until the KV cache has
    room. `parameters`: PARAMETERS. `prompt`: its tokens. The module's docstring explains the arrays. Raises ValueError if they differ in
    length, and TypeError for starts of another kind.
    """
    _check(starts, False, "first_tokens")
    lengths = {len(column) for column in (slots, ahead, inflight, before, running, waiting, usage, room, slots if held is None else held)}
    if len(lengths) > 1 or len({len(speeds), len(limits), len(computed)}) > 1 or len(parameters) != len(PARAMETERS):
        raise ValueError("first_tokens: the arrays differ in length")
    p = dict(zip(PARAMETERS, parameters.tolist(), strict=True))
    theta = parameters.tolist()[:6]
    columns = [[0.0] * len(slots) if held is None else held.tolist()]
    columns += [column.tolist() for column in (ahead, inflight, before, running, waiting, usage, room)]
    result = []
    for slot, blocks, tokens_ahead, now_there, then, ran, waited, used, holds in zip(slots.tolist(), *columns, strict=True):
        known = 0 <= slot < len(speeds)
        speed = float(speeds[slot]) if known else p["usual_speed"]
        limit = float(limits[slot]) if known else p["usual_limit"]
        tokens = max(0.0, prompt - blocks * block_tokens)
        displaced = _displaced(p, speed, tokens, used, holds, float(computed[slot]) if known else 0.0)
        load = max(float(now_there), ran + waited + now_there - then)
        rest_tokens = max(0.0, float(tokens_ahead))
        begun = _newest(starts, slot) if rest_tokens > 0.0 and 0 <= slot < starts.shape[2] else 0.0
        queued = _at_back(starts, slot, waited + now_there - then, rest_tokens)
        room_s = p["place_s"] * max(0.0, used * holds + queued + prompt - holds) / holds if holds > 0.0 else 0.0
        # While prompts wait for memory, the server does not compute them.
        elapsed = max(0.0, now - begun) if begun > 0.0 and room_s <= 0.0 else 0.0
        front = rest_tokens if used > p["crowded"] else _at_front(starts, slot, begun, rest_tokens)
        if rest_tokens > 0.0 and p["serial"] and not 0.0 < limit <= load:
            speed = max(speed, elapsed / (p["base"] + p["rest"] * front / THOUSAND + p["busy"] + p["least_s"]))
        elapsed = min(elapsed, speed * (p["uncached"] * front / THOUSAND + p["overdue_s"]))
        x = features(p["uncached"], p["place_s"], p["overdue_s"], limit, speed, tokens, rest_tokens, elapsed, load)
        own, seconds = p["base"] + p["uncached"] * x[1], speed * sum(a * b for a, b in zip(theta, x, strict=True))
        memory = max(0.0, room_s + speed * own - seconds) if room_s > 0.0 else 0.0
        seconds += memory
        seconds = max(p["least_s"], min(p["most_s"], seconds)) if seconds == seconds else p["most_s"]
        turn = max(0.0, speed * (p["rest"] * x[2] + p["busy"] * x[3])) * _again(prompt, tokens, p["long"])
        full = max(0.0, x[5]) / limit if limit > 0.0 else 0.0
        cost = seconds + p["in_turn"] * turn + p["place"] * speed * p["uncached"] * x[1] * full ** p["sharp"] + displaced
        sent = max(0.0, float(now_there) - then)
        steady = max(1.0 / p["apart"], min(p["apart"], speed))
        cost = max(cost, speed * own + p["burst"] * steady * sent * (own + p["busy"]))
        result.append([seconds, cost, tokens, rest_tokens, elapsed, load, memory])
    busy = sum(found[AHEAD] > 0.0 for found in result) / max(1, len(result))
    later = min(p["later"], busy / (NEARLY + 1.0 - busy))
    for found in result:
        found[COSTS] += later * p["rest"] * max(0.0, found[UNCACHED] - p["long"]) / THOUSAND
    return np.array(result, dtype=np.float64).reshape(len(slots), 7).T


def _displaced(p: dict[str, float], speed: float, tokens: float, used: float, holds: float, computed: float) -> float:
    """Returns what the room in the KV cache costs that the tokens take: memory that later requests lack, and prefixes that are dropped."""
    if not holds > 0.0:
        return 0.0
    lacking = p["displaced"] * p["place_s"] * tokens / holds * float(max(0.0, used) ** p["sharp"])
    dropped = p["serial"] == 0.0 and computed >= p["filled"] * holds
    return lacking + (p["displaced"] * speed * p["uncached"] * tokens / THOUSAND if dropped else 0.0)


def _again(prompt: float, uncached: float, long: float) -> float:
    """Returns how much of the wait in turn a prompt adds a second time: 1 without cached tokens, and 0 if nearly all of a long one is."""
    cached = max(0.0, prompt - uncached)
    return 1.0 - cached / prompt * (cached / long if cached < long else 1.0) if prompt > 0.0 else 1.0


def follow(starts: Floats, worker: int, slot: int, tokens: float) -> None:
    """Adds to a worker's cells that a prompt of `tokens` tokens was sent to an endpoint after the newest start there.

    `starts`: as for `first_tokens`. Raises IndexError, and what `first_tokens` raises for other arrays.
    """
    _check(starts, True, "follow")
    if not (0 <= worker < starts.shape[0] and 0 <= slot < starts.shape[2]):
        raise IndexError(f"follow: there is no cell {worker}, {slot}")
    begun = _newest(starts, slot)
    if starts[worker, SEEN, slot] != begun:
        starts[worker, LATE, slot] = 0.0
        starts[worker, SEEN, slot] = begun
    starts[worker, LATE, slot] += tokens


def _check(starts: Floats, written: bool, name: str) -> None:
    """Raises TypeError or ValueError for an array that cannot have prompt starts."""
    fits = isinstance(starts, np.ndarray) and starts.dtype == np.float64 and starts.ndim == 3
    if not fits or not (starts.flags.carray if written else starts.flags.c_contiguous):
        raise TypeError(f"{name}: a kernel needs a contiguous{' writable' if written else ''} array of its own type and dimensions")
    if starts.shape[1] != CELLS:
        raise ValueError(f"{name}: starts have {CELLS} cells")


def _newest(starts: Floats, slot: int) -> float:
    """Returns the newest start of a slot; 0 if none is known."""
    known: list[float] = starts[:, START, slot].tolist()
    return max(0.0, *known)


def _at_front(starts: Floats, slot: int, begun: float, ahead: float) -> float:
    """Returns how many of the tokens ahead were there at the newest start, `begun`; all if nothing else is known."""
    front = ahead
    if begun <= 0.0:
        return ahead
    for seen, late in starts[:, SEEN : LATE + 1, slot].tolist():
        front -= late if seen == begun else 0.0
    return front if front > 0.0 else ahead


def _at_back(starts: Floats, slot: int, waited: float, ahead: float) -> float:
    """Returns how many of the tokens `ahead` are of waiting prompts, if `waited` prompts wait; all if the number of prompts is unknown."""
    if not waited > 0.0:
        return 0.0
    prompts = float(starts[:, PROMPTS, slot].sum()) if 0 <= slot < starts.shape[2] else 0.0
    return ahead * waited / prompts if prompts > waited else ahead


def cell(outlook: Floats, row: int, index: int) -> float:
    """Returns one row of what `first_tokens` found at the candidate `index`. Raises IndexError."""
    return column(outlook, index)[row]


def column(outlook: Floats, index: int) -> list[float]:
    """Returns what `first_tokens` found at the candidate `index`. Raises IndexError."""
    if not 0 <= index < outlook.shape[1]:
        raise IndexError(f"column: there is no candidate {index}")
    found: list[float] = outlook[:, index].tolist()
    return found


def careful(
    point: float, points: float, prompt: float, outlook: Floats, inflight: NDArray[Any], before: Floats, scraped: Floats,
    running: Floats, usage: Floats,
) -> Floats:  # fmt: skip
    """Returns a cost per candidate, in tokens: tokens to compute + tokens ahead + `point` for each of `points` that it lacks.

    A candidate gets up to one point each for the shortest queue (`waiting` of `inflight`, `before` and `scraped`), for the fewest running
    requests, and for the part of the prompt (`prompt` tokens) that it has cached. The `usage` of its KV cache takes up to one point away,
    and QUEUE_PER_POINT requests in its queue take one away. `outlook`: of `first_tokens`. Raises ValueError if the arrays differ in length.
    """
    if {len(column) for column in (inflight, before, scraped, running, usage)} != {outlook.shape[1]}:
        raise ValueError("careful: the arrays differ in length")
    queue = waiting(inflight, before, scraped)
    lacks = points - fewest(queue) - fewest(running) + usage + queue / QUEUE_PER_POINT
    each = 1.0 + point / max(1.0, prompt)
    costs: Floats = point * lacks + outlook[UNCACHED] * each + outlook[AHEAD]
    return costs


def cheapest(costs: Floats, load: NDArray[Any], near: float, least: float, part: float) -> Floats:
    """Returns (1 - part) * lowest cost / cost. Costs up to lowest + max(least, near * lowest) are treated as equal: they score
    1 - part * load / (1 + highest load). With `part` 0, costs are compared as they are. A cost that is NaN is never the lowest.
    """
    if len(costs) != len(load):
        raise ValueError("cheapest: the arrays differ in length")
    if len(costs) == 0:
        return np.empty(0)
    comparable = [cost for cost in costs.tolist() if not math.isnan(cost)]
    low = min(comparable, default=math.nan)
    if part <= 0.0:
        return low / costs
    limit = low + max(least, near * low)
    each = part / (1.0 + float(load.max()))
    return np.where(costs <= limit, 1.0 - each * load, (1.0 - part) * low / costs)


def fit(
    sums: Floats, prior: Floats, values: Sequence[float], observed: float, floor: float, keep: float, most: float,
    share_max: float, weight: float, bounded: int, bound: int,
) -> list[float]:  # fmt: skip
    """Adds one observation to the sums of a fit, in place, and moves each coefficient to its best value given the others.

    Returns the coefficients. `epp.learning.least_squares` explains the fit. `sums`: for n features, n coefficients in units of the prior, n
    moments, and n * n products. `values`: the features. `floor`: the least prediction. `keep`: what remains of earlier sums. `most`: the
    largest observed / prediction. `share_max`: the largest share that one feature has of a prediction. `weight`: of the imagined
    observations. `bounded`, `bound`: the coefficient of the first feature is at most that of the second.
    """
    size, priors = len(prior), prior.tolist()
    every = sums.tolist()
    ratio, moments, products = every[:size], every[size : 2 * size], every[2 * size :]
    expected = max(floor, sum(r * p * x for r, p, x in zip(ratio, priors, values, strict=True)))
    target = min(observed / expected, most)
    shares = [min(share_max, x * p / expected) for x, p in zip(values, priors, strict=True)]
    for k, share in enumerate(shares):
        moments[k] = keep * moments[k] + share * target
        for j, other in enumerate(shares):
            products[k * size + j] = keep * products[k * size + j] + share * other
    for k in range(size):
        rest = moments[k] + weight - sum(products[k * size + j] * ratio[j] for j in range(size))
        own = products[k * size + k]
        ratio[k] = max(0.0, (rest + own * ratio[k]) / (own + weight))
        if k == bounded:
            ratio[k] = min(ratio[k], ratio[bound])
    sums[:] = [*ratio, *moments, *products]
    return [r * p for r, p in zip(ratio, priors, strict=True)]
