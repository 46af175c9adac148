"""Creates a worker's `App` from the instance. Runs after the fork, in the worker's loop, once per configuration.

    documents ─▶ pool ────────────────────────┐
    services ─▶ plugins started ─▶ pipelines ─┼─▶ App
    telemetry, admission, guards, intake ─────┘

Each part of the app has its own method. `WorkerParts` also keeps the objects that the worker uses later.
"""

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial

import structlog

from epp.config.tenants_section import tenants_of
from epp.data import Column
from epp.decision.admission import OPEN, Admission
from epp.decision.decision import Decision
from epp.decision.pipeline import Pipeline
from epp.decision.receipt import SALT_BYTES, receipt_of
from epp.decision.response_needs import NONE
from epp.metrics import Group
from epp.metrics.request_series import ISOLATION, MODEL_REWRITES, PREDICTION, SHADOWS, TENANT
from epp.points import guard
from epp.points.instrument import Wrap, bare
from epp.request import Request
from epp.request.client_headers import DEBUG_GROUP, untrusted
from epp.request.intake import Intake
from epp.request.pool_choice import UNDECIDED
from epp.request.tenants import Tenants
from shm.areas import SUPERVISOR_AREA, Area
from shm.prefix_index import IndexReader
from shm.series import SeriesWriter
from shm.table import TableReader
from workers.process.instance import Instance
from workers.process.layout import RECORDED_POOL, RECORDING
from workers.shared.bus import BusWriter
from workers.shared.documents import EndpointsView, NamesView
from workers.shared.objectives import Priorities
from workers.shared.pool_crashes import RUNNING, marking, word_of
from workers.shared.query_of_death import DECIDING, PLACES, TRIED, Deciding
from workers.shared.recording import OFF
from workers.transport.interface import Clock
from workers.worker.extproc.app import App, Guards, StreamOptions, Times
from workers.worker.extproc.pipelines import Pipelines
from workers.worker.extproc.pool import Failures, SharedPool
from workers.worker.extproc.shedding import Shedding
from workers.worker.extproc.turns import BODIES_S, ONE_S, Turns
from workers.worker.faults import Faults
from workers.worker.flow.flow_control import FlowControl
from workers.worker.flow_setup import flow_control
from workers.worker.held import held_blocks
from workers.worker.isolation import Isolation
from workers.worker.kept import PoolKept, WorkerKept
from workers.worker.plugin_handles import SharedPrefixIndex
from workers.worker.rewrites import RewritesView
from workers.worker.services import WorkerServices
from workers.worker.telemetry.access_log import AccessLog
from workers.worker.telemetry.alternatives import Agreements
from workers.worker.telemetry.cache_prediction import Comparison, match_name
from workers.worker.telemetry.call_timing import CallTimers, Timing
from workers.worker.telemetry.recorder import Recorder
from workers.worker.telemetry.request_metrics import RequestMetrics
from workers.worker.telemetry.request_telemetry import Telemetry, UsageDoubts
from workers.worker.telemetry.salt_watch import SaltWatch
from workers.worker.telemetry.tenant_counts import TenantCounts
from workers.worker.telemetry.tracing import Tracer
from workers.worker.telemetry.tracing_export import Exporter, open_exporter

log = structlog.get_logger()


