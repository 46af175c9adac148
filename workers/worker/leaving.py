"""Decides when and how a worker leaves (`Exit`), and ends its open streams before (`Drain`).

A worker leaves because it uses more than its share of memory, or because the parent stops it.

    together   The picker stops. New connections and streams are still served until no worker of the picker has a stream. At half
               of the timeout every connection gets GOAWAY, because a gateway without health checks would stay.
    alone      This worker leaves, others serve. When another worker serves, this one stops accepting and sends GOAWAY. Also if the
               picker stops and systemd holds its socket: new connections wait there for the next picker.
    last       At the deadline, or when the parent hurries: undecided requests are refused, and routed requests are cut.

GOAWAY is graceful: streams that are open or on their way are served, then the connection closes.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

import structlog

from shm.areas import Area, Areas
from workers.host.memory import LOOK_S, Bursts, Leaving, MemoryUsage, MemoryWatch, cgroup_limit, share, trim
from workers.process.instance import Instance
from workers.process.layout import LEAVING
from workers.transport.interface import Server
from workers.worker.flow.flow_control import FlowControl
from workers.worker.serving import Serving

FRESH_HEARTBEAT_S = 0.5  # the heartbeat of a worker that accepts connections is younger
POLL_S = 0.02  # polled, because there is no event when a stream or connection ends
RELIEF_S = 5.0  # how long a worker that leaves alone waits until another worker serves
REFUSED_S = 0.5  # the time that peers get to read refusals
CLOSED_S = 0.5  # the time that connections get to close after they were cut

log = structlog.get_logger()


class Exit:
    """Decides when one worker leaves, and drains it. `ordinal`: the number of its area; 0 is the supervisor's."""

    def __init__(self, instance: Instance, area: Area, ordinal: int) -> None:
        self._instance = instance
        self._areas: Areas = instance.memory.areas
        self._area = area
        self._ordinal = ordinal
        self.recycled = False  # whether the worker leaves because of its memory

    def leaving(self) -> dict[int, int]:
        """Returns the `Leaving` states of the other serving workers, by ordinal."""
        states = self._areas.scalars(LEAVING)
        return {ordinal: states[ordinal] for ordinal in self._areas.serving_workers() if ordinal != self._ordinal}

    def watch_memory(self, loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
        """Returns freed memory to the system after each burst of bodies. Sets `stopping` when this process uses more than its share.

        If a fresh process already exceeds its share, logs this and does not watch the share.
        """
        configured, cgroup, usage = self._instance.options.worker_memory_limit, cgroup_limit(), MemoryUsage()
        workers = self._instance.options.workers

        def limit() -> int:
            return share(configured, cgroup, max(workers, len(self._areas.serving_workers())))

        watched = limit()
        if watched and (need := usage.over(watched)):
            log.error(
                "memory of workers is not watched",
                needs_mib=need >> 20,
                limit_mib=watched >> 20,
                why="a fresh worker needs more than its share: give the container more memory, or fewer --workers, "
                "or set --worker-memory-limit",
            )
            watched = 0
        bursts = Bursts(usage.resident, trim, loop.time())
        watch = MemoryWatch(self._ordinal, now=loop.time(), over=usage.over, trim=trim, say=self._say, others=self.leaving)

        def look() -> None:
            if stopping.is_set():
                return
            bursts.look(loop.time())
            if watched and (used := watch.look(loop.time(), limit())):
                log.warning("worker is recycled: memory", used_mib=used >> 20, limit_mib=limit() >> 20)
                self.recycled = True
                stopping.set()
            else:
                loop.call_later(LOOK_S, look)

        loop.call_later(LOOK_S, look)

    async def drain(self, serving: Serving, flows: Callable[[], Iterable[FlowControl]], *, orphaned: Callable[[], bool]) -> None:
        """Drains together with all other workers if the picker stops or the parent is gone. Otherwise drains alone."""
        instance = self._instance

        def refuse_waiting() -> int:  # flow control itself refuses the requests that wait in it, and later requests
            for present in flows():
                present.shut_down()
            return serving.refuse_waiting()

        drain = Drain(
            serving.server,
            timeout_s=instance.options.drain_timeout_s,
            hurried=lambda: instance.words.hurrying,
            refuse_waiting=refuse_waiting,
        )
        if instance.words.stopping or orphaned():
            self._say(Leaving.DRAINS)
            if instance.sockets.activated:
                await drain.alone(lambda: True)  # new connections wait in systemd's socket for the next picker
            else:
                await drain.together(lambda: serving.server.streams > 0 or self._others_busy())
            return
        self._say(Leaving.LEAVES)
        instance.reports.leaving(self._ordinal)
        await drain.alone(self._relieved)

    def _say(self, state: Leaving) -> None:
        self._area.scalars[self._area.schema.scalar[LEAVING]] = state

    def _others_busy(self) -> bool:
        """Whether any other worker has a stream, as its area shows."""
        streams = self._areas.scalars("streams")
        return any(streams[ordinal] for ordinal in self._areas.serving_workers() if ordinal != self._ordinal)

    def _relieved(self) -> bool:
        ages = self._areas.ages(time.monotonic())
        fresh = any(state != Leaving.LEAVES and ages[i] < FRESH_HEARTBEAT_S for i, state in self.leaving().items())
        return fresh or self._instance.words.stopping


class Drain:
    """Drains one worker, in at most `timeout_s` + RELIEF_S + REFUSED_S + CLOSED_S."""

    def __init__(self, server: Server, *, timeout_s: float, hurried: Callable[[], bool], refuse_waiting: Callable[[], int]) -> None:
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
