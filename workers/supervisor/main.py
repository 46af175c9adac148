"""The supervisor, a child process: it discovers and scrapes endpoints, answers probes, and serves the metrics port.

It is the only writer of the endpoint table, the documents and the prefix index in shared memory. After a killed predecessor, it takes
over the table, the index, and the counters of the area. While no supervisor runs, workers decide by the last table and by the requests
in flight, and probes wait in the listening sockets, which the parent holds.

    Readiness            whether requests may come here     `readiness`
    IndexKeeper          prefix index, bus, snapshot        `index_keeper`
    LatencyKeeper        latency model                      `latency_keeper`
    RecordKeeper         recordings of traffic              `record_keeper`
    DataLayer            endpoint table and scraper         `data_layer`
    Kubernetes           pool, pods, objects, lease         `kubernetes`; without it `configured_endpoints`
    Exchange             other replicas, through a store    `replication`; only with --replica-store
    Live                 history and live state             `live`
    PagePort             metrics and debug pages            `page_port`
    Background           timers and tasks of all of them    `background`

How it ends:

    SIGTERM, SIGINT         Ignored. The whole process group gets them, but probes need answers until the last worker has drained.
    end of `parent_pipe`    The parent is gone: the picker is not ready any more.
    end of `workers_pipe`   The parent is gone or has released its children, and no worker is left: the supervisor ends. If the parent
                            died, the supervisor also removes the names of shared memory.

It reports ready to the parent after the first load of endpoints, or as soon as it follows Kubernetes. A bad endpoints file ends the
picker at its first start. A successor instead keeps the endpoints that its predecessor knew, as it does while the Kubernetes API is
away.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
import uvloop

from epp.metrics.areas import FILE_CHANGES, OVERWRITTEN
from shm.areas import SUPERVISOR_AREA, Area
from workers.host import mapped_code
from workers.host.exit_codes import ExitCode
from workers.host.yaml_files import DiscoveryError
from workers.process import StartError
from workers.process.instance import FIRST, Instance
from workers.supervisor.background import Background
from workers.supervisor.config_watch import ConfigWatch
from workers.supervisor.data_layer import CULPRIT, DataLayer, OverwrittenError
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.endpoints.scrape import Sink
from workers.supervisor.endpoints.slots import IndexOwners
from workers.supervisor.index_keeper import IndexKeeper
from workers.supervisor.latency_keeper import LatencyKeepers
from workers.supervisor.later import Later, at_start
from workers.supervisor.live import Live
from workers.supervisor.objects_of_pools import PoolsObjects
from workers.supervisor.objects_watch import flow_areas
from workers.supervisor.page_port import PagePort, Shown
from workers.supervisor.pages.state.parts import Told
from workers.supervisor.predecessor import take_over
from workers.supervisor.readiness import Readiness
from workers.supervisor.record_keeper import RecordKeeper
from workers.supervisor.scaling import READ_S, PoolSignals, ScalingSignal, waiting_in
from workers.supervisor.served_models import decides, follow_models
from workers.supervisor.watches import WATCH_EVERY_S, Watches
from workers.transport.limits import Limits
from workers.transport.native import Server
from workers.worker.extproc.health import Health

if TYPE_CHECKING:
    from workers.replicas.exchange import Exchange
    from workers.supervisor.kubernetes import Kubernetes

HEARTBEAT_S = 0.1
INTACT_EVERY_S = 1.0
HEALTH_MESSAGE_BYTES_MAX = 16 * 1024
ORPHANED_GRACE_S = 5.0
ORDINAL = SUPERVISOR_AREA  # the supervisor's number among the parent's children

log = structlog.get_logger()


def run(instance: Instance) -> int:
    """Runs the supervisor until the parent and all workers are gone. Returns the exit code."""
    import_own()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Supervisor(at_start(instance)).serve())


def import_own() -> None:
    """Imports modules that only the supervisor needs: after the fork, so that no other process has them, and before the loop starts, which
    imports would stop.
    """
    from workers.shared.recording import files  # noqa: F401
    from workers.supervisor.pages import metrics  # noqa: F401


class Supervisor:
    """One supervisor process. The constructor takes over from a predecessor; `serve` runs to the end."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.report = report
        self.predecessor = take_over(instance.memory.areas)
        self.area: Area = instance.memory.areas.area(ORDINAL)
        self.background = Background()
        self.readiness = Readiness(instance, self.area)
        self.index = IndexKeeper(self._present)
        self.exchange = self._exchange() if instance.options.replica_store else None
        self.kubernetes = self._kubernetes() if instance.in_kubernetes else None
        self.live = Live(instance, self._told)
        self.latency: LatencyKeepers
        self.records: RecordKeeper
        self.data: DataLayer
        self.pages: PagePort
        self._of_data = contextlib.ExitStack()  # stops the scrapers of the data layer
        self.objects: PoolsObjects
        self.watches = Watches(report)
        self.checks: list[Callable[[float], None]] = []
        self._later = Later(self)

    def _exchange(self) -> "Exchange":
        from workers.supervisor.replication import exchange_of  # imported before the fork, only with a store

        exchange = exchange_of(self._present, self.index.writer, report)
        self.index.taught, self.index.rhythm = exchange.parts.taught, exchange.pace.rhythm()
        return exchange

    def _sink_of(self, table: EndpointTable) -> Callable[[Instance], Sink]:
        """Returns the sink of the endpoints' pages: the table, or an object before the table that shares pages with other replicas."""
        if self.exchange is None:
            return lambda _pool: table
        from workers.supervisor.replication import sink_of

        return sink_of(self.instance, table, self.exchange.parts.pages)

    def _kubernetes(self) -> "Kubernetes":
        from workers.supervisor.kubernetes import Kubernetes  # imported before the fork, only if it is used

        parts = self.area, self.predecessor, self.readiness, self.background, report
        return Kubernetes(self._present, *parts, assign=lambda names: self._later.assign(names))

    async def serve(self) -> int:
        """Runs the process: starts every component, waits for the end, and stops every component. Returns the exit code.

        Raises the exception of a background task that failed, after everything has stopped.
        """
        with contextlib.ExitStack() as cleanup:
            self._watch_parent(cleanup)
            self._start(cleanup)
            if self.kubernetes is not None:
                await self.kubernetes.connect()
            try:
                # First of all: workers record the first request that they can route.
                self.records.start(self.background, successor=self.predecessor.existed)
                self._follow_objects()
                await self._follow_endpoints()
            except (DiscoveryError, StartError) as failure:
                self.instance.reports.failed(ORDINAL, str(failure))
                return ExitCode.BOOT_FAILED
            self.instance.reports.ready(ORDINAL)
            asyncio.get_running_loop().call_later(mapped_code.AFTER_START_S, mapped_code.give_back)
            self.index.save_regularly(self.background, lambda: self.data.table.owners())
            await self.background.ended()
            await self._stop()
        self.background.raise_fault()
        # Does not use `getppid`, because that may still name the dead parent.
        if self.readiness.orphaned and not self.instance.words.stopping:
            self.instance.unlink()
        return ExitCode.OK

    def _watch_parent(self, cleanup: contextlib.ExitStack) -> None:
        """Watches two pipes: one ends when the parent is gone, the other when all workers are also gone."""
        loop, instance = asyncio.get_running_loop(), self.instance
        loop.set_exception_handler(_log_fault)
        for descriptor, gone in (
            (instance.pipes.workers_pipe.reader, self._workers_gone),
            (instance.pipes.parent_pipe.reader, self._parent_gone),
        ):
            loop.add_reader(descriptor, gone)
            cleanup.callback(loop.remove_reader, descriptor)

    def _start(self, cleanup: contextlib.ExitStack) -> None:
        """Starts the parts that need no list of endpoints: heartbeat, scraper, index, checks, probes and pages."""
        instance, background = self.instance, self.background
        cleanup.callback(background.close)
        remembered = None if self.predecessor.existed else self.index.load()
        self.data = self._data_layer(IndexOwners(self.index.writer, remembered, self._pool_name))
        cleanup.callback(lambda: self._of_data.close())
        self.data.start(self._of_data)
        background.every(HEARTBEAT_S, self._heartbeat)
        self.latency = LatencyKeepers(instance, self._pool_of, surprised=lambda slot: self.data.table.hasten(slot))
        self.latency.start(background)
        self.records = RecordKeeper(instance, self.area)
        cleanup.callback(self.records.end)
        self.index.start(background, cleanup, self.latency.take, self.records.take, lambda owner, tokens: self.data.reported(owner, tokens))
        signals: PoolSignals | None = None
        if instance.pools:
            signals = PoolSignals(lambda: self.instance.pools, self.latency.keepers)
            background.every(READ_S, signals.look)
        else:
            scaling = ScalingSignal(instance, self.area, self.latency.keeper(0), lambda: waiting_in(flow_areas(self.instance)))
            background.every(READ_S, scaling.look)
        if self.exchange is not None:
            from workers.supervisor.replication import ModelsOfPools

            self.exchange.joining.models = ModelsOfPools(self.latency, self._present)
            background.keep(self.exchange.run())
        self.checks = self.watches.of(instance, self.index)
        background.every(WATCH_EVERY_S, self._check)
        background.every(INTACT_EVERY_S, self._check_memory)
        if instance.options.config_watch:
            successor = self.predecessor.existed
            background.keep(ConfigWatch(self._present, lambda: instance.reports.changed(ORDINAL), successor=successor).run())
        if self.kubernetes is not None:
            self.kubernetes.start()
        if instance.pool_list or decides(instance):  # a pool that is chosen by model may come later
            background.keep(follow_models(self._present, lambda: self.data.table, report))
        self._answer_probes(cleanup)
        self.live.start(background)
        self.pages = PagePort(
            instance,
            self.area,
            self.readiness,
            shown=Shown(self.index, self.live, self.records.where, lambda pool: self.latency.model_of(pool), self.exchange, signals),
            table=self.data.table,
            kubernetes=self.kubernetes,
            report=report,
        )
        self.pages.open(cleanup)

    def _pool_of(self, slot: int) -> int | None:
        """Returns the pool of the endpoint in a slot, or None if the endpoint has left. With one pool, does not check whether it has
        left.
        """
        return self.data.table.pool_of(slot) if self.instance.pools else 0

    def _answer_probes(self, cleanup: contextlib.ExitStack) -> None:
        """Serves gRPC health checks."""
        readiness = self.readiness
        elects = self.kubernetes is not None and self.kubernetes.candidacy is not None
        server = Server(asyncio.get_running_loop(), Limits(message=HEALTH_MESSAGE_BYTES_MAX))
        server.serve(self.instance.sockets.health, Health(readiness.ready, elects=elects, missing=readiness.missing).open)
        cleanup.callback(server.abort)

    def _follow_objects(self) -> None:
        """Starts to publish objectives, their bands and model rewrites. Raises DiscoveryError for a bad file at the first start."""
        self.objects = PoolsObjects(self.instance, report)
        changed = not self.instance.pools and self.instance.number > FIRST
        self.objects.start(successor=self.predecessor.existed or changed)
        self.background.keep(self.objects.run())
        if self.kubernetes is not None:
            self.kubernetes.follow_objects(self.objects)

    async def _follow_endpoints(self) -> None:
        """Starts to follow endpoints. Raises DiscoveryError for a bad flag or file at the first start."""
        if self.kubernetes is not None:
            self.kubernetes.follow_endpoints(lambda: self.data.table)
            self.kubernetes.tell_reloads()
        await self._later.follow_endpoints()
        if self.kubernetes is None:
            self.readiness.loaded = True

    def file_changed(self) -> None:
        """Counts a change of the endpoints file."""
        self.area.add(self.area.schema.counter[FILE_CHANGES.name])

    def renew_data(self) -> None:
        """Creates the data layer again, for another configuration. The data layer continues with the endpoints that its table resumes."""
        self.data.publish_counts()
        self._of_data.close()
        self._of_data = contextlib.ExitStack()
        self.data = self._data_layer(self.data.table.index, self.data)
        self.data.start(self._of_data)

    def _data_layer(self, index: IndexOwners, earlier: DataLayer | None = None) -> DataLayer:
        return DataLayer(self.instance, self.area, index, report, sink_of=self._sink_of, earlier=earlier)

    def _told(self) -> Told:
        """Returns the data of the live state that are not in shared memory."""
        kubernetes, exchange = self.kubernetes, self.exchange
        return Told(
            self.data.table.troubles(),
            {} if kubernetes is None else kubernetes.refusals(),
            {} if kubernetes is None else kubernetes.unserved(),
            None if exchange is None else exchange.connected,
        )

    def _pool_name(self, number: int) -> str:
        return self.instance.pools[number].options.pool_name if self.instance.pools else ""

    def pools_replaced(self) -> None:
        """Switches to the pools that have got some of the places."""
        self.latency.use(self.instance)
        if self.exchange is not None:
            from workers.supervisor.replication import waiting_of

            self.exchange.pools_changed(waiting_of(self.instance))

    def limits_changed(self) -> None:
        """Applies the limits of the pools in Kubernetes to their endpoints."""
        if self.kubernetes is not None:
            self.kubernetes.apply_all()

    def _present(self) -> Instance:
        """Returns the instance under the present configuration of this supervisor."""
        return self.instance

    def _check(self) -> None:
        self.data.look()
        for look in self.checks:
            look(time.monotonic())

    def _check_memory(self) -> None:
        """Ends this supervisor if another program has overwritten its part of shared memory. A successor repairs the memory."""
        if part := self.data.overwritten():
            self.area.add(self.area.schema.counter[OVERWRITTEN.name])
            name = self.instance.memory.state_name
            self.background.fail(OverwrittenError(f"another program has overwritten the {part} in {name}: {CULPRIT}"))

    async def _stop(self) -> None:
        """Saves the index and gives the lease back."""
        self.data.close()  # comes first: scrapes of thousands of endpoints would leave no time for the other steps
        self.index.bus.drain()
        self.records.end()
        await self.index.save(self.data.table.owners)
        self.latency.save()
        if self.kubernetes is not None:
            await self.kubernetes.leave()

    def _heartbeat(self) -> None:
        self.area.heartbeat(time.monotonic())
        self.instance.reports.send_again()
        self.data.publish_counts()
        self._later.look()

    def _parent_gone(self) -> None:
        """Makes the picker not ready. The supervisor ends at the latest shortly after the drain timeout."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.instance.pipes.parent_pipe.reader)
        self.readiness.orphaned = True
        loop.call_later(self.instance.options.drain_timeout_s + ORPHANED_GRACE_S, self.background.end)

    def _workers_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self.instance.pipes.workers_pipe.reader)
        self.background.end()


def report(event: str, **fields: Any) -> None:
    """Logs a problem that a component has found."""
    log.warning(event, **fields)


def _log_fault(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an exception in a callback. The loop continues."""
    log.error("fault in the event loop", what=context["message"], exc_info=context.get("exception"))
