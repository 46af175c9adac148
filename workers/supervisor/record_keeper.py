"""Records traffic: takes the batches of workers, adds changes of endpoints, and passes frames on to a thread that writes files.

    workers ─ bus ─▶ take ──┐
    endpoint_records ─ turn ┴─▶ a frame per second or per FRAME_BYTES ─▶ RecordFiles (a thread)

A recording of all requests runs from the start with --record-dir, or for some time when `epp record` asks (`asks`). At all other times a
small recording runs, so that `epp explain` finds decisions of the last minutes: a sample of the requests, in RECENT.bytes. While a
recording runs, a gauge in the supervisor's area has the number of the file to write, negative for a sample. A new file gets a new number.
Workers follow it at their next heartbeat, so the file before stays open for LATE_S. The supervisor wakes the workers to begin, because a
request may wait for their start.

Lost records are counted and delay no work: the metric `recording_lost_records_total` counts them, and `Lost` in the file.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import structlog

from epp.recording import records
from epp.recording.batches import Assembler
from epp.recording.keys import Keyed
from epp.recording.records import Lost, Opened, Record
from epp.request.pool_choice import no_such_pool
from shm.areas import Area
from workers.host.build import version
from workers.process import StartError
from workers.process.instance import Instance
from workers.process.layout import RECORDED_POOL, RECORDING
from workers.shared.recording import FRAME_BYTES, OFF, RECENT, Frame, Limits, asks
from workers.supervisor.background import Background
from workers.supervisor.endpoint_records import EndpointRecords
from workers.supervisor.pages.decisions import Recorded

if TYPE_CHECKING:
    from workers.host.options import Options
    from workers.shared.recording.files import RecordFiles

LOOK_S: Final = 0.05  # the shortest interval of scrapes
SAMPLED_LOOK_S: Final = 0.5  # a small recording has fewer scraped values, and costs an idle picker less
ASKED_S: Final = 0.5  # how often to look for questions
FRAME_S: Final = 1.0
LATE_S: Final = 2.0
AGAIN_S: Final = 60.0  # the shortest time between two files because of lost frames

log = structlog.get_logger()


class FilePart:
    """The batches that wait to be written to one file."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.records = self.size = 0


class RunningRecording:
    """The state of one recording. `ask`: the question that began it; None with --record-dir, and for the small recording (`sampled`)."""

    def __init__(self, files: "RecordFiles", ask: asks.RecordAsk | None, now: float, *, sampled: bool) -> None:
        self.files = files
        self.ask = ask
        self.sampled = sampled
        self.until = now + ask.seconds if ask is not None else None
        self.file = 0  # the number of the file under way
        self.since = now  # when this file was begun
        self.before: tuple[int, float] | None = None  # the previous file, and when to close it
        self.parts: dict[int, FilePart] = {}
        self.framed_at = now
        self.heard = True  # whether a worker has sent records since the last look at endpoints
        self.records = self.bytes = self.lost = 0  # as counted in the area
        self.dropped = 0  # records that never reached the thread
        self.told = 0  # lost records that the file knows of
        self.why = ""  # the last reason for a loss
        self.unwritten = 0  # records that the thread had lost at the last look
        self.gap: int | None = None  # how many records were written when a frame of the present file was found lost

    def needs_another_file(self, now: float) -> bool:
        """Returns whether a frame of the present file was lost, and later frames are written: they may refer to what the lost frame has
        described, as at the end of a time with a full disk.
        """
        files = self.files
        if files.lost > self.unwritten:
            self.unwritten, self.gap = files.lost, files.records
        return self.gap is not None and files.records > self.gap and now - self.since >= AGAIN_S


