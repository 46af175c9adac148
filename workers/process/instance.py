"""Creates an instance: everything that outlives a child. The parent does this before the first fork, and children inherit it.

    sources       where endpoints, metrics and objects come from    follows from options and configuration
    layout        the parts of shared memory and their positions    follows from options and configuration
    lock          the locked file of the running instance           names each segment before it is created
    state_lock    the lock of --state-dir                           no other picker may write into its folder
    memory        segments of shared memory
    sockets       ext_proc, health, metrics
    pipes         bus, reports, parent_pipe, workers_pipe, wakeups
    words         parent -> children
    generations   the configuration in force and those before it
    reports       children -> parent
    credentials   secrets and certificates

Children inherit descriptors and mappings. They open none of these by name. After the fork, a child closes the descriptors that its
process must not hold (`not_for`, `not_for_trial`).

This module runs no process.
"""

import contextlib
import fcntl
import io
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import structlog

from compiled.finder import choose
from epp.config.pools_file import KubePool
from epp.decision import response_needs
from epp.request.pool_choice import PoolChoice
from shm.instance_lock import InstanceLock, sweep
from shm.observe import SECRET
from shm.segment import check_room
from workers.process import StartError
from workers.process.children import Children
from workers.process.credentials import Credentials
from workers.process.generations import Bundle, Generations, TrialResult
from workers.process.layout import Layout
from workers.process.pool_list import PoolList
from workers.process.reports import Reports
from workers.process.resources import Memory, Pipes, Words, enough_descriptors
from workers.process.restart import SUPERVISOR
from workers.process.sockets import NO_PORTS, Sockets, received
from workers.process.sources import Sources
from workers.shared.objectives import static_bands

if TYPE_CHECKING:
    from epp.config.effective import EffectiveConfig
    from workers.host.options import Options
    from workers.process.places import Places

NO_POOLS: Final[PoolList] = {}
FIRST: Final = 1  # the number of the configuration of the start
STATE_LOCK: Final = "lock"  # the name of a file in the folder of --state-dir
HOLDER_BYTES_MAX: Final = 512
FEWER = "reduce the need with a lower --workers-max, --max-endpoints, --index-entries or --kv-index-blocks"

log = structlog.get_logger()


