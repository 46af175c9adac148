"""A worker child's main: its loop, its lane, its streams, its end.

Everything shared was made by the parent before the fork; a worker only reads it, but for its own lane. It drains (`drain`)
together with the others when the parent stops or is gone, and alone when it gets SIGTERM without that, or has outgrown its
share of memory (`memory`); then it says so in its lane and to the parent, which starts a successor in another seat at once.
"""

import asyncio
import contextlib
import gc
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import structlog
import uvloop

from epp import guard
from epp.client_headers import untrusted
from epp.errors import ProducerFailed
from epp.explain import Explanation
from epp.instrument import Wrap, bare
from epp.metrics import (
    ABUSE,
    ATTEMPTS,
    ERROR,
    ISOLATION,
    MODEL_REWRITES,
    PREDICTION,
    REQUEST,
    SHADOWS,
    Group,
    LabelCaps,
)
from epp.pipeline import Pipeline
from epp.plugin import DataProducer, Profile
from epp.response_phase import NONE
from shm.documents import DocumentReader, DocumentWriter
from shm.lanes import SUPERVISOR_LANE, Lane, Lanes
from shm.prefix_index import IndexReader
from shm.series import SeriesWriter
from shm.table import TableReader
from workers.app import App
from workers.bus import BusWriter
from workers.decisions import Publisher, Recent
from workers.documents import EndpointsView, NamesView
from workers.drain import Drain
from workers.exit_codes import ExitCode
from workers.flow import FlowControl
from workers.flow_setup import flow_control
from workers.health import beside
from workers.honesty import Comparison, match_name
from workers.instance import LEAVING, LOADED, Instance
from workers.isolation import Isolation
from workers.log import Rarely, stack, told
from workers.memory import LOOK_S, Leaving, Usage, Watch, cgroup_limit, share, trim
from workers.objectives import ObjectivesView, Priorities, static_bands
from workers.patience import Patience
from workers.peer_faults import SLOW_BODY, PeerFaults
from workers.pool import SharedPool
from workers.query_of_death import DECIDING, Deciding
from workers.request_metrics import RequestMetrics
from workers.rewrites import RewritesView, follow
from workers.scrape import fresh_for
from workers.server import ExtProcStream, open_stream
from workers.services import CallTimers, SharedPrefixIndex, Warnings, WorkerServices
from workers.shadows import Agreements
from workers.shedding import Shedding
from workers.stream_metrics import StreamMetrics
from workers.timing import Timing
from workers.tracing import Tracer
from workers.tracing_export import Exporter, open_exporter
from workers.transport import native
from workers.transport.interface import Application, Clock, Server
from workers.transport.limits import BUDGET_MAX, Budget, Limits