class RecordKeeper:
    """Runs recordings. `take` gets the packets of workers; `start` begins, and `end` is called at the supervisor's end."""

    def __init__(self, instance: Instance, area: Area, now: Callable[[], float] = time.monotonic) -> None:
        options, counter = instance.options, area.schema.counter
        self._now = now
        self._area = area
        self._place = options.run_dir, options.instance
        self._folder = "" if options.record_dir == OFF else options.record_dir
        self._recent = recent_folder(options)
        self._kept = bool(options.state_dir)  # whether the small recording stays after the picker's end
        self._limits = Limits(files=options.record_files_max, bytes=options.record_bytes_max)
        self._secret = Keyed(instance.credentials.prefix_seed).identity
        self._endpoints = EndpointRecords(instance)
        self._gauge = area.schema.scalar[RECORDING]
        self._pipes = instance.pipes
        self._counters = [counter[f"recording_{name}_total"] for name in ("records", "bytes", "lost_records")]
        self._assembler = Assembler()
        self._running: RunningRecording | None = None
        self._ended_file = 0  # the number of the last file of the recording before
        # Why there is no recording.
        self._why_not = f"--record-dir is {OFF}" if options.record_dir == OFF else "no temporary folder can be written; set TMPDIR"
        self._instance = instance
        self._only = area.schema.scalar[RECORDED_POOL]
        self._timer: asyncio.TimerHandle | None = None
        area.scalars[self._gauge] = 0  # a predecessor may have died while it recorded

    def start(self, background: Background, *, successor: bool) -> None:
        """Begins to record with --record-dir, and to look for questions.

        Raises StartError if the folder cannot be used. A `successor` of a killed supervisor only logs this, and the picker continues to
        serve.
        """
        if self._folder and (why := self._begin(self._folder, None)):
            if not successor:
                raise StartError(f"--record-dir {self._folder}: {why}")
            self._why_not = f"--record-dir {self._folder}: {why}"
            log.error("nothing is recorded", folder=self._folder, why=why)
        self._begin_recent()
        asks.forget(*self._place)
        background.every(ASKED_S, self._look_for_questions)

    def where(self) -> Recorded:
        """Says where decisions are recorded at present."""
        running = self._running
        return Recorded("", self._why_not) if running is None else Recorded(os.path.abspath(running.files.folder))

    def use(self, instance: Instance) -> None:
        """Records the columns and pools of a later configuration from now on. Ends a recording of a pool that is gone, because another pool
        may have its place.
        """
        self._instance = instance
        self._endpoints.use(instance)
        running = self._running
        recorded = running.ask.pool if running is not None and running.ask is not None else ""
        if running is not None and recorded and recorded not in self._pools():
            running.why = f"the pool '{recorded}' is gone"
            log.warning("recording ends early", why=running.why)
            self._end()
            self._begin_recent()

    def take(self, data: bytes) -> None:
        """Takes one packet of a worker. Raises CorruptPacket."""
        whole = self._assembler.take(data)
        if whole is None:
            return
        if self._running is not None:
            self._running.heard = True
            # The worker may know an endpoint that joined after the last look; a reader needs its description first.
            if joined := self._endpoints.members(self._now()):
                self._record(joined)
        self._add(whole.file, whole.data, whole.records)

    def end(self) -> None:
        """Ends a running recording, and writes waiting frames. Removes files that no command can find any more."""
        self._end()
        if self._recent and not self._kept:
            shutil.rmtree(self._recent, ignore_errors=True)

    def _end(self) -> None:
        self._area.scalars[self._gauge] = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        running = self._running
        if running is None:
            return
        for file in list(running.parts):
            self._frame(running, file)
        self._running, self._ended_file = None, running.file
        running.files.end()
        self._count(running)
        self._tell(running, "ended")
        say = log.debug if running.sampled else log.info
        say("recording ended", folder=running.files.folder, records=running.records, lost=running.lost)

    # Questions of `epp record`.

    def _look_for_questions(self) -> None:
        ask = asks.take(*self._place)
        if ask is None:
            return
        running = self._running
        if not ask.seconds:
            if running is not None and running.ask is not None and running.ask.id == ask.id:
                self._end()
                self._begin_recent()
        elif running is not None and not running.sampled:
            left = "with --record-dir" if running.until is None else f"for {running.until - self._now():.0f} s more"
            self._refuse(ask, f"the picker records into {running.files.folder} already, {left}")
        else:
            self._end()
            if why := no_such_pool(ask.pool, [pool.options.pool_name for pool in self._instance.pools]):
                self._refuse(ask, why)
                self._begin_recent()
            elif why := self._begin(ask.folder, ask):
                self._refuse(ask, f"{ask.folder}: {why}")
                self._begin_recent()

    def _refuse(self, ask: asks.RecordAsk, why: str) -> None:
        asks.tell(*self._place, asks.RecordingState(ask.id, "failed", why))

    # The recording.

    def _begin_recent(self) -> None:
        """Begins the small recording, if no other recording runs. If this fails, the picker works on, but `epp explain` knows less."""
        if not self._recent or self._running is not None:
            return
        if why := self._begin(self._recent, None, sampled=True):
            self._why_not = f"{self._recent}: {why}"
            log.info("no small recording for epp explain", folder=self._recent, why=why)

    def _begin(self, folder: str, ask: asks.RecordAsk | None, *, sampled: bool = False) -> str:
        """Begins a recording. Returns why no recording can begin, or ""."""
        from workers.shared.recording.files import RecordFiles  # imported before the loop ran

        now = self._now()
        try:
            files = RecordFiles(folder, self._place[1], RECENT if sampled else self._limits)
        except OSError as refused:
            return refused.strerror or str(refused)
        running = self._running = RunningRecording(files, ask, now, sampled=sampled)
        say = log.debug if sampled else log.info
        say("recording begins", folder=folder, seconds=None if ask is None else ask.seconds)
        self._next_file(running, int(time.time()) & 0x7FFF_FFFF)
        self._pipes.wake_workers()
        self._tell(running, "recording")
        self._timer = asyncio.get_running_loop().call_later(SAMPLED_LOOK_S if running.sampled else LOOK_S, self._turn)
        return ""

    def _turn(self) -> None:
        """Follows endpoints and scrapes, writes frames, and begins another file when it is time."""
        running, now = self._running, self._now()
        if running is None:
            return
        if running.until is not None and now >= running.until:
            self._end()
            self._begin_recent()
            return
        self._timer = asyncio.get_running_loop().call_later(SAMPLED_LOOK_S if running.sampled else LOOK_S, self._turn)
        # A small recording shows decisions, so it has no values from times without decisions.
        if running.heard or not running.sampled:
            running.heard = False
            self._follow(running, now)
        if running.before is not None and now >= running.before[1]:
            self._frame(running, running.before[0])
            running.files.put(Frame(running.before[0], None, 0))
            running.before = None
        if now - running.framed_at >= FRAME_S:
            running.framed_at = now
            for file in list(running.parts):
                self._frame(running, file)
            self._count(running)
            self._tell(running, "recording")
        limits = running.files.limits
        full = now - running.since >= limits.file_s or running.files.size >= limits.file_bytes
        if (full or running.needs_another_file(now)) and running.before is None:
            running.before = running.file, now + LATE_S
            self._next_file(running, running.file + 1)

    def _next_file(self, running: RunningRecording, number: int) -> None:
        """Begins a file: describes all endpoints again, and makes the workers do the same."""
        now = self._now()
        running.file, running.since, running.gap = number, now, None
        running.files.size = 0
        if running.sampled:
            with contextlib.suppress(OSError):  # it exists; or else a cleaner of temporary folders has removed it
                os.mkdir(running.files.folder, mode=0o700)
        pools, only = self._pools(), None
        if running.ask is not None and running.ask.pool in pools:
            only, pools = self._number_of(running.ask.pool), [running.ask.pool]
        self._record([Opened(records.VERSION, version(), number, time.time(), now, self._secret, pools)])
        self._endpoints.again(only)
        self._area.scalars[self._only] = 0 if only is None else only + 1
        self._follow(running, now)
        self._area.scalars[self._gauge] = -number if running.sampled else number

    def _follow(self, running: RunningRecording, now: float) -> None:
        found = self._endpoints.look(now)
        if running.lost > running.told:
            found.append(Lost(now, running.lost - running.told))
            running.told = running.lost
        if found:
            self._record(found)

    def _pools(self) -> list[str]:
        """Returns the present names of several pools, or no names if the picker has one pool."""
        return [name for pool in self._instance.pools if (name := pool.options.pool_name)]

    def _number_of(self, pool: str) -> int:
        return next(number for number, view in enumerate(self._instance.pools) if view.options.pool_name == pool)

    # Frames.

    def _record(self, found: list[Record]) -> None:
        assert self._running is not None
        self._add(self._running.file, records.batch(found), len(found))

    def _add(self, file: int, data: bytes, count: int) -> None:
        """Adds a batch to the next frame of a file. The records are lost if the recording has no such file open. The recording that runs
        has not lost them if a worker made them for the recording before.
        """
        running = self._running
        if running is None or file == self._ended_file != running.file:
            self._area.add(self._counters[2], count)
            return
        if file != running.file and (running.before is None or file != running.before[0]):
            running.dropped += count
            return
        part = running.parts.get(file)
        if part is None:
            part = running.parts[file] = FilePart()
        part.batches.append(data)
        part.records += count
        part.size += len(data)
        if part.size >= FRAME_BYTES:
            self._frame(running, file)

    def _frame(self, running: RunningRecording, file: int) -> None:
        part = running.parts.pop(file, None)
        if part is not None and not running.files.put(Frame(file, records.frame(part.batches), part.records)):
            running.dropped += part.records
            running.gap = running.files.records
            running.why = "the disk is too slow"

    def _count(self, running: RunningRecording) -> None:
        """Copies the counts of the thread into the area, and logs the first loss of each kind."""
        files, add = running.files, self._area.add
        now = files.records, files.bytes, files.lost + running.dropped
        before = running.records, running.bytes, running.lost
        running.records, running.bytes, running.lost = now
        for counter, count, counted in zip(self._counters, now, before, strict=True):
            add(counter, count - counted)
        why = files.why or running.why
        if running.lost > before[2] and why != running.why:
            log.warning("the recording loses records", folder=files.folder, why=why, lost=running.lost)
        running.why = why

    def _tell(self, running: RunningRecording, state: Literal["recording", "ended"]) -> None:
        if running.ask is None or running.until is None:
            return
        left, files = max(running.until - self._now(), 0.0), list(running.files.names)
        counts = running.records, running.bytes, running.lost
        asks.tell(*self._place, asks.RecordingState(running.ask.id, state, running.why, left, *counts, files))


def recent_folder(options: "Options") -> str:
    """Returns the folder of the small recording. Returns "" if --record-dir names a folder or is "none", or if no folder can be written.

    With --state-dir, the folder is in that directory, and stays after the picker's end. Otherwise it is a temporary folder of the instance:
    pickers of other users or with other run directories may have the same name.
    """
    if options.record_dir:
        return ""
    if options.state_dir:
        return os.path.join(options.state_dir, "recent")
    try:
        place = hashlib.blake2b(b"%d %s" % (os.getuid(), os.fsencode(os.path.abspath(options.run_dir))), digest_size=4).hexdigest()
        return os.path.join(tempfile.gettempdir(), f"epp-recent-{options.instance}-{place}")
    except FileNotFoundError:
        return ""