class WorkerParts:
    """The app of a worker for one configuration, with the methods that the worker calls at its heartbeats, at wake-ups and at its end."""

    kept: WorkerKept
    own: PoolKept
    app: App

    def __init__(
        self,
        instance: Instance,
        index: int,
        area: Area,
        *,
        bus: BusWriter,
        faults: Faults,
        clock: Clock,
        before: "WorkerParts | None" = None,
        beside: bool = False,
        kept: WorkerKept | None = None,
    ) -> None:
        """`index`: the worker's number, from 0. `area`: its area. `before`: the parts of the previous configuration.

        `kept`: the kept objects of the worker; if None, takes them from `before`, or creates them. `beside`: whether this is a candidate
        that is used beside `before`. If so, its requests use the flow control of `before` until `promote` is called.
        """
        self.instance = instance
        self._index, self._area = index, area
        self._faults, self._clock, self._bus = faults, clock, bus
        self.kept = before.kept if before is not None else kept or WorkerKept(instance, index, area, bus, clock=clock)
        self.own = before.own if before is not None else PoolKept(self.kept, instance)
        self._tenants = _tenants(instance)
        self.services = self._services(bus)
        try:
            self._make(before, beside=beside)
        except BaseException:
            self.services.stop()
            raise
        if before is None:
            self.kept.pools.append(self.own)

    def _make(self, before: "WorkerParts | None", *, beside: bool) -> None:
        """Starts the plugins, and creates the app."""
        instance = self.instance
        configured = instance.config.pipeline
        configured.start(self.services)
        if before is not None:
            take_over(configured, before.app.pipelines.whole)
        self._pool_used = self._pool(configured, before)
        self.objectives = self.own.objectives
        self.objectives.look()
        pipelines = self._pipelines(configured)
        self.timing = pipelines.timing
        self._recording = Recording(self.kept, instance)
        self.intake: Intake = before.intake if before is not None and beside else self._intake()
        self.flow: FlowControl | None = None
        self._guarding = self._guards(pipelines)
        self.app = self._app(pipelines, self.own.metrics, self._stream_options())
        if before is not None and beside:
            self.flow, self.app.admission, self.app.evictions = before.flow, before.app.admission, before.app.evictions
        else:
            self.promote()  # last, because from then on waiting requests are under the new plan

    def lobby(self) -> App:
        """Returns an app for streams whose pool is not known yet, so that no pool counts them."""
        return self._app(self.app.pipelines, self.kept.metrics, self._stream_options()._replace(pool=UNDECIDED, name=""))

    def _app(self, pipelines: Pipelines, metrics: RequestMetrics, options: StreamOptions) -> App:
        clock = self._clock
        return App(
            pipelines,
            self._pool_used,
            self._area,
            self.kept.answers,
            self._telemetry(pipelines.whole, metrics),
            self._guarding,
            Times(clock, time.monotonic, _turns(BODIES_S).soon),
            self.kept.rng,
            intake=self.intake,
            options=options,
        )

    def _stream_options(self) -> StreamOptions:
        options = self.instance.options
        return StreamOptions(
            scores=options.emit_endpoint_scores,
            request_phase_only=self.instance.config.response_phase == NONE,
            receipts=self._receipt if DEBUG_GROUP in options.trust_client_headers else None,
            tenants=self._tenants,
            pool=self.instance.pool or 0,
            name=options.pool_name if self.instance.pool is not None else "",
            budgets=self.own.budgets,
            turns=_turns(ONE_S) if self.instance.pool is not None else None,
        )

    def under(self, instance: Instance, area: Area, *, beside: bool = False) -> "WorkerParts":
        """Creates the parts for a later configuration. `area`: this worker's area in the layout of that configuration.

        Raises PluginFault if a plugin does not start, and then changes nothing.
        """
        bus, faults, clock = self._bus, self._faults, self._clock
        return WorkerParts(instance, self._index, area, bus=bus, faults=faults, clock=clock, before=self, beside=beside)

    def promote(self) -> None:
        """Makes these parts the parts of the configuration in force: flow control continues with their plan."""
        app = self.app
        self.flow = self._flow(self._pool_used)
        app.admission = _admission(self.instance, self._pool_used, self.flow)
        app.evictions = self.flow.evictions if self.flow is not None and self.flow.evicts else None

    def heartbeat(self, now: float) -> None:
        """Reads the documents that the supervisor has published since the last heartbeat, and stores the measured durations."""
        self.record()
        self.kept.heartbeat(now)
        self.own.budgets.heartbeat(now)
        if self.timing is not None:
            self.timing.timers.heartbeat(now)
        self.objectives.look()
        if self.own.rewrites is not None:
            self.own.rewrites.look()

    def record(self) -> None:
        """Begins or ends recording, as the supervisor's area says."""
        self._recording.look(self.app.telemetry)

    def series(self, group: Group) -> SeriesWriter:
        """Returns this worker's part of a table of labelled metrics."""
        return self.kept.series(self.instance, group)

    def leave(self) -> None:
        """Ends the use of the pool's shared memory. Called when no request waits any more. Open streams may still answer."""
        if self.flow is not None:
            self.flow.retire()
        self.flow = self.own.flow = None
        self.app.admission, self.app.evictions = OPEN, None

    async def retire(self) -> None:
        """Stores metrics and ends the plugins' work. Called when the last stream of this configuration has ended."""
        if self.timing is not None:
            self.timing.timers.store()
        await self.services.close()

    async def close(self) -> None:
        """Stores metrics and ends the plugins' work. Called at the worker's end."""
        self.kept.profiler.close()
        self.own.learning.flush()
        self.kept.records.flush()
        await self.retire()

    def _services(self, bus: BusWriter) -> WorkerServices:
        instance = self.instance
        return WorkerServices(
            self._area,
            SharedPrefixIndex(IndexReader(instance.layout.index, instance.memory.index), bus),
            prefix_seed=instance.credentials.prefix_seed,
            held_blocks=held_blocks(instance, self._index, self._area),
            prefills=self.kept.prefills,
            learning=self.own.learning,
            rng=self.kept.rng,
            measures=instance.layout.measures,
            labelled={group.name: self.series(group) for group in instance.layout.plugin_groups},
            now=time.monotonic,
        )

    def _pool(self, pipeline: Pipeline, before: "WorkerParts | None") -> SharedPool:
        instance = self.instance
        saturation = instance.config.saturation
        read = saturation.consumes if saturation is not None else ()
        pool = SharedPool(
            TableReader(instance.layout.table, instance.memory.table),
            EndpointsView(self.kept.documents, instance.pool),
            NamesView(self.kept.documents),
            instance.memory.areas,
            columns=(*pipeline.columns, *(key for key in read if isinstance(key, Column))),
            fresh=instance.sources.believed,
            now=time.monotonic,
            failures=Failures(self._faults.producer_failed, lambda problem: self.app.guards.on_fault(problem), self._faults.shadow_failed),
            honour_subsets=not instance.options.disable_endpoint_subset_filter,
            area=1 + self._index,
        )
        if before is not None and isinstance(before.app.pool, SharedPool):
            pool.take_over(before.app.pool)
        return pool

    def _pipelines(self, configured: Pipeline) -> Pipelines:
        """Adds guards and timers to the calls of the configured pipeline. Returns the pipeline in all its forms."""
        foreign = guard.declared(configured.wiring.plugins)
        guarded = guard.guard(guard.counted(self.services), self._faults.remark) if foreign else bare
        if foreign and self.instance.pool is not None:
            guarded = guard.within(guarded, marking(self._running, self.instance.pool))
        wrap = guarded
        pipeline, timing = configured, None
        if self.instance.options.plugin_metrics:
            calls = self._call_timers()
            wrap = guard.within(guarded, calls)
            pipeline = configured.wrapped(wrap)
            timing = Timing(calls, guarded, pipeline)
        elif foreign:
            pipeline = configured.wrapped(guarded)
        pool = self.instance.options.pool_name if self.instance.layout.pools else ""
        return Pipelines(pipeline, wrap, timing=timing, tracer=self._tracer(pipeline, wrap), pool=pool)

    @property
    def _running(self) -> memoryview:
        """Returns the word of this worker that says which pool's decision runs."""
        at = self._area.schema.scalar[RUNNING]
        return self._area.scalars[at : at + 1]

    def _call_timers(self) -> CallTimers:
        kept, layout, known = self.kept, self.instance.layout, self.kept.calls
        if self.instance.pool is None:
            return CallTimers(self._area, layout.timers, time.perf_counter, self._faults.blocked)
        if known is None or known[0] < len(layout.families):  # a later configuration has brought histograms
            calls = CallTimers(self._area, layout.showing_all().timers, time.perf_counter, self._faults.blocked)
            known = kept.calls = len(layout.families), calls
        return known[1]

    def _tracer(self, pipeline: Pipeline, wrap: Wrap) -> Tracer | None:
        """Creates the tracer. Returns None, and does not import OpenTelemetry, if traces are off."""
        options = self.instance.options.tracing
        if options is None:
            return None
        kept = self.kept
        if kept.traces is None:
            kept.traces = Exporter(open_exporter(options))
        return Tracer(pipeline, wrap, kept.traces.emit, ratio=options.ratio, parent_based=options.parent_based, rng=kept.rng)

    def _telemetry(self, pipeline: Pipeline, metrics: RequestMetrics) -> Telemetry:
        match = match_name(pipeline.wiring)
        return Telemetry(
            self._area,
            metrics,
            self.kept.recent,
            now=time.monotonic,
            comparison=Comparison(match, self.series(PREDICTION), self._bus.cached) if match else None,
            doubts=UsageDoubts(self.series(PREDICTION), log.warning, time.monotonic),
            agreements=Agreements(self.series(SHADOWS)) if pipeline.shadows else None,
            access_log=AccessLog(share, self.kept.rng) if (share := self.instance.options.access_log) else None,
            tenants=self._tenant_counts(),
            look=self.record if self.instance.options.record_dir != OFF else None,
        )

    def _tenant_counts(self) -> TenantCounts | None:
        entry = self.instance.config.tenants
        if entry is None:
            return None
        salts = _salt_watch(self._area, self.series(PREDICTION), self.instance) if entry.salt_place is not None else None
        return TenantCounts(self.series(TENANT), salts)

    def _receipt(self, pipeline: Pipeline, request: Request, decision: Decision) -> str:
        receipt = receipt_of(pipeline, request, decision, at=time.time(), worker=self._index, configuration=self.instance.number)
        return self.kept.seal.seal(receipt, os.urandom(SALT_BYTES))

    def _flow(self, pool: SharedPool) -> FlowControl | None:
        own, caps, failed = self.own, self.kept.caps, self._faults.policy_failed
        flow = flow_control(self.instance, self._index, self._area, pool, self.objectives, self.series, caps, failed, own.flow)
        own.flow = flow or own.flow
        return flow

    def _guards(self, pipelines: Pipelines) -> Guards:
        instance, area = self.instance, self._area
        hidden = untrusted(instance.options.trust_client_headers)
        isolation = Isolation(
            pipelines,
            self.series(ISOLATION),
            now=time.monotonic,
            later=asyncio.get_running_loop().call_later,
            on_fault=self._faults.plugin_failed,
            warn=log.warning,
        )
        at, tried = area.schema.scalar[DECIDING], area.schema.scalar[TRIED[0]]
        refused = partial(area.add, area.schema.counter["deadly_requests_total"])
        return Guards(
            body_bytes_max=instance.options.body_bytes_max,
            deciding=Deciding(
                area.scalars[at : at + 1],
                instance.words.queries_of_death,
                area.scalars[tried : tried + PLACES],
                seed=instance.credentials.prefix_seed,
                headers=sorted({name for plugin in pipelines.whole.wiring.plugins for name in plugin.reads_headers}),
                refused=refused,
                running=self._running if instance.pool is not None else None,
                own=word_of(instance.pool or 0),
            ),
            on_fault=isolation.fault,
            hidden_headers=hidden if self._tenants is None else self._tenants.hidden(hidden),
        )

    def _intake(self) -> Intake:
        """Creates the intake. It reads objectives and model rewrites only if this instance can have any."""
        if not self.instance.sources.has_objects:
            return Intake()
        own, kept = self.own, self.kept
        if own.rewrites is None:
            own.rewrites = RewritesView(kept.documents, self.series(MODEL_REWRITES), kept.caps, kept.rng.random, self.instance.pool)
        unknown: Callable[[], None] = partial(self._area.add, self._area.schema.counter["objectives_unknown_total"])
        return Intake(own.rewrites.present, Priorities(self.objectives, unknown).of)


