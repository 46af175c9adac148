"""Predicts the time to the first token and the time per output token of a request, per endpoint, and learns both from answers.

    first token (s)   speed * (base + a * uncached + b * ahead + c * queue + d * running)
    per token (s)     speed * (base + d * running)

The features of an endpoint for one request:
- uncached: prompt tokens that it has to compute;
- ahead: tokens of the prompts that were sent there and have no first token yet, minus those that it has computed meanwhile. It has spent
  `elapsed` seconds on the prompt at the front, at its own speed (1 / a);
- queue: requests ahead of this one for a place in the batch: load - batch limit + 1. The limit is the largest batch that was seen, once
  requests have waited at that size; a batch that is limited by memory lowers it slowly;
- running: requests in the batch.

The coefficients belong to the pool (`epp.learning.least_squares`), so a new endpoint is predicted from the first request on. The speed
belongs to the endpoint: its logarithm moves by a part of the clipped logarithm of observed / predicted, so one strange answer moves it
little. The speeds of all endpoints have the geometric mean 1. A slow endpoint that gets no requests is trusted again with time, because
nothing else would show that it has recovered.

A model has one writer. Other processes get a copy (`epp.learning.state`) and only predict.
"""

from collections.abc import Sequence
from math import exp
from math import log as ln
from typing import Final, NamedTuple

from epp.learning.least_squares import LeastSquares
from epp.metrics import buckets

BASE, UNCACHED, AHEAD, QUEUE, RUNNING = range(5)
THOUSAND: Final = 1000.0  # tokens count in thousands, so that all coefficients have a similar size
# In seconds: base, per 1000 uncached tokens, per 1000 tokens ahead, per request ahead for a place, per running request.
FIRST_PRIOR: Final[tuple[float, ...]] = (0.03, 0.1, 0.1, 0.1, 0.001)
TOKEN_PRIOR: Final[tuple[float, ...]] = (0.02, 0.0002)
MEMORY: Final = 2000.0  # observations
FIRST_FLOOR_S: Final = 0.02
TOKEN_FLOOR_S: Final = 0.002
LEAST_S: Final = 1e-6  # predictions and observations count as at least this long
MOST_S: Final = 3600.0
STEP: Final = 0.05
SOFT_S: Final = 0.02  # a difference of one decode step says little about an endpoint's speed
STEP_FIRST: Final = (
    10.0  # the n-th observation of an endpoint moves its speed by a part of at least 1 / (n + STEP_FIRST)
)
CLIP: Final = 0.7
LOG_SPEED_MAX: Final = 3.5
DOUBT_S: Final = 60.0  # without observations, the logarithm of a slow endpoint's speed halves in this time
ENOUGH: Final = 8  # observations after which an endpoint is known
FULL_SCRAPES: Final = 8  # scrapes with waiting requests at the largest batch that make it the limit
NEAR_LIMIT: Final = 0.95
LIMIT_STEP: Final = 0.002
ERROR_STEP: Final = 0.02  # the error is about that of the last 50 observations
ERROR_FIRST: Final = 0.5
ERROR_MAX: Final = 2.0
WORSE: Final = 1.1  # a model is not used while its error is so many times that of the mean
SLACK: Final = 0.02  # errors that differ by this little are equal
RATE_S: Final = 3.0
ERROR_BOUNDS: Final[tuple[float, ...]] = buckets.RELATIVE_ERROR


