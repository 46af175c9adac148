"""What the workers of this replica teach the prefix index, on its way to other replicas, and what others teach this one's.

The updates wait in order until the next message. If more than `BACKLOG_BYTES` wait, because the store is away, the oldest are dropped:
that only lowers the hit rate.
"""

from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.endpoints.replicas.places import Places
from workers.endpoints.replicas.wire import UPDATES_MAX, Blocks

BACKLOG_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 16  # updates in one message
UPDATE_BYTES = 32  # of a message, besides the hashes

Hashes = NDArray[np.uint64]


class Index(Protocol):
    """The part of the index writer that is used here."""

    def insert(self, hashes: Hashes, owners: NDArray[np.uint16], age: int) -> None: ...

    def forget(self, hashes: Hashes, owner: int) -> None: ...


class Taught:
    """Passes updates on to the index, and keeps a copy for other replicas. `dropped`: updates that no message will have."""

    def __init__(self, index: Index, places: Places) -> None:
        self._index = index
        self._places = places
        self._waiting: deque[Blocks] = deque()
        self._bytes = 0
        self.dropped = 0

    def insert(self, hashes: Hashes, owners: NDArray[np.uint16], age: int) -> None:
        """Inserts blocks into the index, as `shm.prefix_writer` does; one owner per block."""
        self._index.insert(hashes, owners, age)
        if not len(owners):
            return
        cuts = np.flatnonzero(owners[1:] != owners[:-1]) + 1
        first = 0
        for end in (*cuts.tolist(), len(owners)):
            self._keep(int(owners[first]), hashes[first:end], forget=False)
            first = end

    def forget(self, hashes: Hashes, owner: int) -> None:
        """Takes blocks of one owner out of the index."""
        self._index.forget(hashes, owner)
        self._keep(owner, hashes, forget=True)

    def take(self) -> list[Blocks]:
        """Returns the oldest updates, as many as one message may have."""
        taken: list[Blocks] = []
        size = 0
        waiting = self._waiting
        while waiting and size < MESSAGE_BYTES and len(taken) < UPDATES_MAX:
            update = waiting.popleft()
            size += len(update.hashes) + UPDATE_BYTES
            taken.append(update)
        self._bytes -= size
        return taken

    def learn(self, updates: list[Blocks], age: int) -> int:
        """Applies the updates of another replica. Returns how many were of endpoints that this replica does not know."""
        owners, unknown = self._places.owners, 0
        hashes: list[bytes] = []
        held: list[int] = []
        counts: list[int] = []
        for update in updates:
            owner = owners.get(update.endpoint)
            if owner is None:
                unknown += 1
            elif update.forget:
                self._index.forget(np.frombuffer(update.hashes, "<u8"), owner)
            else:
                hashes.append(update.hashes)
                held.append(owner)
                counts.append(len(update.hashes) // 8)
        if hashes:
            whose = np.repeat(np.array(held, np.uint16), counts)
            self._index.insert(np.frombuffer(b"".join(hashes), "<u8"), whose, age)
        return unknown

    def _keep(self, owner: int, hashes: Hashes, *, forget: bool) -> None:
        key = self._places.keys.get(owner)
        if key is None:
            return
        for at in range(0, len(hashes), MESSAGE_BYTES // 8):
            update = Blocks(key, hashes[at : at + MESSAGE_BYTES // 8].astype("<u8", copy=False).tobytes(), forget)
            self._waiting.append(update)
            self._bytes += len(update.hashes) + UPDATE_BYTES
        while self._bytes > BACKLOG_BYTES:
            self._bytes -= len(self._waiting.popleft().hashes) + UPDATE_BYTES
            self.dropped += 1