class Recording:
    """Records the requests of one configuration while the supervisor writes a file."""

    def __init__(self, kept: WorkerKept, instance: Instance) -> None:
        self._kept = kept
        self._instance = instance
        self._recorder: Recorder | None = None  # made at the first recording
        self._seen = 0, 0  # the gauges of the supervisor's area at the last look

    def look(self, telemetry: Telemetry) -> None:
        """Makes `telemetry` record for the file that the supervisor writes at this moment, or not record."""
        areas, pool = self._instance.memory.areas, self._instance.pool
        number, only = areas.scalars(RECORDING)[SUPERVISOR_AREA], areas.scalars(RECORDED_POOL)[SUPERVISOR_AREA]
        if (number, only) == self._seen:
            return
        self._seen, records = (number, only), self._kept.records
        records.use(abs(number))
        if records.file:
            self._recorder = self._recorder or self._made()
            self._recorder.sample = self._kept.sample if number < 0 else None
        is_recorded = records.file and only in (0, (pool or 0) + 1)
        telemetry.recorder = self._recorder if is_recorded else None

    def _made(self) -> Recorder:
        kept, instance = self._kept, self._instance
        config_hash = instance.generations.hash_of(instance.number) or (instance.bundle.hash if instance.bundle is not None else "")
        pool = instance.options.pool_name if instance.pool is not None else ""
        number, pipeline = instance.number, instance.config.pipeline
        return Recorder(kept.records, kept.keyed, generation=number, config_hash=config_hash, pipeline=pipeline, pool=pool)


