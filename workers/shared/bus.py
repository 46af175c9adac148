"""The bus: carries updates of the prefix index from workers to the index writer.

There is one packet pipe per worker. The parent creates it before the first fork and keeps it open, so a restart on either side loses
only frames that were already read. One write puts a whole frame into the pipe, and one read returns a whole frame. A worker never
waits: if the pipe is full, it drops and counts the frame, and the index misses some blocks.

Both sides batch under load, because a frame with ten prompts, or an insert of a hundred hashes, costs little more than a frame with one
prompt, or an insert of one hash. A worker sends an update at once if it has sent nothing for `FLUSH_S`. Otherwise it collects updates for
`FLUSH_S`. The supervisor reads a frame at once if it has read nothing for `POLL_S`. Otherwise it reads at intervals of `POLL_S`, and waits
for readable pipes again after a read that found no frame. (With other replicas, the supervisor uses another `Rhythm`.) So a single update
needs no timer on either side, and under load the supervisor wakes up once per `POLL_S`, for any number of workers and frames. Then all
workers see an update after (`FLUSH_S` + `POLL_S`) / 2 at the median: 8 ms. Until then, workers see the request as a prefill under way
(`shm.prefills`). Shorter intervals cost both processes more wake-ups.

A FORGET frame takes back what a request has taught the index. Within one flush, a worker sends LEARN frames first. A CACHED frame says that
an endpoint caches more tokens than its metrics promise.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from itertools import chain
from struct import Struct
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from epp.learning.samples import CorruptSamples, is_samples
from epp.prefix.updates import CACHED, FORGET, FRAME_BYTES_MAX, LEARN, SINGLE_BYTES_MAX, CorruptFrame, Frame, decode, frames, single
from epp.recording.batches import CorruptPacket, is_records

FLUSH_S: Final = 0.008
POLL_S: Final = 0.008
AGE_TICKS: Final = 16  # ticks of the index's clock per second
FRAMES_PER_TURN: Final = 256  # limit for reading one pipe; a pipe of 1 MiB holds this many frames
PENDING_BYTES_MAX: Final = 64 * FRAME_BYTES_MAX

_NUMBER: Final = Struct("=Q")
Hashes = NDArray[np.uint64]


class IndexWriting(Protocol):
    """The part of the index writer that the reader uses."""

    def insert(self, hashes: Hashes, owners: NDArray[np.uint16], age: int) -> None: ...

    def forget(self, hashes: Hashes, owner: int) -> None: ...


class Rhythm(NamedTuple):
    """How the supervisor reads the bus. `on_read`: called after each read. Reading at intervals of `poll_s` seconds begins after two reads
    within `patience` intervals, and ends after `patience` reads in a row without a frame.
    """

    on_read: Callable[[], object] = lambda: None
    poll_s: float = POLL_S
    patience: int = 1


RHYTHM: Final = Rhythm()


class BusWriter:
    """Sends a worker's updates to the bus. Calls `on_frame` for each frame that it sends, and `on_drop` for each frame that it drops."""

    def __init__(self, descriptor: int, on_drop: Callable[[], object], on_frame: Callable[[], object] = lambda: None) -> None:
        self._descriptor = descriptor
        self._on_drop = on_drop
        self._on_frame = on_frame
        self._pending: list[tuple[int, bytes]] = []
        self._taken_back: list[tuple[int, bytes]] = []
        self._pending_bytes = 0
        self._sent_at = -FLUSH_S  # time of the last flush, on the loop's clock
        self._loop: asyncio.AbstractEventLoop | None = None

    def learn(self, hashes: Hashes, owner: int) -> None:
        """Reports that `owner` will hold these blocks (uint64, one hash each). The report is sent at once, or at most FLUSH_S later."""
        pending = self._pending
        if not pending and not self._taken_back:
            self._flush_soon()
        data = hashes.tobytes()
        pending.append((owner, data))
        self._pending_bytes += len(data)
        if self._pending_bytes > PENDING_BYTES_MAX:
            self.flush()

    def forget(self, hashes: Hashes, owner: int) -> None:
        """Reports that `owner` does not hold these blocks after all. The report is sent at the time at which a report of `learn` would be
        sent, after pending LEARN frames.
        """
        if not self._pending and not self._taken_back:
            self._flush_soon()
        data = hashes.tobytes()
        self._taken_back.append((owner, data))
        self._pending_bytes += len(data)
        if self._pending_bytes > PENDING_BYTES_MAX:
            self.flush()

    def cached(self, owner: int, tokens: int) -> None:
        """Reports that the endpoint of `owner` had `tokens` tokens of one prompt cached. Sends at once."""
        for frame in frames(CACHED, [(owner, _NUMBER.pack(tokens))]):
            self.send(frame)

    def send(self, frame: bytes) -> None:
        """Sends one frame at once. Its first bytes name its kind, as in `epp.prefix.updates`."""
        try:
            os.write(self._descriptor, frame)
        except (BlockingIOError, BrokenPipeError):  # the pipe is full, or parent and supervisor have ended
            self._on_drop()
        else:
            self._on_frame()

    def offer(self, frame: bytes) -> bool:
        """Sends one frame at once like `send`, but counts no frame. Returns False if the bus is full or has no reader."""
        try:
            os.write(self._descriptor, frame)
        except (BlockingIOError, BrokenPipeError):
            return False
        return True

    def flush(self) -> None:
        """Sends all pending updates."""
        pending, self._pending = self._pending, []
        taken_back, self._taken_back = self._taken_back, []
        size, self._pending_bytes = self._pending_bytes, 0
        if len(pending) == 1 and size <= SINGLE_BYTES_MAX:
            self.send(single(*pending[0]))
        elif pending:
            for frame in frames(LEARN, pending):
                self.send(frame)
        for frame in frames(FORGET, taken_back):
            self.send(frame)

    def _flush_soon(self) -> None:
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        now = loop.time()
        if now - self._sent_at >= FLUSH_S:
            loop.call_soon(self.flush)  # runs after the answer to the request
            self._sent_at = now
        else:
            loop.call_later(FLUSH_S, self._flush_in_time)

    def _flush_in_time(self) -> None:
        assert self._loop is not None
        self._sent_at = self._loop.time()
        self.flush()


