"""Creates the resources that children inherit from the parent: memory, pipes, eventfds, words. This happens before the first fork.

    Memory    the segments of `layout`; the instance's file records their names before they are created
    Pipes     bus: one pipe for each worker, worker -> supervisor
              reports: children -> parent
              parent_pipe: EOF = the parent has ended | workers_pipe: EOF = parent and workers have ended
              wakeups: one eventfd for each worker
    Words     parent -> children, in memory without a name: stopping, hurry, generation, candidate, queries of death, pools that are out of
              service

A pipe shows EOF only when no process holds its writing end. So each child closes the descriptors of other processes, which the
`not_for_...` methods list.
"""

import contextlib
import copy
import fcntl
import mmap
import os
import resource
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog

from epp.metrics import Group
from epp.metrics.label_caps import AtOnce, GroupNames, LabelCaps, coarse
from epp.metrics.page_size import weigher
from shm.areas import Areas
from shm.flow_areas import FlowAreas
from shm.instance_lock import InstanceLock
from shm.layout import WORD
from shm.remote_area import RemoteArea
from shm.segment import Region, Segment
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from workers.process import StartError
from workers.process.kv_memory import KvMemory
from workers.process.layout import Layout, part_of
from workers.shared import query_of_death

CHANGES_AT = 8  # bytes into the page of the parent's words
QUERIES_OF_DEATH_AT = 64  # bytes into the page of the parent's words
CONFIGURATIONS_AT = QUERIES_OF_DEATH_AT + WORD * query_of_death.WORDS  # two words for each configuration
DESCRIPTORS_PER_WORKER = 3  # both ends of its bus pipe, and its eventfd
DESCRIPTORS_OTHER = 36  # sockets, segments, other pipes, those of an event loop, and some for the first connections
PIPE_BYTES = 1 << 20
PIPE_BYTES_MIN = 1 << 16

log = structlog.get_logger()