def _admission(instance: Instance, pool: SharedPool, flow: FlowControl | None) -> Admission:
    """Returns flow control if it is on. Otherwise returns shedding if the configuration has a saturation detector, or else an admission
    that admits all requests.
    """
    if flow is not None:
        return flow
    saturation = instance.config.saturation
    return Shedding(pool, saturation) if saturation is not None else OPEN


def _salt_watch(area: Area, series: SeriesWriter, instance: Instance) -> SaltWatch:
    counters = (area.schema.counter[f"salt_{name}_tokens_total"] for name in ("checked", "lost"))
    checked, lost = (partial(area.add, counter) for counter in counters)
    return SaltWatch(series, checked, lost, seed=instance.credentials.prefix_seed, now=time.monotonic())


def _tenants(instance: Instance) -> Tenants | None:
    entry = instance.config.tenants
    return tenants_of(entry, instance.config.keys, instance.credentials.prefix_seed) if entry is not None else None


def _turns(slice_s: float) -> Turns:
    return Turns(asyncio.get_running_loop().call_soon, time.monotonic, slice_s)


def take_over(configured: Pipeline, before: Pipeline) -> None:
    """Gives each plugin the knowledge of its predecessor: the plugin with the same name and type in the previous configuration."""
    for name, plugin in configured.plugins.items():
        predecessor = before.plugins.get(name)
        if predecessor is not None and predecessor.type_name == plugin.type_name:
            plugin.take_over(predecessor)