@dataclass(slots=True, eq=False, kw_only=True)
class Instance:
    """Holds what all processes of one picker share. Attributes are set once; for a later configuration, `under` makes a new object."""

    options: "Options"
    config: "EffectiveConfig"
    sources: Sources
    layout: Layout
    lock: InstanceLock
    memory: Memory
    sockets: Sockets
    pipes: Pipes
    words: Words
    generations: Generations
    state_lock: io.FileIO | None = None
    number: int = 1  # the number of the configuration (`workers.process.generations`)
    children: Children
    reports: Reports
    credentials: Credentials
    identity: str  # the name of this picker in leader election, unique among replicas
    parent_pid: int
    pools: tuple["Instance", ...] = ()  # the instance as each pool sees it; () if the picker has one pool
    pool: int | None = None  # the number of the pool that sees this instance; None for the whole picker, or with one pool
    choice: PoolChoice | None = None  # finds the pool of a request; None if the picker has one pool
    places: "Places | None" = None  # where pools can appear; None if the pools are known from the start
    kube: KubePool | None = None  # where Kubernetes has the endpoints of that pool
    bundle: Bundle | None = None  # the configuration of that pool as read; None if the pool has no configuration yet
    pool_list: PoolList = field(default_factory=dict)  # the pools of a --pools-file
    room: Sequence[int] = ()  # the number of endpoints for which each of several pools has memory

    @classmethod
    def create(
        cls,
        options: "Options",
        config: "EffectiveConfig",
        layout: Layout | None = None,
        ports: Mapping[int, str] = NO_PORTS,
        later: int = 0,
    ) -> "Instance":
        """Creates everything. Raises StartError, SegmentError or OSError, and then leaves nothing behind.

        `layout`, `ports`, `later`: only for several pools (`workers.process.pool_views`).
        """
        sources, layout = Sources(options, config), layout or Layout(options, config)
        enough_descriptors(layout.workers_max, len(ports) + later)
        lock = _locked(options.run_dir, options.instance)
        with contextlib.ExitStack() as undo:
            undo.callback(_release, lock)
            # A user that can read the file may see private pages of the metrics port.
            lock.record(pid=os.getpid(), **{SECRET: os.urandom(16).hex()})
            if (state_lock := locked_state(options.state_dir, options.instance)) is not None:
                undo.callback(state_lock.close)
            check_room(layout.needs(), FEWER)
            sockets = Sockets.bind(options, received(os.environ), ports, later)
            lock.record(ports=sockets.ports() | sockets.pool_ports())
            memory = Memory.create(layout, options.instance, lock)
            undo.callback(memory.unlink)
            words = Words(1 + (layout.listed or 0))
            speculates = layout.kv_settings is not None and layout.kv_settings.speculative_s > 0
            pipes = Pipes(layout.workers_max, speculates=speculates)
            instance = cls(
                options=options,
                config=config,
                sources=sources,
                layout=layout,
                lock=lock,
                memory=memory,
                sockets=sockets,
                pipes=pipes,
                words=words,
                generations=Generations(words, layout.listed or 0),
                state_lock=state_lock,
                children=Children(layout.ordinals + (layout.kv_settings is not None)),
                reports=Reports(pipes.reports),
                credentials=Credentials.read(options, sources.all, config.source),
                identity=f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.urandom(8).hex()}",
                parent_pid=os.getpid(),
            )
            undo.pop_all()
        instance._log_settings()
        return instance

    @property
    def every(self) -> "Sequence[Instance]":
        """Returns the instance as each pool sees it, in the order of the pools' numbers."""
        return self.pools or (self,)

    @property
    def in_kubernetes(self) -> bool:
        """Returns whether any pool has endpoints from Kubernetes."""
        return any(pool.sources.in_kubernetes for pool in self.every)

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Returns the names of several pools, by number, with "" for a place without a pool. Returns () if the picker has one pool."""
        return tuple(pool.options.pool_name for pool in self.pools) if len(self.pools) > 1 else ()

    @property
    def named(self) -> dict[str, str]:
        """Returns the field of log lines that names the pool; {} if the picker has one pool."""
        return {} if self.pool is None else {"pool": self.options.pool_name}

    def begin(self, bundle: Bundle) -> None:
        """In the parent, before the first fork: records the configuration with which this instance was created."""
        self.generations.store(0, TrialResult(0, "", bundle))
        self.generations.publish(0, bundle.number)

    def under(self, config: "EffectiveConfig", bundle: Bundle, *, copied: bool = False) -> "Instance":
        """Returns this instance with a later configuration. `copied`: whether the new object gets a private copy of the memory.

        Raises StartError if the configuration needs a restart.
        """
        sources, layout = Sources(self.options, config), self.layout.later(self.options, config, bundle.names)
        expected = self.layout.kv_of(self.options.pool_name)
        if (sources.kv_events is None) != (expected is None):
            raise StartError(
                "a precise prefix producer is added or removed, and the memory and the process for it exist from the start or never: "
                "restart the picker with this configuration"
            )
        if sources.kv_events != expected:
            raise StartError(
                "settings of the precise prefix producer change that its process and its memory have from the start: block size, tiers, "
                "limits, addresses, speculation, index metrics: restart the picker with this configuration"
            )
        if sources.in_kubernetes != self.sources.in_kubernetes:
            raise StartError(
                "the source of endpoints changes between Kubernetes and a discovery plugin: restart the picker with this configuration"
            )
        bands, most = len(static_bands(config.flow)), self.memory.flow.schema.bands
        if bands > most:
            raise StartError(
                f"flow control has {bands} bands, and the memory of the pool has room for {most} since the start: "
                "restart the picker with this configuration"
            )
        memory = self.memory.copied(layout) if copied else self.memory.under(layout)
        if self.pool is not None:
            memory = memory.of_pool(self.pool)
        return replace(self, config=config, sources=sources, layout=layout, memory=memory, number=bundle.number, bundle=bundle)

    def with_scrape_tls(self) -> "Instance":
        """Returns this instance with the TLS contexts of its data sources, read from their files. Raises Unusable."""
        return replace(self, credentials=self.credentials.reading(self.sources.all, self.config.source))

    def not_for(self, ordinal: int) -> list[int]:
        """Returns the descriptors that the child with this ordinal must not hold."""
        pipes, sockets = self.pipes, self.sockets
        if ordinal == SUPERVISOR:
            return [*pipes.not_for_supervisor(), *sockets.not_for_supervisor()]
        if ordinal < self.layout.ordinals:
            return [*pipes.not_for_worker(ordinal - 1), *sockets.not_for_worker()]
        return [*pipes.not_for_kv_events(), *sockets.not_for_kv_events()]

    @property
    def served(self) -> bool:
        """Returns whether this place has a pool, and any configuration of the pool is in force."""
        return bool(self.options.pool_name) and (self.generations.number > 0 or (self.bundle is not None and self.bundle.number == FIRST))

    @property
    def used(self) -> bool:
        """Returns whether this place has a pool, and the process uses a configuration of the pool."""
        return bool(self.options.pool_name) and self.bundle is not None

    @property
    def number_in_force(self) -> int:
        """Returns the number of the configuration in force of the pool that sees this instance."""
        return self.generations.number or self.number

    @property
    def outdated(self) -> bool:
        """Returns whether a configuration is in force that this instance does not have."""
        return self.generations.number not in (0, self.number)  # the number is 0 if the parent reloads nothing

    def not_for_trial(self) -> list[int]:
        """Returns the descriptors that a trial child must not hold, because with them, a process that a plugin starts could keep the pipes
        open.
        """
        pipes = self.pipes
        ends = (pipes.parent_pipe.writer, pipes.workers_pipe.writer, pipes.reports.reader, *pipes.bus_readers, *pipes.bus_writers)
        return [*ends, *self.sockets.not_for_kv_events()]

    def unlink(self) -> None:
        """Removes the names of the segments, then the file that records the names. Processes that have mapped a segment can still use
        it.
        """
        self.memory.unlink()
        _release(self.lock)
        if self.state_lock is not None:
            self.state_lock.close()

    def _log_settings(self) -> None:
        use = self.sources.prefix_use
        blocks = {"block_tokens": use.block_tokens} if use is not None else {}
        log.info("request path", code=str(choose()))
        log.info("prefix index", entries=self.layout.index.entries, **blocks)
        if (held := self.layout.kv_events) is not None:
            mib = round(self.layout.needs()["kv"] / (1 << 20), 1)
            log.info("kv events: index of held blocks", blocks=held.blocks, shared_memory_mib=mib)
        log.info("response phase", **response_needs.parts(self.config.pipeline.wiring, self.config.response_phase))


def _locked(run_dir: str, instance: str) -> InstanceLock:
    """Removes the files and segments of killed instances, then takes the lock of this instance. Raises SegmentError."""
    for name in sweep(run_dir):
        log.warning("removed a file or segment of a killed instance", name=name)
    return InstanceLock.acquire(run_dir, instance)


def _release(lock: InstanceLock) -> None:
    with contextlib.suppress(OSError):  # a child may have released the lock already
        lock.release()


def locked_state(folder: str, instance: str) -> io.FileIO | None:
    """Locks the folder of --state-dir, so that two pickers do not overwrite each other's snapshots. Returns None without a folder.

    The lock lasts until this process and all children that inherit the file have closed it or ended. The file itself stays.

    Also returns None if the folder cannot be locked, and logs the reason. Raises StartError if another picker uses it.
    """
    if not folder:
        return None
    path = os.path.join(folder, STATE_LOCK)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
    except OSError as refused:  # each part that writes into the folder reports the error itself
        log.warning("--state-dir cannot be locked: no other picker may use it", file=path, why=refused.strerror)
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"{instance} on {socket.gethostname()}".encode()[:HOLDER_BYTES_MAX])
    except BlockingIOError:
        with file:
            holder = file.read(HOLDER_BYTES_MAX).decode(errors="replace") or "another picker"
        raise StartError(
            f"--state-dir {folder} is used by {holder} (its lock {path} is held): stop that picker, or give each picker a folder of its own"
        ) from None
    except OSError as refused:  # a file system without locks, or a full one
        log.warning("--state-dir may not be locked: no other picker may use it", file=path, why=refused.strerror)
    return file
