"""Passes updates of the prefix index from the workers of this replica to other replicas, and from other replicas to this one's index.

Other replicas get only news: blocks that this index did not have, or that were unused for `STALE_TICKS`. So a prefix that all replicas use
all the time is sent once per `STALE_TICKS`, and not with each request.

The updates wait in order until the next message. If more than `BACKLOG_BYTES` wait, because the store is away, the oldest are dropped. This
only lowers the hit rate.
"""

from array import array
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shm.prefix_writer import IndexWriter
from workers.replicas.endpoint_places import Places
from workers.replicas.wire import RUNS_MAX, Blocks

STALE_TICKS: Final = 64  # ticks of the index's clock: 4 s
BACKLOG_BYTES: Final = 1 << 20
MESSAGE_BYTES: Final = 1 << 16  # hashes in one message
UPDATE_BYTES: Final = 32  # bytes of memory per update, besides the hashes
KEY_BYTES: Final = 8  # bytes of an endpoint's key

Hashes = NDArray[np.uint64]


class Update:
    """Some runs of hashes, as in `wire.Blocks`. `forget`: whether the blocks are taken back."""

    __slots__ = ("counts", "endpoints", "forget", "hashes")

    def __init__(self, endpoints: list[int], counts: list[int], hashes: bytes, forget: bool) -> None:
        self.endpoints, self.counts = array("Q", endpoints).tobytes(), array("H", counts).tobytes()
        self.hashes, self.forget = hashes, forget


class Taught:
    """Passes updates on to the index, and keeps the news for other replicas. `dropped`: the number of updates that were dropped.

    Collects the updates of other replicas. `apply` handles all updates of one turn together, because each step costs as much for one hash
    as for an array.
    """

    def __init__(self, index: IndexWriter, places: Places) -> None:
        self._index = index
        self._places = places
        self._waiting: deque[Update] = deque()
        self._bytes = 0
        self._learned: list[tuple[Blocks, bool]] = []  # blocks of other replicas since the last `apply`, and whether they are taken back
        self.dropped = 0

    def insert(self, hashes: Hashes, owners: NDArray[np.uint16], age: int) -> None:
        """Inserts blocks into the index, as `shm.prefix_writer` does; one owner per block."""
        ids, counts, news = self._index.insert_and_tell(hashes, owners, age, STALE_TICKS)
        if ids:
            self._keep(ids, counts, news, forget=False)

    def forget(self, hashes: Hashes, owner: int) -> None:
        """Takes blocks of one owner out of the index."""
        self._index.forget(hashes, owner)
        self._keep([owner], [len(hashes)], hashes.astype("<u8", copy=False).tobytes(), forget=True)

    def take(self) -> tuple[Blocks | None, Blocks | None]:
        """Returns the oldest updates, as many as one message may have: the learned blocks, then the blocks that were taken back."""
        if not self._waiting:
            return None, None
        return self._take(forget=False), self._take(forget=True)

    def learn(self, learned: Blocks | None, taken_back: Blocks | None) -> None:
        """Collects the updates of another replica until `apply`."""
        if learned is not None:
            self._learned.append((learned, False))
        if taken_back is not None:
            self._learned.append((taken_back, True))

    def apply(self, age: int) -> None:
        """Applies the collected updates of other replicas to the index, except updates of endpoints that this replica does not know."""
        if not self._learned:
            return
        learned, self._learned = self._learned, []
        together: list[Blocks] = []
        for blocks, forget in learned:
            if not forget:
                together.append(blocks)
                continue
            self._insert_learned(together, age)
            together = []
            names = np.frombuffer(blocks.endpoints, "<u8").tolist()
            owners = np.array([self._places.owners.get(name, 0) for name in names], np.uint16)
            owners = owners.repeat(np.frombuffer(blocks.counts, "<u2"))
            known = owners != 0
            self._index.forget(np.frombuffer(blocks.hashes, "<u8")[known], owners[known])
        self._insert_learned(together, age)

    def _insert_learned(self, learned: list[Blocks], age: int) -> None:
        if not learned:
            return
        names = b"".join([blocks.endpoints for blocks in learned])
        counts = b"".join([blocks.counts for blocks in learned])
        hashes = b"".join([blocks.hashes for blocks in learned])
        self._index.insert_named(hashes, self._places.owners, names, counts, age)

    def _take(self, *, forget: bool) -> Blocks | None:
        """Returns the oldest updates of one kind, up to the first one of the other kind."""
        endpoints, counts, hashes = b"", b"", b""
        waiting = self._waiting
        while waiting and waiting[0].forget == forget and len(hashes) < MESSAGE_BYTES:
            update = waiting[0]
            if len(endpoints) + len(update.endpoints) > RUNS_MAX * KEY_BYTES:
                break
            waiting.popleft()
            self._bytes -= len(update.hashes) + UPDATE_BYTES
            endpoints += update.endpoints
            counts += update.counts
            hashes += update.hashes
        return Blocks(endpoints, counts, hashes) if hashes else None

    def _keep(self, owners: list[int], counts: list[int], hashes: bytes, *, forget: bool) -> None:
        """Puts updates into the queue, in parts that one message can have. An owner without endpoint gets the key 0, which no endpoint
        has.
        """
        endpoints = [self._places.keys.get(owner, 0) for owner in owners]
        if len(hashes) <= MESSAGE_BYTES and len(endpoints) <= RUNS_MAX:
            self._put(Update(endpoints, counts, hashes, forget))
            return
        at = 0
        for endpoint, count in zip(endpoints, counts, strict=True):
            end = at + 8 * count
            for first in range(at, end, MESSAGE_BYTES):
                part = hashes[first : min(first + MESSAGE_BYTES, end)]
                self._put(Update([endpoint], [len(part) >> 3], part, forget))
            at = end

    def _put(self, update: Update) -> None:
        self._waiting.append(update)
        self._bytes += len(update.hashes) + UPDATE_BYTES
        while self._bytes > BACKLOG_BYTES:
            oldest = self._waiting.popleft()
            self._bytes -= len(oldest.hashes) + UPDATE_BYTES
            self.dropped += 1
