"""Drains a worker: ends its open streams before the process ends.

    together   The picker stops. New connections and streams are still served until no worker of the picker has a stream. At half
               of the timeout every connection gets GOAWAY, because a gateway without health checks would stay.
    alone      This worker leaves, others serve. When another worker serves, this one stops accepting and sends GOAWAY. Also if the
               picker stops and systemd holds its socket: new connections wait there for the next picker.
    last       At the deadline, or when the parent hurries: undecided requests are refused, and routed requests are cut.

GOAWAY is graceful: streams that are open or on their way are served, then the connection closes.

`workers.worker.leaving` decides when to leave.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

import structlog

POLL_S = 0.02  # polled, because there is no event when a stream or connection ends
RELIEF_S = 5.0  # how long a worker that leaves alone waits for another one to serve
REFUSED_S = 0.5  # the time that peers get to read refusals
CLOSED_S = 0.5  # the time that connections get to close after they were cut


log = structlog.get_logger()


class Draining(Protocol):
    """The part of a server that a drain uses."""

    @property
    def connections(self) -> int: ...
    @property
    def streams(self) -> int: ...
    def stop_accepting(self) -> None: ...
    def drain(self) -> None: ...
    def abort(self) -> None: ...
    async def closed(self) -> None: ...


class Drain:
    """Drains one worker, in at most `timeout_s` + RELIEF_S + REFUSED_S + CLOSED_S."""

    def __init__(self, server: Draining, *, timeout_s: float, hurried: Callable[[], bool], refuse_waiting: Callable[[], int]) -> None:
        """`hurried`: whether the parent wants the drain to end now.

        `refuse_waiting` refuses undecided requests and returns their number.
        """
        self._server = server
        self._timeout_s = timeout_s
        self._hurried = hurried
        self._refuse_waiting = refuse_waiting

    async def together(self, busy: Callable[[], bool]) -> None:
        """Drains together with all workers of the picker. `busy`: whether any of them has a stream."""
        server, half = self._server, self._timeout_s / 2
        await self._wait(lambda: not busy(), half)
        server.drain()
        await self._wait(lambda: not server.connections, half)
        await self._last()

    async def alone(self, relieved: Callable[[], bool]) -> None:
        """Drains while other workers serve. `relieved`: whether another worker accepts connections."""
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
        if server.streams:
            log.warning("drain is over: open streams are cut", streams=server.streams)
        server.abort()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.closed(), CLOSED_S)

    async def _wait(self, done: Callable[[], bool], seconds: float, *, hurry: bool = True) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not done() and asyncio.get_running_loop().time() < deadline and not (hurry and self._hurried()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
