"""Predicts the time to the first token and the time per output token of a request, per endpoint, and learns both from answers.

    first token (s)   speed * (base + a * uncached + b * rest + busy + c * queue + d * running) + memory
    per token (s)     speed * (base + d * running)

The features of an endpoint for one request:
- uncached: prompt tokens that the endpoint has to compute;
- rest: tokens of the prompts ahead, minus tokens that the endpoint has computed of them. A prompt ahead was sent to the endpoint and has
  no first token yet. The endpoint has spent `elapsed` seconds on the first of these prompts, and needs speed * a seconds per token. In this
  time it computes only prompts that it had when the time began, or got at that moment, and no prompt that waits for memory. With a crowded
  KV cache, `elapsed` may include a wait for memory, so any prompt ahead may explain the time. If the rest is below 0 (it has a lower
  limit), a first token is overdue. b is at most a: a token of a prompt ahead takes no longer than a token of this prompt. b is 0 where
  prompts do not wait for each other;
- busy: 1 if there are prompts ahead, for the time that a prompt takes besides its tokens;
- queue: seconds until a place in the batch is free: the requests ahead of this one for a place (load - batch limit + 1), times the mean
  time that an answer lasts / limit. The limit is the largest batch that was seen, once requests have waited at this batch size. If requests
  wait at a smaller batch although the KV cache is not crowded, the limit falls slowly. An endpoint with an unknown limit has the usual
  limit of the other endpoints;
- running: requests in the batch;
- memory: further seconds until the KV cache has room for this prompt and for all that wait. The prompts that wait are those that the last
  scrape found waiting, and those that were sent since; the other prompts ahead have their room. Memory becomes free as answers end: the
  whole cache within the mean time that an answer lasts. Meanwhile, the endpoint computes the prompts ahead. No answer corrects this
  prediction.

All endpoints of the pool share the coefficients (`epp.learning.least_squares`), so the model can predict a new endpoint from the first
request on. Each endpoint has its own speed (`epp.learning.speed`). The geometric mean of all speeds is 1. The model learns a speed from
the time that first tokens take beyond `base`, because `base` includes the time that later requests add. If the endpoints that answer become
faster, those that get no requests count as faster, too. A slow endpoint is trusted again with time, because otherwise it would get no
requests that show its recovery. If `elapsed` is longer than the predicted time for the prompts that the endpoint had when `elapsed` began,
the endpoint is slower than was learned, and the model takes the speed that explains `elapsed`. Prompts that were sent later explain none of
it.

The cost of a request is the time that it takes, and the time that it adds to later requests:

    cost = first token + again * turn * (b / a) ** SHARP + PLACE * own * full ** SHARP_FULL + later * b * long
           + DISPLACED * (taken * usage ** SHARP_FULL + dropped)

- `turn`: the time until the endpoint begins with this prompt, if prompts wait for each other: then b = a. A prompt that is not cached adds
  this time a second time, because later requests join the same step and make it longer.
- `again`: 1 - cached part of the prompt * min(1, cached tokens / LONG_TOKENS), so 1 without hits. If most of a prompt is cached, it delays
  later requests little, and other endpoints would have to compute its prefix again and drop other prefixes for it.
- `own`: the time that the endpoint spends on this prompt. A prompt that is computed again keeps its place in the batch for this time
  longer, and where the batch is full, later requests wait for the place.
- `full`: the taken share of the batch, 0 to 1; 0 if the batch limit is not known.
- `long`: the uncached tokens of the prompt beyond LONG_TOKENS.
- `later`: how many later requests wait for these tokens, where prompts wait for each other: u / (1 - u), at most LATER. `u` is the share of
  the endpoints that have prompts without a first token. So a second copy of a long prefix is dear where most endpoints are busy. A short
  prefix is worth a second copy.
- `taken`: the part of the KV cache that the uncached tokens take, times the mean time that an answer lasts. If the `usage` of the cache,
  0 to 1, is high, later requests lack this memory: they wait, or find fewer cached prefixes.
- `dropped`: speed * a * uncached at an endpoint with a full cache, if prompts do not wait for each other, else 0. The endpoint drops as
  many cached tokens as it computes, and may have to compute those again. (Where prompts wait, `turn` counts twice.) A cache counts as
  full once the endpoint has computed FILLED of the tokens that fit into it.

A model that has learned something strange, for example while one of the servers stood still, may see no cost in what is in flight, and may
take one of two equal endpoints for much faster. So whatever was learned, requests that were sent since the last scrape (`sent`) cost a part
of the time that a request takes alone, at a speed that is not far from the mean. A burst between two scrapes then spreads:

    cost >= speed * alone + BURST * sent * min(max(speed, 1 / APART), APART) * (alone + busy)        alone = base + a * uncached

A model has one writer. Other processes get a copy (`epp.learning.state`) and only predict.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import exp
from math import log as ln
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compiled import calls
from compiled.outlook import CELLS, START, TIMES
from epp.learning.endpoint import ERROR_BOUNDS, ERROR_FIRST, EndpointModel
from epp.learning.least_squares import LeastSquares
from epp.learning.speed import LOG_MAX

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.intp]

BASE, UNCACHED, REST, BUSY, QUEUE, RUNNING = range(6)
THOUSAND: Final = 1000.0  # tokens count in thousands, so that all coefficients have a similar size
# In seconds: base, per 1000 uncached tokens, per 1000 tokens of the rest, if busy, per second of the queue, per running request.
FIRST_PRIOR: Final[tuple[float, ...]] = (0.03, 0.1, 0.1, 0.01, 1.0, 0.001)
TOKEN_PRIOR: Final[tuple[float, ...]] = (0.02, 0.0002)
MEMORY: Final = 2000.0  # how many observations count in the long run
FIRST_FLOOR_S: Final = 0.02
TOKEN_FLOOR_S: Final = 0.002
LEAST_S: Final = 1e-6  # predictions and observations count as at least this long
MOST_S: Final = 3600.0
OVERDUE_S: Final = 0.05  # by how much a first token counts as overdue at most, at the pool's mean speed
SHARP: Final = 4.0
SHARP_FULL: Final = 8.0
LATER: Final = 1.0  # how many later requests wait for a long prompt at most
LONG_TOKENS: Final = 4096.0  # a shorter prefix is worth a second copy
PLACE: Final = 1.5
DISPLACED: Final = 0.5
FILLED: Final = 0.9  # an endpoint that has computed this part of the tokens that fit into its cache has no unused room
BURST: Final = 0.5  # part of the time of a request alone: each request that an endpoint was sent since the last scrape costs at least this
APART: Final = 1.4  # the cost of a burst takes endpoints for at most so many times slower or faster than the mean
TABLE_S: Final = 1.0  # after this time, speeds are computed again, because slow endpoints are trusted again with time
IN_TURN: Final = 0.5  # prompts wait for each other if a token of the rest takes at least this part of the time of an uncached token
SOFT: Final = 0.5  # part of the pool's mean time: a first token that is expected earlier says little about an endpoint's speed
SAME: Final = 0.2  # an endpoint has the usual speed if the logarithms of both differ by at most this, or by at most the model's error
DOUBT_S: Final = 60.0  # without observations, the logarithm of a slow endpoint's speed halves in this time
ENOUGH: Final = 4  # observations after which an endpoint is known
ENOUGH_OF_POOL: Final = 10  # observations after which a pool is known if its prompts do not wait for each other
YOUNG: Final = 300  # before so many first tokens, a model is judged by what it predicts at the answer, not at the decision
FULL_SCRAPES: Final = 2  # after so many scrapes with waiting requests at the largest batch, that batch is the limit
NEAR_LIMIT: Final = 0.95
CROWDED: Final = 0.85  # if this part of the KV cache is taken, requests may wait for memory
LIMIT_STEP: Final = 0.002
PLACE_FIRST_S: Final = 1.0
PLACE_STEP: Final = 0.02  # the time that a place is taken is about the mean of the last 50 answers, or of all and PLACE_FIRST_S
ERROR_STEP: Final = 0.02  # the error is about that of the last 50 observations
WORSE: Final = 1.1  # a trusted model is used until its error is so many times that of a constant prediction, the pool's mean time
SLACK: Final = 0.02  # two errors that differ by no more than this count as equal


class FirstToken(NamedTuple):
    """The time to the first token of one answer, `observed`, and what the decision knew: the features, and the time `predicted`.

    `at`: when the token came, in monotonic seconds. `tokens`: prompt tokens to compute. `ahead`: tokens of the prompts ahead. `elapsed`:
    seconds that the endpoint had spent on the first of these prompts. `load`: requests at the endpoint.
    """

    at: float
    slot: int
    generation: int
    tokens: float
    ahead: float
    elapsed: float
    load: float
    predicted: float
    observed: float


class Table:
    """Holds what `LatencyModel.outlook` predicts with: parameters, and speeds, limits and computed tokens by slot. `at`: when this table
    was made.
    """

    __slots__ = ("at", "changes", "computed", "limits", "parameters", "speeds")

    def __init__(self, changes: int, at: float, parameters: Floats, speeds: Floats, limits: Floats, computed: Floats) -> None:
        self.changes = changes
        self.at = at
        self.parameters = parameters
        self.speeds = speeds
        self.limits = limits
        self.computed = computed


class LatencyModel:
    """Predicts and learns. Times are in seconds, `now` and `at` are monotonic.

    `endpoints`: by slot. `error`, `mean_error`: mean relative errors of the last predictions of this model, and of the pool's mean time
    `mean_s`. `place_s`: how long an answer lasts after its first token. `usual_limit`: the median of the known batch limits; 0 if no
    limit is known. `usual_log`: the median of the logarithms of speeds. `drift`: how far the logarithms of speeds have moved since the
    start, in the mean over the endpoints that answered. `changes`: grows with each change of the model.
    """

    __slots__ = (
        "_answered", "_counted", "_moved", "_table", "changes", "drift", "endpoints", "error", "first", "mean_error", "mean_s", "per_token",
        "place_s", "speed_sum", "token_speed_sum", "trusted", "usual_limit", "usual_log",
    )  # fmt: skip

    def __init__(self) -> None:
        self.first = LeastSquares(FIRST_PRIOR, MEMORY, at_most=(REST, UNCACHED))
        self.per_token = LeastSquares(TOKEN_PRIOR, MEMORY)
        self.endpoints: dict[int, EndpointModel] = {}
        self.speed_sum = 0.0
        self.token_speed_sum = 0.0
        self.error = ERROR_FIRST
        self.mean_error = ERROR_FIRST
        self.mean_s = 0.0
        self.place_s = PLACE_FIRST_S
        self.usual_limit = 0.0
        self.usual_log = 0.0
        self.drift = 0.0
        self._counted = 0
        self._moved = 0.0  # sum of what `log` of the endpoints in `_answered` has moved since `_counted` was 0
        self._answered: set[int] = set()
        self._table: Table | None = None
        self.trusted = True
        self.changes = 0

    def speed(self, slot: int, now: float) -> float:
        """Returns how many times slower than the pool's mean the endpoint is with prompts.

        Unless the endpoint clearly differs, this is the usual speed: small differences vanish by the non-negative garrote (Breiman 1995).
        """
        known = self.endpoints.get(slot)
        if known is None:
            return exp(self.usual_log)
        differs = self._log_speed(known, now) - self.usual_log
        same = max(SAME, self.error)
        return exp(self.usual_log + (differs * (1.0 - (same / differs) ** 2) if abs(differs) > same else 0.0))

    @property
    def share(self) -> float:
        """Returns the time of a token of a prompt ahead, divided by the time of a token of this prompt: 0 if prompts do not wait."""
        theta = self.first.theta
        return theta[REST] / theta[UNCACHED] if theta[UNCACHED] > 0.0 else 0.0

    def token_speed(self, slot: int) -> float:
        """Returns how many times slower than the pool's mean the endpoint is with output tokens; 1 before any observation."""
        known = self.endpoints.get(slot)
        return 1.0 if known is None else exp(known.token_speed.log - self.token_speed_sum / len(self.endpoints))

    def limit(self, slot: int) -> float:
        """Returns the endpoint's batch limit in requests; 0 if it is not known.

        An endpoint without a limit of its own has the usual limit, unless it has run a larger batch.
        """
        if (known := self.endpoints.get(slot)) is None:
            return self.usual_limit
        if known.full >= FULL_SCRAPES:
            return known.batch
        return self.usual_limit if known.batch <= self.usual_limit else 0.0

    def features(self, limit: float, speed: float, tokens: float, ahead: float, elapsed: float, load: float) -> list[float]:
        """Returns the features for the first token. `tokens`, `ahead`: in tokens. `load`: requests at the endpoint."""
        return calls.features(self.first.theta[UNCACHED], self.place_s, OVERDUE_S, limit, speed, tokens, ahead, elapsed, load)

    def outlook(
        self,
        slots: Ints,
        starts: Floats,
        now: float,
        prompt: float,
        held: Floats | None,
        block_tokens: float,
        ahead: Floats,
        inflight: Floats,
        before: Floats,
        running: Floats,
        waiting: Floats,
        usage: Floats,
        room: Floats,
    ) -> Floats:
        """Predicts for one request and each of these slots: the time to the first token, the cost, and the terms of both.

        `compiled.kernels.latency_reference.first_tokens` describes arguments and result.
        """
        table = self._table
        if table is None or self.changes != table.changes or not 0.0 <= now - table.at < TABLE_S:
            table = self._table = self._tabulated(now)
        return calls.first_tokens(
            table.parameters, table.speeds, table.limits, table.computed, starts, now, slots, prompt, held, block_tokens,
            ahead, inflight, before, running, waiting, usage, room,
        )  # fmt: skip

    def first_token_s(self, slot: int, tokens: float, ahead: float, elapsed: float, load: float, now: float) -> float:
        """Predicts the time to the first token at one endpoint."""
        table, none = self._tabulated(now), np.zeros(1)
        starts = np.zeros((1, CELLS, slot + 1))
        starts[0, START, slot] = 1.0
        found = calls.first_tokens(
            table.parameters, table.speeds, table.limits, table.computed, starts, 1.0 + elapsed, np.array([slot]), tokens, None, 0.0,
            np.array([ahead]), np.array([load]), np.array([load]), none, none, none, none,
        )  # fmt: skip
        return float(found[TIMES, 0])

    def alone_s(self, slot: int, tokens: float, now: float) -> float:
        """Predicts the time to the first token at an endpoint without other requests. `tokens`: prompt tokens to compute."""
        return self.speed(slot, now) * (self.first.theta[BASE] + self.first.theta[UNCACHED] * tokens / THOUSAND)

    def _tabulated(self, now: float) -> "Table":
        theta, share = self.first.theta, self.share
        parameters = [
            *theta, self.place_s, OVERDUE_S, float(share >= IN_TURN), share**SHARP, PLACE, SHARP_FULL, exp(self.usual_log),
            self.usual_limit, LEAST_S, MOST_S, BURST, APART, LATER, LONG_TOKENS, DISPLACED, CROWDED, FILLED,
        ]  # fmt: skip
        slots = range(max(self.endpoints, default=-1) + 1)
        return Table(
            self.changes,
            now,
            np.array(parameters),
            np.array([self.speed(slot, now) for slot in slots], dtype=np.float64),
            np.array([self.limit(slot) for slot in slots], dtype=np.float64),
            np.array([known.computed if (known := self.endpoints.get(slot)) is not None else 0.0 for slot in slots], dtype=np.float64),
        )

    def per_token_s(self, slot: int, load: float) -> float:
        """Predicts the time per output token after the first one."""
        limit = self.limit(slot)
        return bounded(self.token_speed(slot) * self.per_token.predict([1.0, min(load, limit) if limit > 0.0 else load]))

    def knows(self, slots: Sequence[int]) -> bool:
        """Returns whether at least half of these endpoints are known. Where prompts do not wait for each other, the pool's first answers
        suffice: the pool's mean is used for all endpoints, and the rule without a model would count tokens for which no prompt waits.
        """
        if self.first.count >= ENOUGH_OF_POOL and self.share < IN_TURN:
            return True
        answered = (known for slot in slots if (known := self.endpoints.get(slot)) is not None)
        return 2 * sum(known.samples >= ENOUGH for known in answered) >= len(slots)

    def learn_first(self, seen: FirstToken) -> None:
        """Takes the time to the first token of one answer."""
        at, slot, generation, tokens, ahead, elapsed, load, predicted, observed = seen
        observed = bounded(observed)
        endpoint = self._endpoint(slot, generation)
        log_speed = self._log_speed(endpoint, at)
        speed = exp(log_speed)
        features = self.features(self.limit(slot), speed, tokens, ahead, elapsed, load)
        expected = bounded(speed * self.first.predict(features))
        self._count_error(endpoint, bounded(predicted), expected, observed)
        soft = SOFT * self.mean_s
        surprise = ln((observed + soft) / (max(0.0, expected + (1.0 - speed) * self.first.theta[BASE]) + soft))
        self.first.learn(features, observed / speed, FIRST_FLOOR_S)
        self._counted += 1
        if self._counted >= len(self.endpoints):
            self.count_speeds()
        doubted = log_speed + self.speed_sum / len(self.endpoints) - endpoint.speed.log
        endpoint.speed.log += doubted
        moved = endpoint.speed.learn(surprise)
        self.speed_sum += doubted + moved
        self._moved += moved
        self._answered.add(slot)
        endpoint.learned_at, endpoint.drift_at = at, self.drift
        endpoint.computed += tokens
        self.changes += 1

    def learn_token(self, slot: int, generation: int, load: float, observed: float, lasted: float) -> None:
        """Takes the mean time per output token of one answer, and how long the answer lasted from the first token on."""
        self.place_s += max(PLACE_STEP, 1.0 / (self.per_token.count + 2.0)) * (bounded(lasted) - self.place_s)
        observed = bounded(observed)
        endpoint = self._endpoint(slot, generation)
        limit = self.limit(slot)
        features = [1.0, min(load, limit) if limit > 0.0 else load]
        speed = self.token_speed(slot)
        surprise = ln(observed / bounded(speed * self.per_token.predict(features)))
        self.per_token.learn(features, observed / speed, TOKEN_FLOOR_S)
        self.token_speed_sum += endpoint.token_speed.learn(surprise)
        self.changes += 1

    def scraped(self, slot: int, generation: int, running: float, waiting: float, usage: float = 0.0) -> None:
        """Takes the batch size and the queue length of one scrape, and which part of the KV cache is taken.

        If the cache is nearly full, requests may wait for memory, so waiting requests do not show the limit of the batch.
        """
        known = self.endpoints.get(slot)
        if (known is None or known.generation != generation) and waiting <= 0.0:
            return
        endpoint = self._endpoint(slot, generation)
        if running > endpoint.batch:
            was_known = endpoint.full >= FULL_SCRAPES
            endpoint.batch, endpoint.full = running, 0
            self.changes += 1
            if was_known:
                self.count_limits()
        if waiting > 0.0 and not usage > CROWDED:
            if running >= NEAR_LIMIT * endpoint.batch:
                endpoint.full += 1
                if endpoint.full == FULL_SCRAPES:
                    self.count_limits()
            else:
                endpoint.batch += LIMIT_STEP * (running - endpoint.batch)
            self.changes += 1

    def count_limits(self) -> None:
        """Updates `usual_limit`."""
        known = sorted(each.batch for each in self.endpoints.values() if each.full >= FULL_SCRAPES)
        self.usual_limit = known[len(known) // 2] if known else 0.0

    def count_speeds(self) -> None:
        """Updates `usual_log` and `drift`."""
        self._counted = 0
        if self._answered:
            self.drift += self._moved / len(self._answered)
            for slot in self._answered & self.endpoints.keys():
                self.endpoints[slot].drift_at = self.drift
            self._moved = 0.0
            self._answered.clear()
        known = sorted(map(self.log_of, self.endpoints.values()))
        self.usual_log = known[(len(known) - 1) // 2] - self.speed_sum / len(known) if known else 0.0

    def forget(self, slot: int) -> None:
        """Forgets an endpoint that has left."""
        known = self.endpoints.pop(slot, None)
        if known is not None:
            self.speed_sum -= known.speed.log
            self.token_speed_sum -= known.token_speed.log
            self.count_limits()
            self.changes += 1

    def adopt(self, known: EndpointModel, slot: int, generation: int, now: float) -> None:
        """Takes over what an earlier run knew of an endpoint. In that run, the endpoint had another slot, and the clock was another."""
        self.forget(slot)
        known.slot, known.generation, known.learned_at, known.drift_at = slot, generation, now, self.drift
        self.endpoints[slot] = known
        self.speed_sum += known.speed.log
        self.token_speed_sum += known.token_speed.log
        self.count_limits()
        self.changes += 1

    def _endpoint(self, slot: int, generation: int) -> EndpointModel:
        """Returns the endpoint's model. A later endpoint in the same slot begins anew."""
        known = self.endpoints.get(slot)
        if known is not None and known.generation == generation:
            return known
        self.forget(slot)
        known = self.endpoints[slot] = EndpointModel(slot, generation)
        known.drift_at = self.drift
        # A new endpoint begins with the pool's mean speed, so that it does not move the speeds of the others.
        others = len(self.endpoints) - 1
        if others:
            known.speed.log, known.token_speed.log = self.speed_sum / others, self.token_speed_sum / others
            self.speed_sum += known.speed.log
            self.token_speed_sum += known.token_speed.log
        return known

    def log_of(self, known: EndpointModel) -> float:
        """Returns the logarithm of an endpoint's speed. If other endpoints become faster, so does an endpoint without answers: maybe all
        were slow at its last answer, for example while they started, and without answers nothing else shows its recovery.
        """
        return max(-LOG_MAX, known.speed.log + min(0.0, self.drift - known.drift_at))

    def _log_speed(self, known: EndpointModel, now: float) -> float:
        """Returns the logarithm of an endpoint's speed, relative to the pool's mean."""
        log = self.log_of(known) - self.speed_sum / len(self.endpoints)
        silent = now - known.learned_at
        return log * 0.5 ** (silent / DOUBT_S) if log > 0.0 and silent > 1.0 else log

    def _count_error(self, endpoint: EndpointModel, predicted: float, expected: float, observed: float) -> None:
        """Counts how wrong `predicted` was. A young model is judged by what it expects when the answer comes (`expected`), because it has
        learned much since the decision.
        """
        wrong = abs(predicted - observed) / observed
        endpoint.errors[bisect_left(ERROR_BOUNDS, wrong)] += 1
        endpoint.error_sum += wrong
        mean_s = self.mean_s or observed
        judged = expected if self.first.count < YOUNG else predicted
        endpoint.error += ERROR_STEP * (_relative(judged, observed) - endpoint.error)
        self.error += ERROR_STEP * (_relative(judged, observed) - self.error)
        self.mean_error += ERROR_STEP * (_relative(mean_s, observed) - self.mean_error)
        self.mean_s = mean_s + ERROR_STEP * (observed - mean_s)
        self.trusted = self.error <= (WORSE if self.trusted else 1.0) * self.mean_error + SLACK


def bounded(seconds: float) -> float:
    """Returns a time between LEAST_S and MOST_S; MOST_S for a value that is not a number."""
    return max(LEAST_S, min(MOST_S, seconds)) if seconds == seconds else MOST_S


def _relative(predicted: float, observed: float) -> float:
    """Returns the error relative to the larger of the two times, 0 to 1, so that too long and too short predictions count alike."""
    return abs(predicted - observed) / max(predicted, observed)
