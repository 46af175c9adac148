"""Runs one simulated model server on the event loop: the engine's timer, faults, the listening socket.

Hundreds of `SimServer`s share one process and one loop (`loadtest.sim.fleet`). A server has no task, only one timer: for the time at
which the engine has its next results. The timer's function passes the results to the requests (`SimExchange`).

Engine time is the event loop's time multiplied by `time_scale`. Answers are deterministic. Each server numbers its requests.
A server that returns after the fault `vanish` has a cold cache, but its counters continue.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from loadtest.sim.engine import Engine, EngineSettings, Job, JobState, QueueFull, Refusal
from loadtest.sim.exchange import Client, SimExchange
from loadtest.sim.exposition import MetricsPage
from loadtest.sim.faults import STATUS_DEFAULT, FaultOrder, ServerFault
from loadtest.sim.request import ApiError, Models
from loadtest.sim.slots import SlotServer

if TYPE_CHECKING:
    from loadtest.sim.events import BlockEvents

TIMER_SLACK_S = 0.0005  # uvloop's timers count whole milliseconds and may fire early
GARBAGE_BYTES = 8192
VANISH_AFTER_S = 0.01  # a delay, so that the answer to the order is sent before the server vanishes
LISTEN_TRIES = 40
LISTEN_PAUSE_S = 0.05
COUNTS = (
    "requests", "scrapes", "refused", "faults",
    "prefilled_for_others", "prefilled_elsewhere", "encoded_elsewhere", "stage_errors",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings that all servers of a process share. `slots`: whether each request has a prefill of its own (`loadtest.sim.slots`)."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    slots: bool = False
    models: tuple[str, ...] = ("sim-model",)
    loras: tuple[str, ...] = ()
    seed: int = 0
    time_scale: float = 1.0


@dataclass(slots=True)
class Fault:
    """The fault of a server. `delay`, `status`: as in the order. `until`: the loop time at which it ends; None if it does not end."""

    kind: ServerFault = ServerFault.NONE
    delay: float = 0.0
    until: float | None = None
    status: int = STATUS_DEFAULT


class FleetServices(Protocol):
    """What a server needs from its fleet: the other servers of the process, and background tasks."""

    servers: list[SimServer]

    def find(self, asking: SimServer, wanted: str | int | None) -> SimServer:
        """Returns the server that an order names, or else the server that received the order. Raises BadFault."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine and keeps a reference to its task until it ends."""


class SimServer:
    """Serves one address: has an engine, its metrics page, its connections, and at most one fault."""

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        settings: ServerSettings,
        fleet: FleetServices,
        connection: Callable[[SimServer], asyncio.BaseProtocol],
        role: str = "",
        events: BlockEvents | None = None,
    ) -> None:
        """`connection`: creates the protocol of an accepted connection. `events`: publishes the KV events; None if none are published."""
        self.name, self.role = name, role
        self.host, self.port = address
        self.fleet = fleet
        self._connection = connection
        self.loop = asyncio.get_running_loop()
        self.events = events
        model = SlotServer if settings.slots else Engine
        self.engine = model(settings.engine, events.take if events is not None else None)
        self.models = Models(settings.models, settings.loras, settings.engine.block_size, settings.seed, keeps_prompts=events is not None)
        self.started = time.time()
        self.page = MetricsPage(self.engine, settings.models[0], self.started)
        self.fault = Fault()
        self.connections: set[Client] = set()
        self.label = b"x-sim-server: " + name.encode() + b"\r\n"
        self.counts = dict.fromkeys(COUNTS, 0)
        self.garbage = random.Random(f"{settings.seed}/{name}").randbytes(GARBAGE_BYTES)
        self._scale = settings.time_scale
        self._exchanges: dict[Job, SimExchange] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._returning: asyncio.TimerHandle | None = None
        self._listener: asyncio.Server | None = None

    async def listen(self) -> None:
        """Opens the listening socket. Port 0 becomes the port that the system chose. Raises OSError."""
        self._listener = await self.loop.create_server(lambda: self._connection(self), self.host, self.port, backlog=1024)
        self.port = self._listener.sockets[0].getsockname()[1]
        if self.events is not None:
            try:
                self.events.open(self.port)
            except OSError:
                self._listener.close()
                self._listener = None
                raise

    def close(self) -> None:
        """Closes the listening socket and all connections, and cancels their requests."""
        if self._returning is not None:
            self._returning.cancel()
            self._returning = None
        self._vanish()

    # The engine's clock

    def now(self) -> float:
        """Returns the present engine time in seconds."""
        return (self.loop.time() + TIMER_SLACK_S) * self._scale

    def advance(self) -> float:
        """Sends the engine's results up to now to the clients. Returns the present engine time."""
        now = self.now()
        for job in self.engine.advance(now):
            exchange = self._exchanges.get(job)
            if exchange is None:  # the client left while this loop ran
                continue
            if job.state is JobState.FINISHED and exchange.sent == 0 and not job.streams:
                exchange.connection.send_whole(exchange)
            else:
                exchange.connection.send_token(exchange)
            if job.state is JobState.FINISHED and exchange.sent >= job.generated:
                self._exchanges.pop(job, None)
        self._publish()
        return now

    def _publish(self) -> None:
        """Publishes the latest changes of the KV cache."""
        if self.events is not None:
            self.events.flush(self.active_fault())

    def rearm(self) -> None:
        """Sets the timer to the time of the engine's next results."""
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

    def submit(self, exchange: SimExchange) -> None:
        """Submits a request to the engine. Raises ApiError if the engine refuses it."""
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
            self._publish()
        finally:
            self.rearm()

    def cancel(self, exchange: SimExchange) -> None:
        """Cancels a request after its client has left, and frees its blocks."""
        if exchange.delayed is not None:
            exchange.delayed.cancel()
        if self._exchanges.pop(exchange.job, None) is not None:
            self.engine.cancel(exchange.job, self.advance())
            self.rearm()

    # Faults

    def active_fault(self) -> ServerFault:
        """Returns the kind of the current fault; NONE if there is none. Clears a fault whose time has passed."""
        fault = self.fault
        if fault.until is not None and self.loop.time() >= fault.until:
            self.fault = fault = Fault()
        return fault.kind

    def order(self, order: FaultOrder) -> None:
        """Begins the fault that the order names, in place of the current one. The kind NONE only ends the current fault."""
        self.counts["faults"] += 1
        until = None if order.seconds is None else self.loop.time() + order.seconds
        gone = self._listener is None
        self.fault = Fault(order.kind, order.delay, until, order.status)
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
            if self.events is not None:
                self.events.close()
        for connection in tuple(self.connections):
            connection.abort()

    def _come_back(self) -> None:
        self._returning = None
        self.engine.pool.forget()
        self.fleet.spawn(self._listen_again())

    async def _listen_again(self) -> None:
        """Listens again after the fault `vanish`. Retries, because an outgoing connection of another process may use the port for a
        moment.
        """
        for _ in range(LISTEN_TRIES):
            try:
                await self.listen()
            except OSError:
                await asyncio.sleep(LISTEN_PAUSE_S)
            else:
                return
        await self.listen()

    def stats(self) -> dict[str, Any]:
        """Returns the answer to GET /sim/stats."""
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
            "kv_messages": self.events.published if self.events is not None else 0,
            "loras": engine.loras.loaded,
            "connections": len(self.connections),
            "fault": self.active_fault().value,
        }
