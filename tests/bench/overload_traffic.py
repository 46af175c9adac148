"""Open-loop load through a gateway: requests of several classes at given times, and what became of each.

Everything follows from the seed, and nobody waits for an answer before the next request goes: a gateway that is slow gets no
rest. All times are from when a request was *meant* to be sent, so a late generator makes figures worse, never better. A client
gives up after `patience_s`, as real ones do, and does not try again.

Part of each class is streamed, and the time to the first token is known of those alone: streams cost a read per token on every
side, and the machine is to be the limit of nothing here.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp

MODEL = "sim-model"
OBJECTIVE = "x-llm-d-inference-objective"
FAIRNESS = "x-llm-d-inference-fairness-id"
DROP_REASON = "x-llm-d-request-dropped-reason"
GAVE_UP, BROKEN = "client gave up", "connection failed"
TOKENS = (20, 60)  # of an answer
PROMPT_WORDS = 12


@dataclass(frozen=True, slots=True)
class Class:
    """Requests that have their importance and their tenant in common; `share` of all."""

    name: str
    share: float
    objective: str = ""
    tenant: str = ""
    streamed: float = 1.0


class Call(NamedTuple):
    """One request of the plan."""

    at: float
    kind: Class
    tokens: int
    streamed: bool


class Result(NamedTuple):
    """What became of one request; times from when it was meant to be sent. `reason` says why there is no whole answer."""

    call: Call
    status: int
    reason: str
    first_s: float | None
    whole_s: float
    retry_after: bool

    @property
    def answered(self) -> bool:
        return self.status == 200 and not self.reason


def plan(rng: random.Random, classes: Sequence[Class], rate: float, seconds: float, start: float = 0.0) -> list[Call]:
    """Poisson arrivals of all classes together."""
    return list(_arrivals(rng, classes, rate, start, start + seconds))


def _arrivals(rng: random.Random, classes: Sequence[Class], rate: float, at: float, end: float) -> Iterator[Call]:
    shares = [kind.share for kind in classes]
    while (at := at + rng.expovariate(rate)) < end:
        kind = rng.choices(classes, shares)[0]
        yield Call(at, kind, rng.randint(*TOKENS), rng.random() < kind.streamed)


class Generator:
    """Sends plans through one gateway."""

    def __init__(self, port: int, patience_s: float, seed: int = 0) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._patience_s = patience_s
        self._rng = random.Random(f"{seed}/prompts")
        self._open = 0

    async def run(self, calls: Sequence[Call], watch: Callable[[float, int], None] | None = None) -> list[Result]:
        """All of them to their end. `watch(second, open requests)` is called every second."""
        loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            start = loop.time() + 0.1
            watching = loop.create_task(self._watch(watch, start)) if watch else None
            tasks = []
            for call in calls:
                if (wait := start + call.at - loop.time()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(self._one(session, call, start + call.at)))
            await asyncio.gather(*tasks)
            if watching:
                watching.cancel()
        return [task.result() for task in tasks]

    async def _watch(self, watch: Callable[[float, int], None], start: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            watch(loop.time() - start, self._open)

    async def _one(self, session: aiohttp.ClientSession, call: Call, due: float) -> Result:
        self._open += 1
        try:
            async with asyncio.timeout_at(due + self._patience_s):
                return await self._exchange(session, call, due)
        except TimeoutError:
            return Result(call, 0, GAVE_UP, None, self._patience_s, False)
        except (aiohttp.ClientError, OSError):
            return Result(call, 0, BROKEN, None, asyncio.get_running_loop().time() - due, False)
        finally:
            self._open -= 1

    async def _exchange(self, session: aiohttp.ClientSession, call: Call, due: float) -> Result:
        now = asyncio.get_running_loop().time
        words = " ".join(f"{self._rng.getrandbits(20):05x}" for _ in range(PROMPT_WORDS))
        asked = {"model": MODEL, "prompt": words, "max_tokens": call.tokens, "stream": call.streamed}
        if call.streamed:
            asked["stream_options"] = {"include_usage": True}  # or flow control would go by estimates
        body = json.dumps(asked).encode()
        headers = {"content-type": "application/json"}
        if call.kind.objective:
            headers[OBJECTIVE] = call.kind.objective
        if call.kind.tenant:
            headers[FAIRNESS] = call.kind.tenant
        first, tail = None, b""
        async with session.post(self._url, data=body, headers=headers) as response:
            async for chunk in response.content.iter_any():
                if first is None:
                    first = now() - due
                tail = (tail + chunk)[-64:]
            reason = ""
            if response.status != 200:
                reason = response.headers.get(DROP_REASON) or f"status {response.status}"
            elif call.streamed and b"[DONE]" not in tail:
                reason = "cut short"
            told = "retry-after" in response.headers
            return Result(call, response.status, reason, first if call.streamed else None, now() - due, told)


def percentile(values: Sequence[float], share: float) -> float:
    """By rank; not a number for nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def firsts(results: Sequence[Result], name: str = "") -> list[float]:
    """Times to the first token of whole streamed answers, of one class or of all."""
    return [r.first_s for r in results if r.answered and r.first_s is not None and name in ("", r.call.kind.name)]


def reasons(results: Sequence[Result]) -> Counter[str]:
    """How many got no whole answer, by why."""
    return Counter(result.reason for result in results if result.reason)


def between(results: Sequence[Result], start: float, end: float) -> list[Result]:
    """Those that were meant to be sent then."""
    return [result for result in results if start <= result.call.at < end]
