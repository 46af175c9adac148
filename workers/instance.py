"""An instance: everything that outlives a child, made by the parent before the first fork.

    shared memory   table and documents | lanes | prefix index        named segments, recorded before they are created
    sockets         ext_proc (all workers accept from it, or each binds its port beside it: `hold`) | health, metrics (the supervisor's)
    pipes           bus: one per worker | life: EOF = the parent is gone | family: EOF = parent and workers are gone
                    reports: children -> parent | one eventfd per worker
    words           stopping, hurry, deadly requests (the parent's; in memory that children inherit)

Children inherit it all by the fork; nothing is passed by name. Who may hold which end is said by `not_for_worker` and
`not_for_supervisor`, and `fork` closes the rest.

What this does not do: run anything.
"""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import resource
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog

from epp import guard, response_phase
from epp.data import COUNTED, SHOWN, Column
from epp.metrics import (
    FLOW_CYCLE,
    FLOW_GROUPS,
    GROUPS,
    PLUGIN_DURATION,
    STREAM_COUNTERS,
    STREAM_DURATION,
    STREAMS_INFLIGHT,
    SUPERVISOR_COUNTERS,
    WORKER_COUNTERS,
    WORKER_GAUGES,
    WORKER_HISTOGRAMS,
    Group,
    LabelCaps,
    Metric,
    counter_groups,
)
from epp.pipeline import Pipeline
from epp.plugins.extractors.core_metrics import CoreMetricsExtractor
from epp.plugins.extractors.metrics_source import MetricsDataSource
from shm.documents import DocumentSchema
from shm.flow_lanes import BANDS_MAX, FlowLanes, FlowSchema
from shm.lanes import Lanes, LaneSchema
from shm.layout import WORD, Plan, Schema
from shm.prefix_index import IndexSchema
from shm.segment import InstanceLock, Region, Segment, check_room, footprint, sweep
from shm.series import SeriesReader, SeriesSchema, SeriesWriter
from shm.table import TableSchema
from workers import decisions, query_of_death
from workers.index_limits import PrefixUse, prefix_use
from workers.index_state import kept_secret
from workers.scrape import source_tls

if TYPE_CHECKING:
    import ssl

    from workers.certificates import Certificates
    from workers.cli.options import Options

DOCUMENT_BYTES_PER_ENDPOINT = 1024
OBJECTIVES_BYTES = 512 << 10
REWRITES_BYTES = 512 << 10
BANDS_BYTES = 4 << 10  # without objectives
BACKLOG = 1024
DEADLY_AT = 64  # bytes into the page of the parent's words
DESCRIPTORS_PER_WORKER = 3  # both ends of its bus pipe, and its eventfd
DESCRIPTORS_OTHER = 32  # sockets, other pipes, an event loop's, and some for what connects first
PIPE_BYTES = 1 << 20
PIPE_BYTES_MIN = 1 << 16
REPORT_BYTES_MAX = 4096
LOADED = "loaded"  # the supervisor's gauge: 1 once the first endpoints are known
LEADS_UNTIL = "leads_until_ms"  # the supervisor's gauge: when it stops to lead, on the clock of `workers.kube.lease`; 0: it does not
LEAVING = "leaving"  # a worker's gauge, see `workers.memory.Watch`: it has outgrown its share, or accepts no more
FEWER = "take less of it by a lower --workers-max, --max-endpoints or --index-entries"
OWN_GAUGES = (LOADED, LEADS_UNTIL, LEAVING, query_of_death.DECIDING, *decisions.SCALARS)

log = structlog.get_logger()


class StartError(Exception):
    """Something that this machine refuses; the text names it, the rule and the fix."""


class Unusable(StartError):
    """A file that a flag or the configuration names, or a flag itself: starting again changes nothing."""