BEAT_S = 0.1
FAULTS_LOGGED_PER_S = 5
GC_YOUNGEST = 20_000  # a stream's objects are freed by reference counts; cycles are rare
LAG_BEATS = 10  # the loop's lag is the worst of so many
LAG = "loop_lag_us"
PEERS_SHARE = 0.25  # of a worker's memory: for what peers have not finished or not taken
FRESH_BEAT_S = 0.5  # who has beaten so lately takes connections

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
        self._warnings = Warnings(time.monotonic)
        self._lags: deque[float] = deque([0.0], LAG_BEATS)  # seconds that beats came late
        self._recycled = False
        self._orphaned = False
        self._clock = Clock()
        self._debug = instance.options.log_level == "debug"
        self._publisher: Publisher
        self._metrics: RequestMetrics
        self._timing: Timing | None = None
        self._caps = LabelCaps()
        self._traces: Exporter | None = None
        self._server: Server
        self._peer_faults: PeerFaults
        self._services: WorkerServices
        self._objectives: ObjectivesView
        self._flow: FlowControl | None = None
        self._follow_rewrites: Callable[[], object] = bool  # nothing to follow

    async def serve(self) -> int:
        """The worker's whole life."""
        loop = asyncio.get_running_loop()
        counter = self.lane.schema.counter
        bus = BusWriter(
            self.instance.bus_writers[self.index],
            partial(self.lane.add, counter["bus_drops_total"]),
            partial(self.lane.add, counter["bus_frames_total"]),
        )
        stopping = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # the parent decides
        loop.add_reader(self.instance.life_reader, self._parent_gone, loop, stopping)
        if self.instance.certificates is not None:
            self.instance.certificates.follow(loop, speaks=self.index == 0)
        server = self._server = self._served(loop, self._application(bus))
        self._beat(loop, time.monotonic())
        self._watch_memory(loop, stopping)
        self._watch_waiting(loop, Patience())
        loop.add_reader(self.instance.wakeups[self.index], self._woken, loop)
        self.instance.ready(self.index + 1)
        await stopping.wait()
        await self._drain(server)
        self._metrics.ledger.store()
        if self._timing is not None:
            self._timing.beat()
        loop.remove_reader(self.instance.wakeups[self.index])
        await self._services.close()
        bus.flush()
        if self._traces is not None:
            await self._traces.close()
        return ExitCode.RECYCLED if self._recycled else ExitCode.OK

    def _parent_gone(self, loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
        """The end of `life`. The kernel closes a dying process's pipes before it gives its children away: getppid lags."""
        loop.remove_reader(self.instance.life_reader)
        self._orphaned = True
        log.warning(
            "the parent is gone: this worker ends when the streams have",
            drain_timeout_s=self.instance.options.drain_timeout_s,
        )
        stopping.set()

    def _woken(self, loop: asyncio.AbstractEventLoop) -> None:
        """Another process wants this one to look at what it says in its lane."""
        with contextlib.suppress(BlockingIOError):  # a predecessor may have taken it
            os.eventfd_read(self.instance.wakeups[self.index])
        self._publisher.woken(loop)
        if self._flow is not None:
            self._flow.woken()

    def _application(self, bus: BusWriter) -> Application:
        instance, app = self.instance, self._app(bus)
        opened: Application = partial(open_stream, app)
        if instance.options.enable_grpc_stream_metrics:
            opened = StreamMetrics(self.lane, time.monotonic).around(opened)
        if not instance.options.health_checking:
            return opened

        def ready() -> bool:  # a worker that leaves alone says nothing about the picker
            return not (self._orphaned or instance.stopping) and bool(self.lanes.scalars(LOADED)[SUPERVISOR_LANE])

        return beside(opened, ready)

    def _app(self, bus: BusWriter) -> App:
        instance = self.instance
        documents = DocumentReader(instance.document_schema, instance.documents)
        rng = random.Random(int.from_bytes(os.urandom(16), "big"))
        services = self._services = WorkerServices(
            self.lane,
            SharedPrefixIndex(IndexReader(instance.index_schema, instance.index), bus),
            prefix_seed=instance.prefix_seed,
            rng=rng,
            measures=instance.measures,
            counters={group.name: self._series(group) for group in instance.counter_groups},
            now=time.monotonic,
        )
        pipeline = instance.config.pipeline
        pipeline.start(services)
        foreign = guard.declared(pipeline.recipe.plugins)
        timers = guarded = guard.guard(guard.counted(services)) if foreign else bare
        if instance.options.plugin_metrics:
            calls = CallTimers(self.lane, instance.timers, time.perf_counter)
            timers = guard.within(guarded, calls)
            pipeline = pipeline.wrapped(timers)
            self._timing = Timing(calls, guarded, pipeline)
        elif foreign:
            pipeline = pipeline.wrapped(guarded)
        recent = Recent(pipeline, self.index, time.monotonic, self._tell if self._debug else None)
        published = DocumentWriter(instance.decision_schema, instance.decisions)
        self._publisher = Publisher(recent, self.lanes, self.lane, published, self.index)
        pool = SharedPool(
            TableReader(instance.table_schema, instance.table),
            EndpointsView(documents),
            NamesView(documents),
            self.lanes,
            columns=(*pipeline.columns, *instance.config.saturation.consumes),
            fresh_for_s=fresh_for(instance.scrape_interval_s),
            now=time.monotonic,
            producer_failed=self._producer_failed,
            shadow_failed=self._shadow_failed,
            honour_subsets=not instance.options.disable_endpoint_subset_filter,
        )
        objectives = self._objectives = ObjectivesView(documents, static_bands(instance.config.flow))
        objectives.look()
        flow = self._flow = flow_control(
            instance, self.index, self.lane, pool, objectives, self._series, self._caps, self._policy_failed
        )
        unknown = partial(self.lane.add, self.lane.schema.counter["objectives_unknown_total"])
        app = App(
            pipeline,
            pool,
            self.lane,
            self._request_metrics(),
            body_bytes_max=instance.options.body_bytes_max,
            clock=self._clock,
            now=time.monotonic,
            soon=asyncio.get_running_loop().call_soon,
            rng=rng,
            on_fault=self._on_fault,
            emit_scores=instance.options.emit_endpoint_scores,
            recent=recent,
            deciding=Deciding(
                self.lane.scalars[(at := self.lane.schema.scalar[DECIDING]) : at + 1],
                instance.deadly,
                partial(self.lane.add, self.lane.schema.counter["deadly_requests_total"]),
            ),
            tracer=self._tracer(pipeline, timers, rng),
            comparison=Comparison(match, self._series(PREDICTION)) if (match := match_name(pipeline.recipe)) else None,
            agreements=Agreements(self._series(SHADOWS)) if pipeline.shadows else None,
            hidden_headers=untrusted(instance.options.trust_client_headers),
            request_phase_only=instance.config.response_phase == NONE,
            flow=flow,
            evictions=flow.evictions if flow is not None else None,
            shedding=Shedding(pool, instance.config.saturation) if flow is None else None,
            priorities=Priorities(objectives, unknown) if instance.has_objects else None,
            timing=self._timing,
        )
        if instance.has_objects:
            rewrites = RewritesView(documents, self._series(MODEL_REWRITES), self._caps, rng.random)
            self._follow_rewrites = partial(follow, app, rewrites)
            self._follow_rewrites()
        Isolation(
            app,
            timers,
            self._series(ISOLATION),
            now=time.monotonic,
            later=asyncio.get_running_loop().call_later,
            told=self._plugin_fault,
            warn=log.warning,
        )
        return app

    def _tracer(self, pipeline: Pipeline, timers: Wrap, rng: random.Random) -> Tracer | None:
        """None: no traces were asked for, and nothing of OpenTelemetry is imported."""
        asked = self.instance.options.tracing
        if asked is None:
            return None
        self._traces = Exporter(open_exporter(asked))
        return Tracer(pipeline, timers, self._traces.emit, ratio=asked.ratio, rng=rng)

    def _request_metrics(self) -> RequestMetrics:
        later = asyncio.get_running_loop().call_later
        self._metrics = RequestMetrics(self._clock, later, *(self._series(g) for g in (REQUEST, ERROR, ATTEMPTS)))
        return self._metrics

    def _series(self, group: Group) -> SeriesWriter:
        """This worker's part of a table of labelled metrics."""
        series = self.instance.series_writer(group, self.index, self._caps)
        series.take_over()
        return series

    def _served(self, loop: asyncio.AbstractEventLoop, application: Application) -> Server:
        """The transport that was asked for, serving."""
        instance = self.instance
        limits = Limits(message=instance.options.message_bytes_max)
        rarely = Rarely("peers' faults", log.warning)
        self._peer_faults = PeerFaults(self._series(ABUSE), rarely, time.monotonic)

        if instance.options.transport == "grpcio":
            from workers.transport import grpcio  # costs 20 MiB, and nobody may fork who has imported it

            known = grpcio.Server(
                loop,
                limits,
                self._budget(),
                on_abuse=self._peer_faults,
                on_error=self._on_fault,
                clock=self._clock,
                now=time.monotonic,
            )
            known.serve(instance.listener, application, instance.certificates)
            return known
        own = native.Server(
            loop,
            limits,
            self._budget(),
            on_abuse=self._peer_faults,
            on_error=self._on_fault,
            on_accept=self._accepted,
            on_leave=self._publish_load,  # at once: the next connection must find this worker's true load
            on_accept_failure=log.error,
            others=self._others,
            accepted_anywhere=self._accepted_anywhere,
            clock=self._clock,
            now=time.monotonic,
        )
        own.serve(instance.listener, application, instance.ssl_context)
        return own

    def _budget(self) -> Budget:
        """How much peers may make this worker keep: a part of its share of memory, if there is one, and always enough
        for the largest body of one peer beside what the others hold."""
        given = self.instance.options
        own = share(given.worker_memory_limit, cgroup_limit(), given.workers)
        return Budget(max(2 * given.message_bytes_max, min(BUDGET_MAX, int(PEERS_SHARE * own)))) if own else Budget()

    def _others(self) -> list[tuple[bool, int, float]]:
        """What gated accept compares itself with: the other workers' lanes."""
        ages = self.lanes.ages(time.monotonic())
        loads = self.lanes.scalars("accept_load")
        return [(said != Leaving.LEAVES, loads[i], ages[i]) for i, said in self._leaving().items()]

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

    def _beat(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = time.monotonic()
        self.lane.beat(now)
        self._publish_load()
        if self._timing is not None:
            self._timing.beat()
        if self._flow is not None and self._objectives.look():
            self._flow.know(self._objectives.places)
        self._lags.append(now - due)
        self._follow_rewrites()
        if (lag := self.lane.schema.scalar.get(LAG)) is not None:
            self.lane.scalars[lag] = int(max(self._lags) * 1e6)
        loop.call_later(BEAT_S, self._beat, loop, now + BEAT_S)

    def _watch_memory(self, loop: asyncio.AbstractEventLoop, stopping: asyncio.Event) -> None:
        """Leave when this process has outgrown its share; never, if a fresh one is over it already."""
        given, cgroup, usage = self.instance.options.worker_memory_limit, cgroup_limit(), Usage()
        first = self.instance.options.workers

        def limit() -> int:
            return share(given, cgroup, max(first, sum(map(self.lanes.serving, range(1, self.lanes.schema.lanes)))))

        if not (own := limit()):
            return
        if need := usage.over(own):
            log.error(
                f"a worker needs {need >> 20} MiB to start with and its share is {own >> 20} MiB: it is not watched; "
                "give the container more memory, or fewer --workers, or set --worker-memory-limit",
            )
            return
        watch = Watch(
            self.index + 1, now=loop.time(), over=usage.over, trim=trim, say=self._say_leaving, others=self._leaving
        )

        def look() -> None:
            if stopping.is_set():
                return
            if used := watch.look(loop.time(), limit()):
                log.warning("worker is recycled: memory", used_mib=used >> 20, limit_mib=limit() >> 20)
                self._recycled = True
                stopping.set()
            else:
                loop.call_later(LOOK_S, look)

        loop.call_later(LOOK_S, look)

    def _watch_waiting(self, loop: asyncio.AbstractEventLoop, patience: Patience) -> None:
        for _ in range(patience.look(ext_proc_streams(self._server))):
            self._peer_faults(SLOW_BODY)
        loop.call_later(patience.seconds / 2, self._watch_waiting, loop, patience)

    def _say_leaving(self, state: Leaving) -> None:
        self.lane.scalars[self.lane.schema.scalar[LEAVING]] = state

    def _leaving(self) -> dict[int, int]:
        """What the other serving workers say, by seat."""
        said = self.lanes.scalars(LEAVING)
        own = self.index + 1
        return {i: said[i] for i in range(1, len(said)) if i != own and self.lanes.serving(i)}

    async def _drain(self, server: Server) -> None:
        """With all others if the picker stops or its parent is gone, else alone."""
        instance = self.instance
        drain = Drain(
            server,
            timeout_s=instance.options.drain_timeout_s,
            hurried=lambda: instance.hurrying,
            refuse_waiting=partial(self._refuse_waiting, server),
        )
        if instance.stopping or self._orphaned:
            await drain.together(self._busy)
            return
        self._say_leaving(Leaving.LEAVES)
        instance.leaving(self.index + 1)
        await drain.alone(self._relieved)

    def _refuse_waiting(self, server: Server) -> int:
        """What waits in flow control gets its own answer, and what comes later too."""
        if self._flow is not None:
            self._flow.shut_down()
        return refuse_waiting(server)

    def _busy(self) -> bool:
        """Whether any worker of the picker has a stream; the others say so in their lanes."""
        own = self.index + 1
        streams = self.lanes.scalars("streams")
        return self._server.streams > 0 or any(
            streams[i] for i in range(1, len(streams)) if i != own and self.lanes.serving(i)
        )

    def _relieved(self) -> bool:
        """Whether another worker accepts what this one will not."""
        ages = self.lanes.ages(time.monotonic())
        fresh = any(said != Leaving.LEAVES and ages[i] < FRESH_BEAT_S for i, said in self._leaving().items())
        return fresh or self.instance.stopping

    def _tell(self, explained: Explanation) -> None:
        log.debug("decision", **msgspec.to_builtins(explained))

    def _shadow_failed(self, profile: Profile, problem: BaseException) -> None:
        self.lane.add(self.lane.schema.counter["shadow_failures_total"])
        self._log_rarely(f"shadow profile '{profile.name}' failed", problem)

    def _policy_failed(self, plugin: str, problem: BaseException) -> None:
        self.lane.add(self.lane.schema.counter["flow_policy_failures_total"])
        self._log_rarely(f"plugin '{plugin}' of flow control failed", problem)

    def _producer_failed(self, producer: DataProducer, failure: ProducerFailed) -> None:
        self.lane.add(self.lane.schema.counter["producer_failures_total"])
        self._warnings.warn(producer, "data producer failed open", error=told(failure))

    def _on_fault(self, problem: BaseException) -> None:
        self._log_rarely("request failed by a fault", problem)

    def _plugin_fault(self, problem: BaseException, plugin: str) -> None:
        self._log_rarely("fault", problem, **({"plugin": plugin} if plugin else {}))

    def _log_rarely(self, event: str, problem: BaseException, **more: str) -> None:
        second, count = self._faults_logged
        now = time.monotonic()
        if now - second > 1:
            second, count = now, 0
        self._faults_logged = (second, count + 1)
        if count < FAULTS_LOGGED_PER_S:
            log.error(event, error=told(problem), exception=stack(problem), **more)


def ext_proc_streams(server: Server) -> list[ExtProcStream]:
    """Those that are open."""
    # One that is measured on its way stands inside another.
    innermost = [getattr(handler, "handler", handler) for handler in server.handlers()]
    return [stream for stream in innermost if isinstance(stream, ExtProcStream)]


def refuse_waiting(server: Server) -> int:
    """Answers every stream that has no decision yet; how many there were."""
    return sum(stream.refuse_waiting() for stream in ext_proc_streams(server))