class BusReader:
    """Reads all pipes of the bus in the supervisor. `frames`: number of received frames. `corrupt`: number of undecodable frames.

    `now` returns the time on the index's clock, in seconds.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        descriptors: Sequence[int],
        index: IndexWriting,
        *,
        now: Callable[[], float],
        on_samples: Callable[[bytes], object] = lambda frame: None,
        on_records: Callable[[bytes], object] = lambda frame: None,
        on_cached: Callable[[int, int], object] = lambda owner, tokens: None,
        rhythm: Rhythm = RHYTHM,
    ) -> None:
        """`on_samples`: gets the frames of samples (`epp.learning.samples`); raises CorruptSamples for a bad frame.

        `on_records`: gets the packets of a recording (`epp.recording.batches`); raises CorruptPacket for a bad packet. `on_cached`: gets
        the reports of `BusWriter.cached`.
        """
        self._on_samples = on_samples
        self._on_records = on_records
        self._on_cached = on_cached
        self._loop = loop
        self._descriptors = tuple(descriptors)
        self._index = index
        self._now = now
        self._on_read, self._poll_s, self._patience = rhythm
        self._empty = 0  # reads in a row that found no frame
        self._timer: asyncio.TimerHandle | None = None
        self._read_at = -self._poll_s * self._patience
        self.frames = 0
        self.corrupt = 0

    def start(self) -> None:
        """Starts to listen. First reads the frames that are already in the pipes."""
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._readable, descriptor)

    def close(self) -> None:
        """Stops listening. The pipes stay open."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)

    def _readable(self, pipe: int) -> None:
        """Reads from a pipe that has a frame. If the last read was shortly before, reads all pipes at intervals from now on."""
        now = self._now()
        frequent = now - self._read_at < self._poll_s * self._patience
        self._read_at = now
        if not frequent:
            learned: list[Frame] = []
            self._read(pipe, learned, 1)  # the loop calls again if there are more frames
            self._learn(learned)
            self._on_read()
            return
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._empty = 0
        self._poll()

    def _poll(self) -> None:
        self._timer = None
        if self.drain():
            self._read_at = self._now()
            self._empty = 0
        else:
            self._empty += 1
        if self._empty < self._patience:
            self._timer = self._loop.call_later(self._poll_s, self._poll)
        else:
            self.start()
        self._on_read()  # last, so that a timer that `_on_read` sets for the same time runs out after the timer for the next read

    def drain(self) -> int:
        """Reads the frames that are in the pipes, up to a limit, and puts them into the index together. Returns their number."""
        before = self.frames
        learned: list[Frame] = []
        for descriptor in self._descriptors:
            self._read(descriptor, learned, FRAMES_PER_TURN)
        self._learn(learned)
        return self.frames - before

    def _read(self, descriptor: int, learned: list[Frame], frames_max: int) -> None:
        for _ in range(frames_max):
            try:
                data = os.read(descriptor, FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            if not data:  # the pipe has no writer any more
                return
            self.frames += 1
            try:
                if is_samples(data):
                    self._on_samples(data)
                    continue
                if is_records(data):
                    self._on_records(data)
                    continue
                frame = decode(data)
            except (CorruptFrame, CorruptSamples, CorruptPacket):
                self.corrupt += 1
                continue
            if frame.kind == LEARN:
                learned.append(frame)
            elif frame.kind == CACHED:
                for owner, (tokens,) in zip(frame.owners, _NUMBER.iter_unpack(frame.hashes), strict=False):
                    self._on_cached(owner, tokens)
            else:
                self._learn(learned)
                learned.clear()
                self._forget(frame)

    def _learn(self, learned: list[Frame]) -> None:
        if not learned:
            return
        hashes = np.frombuffer(b"".join([frame.hashes for frame in learned]), dtype=np.uint64)
        owners = np.fromiter(chain.from_iterable([frame.owners for frame in learned]), dtype=np.uint16)
        counts = np.fromiter(chain.from_iterable([frame.counts for frame in learned]), dtype=np.int64)
        self._index.insert(hashes, np.repeat(owners, counts), int(self._now() * AGE_TICKS))

    def _forget(self, frame: Frame) -> None:
        hashes, at = np.frombuffer(frame.hashes, dtype=np.uint64), 0
        for owner, count in zip(frame.owners, frame.counts, strict=True):
            self._index.forget(hashes[at : at + count], owner)
            at += count
