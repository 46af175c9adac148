"""An instance: everything that outlives a child, made by the parent before the first fork.

    shared memory   table and documents | lanes | prefix index        named segments, recorded before they are created
    sockets         ext_proc (all workers accept from it) | health, metrics (the supervisor's)
    pipes           bus: one per worker | life: EOF = the parent is gone | family: EOF = parent and workers are gone
                    reports: children -> parent | one eventfd per worker
    words           stopping (the parent's; in memory that children inherit)

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
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog

from epp.data import COUNTED
from epp.metrics import SUPERVISOR_COUNTERS, WORKER_COUNTERS, WORKER_GAUGES, WORKER_HISTOGRAMS, Metric
from epp.pipeline import Pipeline
from epp.plugins.extractors.metrics_source import MetricsDataSource
from shm.documents import DocumentSchema
from shm.lanes import Lanes, LaneSchema
from shm.layout import Plan
from shm.prefix_index import IndexSchema
from shm.segment import InstanceLock, Segment, sweep
from shm.table import TableSchema

if TYPE_CHECKING:
    from workers.cli.options import Options

DOCUMENT_BYTES_PER_ENDPOINT = 1024
BACKLOG = 1024
PIPE_BYTES = 1 << 20
PIPE_BYTES_MIN = 1 << 16
REPORT_BYTES_MAX = 4096
LOADED = "loaded"  # the supervisor's gauge: 1 once the first endpoints are known
OWN_GAUGES = (LOADED,)
CIPHERS = {  # TLS 1.2 suites by their IANA names; those of TLS 1.3 cannot be chosen
    f"TLS_{exchange}_WITH_{iana}": f"{exchange.replace('_', '-')}-{openssl}"
    for exchange in ("ECDHE_ECDSA", "ECDHE_RSA")
    for iana, openssl in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
    )
}

log = structlog.get_logger()


class StartError(Exception):
    """Something that this machine refuses; the text names it, the rule and the fix."""


class Family(NamedTuple):
    """One histogram in the lanes; a plugin's carries its labels."""

    metric: Metric
    plugin_name: str = ""
    plugin_type: str = ""

    @property
    def key(self) -> str:
        return f"{self.metric.name}@{self.plugin_name}" if self.plugin_name else self.metric.name


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What a child tells the parent; `text` says why it cannot start, empty = it is ready."""

    seat: int
    pid: int
    text: str = ""


class Pipe(NamedTuple):
    """Both ends of a packet pipe."""

    reader: int
    writer: int


class Instance:
    """What all processes of one picker share. Attributes are set once, before the first fork."""

    __slots__ = (
        "_page", "bus", "config", "document_schema", "documents", "families", "family", "health_listener", "index", "index_schema",
        "lanes", "life", "listener", "lock", "measures", "metrics_listener", "options", "parent_pid", "prefix_seed", "reports",
        "scrape_interval_s", "segments", "ssl_context", "table", "table_schema", "wakeups",
    )  # fmt: skip

    def __init__(self, options: "Options", config: Any) -> None:
        self.options = options
        self.config = config
        self.segments: list[Segment] = []
        self.parent_pid = os.getpid()
        sources = (scraped.source for scraped in config.sources)
        intervals = [s.interval_s for s in sources if isinstance(s, MetricsDataSource) and s.interval_s]
        self.scrape_interval_s: float = min(intervals, default=options.scrape_interval_s)

    @classmethod
    def create(cls, options: "Options", config: Any) -> "Instance":
        """Everything, or an error and nothing left behind. Raises StartError, SegmentError, OSError."""
        instance = cls(options, config)
        instance._become()
        try:
            instance._bind()
            instance._allocate(config.pipeline)
            instance._connect()
            instance._know_secrets()
        except BaseException:
            instance.unlink()
            raise
        return instance

    @property
    def workers(self) -> int:
        return self.options.workers

    @property
    def seats(self) -> int:
        """The supervisor's and the workers'."""
        return 1 + self.options.workers

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
            *self.wakeups,
        ]

    def ready(self, seat: int) -> None:
        """In a child: tell the parent that this seat serves."""
        self._report(Report(seat, os.getpid()))

    def failed(self, seat: int, text: str) -> None:
        """In a child: tell the parent why this seat cannot start, or died."""
        self._report(Report(seat, os.getpid(), text[: REPORT_BYTES_MAX // 8] or "no reason given"))

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
            self.listener = held.enter_context(listen(options.grpc_port, "--grpc-port"))
            self.health_listener = held.enter_context(listen(options.grpc_health_port, "--grpc-health-port"))
            self.metrics_listener = held.enter_context(listen(options.metrics_port, "--metrics-port"))
            held.pop_all()
        sockets = {"grpc": self.listener, "health": self.health_listener, "metrics": self.metrics_listener}
        self.lock.record(ports={name: held.getsockname()[1] for name, held in sockets.items()})

    def _allocate(self, pipeline: Pipeline) -> None:
        options = self.options
        columns = tuple(c.name for c in pipeline.columns if c.type is not frozenset and c.name not in COUNTED)
        self.table_schema = TableSchema(columns, options.max_endpoints)
        self.document_schema = DocumentSchema((DOCUMENT_BYTES_PER_ENDPOINT * options.max_endpoints,) * 2)
        self.index_schema = IndexSchema(options.index_entries)
        self.families = families(pipeline)
        self.measures = {(f.plugin_name, f.metric.name): i for i, f in enumerate(self.families) if f.plugin_name}
        lane_schema = lane_schema_of(self.families, slots=options.max_endpoints, lanes=self.seats)
        state = self._segment("state", Plan({"table": self.table_schema, "documents": self.document_schema}))
        lanes = self._segment("lanes", Plan({"lanes": lane_schema}))
        index = self._segment("index", Plan({"index": self.index_schema}))
        self.table, self.documents = (Segment.planned(*state, part) for part in ("table", "documents"))
        self.lanes = Lanes(lane_schema, Segment.planned(*lanes, "lanes"))
        self.index = Segment.planned(*index, "index")

    def _connect(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.life, self.family, self.reports = packet_pipe(), packet_pipe(), packet_pipe()
        self.bus = [packet_pipe(PIPE_BYTES) for _ in range(self.workers)]
        self.wakeups = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(self.workers)]

    def _know_secrets(self) -> None:
        self.prefix_seed = prefix_seed(self.options)
        self.ssl_context = ssl_context(self.options)

    def _segment(self, part: str, plan: Plan) -> tuple[Segment, Plan]:
        name = f"/{self.options.instance}-{os.urandom(6).hex()}-{part}"
        self.lock.record(segments=[name])
        segment = Segment.create_planned(name, plan)
        self.segments.append(segment)
        log.info("shared memory", segment=name, mib=round(plan.bytes / (1 << 20), 2))
        return segment, plan


def families(pipeline: Pipeline) -> tuple[Family, ...]:
    """All histograms of a lane: the workers' own, and one per plugin instance and metric that its class declares."""
    own = [Family(metric) for metric in WORKER_HISTOGRAMS]
    for plugin in pipeline.plugins.values():
        for metric in plugin.metrics:
            if metric.kind != "histogram":
                raise StartError(
                    f"plugin '{plugin.name}' declares {metric.name} as {metric.kind}: plugins can have histograms only"
                )
            own.append(Family(metric, plugin.name, plugin.type_name))
    return tuple(own)


