"""Decides when and how a worker leaves: because it uses more than its share of memory, or because the parent stops it."""

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from shm.areas import Area, Areas
from workers.host.memory import LOOK_S, Bursts, Leaving, Usage, Watch, cgroup_limit, share, trim
from workers.process.instance import Instance
from workers.process.layout import LEAVING
from workers.worker.drain import Drain
from workers.worker.flow.flow_control import FlowControl
from workers.worker.serving import Serving

FRESH_HEARTBEAT_S = 0.5  # the heartbeat of a worker that accepts connections is younger

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
        configured, cgroup, usage = self._instance.options.worker_memory_limit, cgroup_limit(), Usage()
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
        watch = Watch(self._ordinal, now=loop.time(), over=usage.over, trim=trim, say=self._say, others=self.leaving)

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

        def refuse_waiting() -> int:  # flow control has its own answer for requests that wait there, and for later ones
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
        """Whether another worker accepts connections."""
        ages = self._areas.ages(time.monotonic())
        fresh = any(state != Leaving.LEAVES and ages[i] < FRESH_HEARTBEAT_S for i, state in self.leaving().items())
        return fresh or self._instance.words.stopping
