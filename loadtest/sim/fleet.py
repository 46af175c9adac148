"""Runs all simulated model servers of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from loadtest.sim.connection import Connection
from loadtest.sim.faults import BadFault
from loadtest.sim.server import ServerSettings, SimServer

if TYPE_CHECKING:
    from loadtest.sim.events import BlockEvents
    from loadtest.sim.kv_settings import EventSettings

REPLAYS_EVERY_S = 0.02


class Fleet:
    """Holds the servers, their sockets, and background tasks."""

    def __init__(
        self, addresses: list[tuple[str, int]], settings: ServerSettings, roles: Sequence[str] = ("",), events: EventSettings | None = None
    ) -> None:
        """`roles`: one role for all servers, or one per server. `events`: how the servers publish KV events; None if they publish none."""
        every = list(roles) * len(addresses) if len(roles) == 1 else roles
        self.servers = [
            SimServer(f"sim-{index}", address, settings, self, Connection, role, _block_events(events, index, address, settings))
            for index, (address, role) in enumerate(zip(addresses, every, strict=True))
        ]
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishes = events is not None

    async def listen(self) -> None:
        """Opens all listening sockets, or none. Raises OSError."""
        try:
            for server in self.servers:
                await server.listen()
        except OSError:
            self.close()
            raise
        if self._publishes:
            self.spawn(self._answer_replays())

    async def _answer_replays(self) -> None:
        while True:
            await asyncio.sleep(REPLAYS_EVERY_S)
            for server in self.servers:
                if server.events is not None:
                    server.events.answer_replays()

    def close(self) -> None:
        """Closes all sockets and cancels all tasks."""
        for task in self._tasks:
            task.cancel()
        for server in self.servers:
            server.close()

    def find(self, asking: SimServer, wanted: str | int | None) -> SimServer:
        """Returns the server that an order names, or else the server that received the order. Raises BadFault."""
        if wanted is None:
            return asking
        for index, server in enumerate(self.servers):
            if wanted in (index, server.name):
                return server
        raise BadFault(f"there is no server {wanted!r}; valid names: sim-0 to sim-{len(self.servers) - 1}")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine and keeps a reference to its task until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _block_events(events: EventSettings | None, index: int, address: tuple[str, int], settings: ServerSettings) -> BlockEvents | None:
    """Creates the publisher of one server. Imports ZeroMQ here, because servers without events do not need it."""
    if events is None:
        return None
    from loadtest.sim.events import BlockEvents

    return BlockEvents(events, index, address[0], settings.models[0], settings.engine.block_size)
