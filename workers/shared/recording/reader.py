"""Reads recordings, from a folder or a single file, as records or as arrivals. Also reads arrivals from files of public formats.

The reader reads frame by frame, so its memory does not depend on the size of the file. It raises `Unreadable` if the file is no recording,
or if a newer version wrote the file. It skips and reports damaged parts: a frame with a wrong checksum, or the end of a file in the middle
of a frame, as after a kill.

A recording of several pools names the pools at the beginning of each file (`Opened.pools`), and the pool of each endpoint, configuration
and request. If a pool is chosen, the reader skips records of other pools, as if a picker of the chosen pool alone had recorded them.
"""

import contextlib
import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from epp.recording.imports import Arrival, BadTrace
from epp.recording.imports import arrivals as imported
from epp.recording.records import (
    VERSION,
    Configured,
    CorruptFrame,
    Decided,
    Ended,
    Member,
    Named,
    Opened,
    Record,
    Scraped,
    decode,
    floats,
    ints,
)
from epp.recording.trace import requests
from epp.request.pool_choice import listed
from workers.shared.recording import Unreadable
from workers.shared.recording.files import SUFFIX
from workers.shared.recording.framing import HEAD, HEAD_MAGIC, MARK, MARK_MAGIC, MARK_NAME, NAME, PACKED_BYTES_MAX, PREFIX_BYTES, unpack

FILES_MAX: Final = 4096
HEAD_BYTES: Final = HEAD_MAGIC.to_bytes(4, "little")

Report = Callable[[str], object]


class Removed(Unreadable):
    """Raised if there is no such file."""


def files_of(path: str) -> list[Path]:
    """Returns the files of a recording in the order of their creation: the file `path`, or all files in the folder. Raises Unreadable."""
    found = Path(path)
    try:
        if not found.is_dir():
            return [found]
        files: list[tuple[float, Path]] = []
        for entry in os.scandir(found):
            with contextlib.suppress(FileNotFoundError):  # the picker removes its oldest files
                if entry.name.endswith(SUFFIX):
                    files.append((entry.stat().st_mtime, Path(entry.path)))
    except OSError as refused:
        raise Unreadable(f"{path}: {refused.strerror}") from refused
    if not files:
        raise Unreadable(f"{path}: the folder has no recording (*{SUFFIX})")
    if len(files) > FILES_MAX:
        raise Unreadable(f"{path}: the folder has {len(files)} recordings; give one file, or a folder of at most {FILES_MAX}")
    return [path for _, path in sorted(files)]


def batches_of(path: str, tell: Report) -> Iterator[list[Record]]:
    """Yields the batches of all files. `tell` gets a sentence for each unreadable part, and for a file of a folder that the picker has
    removed meanwhile. Raises Unreadable for a foreign file.
    """
    for file in files_of(path):
        try:
            yield from batches(file, tell)
        except Removed as gone:
            if str(file) == path:
                raise
            tell(str(gone))


def batches_of_pool(path: str, tell: Report, pool: str) -> Iterator[list[Record]]:
    """Yields the batches of one pool; "" means the only pool. Raises Unreadable, also if the recording has several pools, or no pool of
    this name.
    """
    yield from of_pool(batches_of(path, tell), pool, path)


def batches(path: Path, tell: Report) -> Iterator[list[Record]]:
    """Yields the batches of one file. Raises Unreadable if this version cannot read the file, and Removed without the file."""
    try:
        with path.open("rb") as file:
            _check_head(path, file.read(HEAD.size))
            yield from _frames(path, file, tell)
    except FileNotFoundError as gone:
        raise Removed(f"{path}: {gone.strerror}") from gone
    except OSError as refused:
        raise Unreadable(f"{path}: {refused.strerror}") from refused


def _check_head(path: Path, found: bytes) -> None:
    if not found:
        raise Unreadable(f"{path}: the file is empty: its picker ended before it wrote anything")
    if len(found) < HEAD.size or not found.startswith(HEAD_BYTES):
        raise Unreadable(f"{path}: not a recording of an endpoint picker; `epp record` writes them")
    _, size, name, version, _ = HEAD.unpack(found)
    if size != HEAD.size - PREFIX_BYTES or name != NAME:
        raise Unreadable(f"{path}: not a recording of an endpoint picker; `epp record` writes them")
    if version > VERSION:
        raise Unreadable(f"{path}: version {version} of the format, and this epp reads up to {VERSION}: use the picker's own version")