class Memory:
    """Holds the mapped segments and their parts. A part is a region, under the name of its schema in `Layout`."""

    def __init__(self, layout: Layout, segments: Mapping[str, Segment], parts: Mapping[str, Region]) -> None:
        """`segments`, `parts`: the segments and their regions, by the names in `layout.plans`."""
        self.segments = segments
        self.state_name = segments["state"].name if "state" in segments else ""  # the segment with table and documents
        self._regions, self._areas_schema = parts, layout.areas
        self.table: Region = parts["table"]
        self.documents: Region = parts["documents"]
        self.latency: Region = parts["latency"]
        self.starts: Region = parts["starts"]
        self.prefills: Region = parts["prefills"]
        self.answers: Region = parts["answers"]
        self.budgets: Region = parts["budgets"]
        self.reload: Region = parts["reload"]
        self.index: Region = parts["index"]
        self.decisions: Region = parts["decisions"]
        self.profiles: Region = parts["profiles"]
        self.remotes = [
            RemoteArea(schema, parts[part_of("remote", pool)]) for pool, schema in enumerate(layout.remotes)
        ]  # only with a replica store
        self.remote = self.remotes[0] if self.remotes else None  # has the requests of this pool that wait in other replicas
        self.areas = Areas(layout.areas, parts["areas"], self.remote)
        self.kv_events: KvMemory | None = None  # None if no plugin uses KV events
        if layout.kv_events is not None:
            self.kv_events = KvMemory(layout.kv_events, parts)
        self.flows = [FlowAreas(schema, parts[part_of("flow", pool)], self.areas) for pool, schema in enumerate(layout.flows)]
        self.flow = self.flows[0]  # the flow areas of the first or only pool
        self._series = {name: (schema, parts[layout.spares.get(name, name)]) for name, schema in layout.series.items()}

    @classmethod
    def create(cls, layout: Layout, instance: str, lock: InstanceLock) -> "Memory":
        """Creates all segments. If a segment cannot be created, removes the others and raises SegmentError."""
        segments: dict[str, Segment] = {}
        parts: dict[str, Region] = {}
        with contextlib.ExitStack() as undo:
            for part, plan in layout.plans.items():
                name = f"/{instance}-{os.urandom(6).hex()}-{part}"
                lock.record(segments=[name])
                segment = segments[part] = Segment.create_planned(name, plan)
                undo.callback(segment.unlink)
                parts |= {within: segment.planned(plan, within) for within in plan.offsets}
                log.info("shared memory", segment=name, mib=round(plan.bytes / (1 << 20), 2))
            undo.pop_all()
        return cls(layout, segments, parts)

    def under(self, layout: Layout) -> "Memory":
        """Returns this memory with the layout of a later configuration, which has the same sizes."""
        if layout.areas is self._areas_schema:
            return self  # this memory is of a pool, and the configuration brings no new names
        return Memory(layout, self.segments, self._regions)

    def of_pool(self, pool: int) -> "Memory":
        """Returns this memory with the flow areas and the remote area of one of several pools."""
        own = copy.copy(self)
        own.flow = self.flows[pool]
        own.remote = self.remotes[pool] if self.remotes else None
        return own

    def copied(self, layout: Layout) -> "Memory":
        """Returns a private copy of this memory (`Segment.private_copy`). No other process sees writes to the copy."""
        copies: dict[str, Region] = {}
        for name, segment in self.segments.items():
            copy, plan = segment.private_copy(), layout.plans[name]
            copies |= {part: copy.part(plan.offsets[part], plan.sizes[part]) for part in plan.offsets}
        return Memory(layout, self.segments, copies)

    def series_writer(self, group: Group, index: int, caps: LabelCaps | None = None) -> SeriesWriter:
        """Returns the writer of a group's series for worker `index`. The worker must call the writer's `take_over` first.

        `caps`: limits the names of labels for all groups of this worker together; None means no such limit.
        """
        schema, region = self._series[group.name]
        names: GroupNames | None = None
        if caps is not None:  # a spare table has more labels than the group
            names = (AtOnce if group.at_once else GroupNames)(caps, (*group.labels, *schema.labels[len(group.labels) :]))
        return SeriesWriter(schema, schema.area(region, index), names=names)

    def series_reader(self, group: Group) -> SeriesReader:
        """Returns the reader of a group's series, over all workers, with the group's limits on the metrics page."""
        schema, region = self._series[group.name]
        return SeriesReader(
            schema,
            region,
            serving=lambda index: self.areas.serving(index + 1),
            coarse=coarse((*group.labels, *schema.labels[len(group.labels) :])),
            weigh=weigher(group),
            room=group.page_bytes,
        )

    def truncated(self) -> str:
        """Returns the name of a segment that another program has truncated, or ""."""
        return next((each.name for each in self.segments.values() if each.is_truncated()), "")

    def unlink(self) -> None:
        """Removes the names of the segments. Processes that have mapped the segments keep them."""
        for segment in self.segments.values():
            segment.unlink()


class Pipe(NamedTuple):
    """Both ends of a packet pipe, as file descriptors."""

    reader: int
    writer: int


