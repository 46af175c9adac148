"""How a worker's open streams end before it does.

    together   the picker stops. New connections and streams are served on until nobody in the picker has a stream; at half
               time every connection is told to go elsewhere, because a gateway that cannot see health would stay
    alone      this worker leaves, others serve: it accepts no more and says goodbye at once, but not before another serves
    last       at the deadline, or when hurried: what still waits for a decision is refused, what is routed is cut

Goodbye is a graceful GOAWAY: streams that are open or on their way are served, then the connection closes.

What this does not do: decide that it is time to leave.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

POLL_S = 0.02  # streams and connections say nothing when they end
RELIEF_S = 5.0  # how long a worker that leaves alone waits for another to serve
REFUSED_S = 0.5  # for refusals to be read
CLOSED_S = 0.5  # for what was cut to be gone


class Draining(Protocol):
    """What is needed of a server."""

    @property
    def connections(self) -> int: ...
    def stop_accepting(self) -> None: ...
    def drain(self) -> None: ...
    def abort(self) -> None: ...
    async def closed(self) -> None: ...


class Drain:
    """One worker's way out, at most `timeout_s` long but for the times above."""

    def __init__(
        self, server: Draining, *, timeout_s: float, hurried: Callable[[], bool], refuse_waiting: Callable[[], int]
    ) -> None:
        """`refuse_waiting` answers streams without a decision, and says how many there were."""
        self._server = server
        self._timeout_s = timeout_s
        self._hurried = hurried
        self._refuse_waiting = refuse_waiting

    async def together(self, busy: Callable[[], bool]) -> None:
        """`busy`: whether any worker of the picker has a stream."""
        server, half = self._server, self._timeout_s / 2
        await self._wait(lambda: not busy(), half)
        server.drain()
        await self._wait(lambda: not server.connections, half)
        await self._last()

    async def alone(self, relieved: Callable[[], bool]) -> None:
        """`relieved`: whether another worker takes what this one will not."""
        server = self._server
        await self._wait(relieved, RELIEF_S)
        server.stop_accepting()
        server.drain()
        await self._wait(lambda: not server.connections, self._timeout_s)
        await self._last()

    async def _last(self) -> None:
        server = self._server
        server.stop_accepting()
        server.drain()
        if self._refuse_waiting():
            await self._wait(lambda: not server.connections, REFUSED_S, hurry=False)
        server.abort()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.closed(), CLOSED_S)

    async def _wait(self, done: Callable[[], bool], seconds: float, *, hurry: bool = True) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not done() and asyncio.get_running_loop().time() < deadline and not (hurry and self._hurried()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
