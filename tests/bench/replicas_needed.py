"""The scaling signal on day-long traces, in virtual time: `python -m tests.bench.replicas_needed`.

A pool of equal replicas serves Poisson arrivals whose rate follows a trace, in steps of a second. An autoscaler asks for the signal every
POLL_S; a new replica is ready after START_S. The oracle knows the rate and the replicas: it names the fewest that are used to TARGET.

    within 1          of the minutes, how many have a number within 1 of the oracle's at that moment
    within 1, late    the same, where the oracle's number of any moment of the last LATE_S counts: the signal has to see a change first
    changes           of the number in the day
    up, down          the most changes up, and down, in any 10 minutes of a load that has been steady for 10 minutes before

Pools: `places` has replicas with a batch of BATCH requests that get slower as it fills; `prompts` has replicas that compute one prompt at
a time and answer shortly. There, the lengths of prompts vary, and a latency model knows what a token takes.
"""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, exp, pi, sin

import numpy as np

from epp.learning.model import FirstToken, LatencyModel
from epp.learning.prompt_time import PromptTime
from epp.learning.replicas_needed import TARGET, Reading, ReplicasNeeded, batch_share

DAY_S, POLL_S, START_S, LATE_S, STEADY_S = 86_400, 30, 120, 300, 600
BATCH, TOKENS, TOKEN_S, SLOWER = 64, 300, 0.020, 0.005
PROMPT_S, PROMPT_TOKENS = 0.25, 2_500.0
HOUR = 3600.0
WARM_S = 900  # until the first number exists and the pool has followed it


def office(at: float) -> float:
    """A day with one broad peak: 4 to 40 replicas."""
    return 22.0 - 18.0 * sin(2.0 * pi * (at / DAY_S + 0.25))


def two_peaks(at: float) -> float:
    """A low night, a peak in the morning and a higher one in the evening."""
    hour = at / HOUR
    return 3.0 + 14.0 * exp(-(((hour - 10.0) / 2.0) ** 2)) + 24.0 * exp(-(((hour - 19.5) / 1.5) ** 2))


def batches(at: float) -> float:
    """A small steady load, with a batch every four hours: ten minutes of growth to 18 replicas, an hour there, and an end at once."""
    into = at % (4.0 * HOUR)
    grown = min(1.0, into / 600.0) if into < HOUR + 600.0 else 0.0
    return 5.4 + 12.0 * grown


def steady(at: float) -> float:
    """Six loads, each for four hours. Some are just at a whole number of replicas."""
    return (3.0, 7.02, 12.0, 20.5, 31.98, 9.95)[int(at / (4.0 * HOUR))]


