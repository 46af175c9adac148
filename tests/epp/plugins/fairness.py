"""Flows of one band that compete for a pool: who is dispatched, at which cost, and after which wait."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count
from typing import Any

from epp.decision.decision import Decision, ProfileRun, Response, Usage
from epp.plugin import FairnessPolicy
from epp.plugins.ordering import FirstCome
from tests.contract.waiting import Band, Waits, asking, made
from tests.fakes import candidates

Tokens = Callable[[str], tuple[int, int]]  # of a flow's next request: input, output


def decision() -> Decision:
    plain = candidates({"waiting_requests": [0.0, 0.0]})
    run = ProfileRun(plain, plain.zeros(), [1])
    return Decision(run.targets, {"default": run}, "default")


def answer(policy: Any, item: Waits, now: float, usage: Usage | None, status: int = 200) -> None:
    item.request.now = now
    response = Response(status)
    response.usage = usage
    policy.response_complete(item.request, decision(), response)


def names(band: Band, dispatches: int) -> str:
    served = (band.dispatch(1.0) for _ in range(dispatches))
    return "".join(item.flow.fairness_id for item in served if item is not None)


def band(cls: type[FairnessPolicy], ordering: Any = FirstCome, **parameters: Any) -> Band:
    return Band(made(cls, **parameters), made(ordering))


class Fleet:
    """Simulates servers with a number of slots. A request takes a slot for a time that grows with its tokens.

    Everything that arrives waits in one band. A free slot goes to the flow that the policy picks.
    """

    def __init__(self, policy: FairnessPolicy, tokens: Tokens, slots: int = 8, seed: int = 1) -> None:
        self.band = Band(policy, made(FirstCome))
        self.policy = policy
        self.tokens = tokens
        self.free = slots
        self.rng = random.Random(seed)
        self.served: Counter[str] = Counter()
        self.waits: dict[str, list[float]] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()

    def arrivals(self, rates: Mapping[str, float], until: float) -> None:
        for name, rate in rates.items():
            now = self.rng.expovariate(rate)
            while now < until:
                self._at(now, lambda at, name=name: self._arrive(name, at))
                now += self.rng.expovariate(rate)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            now, _, act = heappop(self._events)
            act(now)
            while self.free:
                item = self.band.dispatch(now)
                if item is None:
                    break
                self._serve(item, now)

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (when, next(self._order), act))

    def _arrive(self, name: str, now: float) -> None:
        self.band.offer(asking(name, arrival=now, bytes=2000))

    def _serve(self, item: Waits, now: float) -> None:
        name = item.flow.fairness_id
        self.free -= 1
        self.waits.setdefault(name, []).append(now - item.arrival)
        prompt, output = self.tokens(name)
        if hasattr(self.policy, "before_send"):
            item.request.now = now
            self.policy.before_send(item.request, decision())
        self._at(now + (prompt + 10 * output) / 10_000, lambda at: self._end(item, at, prompt, output))

    def _end(self, item: Waits, now: float, prompt: int, output: int) -> None:
        self.free += 1
        self.served[item.flow.fairness_id] += prompt + output
        if hasattr(self.policy, "response_complete"):
            answer(self.policy, item, now, Usage(prompt, output, 0))


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def p95(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.95)]
