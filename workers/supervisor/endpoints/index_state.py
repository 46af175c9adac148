"""Keeps the prefix index over restarts of the picker, as a snapshot in a folder (`--state-dir`). Only one picker may use a folder at a
time.

    prefix-secret   the seed of block hashes, unless --prefix-secret-file gives it; mode 0600 (`prefix_secret`)
    prefix-index    header | slice of buckets: entries, ages | ... | owners, msgpack | footer

    header          magic | version | block tokens | layout | entries | fingerprint of the secret
    footer          as in `snapshot_file`, which writes and reads the file

The file of a picker of several pools is `prefix-index-of-pools`. Owners and block tokens are by pool in this file, and the block tokens in
the header are 0. Entries of a pool that is gone, or has changed its blocks, are dropped.

The supervisor writes a snapshot every `EVERY_S` if the index changed, when the picker begins to stop, and when the supervisor ends. It
writes to a temporary file, slice by slice (the event loop copies a slice, a thread writes it), then syncs and renames the file. So a
snapshot is always complete, and the loop never waits for the disk. Each slice shows its buckets at the time of the copy. The list of owners
names only owners that belonged to the same endpoint before the first slice was copied and after the last one was.

The supervisor reads the snapshot before it knows any endpoint, and takes all of it or none. It refuses a snapshot that is truncated or
damaged, has another secret, layout or version, or is older than `AGE_MAX_S`, and logs one line. Entries have aged by the wall-clock time
since the snapshot. `EndpointTable` frees the entries of endpoints that discovery does not find again.

No failure here ends the picker: it starts with an empty index, or runs without snapshots, and logs this once.
"""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from struct import Struct

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from shm.prefix_index import WAYS, IndexSchema
from shm.prefix_writer import IndexWriter
from workers.process.prefix_secret import create_private
from workers.shared.bus import AGE_TICKS
from workers.shared.documents import Identity, Known
from workers.supervisor.endpoints.snapshot_file import RefusedSnapshot, Snapshot, age, append, check_owners, finish, publish, trailer

SNAPSHOT = "prefix-index"
SNAPSHOT_OF_POOLS = "prefix-index-of-pools"
EVERY_S = 60.0
LOOK_S = 0.25
CLOSE_S = 3.0  # a little less than the time that the parent gives the supervisor to end
SLICE_BUCKETS = 4096
OWNERS_BYTES_MAX = 64 << 20

VERSION = 2
MAGIC = b"EPPINDEX"
HEADER = Struct("=8sIIQQ16s")
ENTRY_BYTES = 12
FAULTS = (
    (4, "it has {0} entries, and this picker's index {1} (--index-entries)"),
    (3, "the index had another layout when it was written"),
    (2, "its blocks have {0} tokens, and this picker's {1} (blockSizeTokens)"),
    (5, "it was written with another prefix secret"),
)

log = structlog.get_logger()


class Owners(msgspec.Struct, array_like=True, frozen=True):
    """The trailer of the file, after the slices: the owner ids of the endpoints, and the time of the snapshot."""

    written_at: float  # Unix time in seconds
    tick: int  # the same time in ticks of the index's clock
    owners: list[tuple[Identity, int]]


class OwnersOfPools(msgspec.Struct, array_like=True, frozen=True):
    """The trailer of the file of several pools. `block_tokens`: the tokens per block, by the name of the pool. The other fields are those
    of `Owners`.
    """

    written_at: float
    tick: int
    owners: list[tuple[Known, int]]
    block_tokens: dict[str, int]


