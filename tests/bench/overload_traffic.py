"""Open-loop load through a gateway: planned requests of several classes, and their results.

Everything follows from the seed. The next request starts on schedule, whether or not earlier ones were answered, so a slow gateway
gets no pause. All times count from the *scheduled* send time, so a late generator makes figures worse, never better. A client gives up
after `patience_s`, like real clients, and does not retry.

A part of each class is streamed. Only those requests have a time to the first token: streams cost every process a read per token, and the
machine must not become the bottleneck.
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
TOKENS = (20, 60)  # tokens of an answer
PROMPT_WORDS = 12


@dataclass(frozen=True, slots=True)
class Class:
    """Requests with the same priority and tenant; `share` is their share of all requests."""

    name: str
    share: float
    objective: str = ""
    tenant: str = ""
    streamed: float = 1.0


class Call(NamedTuple):
    """One planned request."""

    at: float
    kind: Class
    tokens: int
    streamed: bool


class Result(NamedTuple):
    """The result of one request. Times count from the scheduled send time. `reason`: why there is no whole answer; "" if there is one."""

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
    """Plans Poisson arrivals of all classes together. `rate`: requests per second. `start`: the time of the first second."""
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
        """Runs all calls to their end. Calls `watch(second, open requests)` every second."""
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
        fields = {"model": MODEL, "prompt": words, "max_tokens": call.tokens, "stream": call.streamed}
        if call.streamed:
            fields["stream_options"] = {"include_usage": True}  # without usage, flow control would use estimates
        body = json.dumps(fields).encode()
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
            retry_after = "retry-after" in response.headers
            return Result(call, response.status, reason, first if call.streamed else None, now() - due, retry_after)


def percentile(values: Sequence[float], share: float) -> float:
    """Returns a percentile by rank, or NaN without values. `share`: from 0 to 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def firsts(results: Sequence[Result], name: str = "") -> list[float]:
    """Returns the times to the first token of whole streamed answers, of the class `name` or of all."""
    return [r.first_s for r in results if r.answered and r.first_s is not None and name in ("", r.call.kind.name)]


def reasons(results: Sequence[Result]) -> Counter[str]:
    """Counts the requests without a whole answer, by reason."""
    return Counter(result.reason for result in results if result.reason)


def between(results: Sequence[Result], start: float, end: float) -> list[Result]:
    """Returns the results of the requests with a scheduled send time in [start, end)."""
    return [result for result in results if start <= result.call.at < end]