class FirstToken(NamedTuple):
    """The time to the first token of one answer, `observed`, and what its decision knew: the features, and `predicted`.

    `at`: when it came, in monotonic seconds. `tokens`: prompt tokens to compute. `ahead`: tokens in flight without a first token, on whose
    front the endpoint had spent `elapsed` seconds. `load`: requests there.
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


class EndpointModel:
    """Holds what is known of one endpoint: (slot, generation).

    `log_speed`, `token_log_speed`: logarithms of how many times slower it is than the pool's mean, before they are centred. `samples`,
    `token_samples`: observations. `learned_at`: the time of the last one. `error`: the mean relative error of its last predictions.
    `batch`: the largest batch; `full`: scrapes with waiting requests at that size. `errors`: observations by relative error, one more
    than `ERROR_BOUNDS`; `error_sum`: the sum of these errors.
    """

    __slots__ = (
        "batch", "error", "error_sum", "errors", "full", "generation", "learned_at", "log_speed", "samples", "slot",
        "token_log_speed", "token_samples",
    )  # fmt: skip

    def __init__(self, slot: int, generation: int) -> None:
        self.slot = slot
        self.generation = generation
        self.log_speed = 0.0
        self.token_log_speed = 0.0
        self.samples = 0
        self.token_samples = 0
        self.learned_at = 0.0
        self.error = ERROR_FIRST
        self.batch = 0.0
        self.full = 0
        self.errors = [0] * (len(ERROR_BOUNDS) + 1)
        self.error_sum = 0.0

    @property
    def limit(self) -> float:
        """Returns the batch limit in requests; 0: not known."""
        return self.batch if self.full >= FULL_SCRAPES else 0.0


class LatencyModel:
    """Predicts and learns. Times are in seconds, `now` and `at` are monotonic.

    `endpoints`: by slot. `error`, `mean_error`: mean relative errors of the last predictions of this model, and of the pool's mean time
    `mean_s`. `rate`: observations per second. `changes`: grows with each change.
    """

    __slots__ = (
        "changes", "endpoints", "error", "first", "last_at", "mean_error", "mean_s", "per_token", "rate", "speed_sum", "token_speed_sum",
        "trusted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.first = LeastSquares(FIRST_PRIOR, MEMORY)
        self.per_token = LeastSquares(TOKEN_PRIOR, MEMORY)
        self.endpoints: dict[int, EndpointModel] = {}
        self.speed_sum = 0.0
        self.token_speed_sum = 0.0
        self.error = ERROR_FIRST
        self.mean_error = ERROR_FIRST
        self.mean_s = 0.0
        self.rate = 0.0
        self.last_at = 0.0
        self.trusted = True
        self.changes = 0

    def speed(self, slot: int, now: float) -> float:
        """Returns how many times slower than the pool's mean the endpoint is with prompts; 1 if nothing is known."""
        known = self.endpoints.get(slot)
        if known is None:
            return 1.0
        centred = known.log_speed - self.speed_sum / len(self.endpoints)
        silent = now - known.learned_at
        if centred > 0.0 and silent > 1.0:
            centred *= 0.5 ** (silent / DOUBT_S)
        return exp(centred)

    def token_speed(self, slot: int) -> float:
        """Returns how many times slower than the pool's mean the endpoint is with output tokens; 1 if nothing is known."""
        known = self.endpoints.get(slot)
        return 1.0 if known is None else exp(known.token_log_speed - self.token_speed_sum / len(self.endpoints))

    def limit(self, slot: int) -> float:
        """Returns the endpoint's batch limit in requests; 0: not known."""
        known = self.endpoints.get(slot)
        return 0.0 if known is None else known.limit

    def features(
        self, slot: int, speed: float, tokens: float, ahead: float, elapsed: float, load: float
    ) -> list[float]:
        """Returns the features for the first token. `tokens`, `ahead`: in tokens. `load`: requests at the endpoint."""
        rest = ahead / THOUSAND
        rate = speed * self.first.theta[UNCACHED]
        if rest > 0.0 and rate > 0.0:
            rest = max(0.0, rest - elapsed / rate)
        limit = self.limit(slot)
        if limit <= 0.0:
            return [1.0, tokens / THOUSAND, rest, 0.0, load]
        return [1.0, tokens / THOUSAND, rest, max(0.0, load - limit + 1.0), min(load, limit)]

    def first_token_s(self, slot: int, tokens: float, ahead: float, elapsed: float, load: float, now: float) -> float:
        """Predicts the time to the first token."""
        speed = self.speed(slot, now)
        return bounded(speed * self.first.predict(self.features(slot, speed, tokens, ahead, elapsed, load)))

    def per_token_s(self, slot: int, load: float) -> float:
        """Predicts the time per output token after the first one."""
        limit = self.limit(slot)
        return bounded(
            self.token_speed(slot) * self.per_token.predict([1.0, min(load, limit) if limit > 0.0 else load])
        )

    def knows(self, slots: Sequence[int]) -> bool:
        """Returns whether at least half of these endpoints are known."""
        known = 0
        for slot in slots:
            found = self.endpoints.get(slot)
            if found is not None and found.samples >= ENOUGH:
                known += 1
        return 2 * known >= len(slots)

    def learn_first(self, seen: FirstToken) -> None:
        """Takes the time to the first token of one answer."""
        at, slot, generation, tokens, ahead, elapsed, load, predicted, observed = seen
        observed = bounded(observed)
        endpoint = self._endpoint(slot, generation)
        self._count_error(endpoint, bounded(predicted), observed)
        self._count_rate(at)
        speed = self.speed(slot, at)
        features = self.features(slot, speed, tokens, ahead, elapsed, load)
        expected = bounded(speed * self.first.predict(features))
        surprise = ln((observed + SOFT_S) / (expected + SOFT_S))
        self.first.learn(features, observed / speed, FIRST_FLOOR_S)
        moved = _moved(endpoint.log_speed, surprise, endpoint.samples)
        self.speed_sum += moved - endpoint.log_speed
        endpoint.log_speed = moved
        endpoint.samples += 1
        endpoint.learned_at = at
        self.changes += 1

    def learn_token(self, slot: int, generation: int, load: float, observed: float) -> None:
        """Takes the mean time per output token of one answer."""
        observed = bounded(observed)
        endpoint = self._endpoint(slot, generation)
        limit = endpoint.limit
        features = [1.0, min(load, limit) if limit > 0.0 else load]
        speed = self.token_speed(slot)
        surprise = ln(observed / bounded(speed * self.per_token.predict(features)))
        self.per_token.learn(features, observed / speed, TOKEN_FLOOR_S)
        moved = _moved(endpoint.token_log_speed, surprise, endpoint.token_samples)
        self.token_speed_sum += moved - endpoint.token_log_speed
        endpoint.token_log_speed = moved
        endpoint.token_samples += 1
        self.changes += 1

    def scraped(self, slot: int, generation: int, running: float, waiting: float) -> None:
        """Takes the batch size and the queue length of one scrape."""
        known = self.endpoints.get(slot)
        if (known is None or known.generation != generation) and waiting <= 0.0:
            return
        endpoint = self._endpoint(slot, generation)
        if running > endpoint.batch:
            endpoint.batch, endpoint.full = running, 0
        if waiting > 0.0:
            if running >= NEAR_LIMIT * endpoint.batch:
                endpoint.full += 1
            else:
                endpoint.batch += LIMIT_STEP * (running - endpoint.batch)
            self.changes += 1

    def forget(self, slot: int) -> None:
        """Forgets an endpoint that has left."""
        known = self.endpoints.pop(slot, None)
        if known is not None:
            self.speed_sum -= known.log_speed
            self.token_speed_sum -= known.token_log_speed
            self.changes += 1

    def adopt(self, known: EndpointModel, slot: int, generation: int, now: float) -> None:
        """Takes over what was known of an endpoint in an earlier run, in which it had another slot and another clock was in use."""
        self.forget(slot)
        known.slot, known.generation, known.learned_at = slot, generation, now
        self.endpoints[slot] = known
        self.speed_sum += known.log_speed
        self.token_speed_sum += known.token_log_speed
        self.changes += 1

    def _endpoint(self, slot: int, generation: int) -> EndpointModel:
        """Returns the endpoint's model. A later endpoint in the same slot begins anew."""
        known = self.endpoints.get(slot)
        if known is not None and known.generation == generation:
            return known
        self.forget(slot)
        known = self.endpoints[slot] = EndpointModel(slot, generation)
        # It begins with the pool's mean, so that it does not move the others.
        others = len(self.endpoints) - 1
        if others:
            known.log_speed, known.token_log_speed = self.speed_sum / others, self.token_speed_sum / others
            self.speed_sum += known.log_speed
            self.token_speed_sum += known.token_log_speed
        return known

    def _count_error(self, endpoint: EndpointModel, predicted: float, observed: float) -> None:
        wrong = abs(predicted - observed) / observed
        bucket = 0
        while bucket < len(ERROR_BOUNDS) and wrong > ERROR_BOUNDS[bucket]:
            bucket += 1
        endpoint.errors[bucket] += 1
        endpoint.error_sum += wrong
        mean_s = self.mean_s or observed
        endpoint.error += ERROR_STEP * (_relative(predicted, observed) - endpoint.error)
        self.error += ERROR_STEP * (_relative(predicted, observed) - self.error)
        self.mean_error += ERROR_STEP * (_relative(mean_s, observed) - self.mean_error)
        self.mean_s = mean_s + ERROR_STEP * (observed - mean_s)
        self.trusted = self.error <= (WORSE if self.trusted else 1.0) * self.mean_error + SLACK

    def _count_rate(self, at: float) -> None:
        gap = max(0.0, at - self.last_at) if self.last_at else RATE_S
        part = min(1.0, gap / RATE_S)
        self.rate += 1.0 / RATE_S - part * self.rate
        self.last_at = max(at, self.last_at)


def bounded(seconds: float) -> float:
    """Returns a time between LEAST_S and MOST_S; MOST_S for a value that is not a number."""
    return max(LEAST_S, min(MOST_S, seconds)) if seconds == seconds else MOST_S


def _relative(predicted: float, observed: float) -> float:
    """Returns the error relative to the larger one of the two, so that too long and too short count alike: 0 to 1."""
    return abs(predicted - observed) / max(predicted, observed)


def _moved(log_speed: float, surprise: float, samples: int) -> float:
    step = max(STEP, 1.0 / (samples + STEP_FIRST))
    moved = log_speed + step * max(-CLIP, min(CLIP, surprise))
    return max(-LOG_SPEED_MAX, min(LOG_SPEED_MAX, moved))