TRACES: tuple[Callable[[float], float], ...] = (office, two_peaks, batches, steady)


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one day. `up`, `down`: the most changes in any STEADY_S of steady load."""

    within: float
    within_late: float
    up: int
    down: int
    changes: int
    waiting_share: float


class PlacesPool:
    """Replicas with a batch. `rate`: the arrivals per second that use one replica to TARGET."""

    name = "places"

    def __init__(self) -> None:
        self.model = LatencyModel()
        for _ in range(200):
            for load in (1.0, 16.0, 40.0, 64.0):
                self.model.learn_token(0, 0, load, TOKEN_S * (1.0 + SLOWER * (load - 1.0)), 1.0)
        endpoint = self.model.endpoints[0]
        endpoint.batch, endpoint.full = float(BATCH), 100
        self.running = self.waiting = 0
        self.rate = TARGET * BATCH / self._lasts(TARGET * BATCH)
        self.prompt_s = 0.0  # the places limit these replicas

    def step(self, arrived: int, replicas: int, rng: np.random.Generator) -> int:
        """Serves one second. Returns how many requests end in it."""
        ended = int(rng.binomial(self.running, 1.0 / self._lasts(self.running / replicas)))
        self.waiting += arrived
        entered = max(0, min(self.waiting, replicas * BATCH - self.running + ended))
        self.waiting -= entered
        self.running += entered - ended
        return ended

    def places(self, replicas: int) -> float:
        return replicas * batch_share(self.model, 0, self.running / replicas, 0.0)

    def _lasts(self, load: float) -> float:
        return TOKENS * TOKEN_S * (1.0 + SLOWER * (max(1.0, load) - 1.0))


class PromptsPool:
    """Replicas that compute one prompt at a time. Their batches are never full."""

    name = "prompts"

    def __init__(self) -> None:
        self.model = LatencyModel()
        self.prompts = PromptTime()
        for tokens in (500.0, 2_500.0, 8_000.0):
            for ahead in (0.0, 4_000.0) * 200:
                took = (tokens + ahead) * PROMPT_S / PROMPT_TOKENS
                self.model.learn_first(FirstToken(0.0, 0, 0, tokens, ahead, 0.0, 1.0, took, took))
        self.waiting = 0
        self.rate = TARGET / PROMPT_S

    @property
    def prompt_s(self) -> float:
        return self.prompts.seconds(self.model)

    def step(self, arrived: int, replicas: int, rng: np.random.Generator) -> int:
        """Serves one second. Returns how many requests end in it."""
        self.waiting += arrived
        ended = min(self.waiting, int(rng.poisson(min(self.waiting, replicas / PROMPT_S))))
        self.waiting -= ended
        for tokens in rng.exponential(PROMPT_TOKENS, ended).tolist():
            self.prompts.add(tokens)
        return ended

    def places(self, replicas: int) -> float:
        return 0.0


def day(pool: PlacesPool | PromptsPool, trace: Callable[[float], float], seed: int) -> Result:
    """Runs one day."""
    rng = np.random.default_rng(seed)
    signal = ReplicasNeeded()
    ready, starting = ceil(trace(0.0)), deque[tuple[int, int]]()
    arrived = finished = late = 0
    recent: deque[int] = deque(maxlen=LATE_S // 60)
    minutes = within = within_late = 0
    changes, steady_since, steady_load = 0, 0, 0.0
    settled: list[tuple[int, int]] = []  # changes under a steady load
    for at in range(DAY_S):
        load = trace(float(at))
        came = int(rng.poisson(load * pool.rate))
        finished += pool.step(came, ready, rng)
        arrived += came
        late += pool.waiting > ready
        before = signal.needed
        waiting = float(pool.waiting if isinstance(pool, PlacesPool) else 0)
        signal.read(Reading(float(at), ready, arrived, finished, pool.places(ready), waiting, pool.prompt_s))
        steady_since = at if load != steady_load else steady_since
        steady_load = load
        if before is not None and signal.needed is not None and signal.needed != before and at > WARM_S:
            changes += 1
            if at - steady_since >= STEADY_S:
                settled.append((at, 1 if signal.needed > before else -1))
        if at % POLL_S == 0 and signal.needed is not None:
            wanted = signal.needed
            if wanted < ready:
                ready = wanted
                starting.clear()
            elif wanted > ready + len(starting):
                starting.extend((at + START_S, 1) for _ in range(wanted - ready - len(starting)))
        while starting and starting[0][0] <= at:
            ready += starting.popleft()[1]
        if at % 60 == 0:
            recent.append(ceil(load))
            if at > WARM_S and signal.needed is not None:
                minutes += 1
                within += abs(signal.needed - recent[-1]) <= 1
                within_late += min(recent) - 1 <= signal.needed <= max(recent) + 1
    up, down = (most_in(STEADY_S, [at for at, way in settled if way == sign]) for sign in (1, -1))
    return Result(within / minutes, within_late / minutes, up, down, changes, late / DAY_S)


def most_in(window: int, times: list[int]) -> int:
    """Returns the most of these times in any window."""
    return max((sum(begin <= at < begin + window for at in times) for begin in times), default=0)


def main() -> int:
    print("| pool | trace | within 1 | within 1, late | changes | most in 10 min, up / down |")
    print("|---|---|---|---|---|---|")
    for make in (PlacesPool, PromptsPool):
        for trace in TRACES:
            results = [day(make(), trace, seed) for seed in range(3)]
            least = min(r.within for r in results), min(r.within_late for r in results)
            print(
                f"| {make.name} | {trace.__name__} | {least[0]:.4f} | {least[1]:.4f} | {max(r.changes for r in results)} |",
                f"{max(r.up for r in results)} / {max(r.down for r in results)} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
