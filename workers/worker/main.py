"""The main function of a worker process: its event loop, its area, its streams, its end.

The parent has created all shared resources before the fork. A worker writes only its own parts and reads the others. It drains (`leaving`)
together with the other workers when the parent stops or is gone. It drains alone when it gets SIGTERM for another reason, or uses more than
its share of memory. Before a worker drains alone, it shows this in its area and reports it to the parent, which starts a successor in
another ordinal at once.
"""

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections import deque
from functools import partial

import structlog
import uvloop

from epp.metrics.request_series import ABUSE
from shm.areas import SUPERVISOR_AREA, Area, Areas
from workers.host import mapped_code
from workers.host.exit_codes import ExitCode
from workers.process.instance import Instance
from workers.process.layout import CERTIFICATE_SOON, CERTIFICATE_UNTIL, LOADED
from workers.process.pool_views import present
from workers.shared.bus import BusWriter
from workers.transport.interface import Application, Clock
from workers.worker.adoption import Adoption
from workers.worker.body_timeout import BodyTimeout
from workers.worker.extproc.health import beside
from workers.worker.faults import SLOW_BODY, Faults
from workers.worker.kept import WorkerKept
from workers.worker.leaving import Exit
from workers.worker.serving import Serving
from workers.worker.setup import WorkerParts
from workers.worker.telemetry.stream_metrics import StreamMetrics
from workers.worker.worker_pools import WorkerPools

HEARTBEAT_S = 0.1
GC_YOUNGEST = 20_000  # high, because reference counts free a stream's objects, and cycles are rare
LAG_HEARTBEATS = 10  # the loop's lag is the largest of the last LAG_HEARTBEATS heartbeats
LAG = "loop_lag_us"

log = structlog.get_logger()


def run(instance: Instance, index: int) -> int:
    """Runs a worker until it has to leave. Returns an ExitCode. `index`: the worker's number, from 0; its area is `index + 1`."""
    gc.set_threshold(GC_YOUNGEST, 20, 20)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Worker(present(instance), index).serve())


