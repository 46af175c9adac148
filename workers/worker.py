"""A worker child's main: its loop, its lane, its streams, its end.

Everything shared was made by the parent before the fork; a worker only reads it, but for its own lane. SIGTERM drains: new
streams are still accepted until the last open one ends or the drain time-out; then the worker leaves with exit code 0.
"""

import asyncio
import contextlib
import gc
import os
import random
import signal
import time
from functools import partial

import structlog
import uvloop

from shm.documents import DocumentReader
from shm.lanes import Lane, Lanes
from shm.prefix_index import IndexReader
from shm.table import TableReader
from workers.bus import BusWriter
from workers.documents import EndpointsView, NamesView
from workers.exit_codes import ExitCode
from workers.instance import Instance
from workers.pool import SharedPool
from workers.scrape import fresh_for
from workers.server import App
from workers.services import WorkerServices
from workers.transport.limits import Limits
from workers.transport.native import Server

BEAT_S = 0.1
FAULTS_LOGGED_PER_S = 5
GC_YOUNGEST = 20_000  # a stream's objects are freed by reference counts; cycles are rare
DRAIN_POLL_S = 0.02

log = structlog.get_logger()


def run(instance: Instance, index: int) -> int:
    """Serves until told to stop. `index` counts from 0; lane 0 is the supervisor's."""
    gc.set_threshold(GC_YOUNGEST, 20, 20)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Worker(instance, index).serve())


class Worker:
    """One worker process."""

    def __init__(self, instance: Instance, index: int) -> None:
        self.instance = instance
        self.index = index
        self.lanes: Lanes = instance.lanes
        self.lane: Lane = instance.lanes.lane(index + 1)
        self.lane.take_over()
        self._faults_logged = (0.0, 0)
        self._server: Server

    async def serve(self) -> int:
        """The worker's whole life."""
        loop = asyncio.get_running_loop()
        options = self.instance.options
        bus = BusWriter(
            self.instance.bus_writers[self.index], partial(self.lane.add, self.lane.schema.counter["bus_drops_total"])
        )
        counter = self.lane.schema.counter
        server = Server(
            loop,
            Limits(message=options.message_bytes_max),
            on_abuse=lambda _cause: self.lane.add(counter["abuse_total"]),
            on_error=self._on_fault,
            on_accept=self._accepted,
            on_leave=self._publish_load,  # at once: the next connection must find this worker's true load
            on_accept_failure=log.error,
            others=self._others,
            accepted_anywhere=self._accepted_anywhere,
        )
        self._server = server
        stopping = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # the parent decides
        loop.add_reader(self.instance.life_reader, stopping.set)
        server.serve(self.instance.listener, self._app(bus).open, self.instance.ssl_context)
        self._beat(loop)
        self.instance.ready(self.index + 1)
        await stopping.wait()
        loop.remove_reader(self.instance.life_reader)
        await self._drain(server)
        bus.flush()
        return ExitCode.OK

    def _app(self, bus: BusWriter) -> App:
        instance = self.instance
        documents = DocumentReader(instance.document_schema, instance.documents)
        rng = random.Random(int.from_bytes(os.urandom(16), "big"))
        services = WorkerServices(
            self.lane,
            IndexReader(instance.index_schema, instance.index),
            bus,
            prefix_seed=instance.prefix_seed,
            rng=rng,
            measures=instance.measures,
        )
        pipeline = instance.config.pipeline
        pipeline.start(services)
        pool = SharedPool(
            TableReader(instance.table_schema, instance.table),
            EndpointsView(documents),
            NamesView(documents),
            self.lanes,
            columns=pipeline.columns,
            fresh_for_s=fresh_for(instance.scrape_interval_s),
            now=time.monotonic,
            producer_failed=self._producer_failed,
            honour_subsets=not instance.options.disable_endpoint_subset_filter,
        )
        return App(
            pipeline,
            pool,
            self.lane,
            body_bytes_max=instance.options.body_bytes_max,
            now=time.monotonic,
            rng=rng,
            on_fault=self._on_fault,
        )

    def _others(self) -> list[tuple[bool, int, float]]:
        """What gated accept compares itself with: the other workers' lanes."""
        ages = self.lanes.ages(time.monotonic())
        loads = self.lanes.scalars("accept_load")
        own = self.index + 1
        return [(self.lanes.serving(i), loads[i], ages[i]) for i in range(1, len(ages)) if i != own]

    def _accepted(self) -> None:
        self.lane.add(self.lane.schema.counter["connections_total"])
        self._publish_load()  # at once: the next connection may arrive with this one

    def _publish_load(self) -> None:
        scalars, scalar = self.lane.scalars, self.lane.schema.scalar
        scalars[scalar["streams"]] = self._server.streams
        scalars[scalar["connections"]] = self._server.connections
        scalars[scalar["accept_load"]] = self._server.load()

    def _accepted_anywhere(self) -> int:
        return self.lanes.counters()["connections_total"]

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lane.beat(time.monotonic())
        self._publish_load()
        loop.call_later(BEAT_S, self._beat, loop)

    async def _drain(self, server: Server) -> None:
        """Streams end by themselves, or at the time-out; an idle worker leaves at once."""
        deadline = time.monotonic() + self.instance.options.drain_timeout_s
        while server.streams and time.monotonic() < deadline:  # noqa: ASYNC110 - streams say nothing when they end
            await asyncio.sleep(DRAIN_POLL_S)
        server.stop_accepting()
        server.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.closed(), max(0.0, deadline - time.monotonic()))
        server.abort()

    def _producer_failed(self, failure: BaseException) -> None:
        self.lane.add(self.lane.schema.counter["producer_failures_total"])
        self._log_rarely("data producer failed open", failure)

    def _on_fault(self, problem: BaseException) -> None:
        self._log_rarely("request failed by a fault", problem)

    def _log_rarely(self, event: str, problem: BaseException) -> None:
        second, count = self._faults_logged
        now = time.monotonic()
        if now - second > 1:
            second, count = now, 0
        self._faults_logged = (second, count + 1)
        if count < FAULTS_LOGGED_PER_S:
            log.error(event, error=repr(problem), exc_info=problem)
