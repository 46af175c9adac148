"""Says what it costs to wait for a prefix that an endpoint computes now, and what it costs to compute the prefix a second time.

If a prompt shares its prefix with a prefill under way at an endpoint, the prompt waits for the end of that prefill, and then only its own
rest is computed. The model predicts this wait only where prompts wait for each other. Elsewhere, it counts the prefix as cached already, so
this module adds the wait.

All other endpoints would compute the prefix a second time. For a request that comes right after the first one, waiting and computing
take the same time. Such a request should wait, because a second copy takes time and memory of another endpoint. So the costs of the other
endpoints grow by the part TWICE of the time that the second copy takes. This rule holds for long prefixes (LONG_TOKENS) of siblings:
requests within SIBLINGS_S, such as several questions about one document. A prefix that is short, or for which further requests come while
it is computed, is worth a second copy.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from compiled.outlook import AHEAD, COSTS, TIMES, UNCACHED
from epp.candidates import Floats
from epp.learning import model as models
from epp.learning.model import LONG_TOKENS, THOUSAND, LatencyModel

TWICE: Final = 0.25
SIBLINGS_S: Final = 0.1


class Wait(NamedTuple):
    """A prefill for which the prompt can wait at one candidate. `at`: the candidate's index. `shared`: the common leading tokens.

    `since`: when the prefill was sent, in monotonic seconds. `tokens`: how many tokens the prefill computes.
    """

    at: int
    shared: float
    since: float
    tokens: float


def without_waits(outlook: Floats, waits: Sequence[Wait], now: float) -> Floats:
    """Returns, for costs without a model, the outlook as if the prefills of siblings were done."""
    siblings = _siblings(waits, now)
    if not siblings:
        return outlook
    done = outlook.copy()
    for wait in siblings:
        done[AHEAD, wait.at] = max(0.0, float(done[AHEAD, wait.at]) - wait.tokens)
    return done


def add_waits(model: LatencyModel, slots: Sequence[int], prompt: float, outlook: Floats, waits: Sequence[Wait], now: float) -> None:
    """Adds to the times and costs of an outlook what the model does not predict: waits for prefixes, and computing prefixes twice.

    `prompt`: all tokens of the prompt. `slots`, `outlook`: as in `LatencyModel.outlook`.
    """
    times, costs = outlook[TIMES], outlook[COSTS]
    for wait in waits:
        slot = slots[wait.at]
        left = model.alone_s(slot, wait.tokens, now) - (now - wait.since)
        later = left + model.alone_s(slot, float(outlook[UNCACHED, wait.at]), now) - float(times[wait.at])
        if left > 0.0 and later > 0.0:
            times[wait.at] += later
            costs[wait.at] += later
    siblings = _siblings(waits, now)
    if not siblings:
        return
    for wait in siblings:
        costs[wait.at] = times[wait.at]  # a request that waits for a prefix takes no other request's turn
    shared = max(wait.shared for wait in siblings)
    own = prompt - shared  # tokens that no sibling computes
    for i, slot in enumerate(slots):
        again = min(float(outlook[UNCACHED, i]) - own, shared)
        if again > 0.0:
            costs[i] += TWICE * model.speed(slot, now) * model.first.theta[models.UNCACHED] * again / THOUSAND


def _siblings(waits: Sequence[Wait], now: float) -> list[Wait]:
    """Returns the waits for long prefixes of siblings."""
    return [wait for wait in waits if is_sibling(wait.shared, wait.since, now)]


def is_sibling(shared: float, since: float, now: float) -> bool:
    """Returns whether a prefill that was sent at `since` is of a sibling with a long common prefix, of `shared` tokens."""
    return now - since <= SIBLINGS_S and shared >= LONG_TOKENS