class Worker:
    """One worker process. `index`: the worker's number, from 0."""

    def __init__(self, instance: Instance, index: int) -> None:
        self.instance = instance
        self.index = index
        self.areas: Areas = instance.memory.areas
        self.area: Area = instance.memory.areas.area(index + 1)
        self.area.take_over()
        self.faults = Faults(self.area)
        self._clock = Clock()
        self._exit = Exit(instance, self.area, index + 1)
        self._lags: deque[float] = deque([0.0], LAG_HEARTBEATS)  # how late each of the last heartbeats was, in seconds
        self._orphaned = False
        self._adoption: Adoption | WorkerPools
        self._kept: WorkerKept
        self._serving: Serving

    async def serve(self) -> int:
        """Runs the worker from its start to its end. Returns an ExitCode."""
        loop = asyncio.get_running_loop()
        bus = self._bus()
        stopping = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # ignored: the parent decides when the worker ends
        loop.add_reader(self.instance.pipes.parent_pipe.reader, self._parent_gone, loop, stopping)
        if self.instance.credentials.ext_proc is not None:
            self.instance.credentials.ext_proc.follow(loop, speaks=self.index == 0, say=self._publish_certificate)
        self.set_up(bus)
        kept = self._kept
        serving = self._serving = self._create_serving()
        serving.start(loop, self.application())
        self._heartbeat(loop, time.monotonic())
        self._exit.watch_memory(loop, stopping)
        self._watch_bodies(loop, BodyTimeout())
        loop.add_reader(self.instance.pipes.wakeups[self.index], self.woken, loop)
        self.instance.reports.ready(self.index + 1)
        loop.call_later(mapped_code.AFTER_START_S, mapped_code.give_back)
        await stopping.wait()
        await self._exit.drain(serving, kept.flows, orphaned=lambda: self._orphaned)
        loop.remove_reader(self.instance.pipes.wakeups[self.index])
        await self._adoption.close()
        bus.flush()
        if kept.traces is not None:
            await kept.traces.close()
        return ExitCode.RECYCLED if self._exit.recycled else ExitCode.OK

    def set_up(self, bus: BusWriter) -> None:
        """Creates the worker's app and the other parts for its configuration. If the picker has several pools, they begin without parts."""

        def made(instance: Instance) -> WorkerParts:
            areas = instance.memory.areas  # the areas may have more histograms under a later configuration
            area = self.area if areas is self.areas else areas.area(self.index + 1)
            return WorkerParts(instance, self.index, area, bus=bus, faults=self.faults, clock=self._clock, kept=self._kept)

        self._kept = WorkerKept(self.instance, self.index, self.area, bus, clock=self._clock)
        if self.instance.pools:
            serving = (lambda: self._serving.streams(), lambda: self._serving.look())
            self._adoption = WorkerPools(self.instance, made, self.area, self.index + 1, *serving)
        else:
            parts = made(self.instance)
            self._adoption = Adoption(parts, self.area, self.index + 1, lambda: (each.app for each in self._serving.streams()))

    def _publish_certificate(self, until: float, soon_at: float) -> None:
        place = self.area.schema.scalar
        self.area.scalars[place[CERTIFICATE_UNTIL]], self.area.scalars[place[CERTIFICATE_SOON]] = int(until), int(soon_at)

    def woken(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handles a wake-up: another process has changed its area and wants this worker to look."""
        with contextlib.suppress(BlockingIOError):  # the event may have been read by a predecessor
            os.eventfd_read(self.instance.pipes.wakeups[self.index])
        kept = self._kept
        self._adoption.woken()
        kept.publisher.woken(loop)
        kept.profiler.woken()
        for flow in kept.flows():
            flow.woken()
        self._adoption.look()

    def _bus(self) -> BusWriter:
        counter = self.area.schema.counter
        return BusWriter(
            self.instance.pipes.bus_writers[self.index],
            partial(self.area.add, counter["bus_drops_total"]),
            partial(self.area.add, counter["bus_frames_total"]),
        )

    def _create_serving(self) -> Serving:
        return Serving(
            self.instance,
            self.area,
            self._kept.series(self.instance, ABUSE),
            clock=self._clock,
            on_error=self.faults.request_failed,
            leaving=self._exit.leaving,
            pool_at=self._adoption.name_at,
        )

    def application(self) -> Application:
        """Returns the application for the transport: ext_proc, with stream metrics and health checks if they are enabled."""
        instance = self.instance
        opened: Application = self._adoption.open
        if instance.options.enable_grpc_stream_metrics:
            opened = StreamMetrics(self.area, time.monotonic).around(opened)
        if not instance.options.health_checking:
            return opened

        def ready() -> bool:  # stays True while only this worker leaves, because the picker still serves
            return not (self._orphaned or instance.words.stopping) and bool(self.areas.scalars(LOADED)[SUPERVISOR_AREA])

        return beside(opened, ready)

    def _parent_gone(self, loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
        """Begins to stop, because the pipe `parent_pipe` has ended. The kernel closes a dying process's pipes before getppid() shows its
        death.
        """
        loop.remove_reader(self.instance.pipes.parent_pipe.reader)
        self._orphaned = True
        log.warning(
            "the parent is gone: this worker ends when all streams have ended", drain_timeout_s=self.instance.options.drain_timeout_s
        )
        stopping.set()

    def _heartbeat(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = time.monotonic()
        self.area.heartbeat(now)
        self.instance.reports.send_again()
        self._serving.publish_load()
        self.areas.add_remote(now)  # flow control uses these areas under later configurations, too
        self._adoption.beat(now)
        self._adoption.look()
        self._lags.append(now - due)
        if (lag := self.area.schema.scalar.get(LAG)) is not None:
            self.area.scalars[lag] = int(max(self._lags) * 1e6)
        loop.call_later(HEARTBEAT_S, self._heartbeat, loop, now + HEARTBEAT_S)

    def _watch_bodies(self, loop: asyncio.AbstractEventLoop, timeout: BodyTimeout) -> None:
        for origin in timeout.look(self._serving.streams()):
            self._serving.peer_faults(f"{SLOW_BODY}: {origin}")
        loop.call_later(timeout.seconds / 2, self._watch_bodies, loop, timeout)