class Family(NamedTuple):
    """One histogram in the lanes; a plugin's carries its labels, that of its calls also where it is called."""

    metric: Metric
    plugin_name: str = ""
    plugin_type: str = ""
    extension_point: str = ""

    @property
    def key(self) -> str:
        return "@".join(part for part in (self.metric.name, self.extension_point, self.plugin_name) if part)

    @property
    def labels(self) -> dict[str, str]:
        if self.extension_point:
            return {
                "extension_point": self.extension_point,
                "plugin_type": self.plugin_type,
                "plugin_name": self.plugin_name,
            }
        return {"plugin_name": self.plugin_name, "plugin_type": self.plugin_type} if self.plugin_name else {}


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What a child tells the parent: why it cannot start (`text`), that it has begun to leave, or else that it is ready."""

    seat: int
    pid: int
    text: str = ""
    leaving: bool = False


class Planned(NamedTuple):
    """The segments of an instance, by name, and what of their layout is needed to use them."""

    plans: Mapping[str, Plan]
    lanes: LaneSchema
    series: tuple[SeriesSchema, ...]
    flow: FlowSchema | None

    def needs(self) -> dict[str, int]:
        """Bytes of shared memory, by segment."""
        return {part: footprint(plan) for part, plan in self.plans.items()}


class Pipe(NamedTuple):
    """Both ends of a packet pipe."""

    reader: int
    writer: int


class Instance:
    """What all processes of one picker share. Attributes are set once, before the first fork."""

    __slots__ = (
        "_page", "bus", "certificates", "config", "counter_groups", "deadly", "decision_schema", "decisions", "document_schema",
        "documents", "families", "family", "flow_lanes", "health_listener", "identity", "index", "index_schema", "lanes", "life",
        "listener", "lock", "measures", "metrics_certificates", "metrics_listener", "options", "parent_pid", "prefix_seed",
        "prefix_use", "reports", "scrape_interval_s", "scrape_tls", "segments", "series", "table", "table_schema", "timers", "wakeups",
    )  # fmt: skip

    def __init__(self, options: "Options", config: Any) -> None:
        self.options = options
        self.config = config
        self.segments: list[Segment] = []
        self.parent_pid = os.getpid()
        self.identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.urandom(8).hex()}"  # among replicas
        sources = (scraped.source for scraped in config.sources)
        intervals = [s.interval_s for s in sources if isinstance(s, MetricsDataSource) and s.interval_s]
        self.scrape_interval_s: float = min(intervals, default=options.scrape_interval_s)

    @classmethod
    def create(cls, options: "Options", config: Any) -> "Instance":
        """Everything, or an error and nothing left behind. Raises StartError, SegmentError, OSError."""
        instance = cls(options, config)
        instance._know_prefix_use()
        enough_descriptors(instance.workers_max)
        instance._become()
        try:
            planned = instance._plan(config.pipeline)
            check_room(planned.needs(), FEWER)
            instance._bind()
            instance._allocate(planned)
            instance._connect()
            instance._know_secrets()
        except BaseException:
            instance.unlink()
            raise
        return instance

    @property
    def scraped(self) -> tuple[MetricsDataSource, CoreMetricsExtractor]:
        """The source that fills the table, and who reads its pages."""
        for scraped in self.config.sources:
            for extractor in scraped.extractors:
                if isinstance(scraped.source, MetricsDataSource) and isinstance(extractor, CoreMetricsExtractor):
                    return scraped.source, extractor
        raise AssertionError("a checked configuration has a metrics source with an extractor")

    @property
    def has_objects(self) -> bool:
        """Whether objectives and model rewrites can come from anywhere."""
        return bool(self.options.objects_dir) or self.asks_objects

    @property
    def asks_objects(self) -> bool:
        """Whether a Kubernetes API is asked for them: they are those of an InferencePool."""
        return self.in_kubernetes and not self.options.endpoint_selector

    @property
    def in_kubernetes(self) -> bool:
        """Whether endpoints come from Kubernetes: nothing else was said, but whose they are."""
        options = self.options
        given = options.pool_given or bool(options.endpoint_selector)
        return given and not options.endpoints and self.config.discovery is None

    @property
    def workers_max(self) -> int:
        """As many workers there can be; at first `options.workers` of them run."""
        return self.options.workers_max or 2 * self.options.workers

    @property
    def seats(self) -> int:
        """The supervisor's and the workers', those included that are empty so far."""
        return 1 + self.workers_max

    @property
    def ssl_context(self) -> "ssl.SSLContext | None":
        """For the ext_proc port; None without TLS."""
        return self.certificates.context if self.certificates else None

    @property
    def life_reader(self) -> int:
        """Readable (EOF) when the parent is gone."""
        return self.life.reader

    @property
    def family_reader(self) -> int:
        """Readable (EOF) when the parent and all workers are gone."""
        return self.family.reader

    @property
    def bus_writers(self) -> Sequence[int]:
        """Per worker, where it says what it learned."""
        return [pipe.writer for pipe in self.bus]

    @property
    def bus_readers(self) -> Sequence[int]:
        """Where the supervisor hears it."""
        return [pipe.reader for pipe in self.bus]

    @property
    def groups(self) -> tuple[Group, ...]:
        """All tables of labelled metrics: those of requests, and a counter's that plugins declare each."""
        return (*GROUPS, *(FLOW_GROUPS if self.config.flow is not None else ()), *self.counter_groups)

    def series_writer(self, group: Group, index: int, caps: LabelCaps | None = None) -> SeriesWriter:
        """In worker `index`: its series of a group. Groups of one worker share `caps`; `take_over` comes next."""
        schema, region = self.series[group.name]
        return SeriesWriter(schema, schema.lane(region, index), fold=(caps or LabelCaps()).fold(group))

    def series_reader(self, group: Group) -> SeriesReader:
        """All workers' series of a group."""
        schema, region = self.series[group.name]
        return SeriesReader(schema, region, serving=lambda index: self.lanes.serving(index + 1))

    def not_for_worker(self, index: int) -> list[int]:
        """Descriptors that worker `index` must not hold."""
        others = [pipe.writer for i, pipe in enumerate(self.bus) if i != index]
        sockets = [self.health_listener.fileno(), self.metrics_listener.fileno()]
        return [self.life.writer, self.family.reader, self.reports.reader, *self.bus_readers, *others, *sockets]

    def not_for_supervisor(self) -> list[int]:
        """Descriptors that the supervisor must not hold."""
        return [
            self.life.writer,
            self.family.writer,
            self.reports.reader,
            *self.bus_writers,
            self.listener.fileno(),
        ]

    def ports(self) -> dict[str, int]:
        """Where the picker listens."""
        sockets = {"grpc": self.listener, "health": self.health_listener, "metrics": self.metrics_listener}
        return {name: held.getsockname()[1] for name, held in sockets.items()}

    def ready(self, seat: int) -> None:
        """In a child: tell the parent that this seat serves."""
        self._report(Report(seat, os.getpid()))

    def failed(self, seat: int, text: str) -> None:
        """In a child: tell the parent why this seat cannot start, or died."""
        self._report(Report(seat, os.getpid(), text[: REPORT_BYTES_MAX // 8] or "no reason given"))

    def leaving(self, seat: int) -> None:
        """In a worker: tell the parent that this seat's child has begun to leave by itself."""
        self._report(Report(seat, os.getpid(), leaving=True))

    def received(self) -> list[Report]:
        """In the parent: what children have said since the last call."""
        reports = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.reports.reader, REPORT_BYTES_MAX):
                with contextlib.suppress(msgspec.DecodeError):  # a child that died inside a write said nothing
                    reports.append(msgspec.msgpack.decode(data, type=Report))
        return reports

    @property
    def stopping(self) -> bool:
        """Whether the parent has been told to stop."""
        return self._page[0] != 0

    def stop(self) -> None:
        """In the parent: no longer ready, for everybody to see."""
        self._page[0] = 1

    @property
    def hurrying(self) -> bool:
        """Whether the parent has been told to stop twice."""
        return self._page[1] != 0

    def hurry(self) -> None:
        """In the parent: no time to drain, for all workers to see."""
        self._page[1] = 1

    def release_children(self) -> None:
        """In the parent, when all workers are gone: the supervisor sees the end of life and family, and leaves."""
        for descriptor in (self.life.writer, self.family.writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def unlink(self) -> None:
        """Remove all names: segments, then the file that records them. Whoever still has them mapped keeps them."""
        for segment in self.segments:
            with contextlib.suppress(FileNotFoundError):
                segment.unlink()
        with contextlib.suppress(OSError):
            self.lock.release()

    def _report(self, report: Report) -> None:
        with contextlib.suppress(OSError):
            os.write(self.reports.writer, msgspec.msgpack.encode(report))

    def _become(self) -> None:
        options = self.options
        for name in sweep(options.run_dir):
            log.warning("removed what a killed instance had left", name=name)
        self.lock = InstanceLock.acquire(options.run_dir, options.instance)
        self.lock.record(pid=os.getpid())

    def _bind(self) -> None:
        options = self.options
        with contextlib.ExitStack() as held:
            bind = listen if options.transport == "native" else hold
            self.listener = held.enter_context(bind(options.grpc_port, "--grpc-port"))
            self.health_listener = held.enter_context(listen(options.grpc_health_port, "--grpc-health-port"))
            self.metrics_listener = held.enter_context(listen(options.metrics_port, "--metrics-port"))
            held.pop_all()
        self.lock.record(ports=self.ports())

    def _plan(self, pipeline: Pipeline) -> Planned:
        """What lies where, before anything is made."""
        options = self.options
        columns = tuple(c.name for c in scraped_columns(pipeline) if c.type is not frozenset)
        self.table_schema = TableSchema(columns, options.max_endpoints)
        endpoints = DOCUMENT_BYTES_PER_ENDPOINT * options.max_endpoints
        self.document_schema = DocumentSchema(
            (
                endpoints,
                endpoints,
                OBJECTIVES_BYTES if self.has_objects else BANDS_BYTES,
                REWRITES_BYTES if self.has_objects else 1,
            )
        )
        self.index_schema = IndexSchema(options.index_entries)
        self.families = families(pipeline, timed=options.plugin_metrics)
        if self.config.flow is not None:
            self.families += (Family(FLOW_CYCLE),)
        members = list(enumerate(self.families))
        self.measures = {
            (f.plugin_name, f.metric.name): i for i, f in members if f.plugin_name and not f.extension_point
        }
        self.timers = {(f.extension_point, f.plugin_name): i for i, f in members if f.extension_point}
        lane_schema = lane_schema_of(self.families, slots=options.max_endpoints, lanes=self.seats)
        plugins = pipeline.recipe.plugins
        self.counter_groups = counter_groups((*(m for p in plugins for m in p.metrics), *guard.declared(plugins)))
        series = tuple(series_schema_of(group, lanes=self.seats - 1) for group in self.groups)
        self.decision_schema = decisions.schema(self.seats - 1)
        parts: dict[str, Schema] = {"lanes": lane_schema, **{schema.name: schema for schema in series}}
        parts["decisions"] = self.decision_schema
        flow_schema = FlowSchema(BANDS_MAX, self.workers_max) if self.config.flow is not None else None
        if flow_schema is not None:
            parts["flow"] = flow_schema
        plans = {
            "state": Plan({"table": self.table_schema, "documents": self.document_schema}),
            "lanes": Plan(parts),
            "index": Plan({"index": self.index_schema}),
        }
        return Planned(plans, lane_schema, series, flow_schema)

    def _allocate(self, planned: Planned) -> None:
        plans, lane_schema, series, flow_schema = planned
        state, lanes, index = (self._segment(part, plan) for part, plan in plans.items())
        self.table, self.documents = (Segment.planned(*state, part) for part in ("table", "documents"))
        self.lanes = Lanes(lane_schema, Segment.planned(*lanes, "lanes"))
        self.series: dict[str, tuple[SeriesSchema, Region]] = {
            schema.name: (schema, Segment.planned(*lanes, schema.name)) for schema in series
        }
        self.decisions = Segment.planned(*lanes, "decisions")
        self.flow_lanes: FlowLanes | None = None  # None: flow control is off
        if flow_schema is not None:
            self.flow_lanes = FlowLanes(flow_schema, Segment.planned(*lanes, "flow"), self.lanes)
        self.index = Segment.planned(*index, "index")
        blocks = {"block_tokens": self.prefix_use.block_tokens} if self.prefix_use is not None else {}
        log.info("prefix index", entries=self.index_schema.entries, **blocks)
        log.info("response phase", **response_phase.parts(self.config.pipeline.recipe, self.config.response_phase))

    def _connect(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        words = memoryview(self._page)[DEADLY_AT:][: WORD * query_of_death.WORDS]
        self.deadly = words.cast("q")  # the parent's list of requests that end workers
        self.life, self.family, self.reports = packet_pipe(), packet_pipe(), packet_pipe()
        self.bus = [packet_pipe(PIPE_BYTES) for _ in range(self.workers_max)]
        self.wakeups = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(self.workers_max)]

    def _know_prefix_use(self) -> None:
        self.prefix_use: PrefixUse | None = prefix_use(self.config.pipeline.plugins.values())

    def _know_secrets(self) -> None:
        self.prefix_seed = prefix_seed(self.options)
        try:
            self.scrape_tls = source_tls(self.scraped[0])
        except ValueError as wrong:
            raise Unusable(f"{self.config.source}: {wrong}") from wrong
        self.certificates, self.metrics_certificates = certificates(self.options)

    def _segment(self, part: str, plan: Plan) -> tuple[Segment, Plan]:
        name = f"/{self.options.instance}-{os.urandom(6).hex()}-{part}"
        self.lock.record(segments=[name])
        segment = Segment.create_planned(name, plan)
        self.segments.append(segment)
        log.info("shared memory", segment=name, mib=round(plan.bytes / (1 << 20), 2))
        return segment, plan


def shared_bytes(options: "Options", config: Any) -> dict[str, int]:
    """What `epp serve` would take of /dev/shm with these, by segment."""
    return Instance(options, config)._plan(config.pipeline).needs()


def scraped_columns(pipeline: Pipeline) -> list[Column[Any]]:
    """What is taken from model servers' pages, by name: what plugins read, and what the metrics page shows anyway."""
    columns: list[Column[Any]] = [*SHOWN, *pipeline.columns]
    wanted = {c.name: c for c in columns if c.name not in COUNTED}
    return [wanted[name] for name in sorted(wanted)]


def families(pipeline: Pipeline, *, timed: bool = True) -> tuple[Family, ...]:
    """All histograms of a lane: the workers' own, one per place where a plugin is called, one per metric that a plugin declares."""
    own = [Family(metric) for metric in (*WORKER_HISTOGRAMS, STREAM_DURATION)]
    points = pipeline.timed_points() if timed else ()
    own += [Family(PLUGIN_DURATION, plugin.name, plugin.type_name, point) for point, plugin in points]
    for plugin in pipeline.plugins.values():
        for metric in plugin.metrics:
            if metric.kind == "gauge" or (metric.kind == "histogram" and metric.labels):
                raise StartError(
                    f"plugin '{plugin.name}' declares {metric.name} as {metric.kind} with labels {metric.labels}: "
                    "plugins can have counters, and histograms without labels"
                )
            if metric.kind == "histogram":
                own.append(Family(metric, plugin.name, plugin.type_name))
    return tuple(own)


def lane_schema_of(members: Sequence[Family], *, slots: int, lanes: int) -> LaneSchema:
    """What each process says about itself."""
    return LaneSchema(
        slots,
        (*(metric.name for metric in (*WORKER_GAUGES, STREAMS_INFLIGHT)), *OWN_GAUGES),
        (*(metric.name for metric in (*WORKER_COUNTERS, *SUPERVISOR_COUNTERS)), *STREAM_COUNTERS),
        tuple((family.key, family.metric.buckets) for family in members),
        lanes=lanes,
    )


def series_schema_of(group: Group, *, lanes: int) -> SeriesSchema:
    """What each worker says about requests, by their labels."""
    return SeriesSchema(
        group.name,
        group.labels,
        tuple(metric.name for metric in group.gauges),
        tuple(metric.name for metric in group.counters),
        tuple((histogram.key, histogram.metric.buckets) for histogram in group.histograms),
        blocks=group.blocks,
        lanes=lanes,
    )


def enough_descriptors(workers_max: int) -> None:
    """Raises StartError if this process may not open what it needs before the first connection."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS_PER_WORKER * workers_max + DESCRIPTORS_OTHER
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise StartError(
            f"this process may have {allowed} open files, and a picker of up to {workers_max} workers needs {needed}, "
            "and one more for each connection: raise the limit (`ulimit -n`, or LimitNOFILE=), or set a lower --workers-max"
        )


def packet_pipe(size: int = 0) -> Pipe:
    """A pipe whose writes of up to 4,096 bytes are read one by one; as large as the machine allows, up to `size`."""
    pipe = Pipe(*os.pipe2(os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC))
    while size > PIPE_BYTES_MIN:
        try:
            fcntl.fcntl(pipe.writer, fcntl.F_SETPIPE_SZ, size)
            break
        except OSError:  # over what /proc/sys/fs/pipe-max-size or the user's quota allows
            size //= 2
    return pipe


def listen(port: int, flag: str) -> socket.socket:
    """A listening socket for all addresses of this machine. Never shared: a second picker on the port is refused."""
    return _anywhere(port, flag, listening=True)


def hold(port: int, flag: str) -> socket.socket:
    """A socket that keeps a port for children who listen there for themselves, with SO_REUSEPORT.

    It is bound as one that shares with nobody, so a port in use is refused, and made sharable only then: from there on
    sockets of this user that say so too may have the port, and nobody else, whether a child listens or not."""
    held = _anywhere(port, flag, listening=False)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return held


def _anywhere(port: int, flag: str, *, listening: bool) -> socket.socket:
    try:
        return _bound(socket.AF_INET6, "::", port, listening)
    except OSError as refused:
        if refused.errno in (errno.EADDRINUSE, errno.EACCES):
            raise StartError(_not_bound(port, flag, refused)) from refused
    try:
        return _bound(socket.AF_INET, "0.0.0.0", port, listening)  # a machine without IPv6
    except OSError as refused:
        raise StartError(_not_bound(port, flag, refused)) from refused


def _bound(family: int, address: str, port: int, listening: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections in TIME_WAIT do not hold the port
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((address, port))
        if listening:
            made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def _not_bound(port: int, flag: str, refused: OSError) -> str:
    if refused.errno == errno.EADDRINUSE:
        return (
            f"port {port} ({flag}) is in use: another picker, one that is still draining, or another program listens there "
            f"(`ss -ltnp 'sport = :{port}'` names it); end it, or give {flag} another port"
        )
    if refused.errno == errno.EACCES:
        return f"port {port} ({flag}) may not be bound by this user: give {flag} a port above 1023"
    return f"port {port} ({flag}) cannot be bound: {refused}"


def prefix_seed(options: "Options") -> int:
    """64 bits from the deployment's secret, else from the one that --state-dir keeps; without both, new ones for every start."""
    if not options.prefix_secret_file:
        return _seed(kept_secret(options.state_dir)) if options.state_dir else int.from_bytes(os.urandom(8), "little")
    try:
        with open(options.prefix_secret_file, "rb") as file:
            secret = file.read().strip()
    except OSError as refused:
        raise Unusable(
            f"--prefix-secret-file {options.prefix_secret_file} cannot be read: {refused.strerror}"
        ) from refused
    if len(secret) < 16:
        raise Unusable(
            f"--prefix-secret-file {options.prefix_secret_file} has {len(secret)} bytes: a secret has at least 16"
        )
    return _seed(secret)


def _seed(secret: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(secret, digest_size=8).digest(), "little")


def certificates(options: "Options") -> tuple["Certificates | None", "Certificates | None"]:
    """Of the ext_proc and of the metrics port; None without TLS."""
    if not (options.secure_serving or options.metrics_cert_dir):
        return None, None
    from workers.certificates import of_ext_proc, of_metrics  # not needed, and not small, without TLS
    from workers.transport.tls import TlsError

    try:
        return of_ext_proc(options), of_metrics(options)
    except TlsError as refused:
        raise Unusable(str(refused)) from refused
