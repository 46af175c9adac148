"""What the workers of this replica teach the prefix index, on its way to other replicas, and what others teach this one's.

The updates wait in order until the next message. If more than `BACKLOG_BYTES` wait, because the store is away, the oldest are dropped:
that only lowers the hit rate.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.endpoints.replicas.places import Places
from workers.endpoints.replicas.wire import UPDATES_MAX, Blocks

BACKLOG_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 16  # updates in one message
UPDATE_BYTES = 32  # of a message, besides the hashes
COLLECTED_MAX = 1 << 14  # hashes; more are sorted at once

Hashes = NDArray[np.uint64]


class Index(Protocol):
    """The part of the index writer that is used here."""

    def insert(self, hashes: Hashes, owners: NDArray[np.uint16], age: int) -> None: ...

    def forget(self, hashes: Hashes, owner: int) -> None: ...


class Taught:
    """Passes updates on to the index, and keeps a copy for other replicas. `dropped`: updates that no message will have.

    Updates in both directions are only collected at first. `take` and `apply` handle all of one tick together: for an array of hashes,
    each step costs as much as for one hash.
    """

    def __init__(self, index: Index, places: Places) -> None:
        self._index = index
        self._places = places
        self._collected: list[tuple[Hashes, NDArray[np.uint16]]] = []  # inserts since the last `take`
        self._collected_hashes = 0
        self._waiting: deque[Blocks] = deque()
        self._bytes = 0
        self._learned: list[Blocks] = []  # of others, since the last `apply`
        self.dropped = 0
        self.on_insert: Callable[[], None] = lambda: None  # called after each insert

    def insert(self, hashes: Hashes, owners: NDArray[np.uint16], age: int) -> None:
        """Inserts blocks into the index, as `shm.prefix_writer` does; one owner per block."""
        self._index.insert(hashes, owners, age)
        self._collected.append((hashes, owners))
        self._collected_hashes += len(hashes)
        if self._collected_hashes > COLLECTED_MAX:
            self._keep_collected()
        self.on_insert()

    def forget(self, hashes: Hashes, owner: int) -> None:
        """Takes blocks of one owner out of the index."""
        self._index.forget(hashes, owner)
        self._keep_collected()
        self._keep(owner, hashes, forget=True)

    def take(self) -> list[Blocks]:
        """Returns the oldest updates, as many as one message may have."""
        self._keep_collected()
        taken: list[Blocks] = []
        size = 0
        waiting = self._waiting
        while waiting and size < MESSAGE_BYTES and len(taken) < UPDATES_MAX:
            update = waiting.popleft()
            size += len(update.hashes) + UPDATE_BYTES
            taken.append(update)
        self._bytes -= size
        return taken

    def learn(self, updates: list[Blocks]) -> None:
        """Collects the updates of another replica until `apply`."""
        self._learned += updates

    def apply(self, age: int) -> None:
        """Applies the collected updates of others to the index, but those of endpoints that this replica does not know."""
        if not self._learned:
            return
        learned, self._learned = self._learned, []
        owner_of = self._places.owners.get
        hashes: list[bytes] = []
        owners: list[int] = []
        for update in learned:
            owner = owner_of(update.endpoint)
            if owner is None:
                continue
            if not update.forget:
                hashes.append(update.hashes)
                owners.append(owner)
                continue
            self._insert_learned(hashes, owners, age)
            hashes, owners = [], []
            self._index.forget(np.frombuffer(update.hashes, "<u8"), owner)
        self._insert_learned(hashes, owners, age)

    def _insert_learned(self, hashes: list[bytes], owners: list[int], age: int) -> None:
        if hashes:
            whose = np.array(owners, np.uint16).repeat([len(part) >> 3 for part in hashes])
            self._index.insert(np.frombuffer(b"".join(hashes), "<u8"), whose, age)

    def _keep_collected(self) -> None:
        """Puts the collected inserts into the queue: one update for each endpoint, so that a message names it once."""
        collected, self._collected, self._collected_hashes = self._collected, [], 0
        if not collected:
            return
        hashes = np.concatenate([part for part, _ in collected])
        owners = np.concatenate([part for _, part in collected])
        order = owners.argsort(kind="stable")
        hashes, owners = hashes[order], owners[order]
        ends = [*((owners[1:] != owners[:-1]).nonzero()[0] + 1).tolist(), len(owners)]
        first = 0
        for end in ends:
            self._keep(int(owners[first]), hashes[first:end], forget=False)
            first = end

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
