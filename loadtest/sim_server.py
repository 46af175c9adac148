"""One simulated model server on the event loop: the engine's timer, faults, the open socket.

Hundreds of `SimServer`s share one process and one loop. A server has one timer, set to the engine's
next news, and no task at all; a request is an `Exchange`, fed from that timer.

Engine time is loop time times `time_scale`. Answers are deterministic; identifiers count up per
server. A server that vanished comes back with a cold cache; its counters go on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.engine import Engine, EngineSettings, Job, JobState, QueueFull, Refusal
from loadtest.exposition import MetricsPage
from loadtest.faults import BadFault, FaultOrder, ServerFault
from loadtest.sim_api import ApiError, Models
from loadtest.sim_connection import Connection, Exchange

TIMER_SLACK_S = 0.0005  # uvloop's timers count whole milliseconds and may fire early
GARBAGE_BYTES = 8192
VANISH_AFTER_S = 0.01  # time for the answer to the order to leave
LISTEN_TRIES = 40
LISTEN_PAUSE_S = 0.05
COUNTS = (
    "requests", "scrapes", "refused", "faults",
    "prefilled_for_others", "prefilled_elsewhere", "encoded_elsewhere", "stage_errors",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What all servers of a process have in common."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    models: tuple[str, ...] = ("sim-model",)
    loras: tuple[str, ...] = ()
    seed: int = 0
    time_scale: float = 1.0


@dataclass(slots=True)
class Fault:
    """The fault of a server and until when, in loop time, it lasts."""

    kind: ServerFault = ServerFault.NONE
    delay: float = 0.0
    until: float | None = None


class SimServer:
    """One address: an engine, its metrics page, its connections, and at most one fault."""

    def __init__(self, name: str, host: str, port: int, settings: ServerSettings, fleet: Fleet, role: str = "") -> None:
        self.name, self.host, self.port, self.role = name, host, port, role
        self.fleet = fleet
        self.loop = asyncio.get_running_loop()
        self.engine = Engine(settings.engine)
        self.models = Models(settings.models, settings.loras, settings.engine.block_size, settings.seed)
        self.started = time.time()
        self.page = MetricsPage(self.engine, settings.models[0], self.started)
        self.fault = Fault()
        self.connections: set[Connection] = set()
        self.label = b"x-sim-server: " + name.encode() + b"\r\n"
        self.counts = dict.fromkeys(COUNTS, 0)
        self.garbage = random.Random(f"{settings.seed}/{name}").randbytes(GARBAGE_BYTES)
        self._scale = settings.time_scale
        self._exchanges: dict[Job, Exchange] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._returning: asyncio.TimerHandle | None = None
        self._listener: asyncio.Server | None = None

    async def listen(self) -> None:
        """Open the listening socket; port 0 becomes the port that the system gives."""
        self._listener = await self.loop.create_server(lambda: Connection(self), self.host, self.port, backlog=1024)
        self.port = self._listener.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Close the listening socket and all connections, and give up their requests."""
        if self._returning is not None:
            self._returning.cancel()
            self._returning = None
        self._vanish()

    # The engine's clock

    def now(self) -> float:
        """Engine time."""
        return (self.loop.time() + TIMER_SLACK_S) * self._scale

    def advance(self) -> float:
        """Deliver what the engine has done until now; the engine time that this was."""
        now = self.now()
        for job in self.engine.advance(now):
            exchange = self._exchanges.get(job)
            if exchange is None:  # its client has just left
                continue
            if job.state is JobState.FINISHED and exchange.sent == 0 and not job.streams:
                exchange.connection.send_whole(exchange)
            else:
                exchange.connection.send_token(exchange)
            if job.state is JobState.FINISHED and exchange.sent >= job.generated:
                self._exchanges.pop(job, None)
        return now

    def rearm(self) -> None:
        """Set the timer to the engine's next news."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.engine.next_due()
        if due is not None:
            self._timer = self.loop.call_at(due / self._scale, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.advance()
        self.rearm()

    def submit(self, exchange: Exchange) -> None:
        """Hand a request to the engine. Raises ApiError if it is refused."""
        exchange.delayed = None
        now = self.advance()
        try:
            self.engine.submit(exchange.job, now)
        except Refusal as refusal:
            self.counts["refused"] += 1
            status = 503 if isinstance(refusal, QueueFull) else 400
            raise ApiError(status, str(refusal)) from None
        else:
            self._exchanges[exchange.job] = exchange
        finally:
            self.rearm()

    def cancel(self, exchange: Exchange) -> None:
        """The client left: free what its request holds."""
        if exchange.delayed is not None:
            exchange.delayed.cancel()
        if self._exchanges.pop(exchange.job, None) is not None:
            self.engine.cancel(exchange.job, self.advance())
            self.rearm()

    # Faults

    def active_fault(self) -> ServerFault:
        """The fault of this moment."""
        fault = self.fault
        if fault.until is not None and self.loop.time() >= fault.until:
            self.fault = fault = Fault()
        return fault.kind

    def order(self, order: FaultOrder) -> None:
        """Begin or end a fault."""
        self.counts["faults"] += 1
        until = None if order.seconds is None else self.loop.time() + order.seconds
        gone = self._listener is None
        self.fault = Fault(order.kind, order.delay, until)
        if self._returning is not None:
            self._returning.cancel()
            self._returning = None
        if order.kind is ServerFault.VANISH:
            self.loop.call_later(VANISH_AFTER_S, self._vanish)
            if until is not None:
                self._returning = self.loop.call_at(until, self._come_back)
        elif gone:
            self._come_back()

    def _vanish(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in tuple(self.connections):
            connection.abort()

    def _come_back(self) -> None:
        self._returning = None
        self.engine.pool.forget()
        self.fleet.spawn(self._listen_again())

    async def _listen_again(self) -> None:
        """The port may be taken for a moment by somebody's outgoing connection."""
        for _ in range(LISTEN_TRIES):
            try:
                await self.listen()
            except OSError:
                await asyncio.sleep(LISTEN_PAUSE_S)
            else:
                return
        await self.listen()

    def stats(self) -> dict[str, Any]:
        """The answer to GET /sim/stats."""
        self.advance()
        self.rearm()
        engine, seen = self.engine, self.engine.seen
        return {
            "server": self.name,
            "role": self.role,
            "address": f"{self.host}:{self.port}",
            **self.counts,
            "served": seen.served,
            "aborted": seen.aborted,
            "running": engine.running,
            "waiting": engine.waiting,
            "prompt_tokens": seen.prefix_queries,
            "cached_tokens": seen.prefix_hits,
            "generation_tokens": seen.generation_tokens,
            "kv_blocks": engine.pool.total,
            "kv_blocks_in_use": engine.pool.in_use,
            "kv_blocks_idle": engine.pool.idle,
            "loras": engine.loras.loaded,
            "connections": len(self.connections),
            "fault": self.active_fault().value,
        }


class Fleet:
    """All simulated servers of this process."""

    def __init__(
        self, addresses: list[tuple[str, int]], settings: ServerSettings, roles: Sequence[str] = ("",)
    ) -> None:
        """`roles`: one for all, or one each."""
        every = list(roles) * len(addresses) if len(roles) == 1 else roles
        self.servers = [
            SimServer(f"sim-{index}", host, port, settings, self, role)
            for index, ((host, port), role) in enumerate(zip(addresses, every, strict=True))
        ]
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Open all listening sockets, or none."""
        try:
            for server in self.servers:
                await server.listen()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close everything."""
        for task in self._tasks:
            task.cancel()
        for server in self.servers:
            server.close()

    def find(self, asking: SimServer, wanted: str | int | None) -> SimServer:
        """The server that an order names, or else the one that was asked. Raises BadFault."""
        if wanted is None:
            return asking
        for index, server in enumerate(self.servers):
            if wanted in (index, server.name):
                return server
        raise BadFault(f"there is no server {wanted!r}; names are sim-0 to sim-{len(self.servers) - 1}")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine and hold on to it until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
