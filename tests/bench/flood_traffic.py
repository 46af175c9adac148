"""Traffic of `tests.bench.floods` that must not suffer: good requests at an even rate, and tenants that compete for busy servers."""

import asyncio
import collections
import functools
import json
import ssl
import statistics
import time
from collections.abc import Sequence

from tests.faults.client import Answering, Ending, Gateway, OneConnection, completion, event_stream, long_request
from tests.faults.failing_servers import SERVED_S, BlackHole, answered

ANSWER_S = 10.0
OWN_CONNECTION_EVERY = 10
SIZES = (600, 600, 60_000, 600, 400_000)
REQUESTS = [long_request(size) for size in SIZES]
ANSWERS = [event_stream(1), event_stream(1), event_stream(1), event_stream(30), event_stream(1)]
HONEST, RIVAL = "honest", "rival"
CLIENTS = 32  # of each tenant
TOKENS = 8
LIE = 1_000_000


class Good:
    """Sends good traffic for some time, and measures it."""

    def __init__(
        self,
        port: int,
        rate: float,
        *,
        shared: bool = False,
        aborts_per_s: int = 0,
        context: ssl.SSLContext | None = None,
        servers: BlackHole | None = None,
    ) -> None:
        """`shared`: whether all requests use one connection. `aborts_per_s`: how many streams another client aborts early on it.

        `context`: for TLS; None: plaintext. `servers`: who answers; None: servers that work.
        """
        self._servers = servers
        self._port, self._rate, self._shared, self._aborts_per_s = port, rate, shared, aborts_per_s
        self._context = context
        self._gateway: Gateway = OneConnection(port) if shared else Gateway(port, context=context)
        self.took: list[float] = []
        self.errors = 0

    async def run(self, seconds: float) -> None:
        aborting = asyncio.create_task(self._abort())
        begun, tasks = time.monotonic(), []
        for number in range(int(seconds * self._rate)):
            due = begun + number / self._rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self._one(number, due)))
        await asyncio.gather(*tasks)
        aborting.cancel()
        await self._gateway.close()

    async def _abort(self) -> None:
        """Opens streams and aborts them at once."""
        while self._aborts_per_s:
            for _ in range(self._aborts_per_s // 100):
                stream = await self._gateway.stream()
                stream.send(REQUESTS[0][0])
                stream.cancel()
            await asyncio.sleep(0.01)

    async def _one(self, number: int, due: float) -> None:
        new_connection = number % OWN_CONNECTION_EVERY == 0 and not self._shared
        gateway = Gateway(self._port, context=self._context) if new_connection else self._gateway
        usual = ANSWERS[number % len(ANSWERS)]
        answer = usual if self._servers is None else functools.partial(self._servers.answer, usual)
        asked = REQUESTS[number % len(REQUESTS)]
        if self._servers is not None:  # a request that only repeats another one says nothing about its server
            asked = long_request(SIZES[number % len(SIZES)], end=str(number))
        if await self._ending(gateway, asked, answer) is Ending.OK:
            self.took.append(time.monotonic() - due)
        else:
            self.errors += 1
        if new_connection:
            await gateway.close()

    async def _ending(self, gateway: Gateway, asked: Sequence[bytes], answer: Sequence[bytes] | Answering) -> Ending:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await gateway.whole(asked, answer)
        except TimeoutError:
            return Ending.LOST

    def percentiles_ms(self) -> tuple[float, float]:
        """Returns p50 and p99 in milliseconds, or NaN for fewer than two requests."""
        if len(self.took) < 2:
            return (float("nan"), float("nan"))
        cuts = statistics.quantiles(self.took, n=100)
        return (cuts[49] * 1e3, cuts[98] * 1e3)


class Tenants(Good):
    """Two tenants with requests that wait for busy servers. Measures those of the honest one. `share`: its part of the answers.

    A server that lies reports LIE tokens for each of its answers.
    """

    def __init__(self, port: int, *, lies: bool) -> None:
        super().__init__(port, 0.0)
        self._lies = lies
        self._liar = ""
        self._ended: collections.Counter[str] = collections.Counter()

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._client(tenant, until) for tenant in (HONEST, RIVAL) for _ in range(CLIENTS)))
        await self._gateway.close()

    async def _client(self, tenant: str, until: float) -> None:
        asked = completion("as many words as the other " * 4, tenant=tenant, max_tokens=TOKENS)
        while (begun := time.monotonic()) < until:
            if await self._ending(self._gateway, asked, functools.partial(self._answer, tenant)) is not Ending.OK:
                self.errors += 1
                continue
            self._ended[tenant] += 1
            if tenant == HONEST:
                self.took.append(time.monotonic() - begun)

    async def _answer(self, tenant: str, target: str) -> Sequence[bytes]:
        self._liar = self._liar or target
        await asyncio.sleep(2 * SERVED_S)
        tokens = LIE if self._lies and tenant == HONEST and target == self._liar else TOKENS
        usage = {"prompt_tokens": 30, "completion_tokens": tokens}
        return answered(200, json.dumps({"choices": [{"text": "token " * TOKENS}], "usage": usage}).encode())

    @property
    def share(self) -> float:
        return self._ended[HONEST] / max(1, self._ended.total())