def _frames(path: Path, file: BinaryIO, tell: Report) -> Iterator[list[Record]]:
    """Yields the batches of the whole frames. Skips damaged frames. Stops if the next mark cannot be found."""
    frames = 0
    while mark := file.read(MARK.size):
        at = file.tell() - len(mark)
        if len(mark) < MARK.size:
            tell(f"{path}: cut off at byte {at}; the {frames} frames before are read")
            return
        magic, size, name, length, records = MARK.unpack(mark)
        if (magic, size, name) != (MARK_MAGIC, MARK.size - PREFIX_BYTES, MARK_NAME) or length > PACKED_BYTES_MAX:
            tell(f"{path}: damaged at byte {at}; the {frames} frames before are read")
            return
        packed = file.read(length)
        if len(packed) < length:
            tell(f"{path}: cut off at byte {at}; the {frames} frames before are read")
            return
        try:
            found = decode(unpack(packed))
        except (ValueError, CorruptFrame) as damaged:
            tell(f"{path}: the frame at byte {at} is damaged and left out with its {records} records ({damaged})")
            continue
        if not frames and not (found and found[0] and isinstance(found[0][0], Opened)):
            tell(f"{path}: its first frame is missing, so times and endpoints may be incomplete")
        frames += 1
        yield from found


def of_pool(batches: Iterable[list[Record]], pool: str, path: str) -> Iterator[list[Record]]:
    """Yields the records of one pool ("" means the only pool) of the recording in `path`. Raises Unreadable, which names the pools."""
    chosen = _Chosen(pool, path)
    for batch in batches:
        yield [kept for record in batch if (kept := chosen.kept(record)) is not None]


@dataclass(slots=True)
class _Chosen:
    """The state of a reader. `slots`: the slots of the pool's endpoints."""

    pool: str
    path: str
    slots: set[int] = field(default_factory=set)

    def kept(self, record: Record) -> Record | None:
        """Returns the record as a picker of this pool alone would have written it. Returns None for a record of another pool."""
        if isinstance(record, Opened):
            self._check(record.pools)
            return record
        if not self.pool:
            return record  # the record is of the only pool, with or without a name
        if isinstance(record, (Configured, Decided)):
            return record if record.pool == self.pool else None
        if isinstance(record, Member):
            return self._member(record)
        if isinstance(record, Scraped):
            return self._scraped(record)
        if isinstance(record, (Named, Ended)):
            return record if record.slot in self.slots else None
        return record

    def _check(self, pools: Sequence[str]) -> None:
        if self.pool and not pools:
            raise Unreadable(f"{self.path}: the recording is of a picker of one pool: leave --pool out")
        if self.pool not in pools and len(pools) > 1:
            why = f"the recording has no pool '{self.pool}'" if self.pool else "the recording has several pools: give one with --pool"
            raise Unreadable(f"{self.path}: {why}; pools: {listed(pools)}")

    def _member(self, record: Member) -> Member | None:
        if record.pool != self.pool:
            self.slots.discard(record.slot)
            return None
        self.slots.add(record.slot)
        return record

    def _scraped(self, record: Scraped) -> Scraped | None:
        slots = ints(record.slots).tolist()
        own = np.fromiter((slot in self.slots for slot in slots), bool, len(slots))
        if own.all():
            return record
        return self._only(record, own) if own.any() or record.columns else None  # the names of columns are said once

    def _only(self, record: Scraped, own: NDArray[np.bool_]) -> Scraped:
        values = floats(record.values).reshape(len(own), -1)[own]
        states = bytes(state for state, mine in zip(record.states, own.tolist(), strict=True) if mine)
        slots, scraped_at = ints(record.slots)[own], floats(record.scraped_at)[own]
        return Scraped(record.at, record.columns, slots.tobytes(), scraped_at.tobytes(), values.tobytes(), states)


def arrivals(path: str, report: Callable[[str], object]) -> Iterator[Arrival]:
    """Yields the arrivals of the trace at `path`, for a recording in the order in which the requests ended. Raises Unreadable.

    `report` gets a sentence for each unreadable part of a recording.
    """
    try:
        if is_recording(path):
            yield from _recorded(path, report)
            return
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8", errors="replace", newline="") as lines:
            yield from imported(lines)
    except gzip.BadGzipFile as wrong:
        raise Unreadable(f"{path}: not packed with gzip, although the name ends with .gz: rename the file") from wrong
    except (EOFError, zlib.error) as cut:
        raise Unreadable(f"{path}: the packed file is cut off or damaged: copy it again") from cut
    except OSError as refused:
        raise Unreadable(f"{path}: {refused.strerror or refused}") from refused
    except BadTrace as wrong:
        raise Unreadable(f"{path}: {wrong}") from wrong


def is_recording(path: str) -> bool:
    """Returns whether `path` is a recording, by its name or its first bytes, or a folder. Raises Unreadable."""
    try:
        if Path(path).is_dir() or path.endswith(SUFFIX):
            return True
        with open(path, "rb") as file:
            return file.read(len(HEAD_BYTES)) == HEAD_BYTES
    except OSError as refused:
        raise Unreadable(f"{path}: {refused.strerror}") from refused


def _recorded(path: str, report: Callable[[str], object]) -> Iterator[Arrival]:
    for request in requests(batches_of(path, report)):
        decided, ended = request.decided, request.ended
        prompt = ended.prompt if ended is not None else None
        blocks = memoryview(decided.hashes).cast("Q").tolist()
        yield Arrival(
            request.at,
            decided.prompt_tokens if prompt is None else prompt,
            (ended.completion or 0) if ended is not None else 0,
            blocks,
            decided.block_tokens,
            decided.model,
        )
