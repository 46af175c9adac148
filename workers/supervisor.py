"""The metrics supervisor, a child: discovery, scrapes, the only writer of table, documents and index; metrics and health.

It runs its own loop and takes over whatever a killed predecessor left: the table's rows, the index, its lane's counters. While
it is gone, workers decide by the last table and by the load in flight, and probes wait in the parent's listening sockets.

    SIGTERM, SIGINT   ignored: the group gets them, and the supervisor has to answer probes until the last worker has drained
    end of life       the parent is gone: not ready any more
    end of family     the parent is gone, or has let go, and no worker is left: leave; if the parent died, remove the names

Ready (to the parent) after the first load of endpoints, or once Kubernetes is followed. An endpoints file that is bad at first
start ends the instance; one that is bad when a successor starts leaves the endpoints that the predecessor knew, as a Kubernetes
API that is away does.

With leader election only the replica that leads is ready; until when it does is in its lane, so that a successor goes on leading.
"""

import asyncio
import contextlib
import functools
import os
import random
import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import structlog
import uvloop

from epp.document import STANDBY_GATE
from epp.metrics import PREDICTION
from epp.plugins.discovery.file import FileDiscovery
from epp.plugins.producers.inflight import InflightLoad
from shm.documents import DocumentReader, DocumentWriter
from shm.lanes import Lane
from shm.prefix_index import IndexWriter
from shm.table import TableReader, TableWriter
from workers.admin import AdminServer, Answer, Guard, Request, all_may
from workers.bus import AGE_TICKS, BusReader
from workers.decisions import Asking
from workers.decisions_page import DecisionsPage
from workers.discovery import Discovery, Entry, File, follow, parse_flag
from workers.documents import ENDPOINTS, EndpointsView, NamesView, decode_endpoints
from workers.endpoint_log import EndpointLog, Snapshots
from workers.endpoints import EndpointTable
from workers.exit_codes import ExitCode
from workers.flow_watch import blind_watch
from workers.health import Health
from workers.honesty import LOOK_S, PredictionWatch, match_name
from workers.index_limits import IndexLimits
from workers.index_state import IndexState
from workers.instance import LEADS_UNTIL, LOADED, Instance, scraped_columns
from workers.kube.api import Api
from workers.kube.discovery import KubernetesDiscovery, wanted
from workers.kube.lease import Candidacy
from workers.kube.objects import KubeObjects
from workers.kube.pool import unspoken
from workers.kube.reflect import Outage
from workers.kube.review import Reviewer
from workers.leader import NEVER, Election
from workers.object_kinds import PoolName
from workers.objectives import static_bands
from workers.objects import ANY_POOL
from workers.objects_watch import ObjectsWatch
from workers.scrape import Scraper, fresh_for
from workers.transport.limits import Limits
from workers.transport.native import Server
from workers.yaml_files import DiscoveryError

if TYPE_CHECKING:
    from workers.metrics_page import MetricsPage

BEAT_S = 0.1
HEALTH_MESSAGE_BYTES_MAX = 16 * 1024
SWEEP_S = 0.05
SWEEP_BUCKETS = 8192
WORKER_BEAT_MAX_S = 1.0  # a worker that has not beaten for longer does not count for readiness
ORPHANED_GRACE_S = 5.0
GOODBYE_S = 2.0
SEAT = 0

log = structlog.get_logger()