class IndexState:
    """Saves and loads the snapshot of one picker. Call `load` first, then `run` as a background task, and `close` at the end."""

    def __init__(
        self,
        folder: str,
        index: IndexWriter,
        *,
        seed: int,
        block_tokens: Callable[[], Mapping[str, int]],
        ticks: Callable[[], int],
        wall: Callable[[], float] = time.time,
        several: bool = False,
    ) -> None:
        """`seed`: the prefix secret. `block_tokens` returns the present number of tokens in a block of each pool, by the pool's name, which
        is "" if the picker has one pool. `ticks` returns the time on the index's clock, `wall` Unix time in seconds. `several`: whether the
        picker has several pools.
        """
        self._several = several
        self._file = Snapshot(Path(folder, SNAPSHOT_OF_POOLS if several else SNAPSHOT), "the prefix index", HEADER, self._header, FAULTS)
        self._index = index
        self._schema: IndexSchema = index.schema
        self._fingerprint = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=16, person=b"prefix index").digest()
        self._block_tokens = block_tokens
        self._ticks = ticks
        self._wall = wall
        # The value of `index.changes` at the last snapshot. It is -1 if the index has entries of a predecessor, which may not have saved
        # them.
        self._saved = -1 if index.size() else index.changes
        self._writing = asyncio.Lock()

    def load(self) -> dict[Known, int]:
        """Fills the index from the snapshot. Returns the owner ids of the endpoints in the snapshot.

        Returns {} without a snapshot. If the snapshot cannot be used, returns {} and logs the reason.
        """
        return self._file.loaded(self._load) or {}

    async def run(self, owners: Callable[[], Mapping[Known, int]], stopping: Callable[[], bool]) -> None:
        """Saves a snapshot every EVERY_S, and once more when the picker begins to stop. It runs until its task is cancelled."""
        loop = asyncio.get_running_loop()
        due, saved_at_stop = loop.time() + EVERY_S, False
        while True:
            await asyncio.sleep(LOOK_S)
            stops = stopping()
            if loop.time() >= due or (stops and not saved_at_stop):
                due, saved_at_stop = loop.time() + EVERY_S, stops
                await self.save(owners)

    async def close(self, owners: Callable[[], Mapping[Known, int]]) -> None:
        """Saves the last snapshot. Gives up after CLOSE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.save(owners)

    async def save(self, owners: Callable[[], Mapping[Known, int]]) -> None:
        """Writes a snapshot if the index has changed since the last one. Of several failures in a row, logs only the first."""
        async with self._writing:
            changes = self._index.changes
            if changes == self._saved:
                return
            with self._file.saving():
                await self._write(owners)
                self._saved = changes

    async def _write(self, owners: Callable[[], Mapping[Known, int]]) -> None:
        temporary = self._file.path.with_name(f"{self._file.path.name}.tmp")
        descriptor = await asyncio.to_thread(create_private, temporary)
        try:
            first = dict(owners())
            checksum = await asyncio.to_thread(append, descriptor, [self._file.header()], 0)
            for bucket in range(0, self._schema.buckets, SLICE_BUCKETS):
                part = self._index.copy(bucket, SLICE_BUCKETS)
                checksum = await asyncio.to_thread(append, descriptor, part, checksum)
            last = owners()
            kept = self._kept([(known, owner) for known, owner in first.items() if last.get(known) == owner])
            await asyncio.to_thread(finish, descriptor, kept, checksum)
            await asyncio.to_thread(publish, descriptor, temporary, self._file.path)
        # A cancellation does not close the file, because a thread may still write to it. The end of the process closes it.
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):  # frees the space on a full disk
                os.unlink(temporary)
            raise
        os.close(descriptor)

    def _kept(self, owners: list[tuple[Known, int]]) -> Owners | OwnersOfPools:
        at = self._wall(), self._ticks()
        if self._several:
            return OwnersOfPools(*at, owners, dict(self._block_tokens()))
        return Owners(*at, [(identity, owner) for (_, identity), owner in owners])

    def _owners_in(self, kept: Owners | OwnersOfPools) -> dict[Known, int]:
        """Returns the owners of a trailer that still have usable entries. Raises RefusedSnapshot."""
        check_owners([owner for _, owner in kept.owners])
        if isinstance(kept, Owners):
            return {("", identity): owner for identity, owner in kept.owners}
        now, then = self._block_tokens(), kept.block_tokens
        return {known: owner for known, owner in kept.owners if then.get(known[0]) == now.get(known[0], then.get(known[0]))}

    def _header(self) -> tuple[bytes, int, int, int, int, bytes]:
        schema, block_tokens = self._schema, 0 if self._several else self._block_tokens()[""]
        return MAGIC, VERSION, block_tokens, schema.layout_hash, schema.entries, self._fingerprint

    def _load(self) -> dict[Known, int]:
        content = self._file.read(self._schema.entries * ENTRY_BYTES + OWNERS_BYTES_MAX)
        kept: Owners | OwnersOfPools
        kept, slices_end = trailer(content, OwnersOfPools) if self._several else trailer(content, Owners)
        if slices_end != HEADER.size + self._schema.entries * ENTRY_BYTES:
            raise RefusedSnapshot("it is damaged: its parts do not add up")
        owners = self._owners_in(kept)
        ids = list(owners.values())
        age_s = age(kept.written_at, self._wall())
        entries, ages = self._arrays(content)
        self._index.load(entries, ages, ids, self._ticks() - int(max(age_s, 0.0) * AGE_TICKS) - kept.tick)
        self._saved = self._index.changes
        log.info(
            "prefix index taken over", file=str(self._file.path), entries=self._index.size(), endpoints=len(ids), age_s=round(age_s, 1)
        )
        return owners

    def _arrays(self, content: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Returns the entries and the ages of all slices."""
        entries, ages = [], []
        at = HEADER.size
        for bucket in range(0, self._schema.buckets, SLICE_BUCKETS):
            count = min(SLICE_BUCKETS, self._schema.buckets - bucket) * WAYS
            entries.append(np.frombuffer(content, np.uint64, count, at))
            at += count * 8
            ages.append(np.frombuffer(content, np.uint32, count, at))
            at += count * 4
        return np.concatenate(entries), np.concatenate(ages)