def lane_schema_of(members: Sequence[Family], *, slots: int, lanes: int) -> LaneSchema:
    """What each process says about itself."""
    return LaneSchema(
        slots,
        (*(metric.name for metric in WORKER_GAUGES), *OWN_GAUGES),
        tuple(metric.name for metric in (*WORKER_COUNTERS, *SUPERVISOR_COUNTERS)),
        tuple((family.key, family.metric.buckets) for family in members),
        lanes=lanes,
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
    try:
        return _listening(socket.AF_INET6, "::", port)
    except OSError as refused:
        if refused.errno in (errno.EADDRINUSE, errno.EACCES):
            raise StartError(_not_bound(port, flag, refused)) from refused
    try:
        return _listening(socket.AF_INET, "0.0.0.0", port)  # a machine without IPv6
    except OSError as refused:
        raise StartError(_not_bound(port, flag, refused)) from refused


def _listening(family: int, address: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections in TIME_WAIT do not hold the port
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((address, port))
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
    """64 bits from the deployment's secret; without one, new ones for every start."""
    if not options.prefix_secret_file:
        return int.from_bytes(os.urandom(8), "little")
    try:
        with open(options.prefix_secret_file, "rb") as file:
            secret = file.read().strip()
    except OSError as refused:
        raise StartError(
            f"--prefix-secret-file {options.prefix_secret_file} cannot be read: {refused.strerror}"
        ) from refused
    if len(secret) < 16:
        raise StartError(
            f"--prefix-secret-file {options.prefix_secret_file} has {len(secret)} bytes: a secret has at least 16"
        )
    return int.from_bytes(hashlib.blake2b(secret, digest_size=8).digest(), "little")


def ssl_context(options: "Options") -> ssl.SSLContext | None:
    """For the ext_proc port; None without TLS."""
    if not options.secure_serving:
        return None
    from workers.transport import tls  # not needed, and not small, without TLS

    unknown = [name for name in options.tls_cipher_suites if name not in CIPHERS]
    if unknown:
        raise StartError(f"--tls-cipher-suites: {', '.join(unknown)} unknown; known are {', '.join(CIPHERS)}")
    try:
        return tls.server_context(
            Path(options.cert_path) if options.cert_path else None,
            "1.3" if options.tls_min_version == "VersionTLS13" else "1.2",
            ":".join(CIPHERS[name] for name in options.tls_cipher_suites) or None,
        )
    except tls.TlsError as refused:
        raise StartError(f"--cert-path: {refused}" if options.cert_path else str(refused)) from refused