def run(instance: Instance) -> int:
    """Supervises until parent and workers are gone."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Supervisor(instance).serve())


class Supervisor:
    """The supervisor's process."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.lane: Lane = instance.lanes.lane(SEAT)
        self.successor = instance.lanes.successions()[SEAT] > 0
        scalars, place = self.lane.scalars, self.lane.schema.scalar
        loaded, leads_until_ms = scalars[place[LOADED]], scalars[place[LEADS_UNTIL]]
        self.lane.take_over()
        # What the predecessor has loaded is in the documents still: a probe that waited for a successor is not told otherwise.
        scalars[place[LOADED]] = loaded
        self.knows = bool(loaded)
        self.lane.beat(time.monotonic())
        self.orphaned = False
        self.conditions: list[Callable[[], str]] = []  # of readiness: each says what is missing, "" if nothing is
        self.debug = instance.options.log_level == "debug"
        self.index = IndexWriter(instance.index_schema, instance.index)
        self.state = self._kept_state()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._fault: BaseException | None = None
        self._ended: asyncio.Event
        self.api: Api | None = None
        self.candidacy = self._candidacy(leads_until_ms)
        self.outage = Outage(self._report)
        self.bus: BusReader
        self.table: EndpointTable

    async def serve(self) -> int:
        """The supervisor's whole life."""
        loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        loop.add_reader(self.instance.family_reader, self._family_gone)
        loop.add_reader(self.instance.life_reader, self._parent_gone)
        loop.set_exception_handler(self._on_fault)
        bus = self.bus = BusReader(loop, self.instance.bus_readers, self.index, now=time.monotonic)
        table, scraper = self._data_layer(loop)
        self.table = table
        counts = ScrapeCounts(self.lane, scraper)
        self._every(BEAT_S, lambda: self._beat(counts))
        self._every(SWEEP_S, lambda: self.index.sweep_step(SWEEP_BUCKETS))
        if match_name(self.instance.config.pipeline.recipe):
            predictions = self._predictions()
            self._every(LOOK_S, lambda: predictions.look(time.monotonic()))
        if (blind := blind_watch(self.instance, self._report)) is not None:
            self._every(LOOK_S, lambda: blind.look(time.monotonic()))
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._close)
            cleanup.callback(scraper.close)
            if self.debug:
                cleanup.callback(self._log_snapshots(loop).close)
            cleanup.callback(bus.close)
            bus.start()
            if self.candidacy is not None:
                self._every(BEAT_S, self._resign_in_time)
            await self._open_pages(loop, cleanup)
            if self.instance.in_kubernetes:
                self.api = await Api.connect(os.environ)
            if self.api is not None and self.candidacy is not None:
                self._keep(self.candidacy.run(self.api))
            try:
                self._objects()
                loaded = await self._discover(table)
            except DiscoveryError as wrong:
                self.instance.failed(SEAT, str(wrong))
                return ExitCode.BOOT_FAILED
            if loaded:
                self._loaded(loaded=True)
            self.instance.ready(SEAT)
            if self.state is not None:
                self._keep(self.state.run(table.owners, lambda: self.instance.stopping))
            await self._ended.wait()
            scraper.close()  # of thousands of endpoints it would leave no time for what follows
            if self.state is not None:
                bus.drain()
                await self.state.close(table.owners)
            if self.candidacy is not None and self.leaving:
                self.candidacy.resign()
                await self.candidacy.given_back()
            if self.api is not None:
                await self._leave_kubernetes(self.api)
        if self._fault is not None:
            raise self._fault
        if self.orphaned and not self.instance.stopping:  # the parent died; getppid may lag behind the end of its pipes
            self.instance.unlink()
        return ExitCode.OK

    @property
    def leaving(self) -> bool:
        """Whether the instance ends; a supervisor that ends alone has a successor."""
        return self.orphaned or self.instance.stopping

    def ready(self) -> bool:
        """Nothing is missing."""
        return not self.missing()

    def missing(self) -> str:
        """Why requests should go elsewhere, the first reason; "" when endpoints are known, a worker serves and nobody stops us."""
        if self.leaving:
            return "stopping"
        if reason := next(filter(None, (condition() for condition in self.conditions)), ""):
            return reason
        if not self.lane.scalars[self.lane.schema.scalar[LOADED]]:
            return "no endpoints were loaded yet"
        lanes = self.instance.lanes
        ages = lanes.ages(time.monotonic())
        if any(lanes.serving(seat) and ages[seat] < WORKER_BEAT_MAX_S for seat in range(1, len(ages))):
            return ""
        return "no worker serves"

    def _kept_state(self) -> IndexState | None:
        """What keeps the index over restarts, if it is to be kept."""
        instance, folder = self.instance, self.instance.options.state_dir
        if not folder:
            return None
        use = instance.prefix_use
        return IndexState(
            folder,
            self.index,
            seed=instance.prefix_seed,
            block_tokens=use.block_tokens if use is not None else 0,
            ticks=lambda: int(time.monotonic() * AGE_TICKS),
        )

    def _data_layer(self, loop: asyncio.AbstractEventLoop) -> tuple[EndpointTable, Scraper]:
        instance = self.instance
        source, extractor = instance.scraped
        wanted = scraped_columns(instance.config.pipeline)
        table = EndpointTable(
            loop,
            table=TableWriter(instance.table_schema, instance.table),
            documents=DocumentWriter(instance.document_schema, instance.documents),
            owners=self.index,
            slot_inflight=instance.lanes.slot_inflight,
            extractor=extractor,
            wanted=wanted,
            fresh_for_s=fresh_for(instance.scrape_interval_s),
            report=self._report,
            log=EndpointLog(debug=self.debug),
            limits=IndexLimits(self.index, instance.prefix_use, wanted),
            remembered=self.state.load() if self.state is not None and not self.successor else None,
        )
        scraper = Scraper.of(
            source,
            loop,
            interval_s=instance.scrape_interval_s,
            tls=instance.scrape_tls,
            inflight=instance.lanes.slot_inflight,
            sink=table,
        )
        left = DocumentReader(instance.document_schema, instance.documents).read(ENDPOINTS)
        table.start(
            scraper,
            predecessor=decode_endpoints(left[1]) if left is not None and left[1] else (),
            copy=TableReader(instance.table_schema, instance.table).copy(),
            now=time.monotonic(),
        )
        scraper.start()
        return table, scraper

    def _log_snapshots(self, loop: asyncio.AbstractEventLoop) -> Snapshots:
        instance = self.instance
        documents = DocumentReader(instance.document_schema, instance.documents)
        table = TableReader(instance.table_schema, instance.table)
        snapshots = Snapshots(loop, table, EndpointsView(documents), NamesView(documents), now=time.monotonic)
        snapshots.start()
        return snapshots

    def _objects(self) -> None:
        """Publish objectives, their bands and model rewrites, and go on doing so."""
        instance, flow = self.instance, self.instance.flow_lanes
        if flow is None and not instance.has_objects:
            return
        watch = ObjectsWatch(
            instance.options.objects_dir,
            DocumentReader(instance.document_schema, instance.documents),
            DocumentWriter(instance.document_schema, instance.documents),
            static_bands(instance.config.flow),
            flow,
            pool=self._pool(),
            api=instance.asks_objects,
            report=self._report,
            now=time.monotonic,
        )
        watch.start(successor=self.successor)
        self._keep(watch.run())
        if self.api is not None and instance.asks_objects:
            asked = KubeObjects(
                self.api,
                instance.options.pool_namespace,
                self._pool(),
                told=watch.told,
                report=self._report,
                outage=self.outage,
                expects=watch.expects,
            )
            self._keep(self._when_it_may(asked.run))
            if not self.knows:  # whose predecessor knew something goes on with that
                self.conditions.append(asked.missing)

    def _pool(self) -> PoolName:
        """The pool that objects have to be for."""
        options = self.instance.options
        return PoolName(options.pool_name, options.pool_group) if options.pool_given else ANY_POOL

    async def _discover(self, table: EndpointTable) -> bool:
        """Find endpoints, and go on finding them: whether they are known by now. Raises DiscoveryError at the first start."""
        if self.api is not None:
            if self.successor:
                table.resume()
            self._keep(self._when_it_may(self._in_kubernetes(table, self.api).run))
            return False
        discovery = Discovery(lambda specs: table.apply(specs, complete=discovery.complete), self._report)
        given, plugin = self.instance.options.endpoints, self.instance.config.discovery
        entries: list[Entry] | None = None
        if given:
            entries = parse_flag(given)
        elif isinstance(plugin, FileDiscovery):
            file = File(plugin.path, self._report)
            entries = file.reload() if self.successor else file.load()
            if plugin.watch:
                self._keep(follow(file, discovery.use))
        if entries is None:
            table.resume()
        elif self.successor:  # scrapes go on at once, whether or not names can be resolved just now
            discovery.resume(entries, table.inherited())
            self._keep(discovery.use(entries))
        else:
            await discovery.use(entries)
        self._keep(discovery.resolve_forever())
        return True

    def _in_kubernetes(self, table: EndpointTable, api: Api) -> KubernetesDiscovery:
        instance, options = self.instance, self.instance.options
        found = KubernetesDiscovery(
            api,
            wanted(options),
            apply=table.apply,
            stands=self._stands,
            fits=functools.partial(
                unspoken, parsers=[(p.name, p.app_protocols) for p in instance.config.pipeline.recipe.parsers]
            ),
            report=self._report,
            outage=self.outage,
            successor=self.successor,
        )
        # While nothing is heard, what a predecessor found stays true.
        self.conditions.append(lambda: "" if self.lane.scalars[self.lane.schema.scalar[LOADED]] else found.standing())
        return found

    def _candidacy(self, leads_until_ms: int) -> Candidacy | None:
        """This picker's part in the election of a leader, if there is to be one; a predecessor may have led."""
        instance, options = self.instance, self.instance.options
        if not (options.ha_enable_leader_election and instance.in_kubernetes):
            return None
        scalars, place = self.lane.scalars, self.lane.schema.scalar[LEADS_UNTIL]

        def keep(leads_until: float) -> None:
            scalars[place] = max(0, int(max(leads_until, 0.0) * 1e3))

        leads_until = leads_until_ms / 1e3 if leads_until_ms else NEVER
        election = Election(instance.identity, leads_until=leads_until, random=random.random)
        keep(leads_until)
        found = Candidacy(election, options.pool_namespace, options.pool_name, keep=keep)
        self.conditions.append(found.missing)
        return found

    def _resign_in_time(self) -> None:
        """At once when the picker is told to stop: workers may drain for long, and another can lead meanwhile."""
        if self.leaving and self.candidacy is not None:
            self.candidacy.resign()

    async def _when_it_may(self, follow: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Follow Kubernetes; a standby without the gate for it only when it leads for the first time."""
        standby_knows = self.knows or self.instance.config.gates[STANDBY_GATE]
        if self.candidacy is not None and not standby_knows:
            await self.candidacy.elected()
        await follow()

    async def _leave_kubernetes(self, api: Api) -> None:
        """Whoever asks the API ends first, and may still say good-bye."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await api.close()

    def _stands(self, missing: str) -> None:
        """Kubernetes has been heard."""
        self._loaded(loaded=not missing)
        if missing:
            log.warning("not ready", why=missing)
        else:
            log.info("endpoints are known", endpoints=len(self.table))

    def _loaded(self, *, loaded: bool) -> None:
        self.lane.scalars[self.lane.schema.scalar[LOADED]] = int(loaded)

    async def _open_pages(self, loop: asyncio.AbstractEventLoop, cleanup: contextlib.ExitStack) -> None:
        instance = self.instance
        health = Server(loop, Limits(message=HEALTH_MESSAGE_BYTES_MAX))
        health.serve(
            instance.health_listener, Health(self.ready, elects=self.candidacy is not None, missing=self.missing).open
        )
        cleanup.callback(health.abort)
        admin = AdminServer(
            {
                "/metrics": lambda request: self.page.page(request),
                "/healthz": lambda _: Answer(b"ok\n"),
                "/readyz": self._readyz,
                "/debug/decisions": self._decisions(),
            },
            self._report,
            self._guard(cleanup),
        )
        certificates = instance.metrics_certificates
        if certificates is not None:
            certificates.follow(loop, speaks=True)
            cleanup.callback(certificates.close)
        admin.serve(instance.metrics_listener, certificates.context if certificates else None)
        cleanup.callback(admin.close)

    def _guard(self, cleanup: contextlib.ExitStack) -> Guard:
        """Who may read the metrics port's pages: in Kubernetes whoever has a token for it, unless told otherwise."""
        if not self.instance.in_kubernetes or self.instance.options.metrics_endpoint_auth is False:
            return all_may
        reviewer = Reviewer(lambda: self.api, self._report)
        cleanup.callback(reviewer.close)
        return reviewer.guard

    @functools.cached_property
    def page(self) -> "MetricsPage":
        """Made by the first scrape: what it imports is memory that a picker nobody scrapes can do without."""
        from workers.flow_page import figures_of
        from workers.metrics_page import IndexFigures, MetricsPage, Pool

        instance = self.instance
        pool = Pool(
            TableReader(instance.table_schema, instance.table),
            EndpointsView(DocumentReader(instance.document_schema, instance.documents)),
            name=instance.options.pool_name,
            fresh_for_s=fresh_for(instance.scrape_interval_s),
        )
        source, extractor = instance.scraped
        plugins = instance.config.pipeline.plugins
        return MetricsPage(
            instance.lanes,
            instance.families,
            pool,
            IndexFigures(
                self.index.size,
                lambda: self.index.evictions,
                lambda: self.index.dropped,
                lambda: self.bus.corrupt,
                self.index.freed,
            ),
            source_type=source.type_name,
            extractor_type=extractor.type_name,
            now=time.monotonic,
            scrape_seconds=self.table.scrape_seconds,
            series=[(group, instance.series_reader(group)) for group in instance.groups],
            producer_name=next((name for name, p in plugins.items() if isinstance(p, InflightLoad)), ""),
            stream_metrics=instance.options.enable_grpc_stream_metrics,
            legacy_names=instance.options.metrics_legacy_names,
            flow=figures_of(instance),
            leads=self.candidacy.by_lease() if self.candidacy is not None else {},
        )

    def _predictions(self) -> PredictionWatch:
        instance = self.instance
        return PredictionWatch(
            instance.series_reader(PREDICTION),
            TableReader(instance.table_schema, instance.table),
            EndpointsView(DocumentReader(instance.document_schema, instance.documents)),
            lambda: self.index.evictions + self.index.over_capacity,
            self._report,
        )

    def _decisions(self) -> DecisionsPage:
        instance = self.instance
        asking = Asking(
            self.lane,
            instance.lanes,
            DocumentReader(instance.decision_schema, instance.decisions),
            wake=lambda index: os.eventfd_write(instance.wakeups[index], 1),
            now=time.monotonic,
        )
        return DecisionsPage(asking, time.monotonic, remote=instance.options.debug_remote)

    def _readyz(self, _request: Request) -> Answer:
        if not (why := self.missing()):
            return Answer(b"ok\n")
        return Answer(f"not ready: {why}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)

    def _beat(self, counts: "ScrapeCounts") -> None:
        self.lane.beat(time.monotonic())
        counts.copy()

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        """Now, and again and again until the end."""
        act()
        self._timers[act] = asyncio.get_running_loop().call_later(seconds, self._every, seconds, act)

    def _close(self) -> None:
        loop = asyncio.get_running_loop()
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        for descriptor in (self.instance.family_reader, self.instance.life_reader):
            loop.remove_reader(descriptor)

    def _keep(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run beside; a fault in it ends the supervisor, and the successor starts anew."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = fault
            self._ended.set()

    def _parent_gone(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.instance.life_reader)
        self.orphaned = True
        loop.call_later(self.instance.options.drain_timeout_s + ORPHANED_GRACE_S, self._ended.set)

    def _family_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self.instance.family_reader)
        self._ended.set()

    def _report(self, text: str) -> None:
        log.warning(text)

    def _on_fault(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: said, and the loop goes on."""
        log.error("fault in the event loop", what=context["message"], exc_info=context.get("exception"))


class ScrapeCounts:
    """Copies the scraper's counts into the lane, behind what predecessors counted there."""

    def __init__(self, lane: Lane, scraper: Scraper) -> None:
        self._lane = lane
        self._counters = scraper.counters
        names = (
            "scrapes_total",
            "scrapes_skipped_total",
            "datalayer_poll_errors_total",
            "datalayer_extract_errors_total",
        )
        self._places = [lane.schema.counter[name] for name in names]
        self._before = [lane.counters[place] for place in self._places]

    def copy(self) -> None:
        """What was counted until now."""
        found = self._counters
        failed = sum(found.poll_errors.values())
        counts = (found.taken, found.late, failed, found.extract_errors)
        for place, before, count in zip(self._places, self._before, counts, strict=True):
            self._lane.counters[place] = max(self._lane.counters[place], before + count)