class Pipes:
    """Pipes and eventfds between parent and children."""

    def __init__(self, workers_max: int, *, speculates: bool = False) -> None:
        """`speculates`: whether workers report to the kv-events process."""
        self.parent_pipe, self.workers_pipe, self.reports = packet_pipe(), packet_pipe(), packet_pipe()
        self.bus = [packet_pipe(PIPE_BYTES) for _ in range(workers_max)]
        self.kv_bus = [packet_pipe(PIPE_BYTES) for _ in range(workers_max if speculates else 0)]
        self.wakeups = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(workers_max)]

    def wake_workers(self) -> None:
        """Wakes all workers, so that they look for changes before their next heartbeat."""
        for wakeup in self.wakeups:
            os.eventfd_write(wakeup, 1)

    @property
    def bus_readers(self) -> Sequence[int]:
        """The reading ends of all workers' bus pipes, for the supervisor."""
        return [pipe.reader for pipe in self.bus]

    @property
    def bus_writers(self) -> Sequence[int]:
        """The writing ends of the bus pipes, one for each worker."""
        return [pipe.writer for pipe in self.bus]

    @property
    def kv_bus_readers(self) -> Sequence[int]:
        """The reading ends of the pipes from workers to the kv-events process."""
        return [pipe.reader for pipe in self.kv_bus]

    @property
    def _kv_bus_writers(self) -> Sequence[int]:
        return [pipe.writer for pipe in self.kv_bus]

    def not_for_worker(self, index: int) -> list[int]:
        """Descriptors that worker `index` must not hold."""
        other_writers = [pipe.writer for pipes in (self.bus, self.kv_bus) for i, pipe in enumerate(pipes) if i != index]
        readers = [*self.bus_readers, *self.kv_bus_readers]
        return [self.parent_pipe.writer, self.workers_pipe.reader, self.reports.reader, *readers, *other_writers]

    def not_for_supervisor(self) -> list[int]:
        """Descriptors that the supervisor must not hold."""
        kv_bus = [*self.kv_bus_readers, *self._kv_bus_writers]
        return [self.parent_pipe.writer, self.workers_pipe.writer, self.reports.reader, *self.bus_writers, *kv_bus]

    def not_for_kv_events(self) -> list[int]:
        """Descriptors that the kv-events process must not hold."""
        bus = [*self.bus_readers, *self.bus_writers, *self._kv_bus_writers]
        return [self.parent_pipe.writer, self.workers_pipe.writer, self.reports.reader, *bus, *self.wakeups]

    def release_children(self) -> None:
        """In the parent, after all workers have ended: closes both pipes, so that the supervisor ends."""
        for descriptor in (self.parent_pipe.writer, self.workers_pipe.writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Words:
    """Words in shared memory that the parent writes and children read."""

    def __init__(self, configurations: int = 1) -> None:
        """`configurations`: the largest number of them: 1 for one pool; with several pools, one per pool and one for their list."""
        self._page = mmap.mmap(-1, CONFIGURATIONS_AT + 2 * WORD * configurations)
        self._numbers = memoryview(self._page).cast("q")
        page = memoryview(self._page)[QUERIES_OF_DEATH_AT:CONFIGURATIONS_AT]
        self.queries_of_death = page.cast("q")  # the list of queries of death (`workers.shared.query_of_death`)
        # For each pool two words: one names the configuration in force and its file, the other names the candidate and its file
        # (`generations`)
        self.configurations = memoryview(self._page)[CONFIGURATIONS_AT:].cast("q")
        # The pools that are out of service (`workers.shared.pool_crashes`)
        self.out_of_service = memoryview(mmap.mmap(-1, WORD * (1 + 2 * configurations))).cast("q")

    @property
    def stopping(self) -> bool:
        """Whether the parent has received a signal to stop."""
        return self._page[0] != 0

    def stop(self) -> None:
        """In the parent: tells children that the picker stops and is not ready."""
        self._page[0] = 1

    @property
    def changes(self) -> int:
        """How often a word of `configurations` has changed."""
        return self._numbers[CHANGES_AT // WORD]

    def change(self, place: int, word: int) -> None:
        """In the parent: changes a word of `configurations`."""
        self.configurations[place] = word
        self._numbers[CHANGES_AT // WORD] += 1

    @property
    def hurrying(self) -> bool:
        """Whether the parent has received a second signal to stop."""
        return self._page[1] != 0

    def hurry(self) -> None:
        """In the parent: tells workers to stop without draining."""
        self._page[1] = 1


def packet_pipe(size: int = 0) -> Pipe:
    """Creates a pipe that keeps each write of up to 4,096 bytes as one packet.

    `size`: the wanted size of its buffer in bytes; the machine may allow less. 0 means the system's default.
    """
    pipe = Pipe(*os.pipe2(os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC))
    while size > PIPE_BYTES_MIN:
        try:
            fcntl.fcntl(pipe.writer, fcntl.F_SETPIPE_SZ, size)
            break
        except OSError:  # more than /proc/sys/fs/pipe-max-size or the user's quota allows
            size //= 2
    return pipe


def enough_descriptors(workers_max: int, ports: int = 0) -> None:
    """Raises StartError if the limit of open files is too low for the files that are open before the first connection.

    `ports`: the number of ports of pools, besides the usual ports.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS_PER_WORKER * workers_max + DESCRIPTORS_OTHER + ports
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise StartError(
            f"this process may have {allowed} open files, and a picker of up to {workers_max} workers needs {needed}, "
            "plus one for each connection: raise the limit (`ulimit -n`, or LimitNOFILE=), or set a lower --workers-max"
        )
