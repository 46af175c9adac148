"""Keeps the held blocks of all endpoints over restarts of the picker, in a snapshot in `--state-dir`.

    held-blocks     header | places, u32 | keys, u64 | links, u64 | metas, u64 | streams, msgpack | footer

    header          magic | version | layout | entries of the table of links | fingerprint of the secret

The snapshot has the used entries of the table of links, and how far each stream was read. The index of held blocks is made from the links.
Both parts are copied between two turns of the loop, so they show the same moment. A thread writes the copy (`snapshot_file`): every EVERY_S
if something has changed, when the picker begins to stop, and at its end.

A loaded snapshot must be confirmed. An endpoint is precise only after its stream has continued: either a replay begins with the last
message that was applied, or the next live message has the next number. Otherwise the endpoint's entries are dropped, as after any gap. They
are also dropped if the endpoint does not come back within KEEP_S.

A snapshot is refused, with one line in the log, if it is damaged, too old, or made for another secret, size or list of tiers.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from shm.held_blocks import HeldWriter
from shm.link_table import Links
from workers.shared.documents import Identity
from workers.supervisor.endpoints.snapshot_file import RefusedSnapshot, Snapshot, age, check_owners, trailer

SNAPSHOT: Final = "held-blocks"
EVERY_S: Final = 60.0
CLOSE_S: Final = 3.0  # a little less than the time that the parent gives this process to end
KEEP_S: Final = 60.0  # counted from the time at which discovery first names endpoints
STREAMS_BYTES_MAX: Final = 64 << 20

VERSION: Final = 1
MAGIC: Final = b"EPPHELD\0"
HEADER: Final = Struct("=8sIQQ16s")
COLUMNS: Final = (np.dtype("<u4"), np.dtype("<u8"), np.dtype("<u8"), np.dtype("<u8"))  # the columns of `Links`
FAULTS: Final = (
    (3, "it has room for {0} links, and this picker for {1} (--kv-index-blocks)"),
    (2, "the table of links had another layout when it was written"),
    (4, "it was written with another prefix secret"),
)
ENTRY_BYTES: Final = sum(column.itemsize for column in COLUMNS)

log = structlog.get_logger()


class SavedStream(msgspec.Struct, array_like=True, frozen=True):
    """The state of one endpoint's stream in a snapshot.

    `owners`: the endpoint's owner ids, one per tier, then the id for speculative blocks. `position`, `check`: the last applied message
    (`shm.stream_positions`).
    `block_tokens`: tokens per block. `group`: the group of KV caches whose blocks are used; None without groups. `remark`: see `Stream`.
    """

    owners: list[int]
    position: int
    check: int
    block_tokens: int
    group: int | None
    remark: str


class Trailer(msgspec.Struct, array_like=True, frozen=True):
    """The part of the file after the links. `written_at`: Unix time in seconds. `adapters`: hash words of the adapters that events have
    named.
    """

    written_at: float
    tiers: list[str]
    adapters: list[int]
    streams: list[tuple[Identity, SavedStream]]


class Loaded(NamedTuple):
    """The content of a snapshot."""

    streams: Mapping[Identity, SavedStream]
    adapters: Sequence[int]
    links: Links


class HeldState:
    """Saves and loads the snapshot of one picker."""

    def __init__(self, folder: str, writer: HeldWriter, tiers: Sequence[str], *, seed: int, wall: Callable[[], float] = time.time) -> None:
        """`seed`: the prefix secret. `wall` returns Unix time in seconds.

        `tiers`: the names of the tiers, in the order of the owner ids.
        """
        self._writer = writer
        self._tiers = list(tiers)
        self._wall = wall
        schema = writer.links.schema
        fingerprint = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=16, person=b"held blocks").digest()
        header = (MAGIC, VERSION, schema.layout_hash, schema.entries, fingerprint)
        self._file = Snapshot(Path(folder, SNAPSHOT), "the index of held blocks", HEADER, lambda: header, FAULTS)
        self._saved = -1
        self._due = 0.0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def load(self) -> Loaded | None:
        """Reads the snapshot. Returns None without a snapshot. If the snapshot cannot be used, logs the reason and returns None."""
        return self._file.loaded(self._load)

    def look(self, now: float, stopping: bool, kept: Callable[[], Trailer]) -> None:
        """Starts to save if it is time. Call it between two turns of the loop.

        `kept` returns the trailer. The `written_at` and `tiers` of that trailer are replaced.
        """
        if not self._due:
            self._due = now + EVERY_S
        begins_to_stop = stopping and not self._stopping
        if (now < self._due and not begins_to_stop) or self._writing:
            return
        self._stopping = stopping
        self._due = now + EVERY_S
        self._save(kept)

    def wait(self, seconds: float = CLOSE_S) -> None:
        """Waits until the save under way has ended, for `seconds` at most."""
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))

    def close(self, kept: Callable[[], Trailer]) -> None:
        """Saves the last snapshot. Gives up after CLOSE_S."""
        until = time.monotonic() + CLOSE_S
        self.wait()
        if not self._writing:
            self._save(kept)
            self.wait(until - time.monotonic())

    @property
    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _save(self, kept: Callable[[], Trailer]) -> None:
        """Copies the links and the trailer, and starts a thread that writes them. Does nothing if nothing has changed."""
        changes = self._writer.changes
        if changes == self._saved:
            return
        present = msgspec.structs.replace(kept(), written_at=self._wall(), tiers=self._tiers)
        links = self._writer.links.copy()
        self._thread = threading.Thread(target=self._write, args=(links, present, changes), daemon=True)
        self._thread.start()

    def _write(self, links: Links, kept: Trailer, changes: int) -> None:
        with self._file.saving():
            self._file.write([column.tobytes() for column in links], kept)
            self._saved = changes

    def _load(self) -> Loaded:
        entries = self._writer.links.schema.entries
        content = self._file.read(entries * ENTRY_BYTES + STREAMS_BYTES_MAX)
        kept, end = trailer(content, Trailer)
        count, rest = divmod(end - HEADER.size, ENTRY_BYTES)
        if end < HEADER.size or rest or count > entries:
            raise RefusedSnapshot("it is damaged: its parts do not add up")
        if kept.tiers != self._tiers:
            before, now = (", ".join(tiers) for tiers in (kept.tiers, self._tiers))
            raise RefusedSnapshot(f"its tiers are {before}, and this picker's {now} (kvCacheBackendConfigs)")
        owners = [stream.owners for _, stream in kept.streams]
        check_owners([owner for each in owners for owner in each])
        if any(len(each) != len(self._tiers) + 1 for each in owners):
            raise RefusedSnapshot("it is damaged: its owner ids are not valid")
        age_s = age(kept.written_at, self._wall())
        links = Links(*_columns(content, count))
        if count and int(links.places.max()) >= entries:
            raise RefusedSnapshot("it is damaged: it has entries beyond the end of the table")
        log.info(
            "kv-events: held blocks taken over; each endpoint's stream has to confirm them",
            file=str(self._file.path),
            blocks=count,
            endpoints=len(kept.streams),
            age_s=round(age_s, 1),
        )
        return Loaded(dict(kept.streams), kept.adapters, links)


def _columns(content: bytes, count: int) -> Iterator[NDArray[Any]]:
    """Returns the columns of a file with `count` links."""
    at = HEADER.size
    for kind in COLUMNS:
        yield np.frombuffer(content, kind, count, at)
        at += count * kind.itemsize
