"""Decides which replicas get copies of the prefix index and of the latency model, how many, and which replica sends them.

A replica that joins says in each message that it wants a copy, until the last slice has come or COPY_S passed without one. Among the
replicas that have the same secret and want no copy themselves, the replica with the first name sends the copy: one slice per tick, in turns
if several replicas wait. At most COPIES_MAX copies begin in COPIES_S, so that forged wishes cost little.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain

from shm.prefix_writer import IndexWriter
from workers.replicas.copying import SLICE_BUCKETS, Model, Models, merge, model_parts, read, slices, take_over
from workers.replicas.endpoint_places import Places
from workers.replicas.others import Others
from workers.replicas.wire import Message, NotUsable

COPY_S = 10.0  # how long a replica waits for the first slice or the next slice
AGAIN_S = 10.0  # a replica gets another copy only after this time
COPIES_MAX, COPIES_S = 16, 60.0


class Joining:
    """Reads a copy of another replica's prefix index when this replica joins, and sends copies of its own index to other joining replicas.

    `entries`: the number of entries from copies.
    """

    def __init__(self, index: IndexWriter, places: Places, others: Others, *, secret: int, pools: int = 1) -> None:
        """`secret`: the fingerprint of the seed of block hashes. `pools`: the largest number of this replica's pools; each pool has a
        model.
        """
        self.wants = True
        self.entries = 0
        self._index = index
        self._places = places
        self._others = others
        self._secret = secret
        self._until = float("inf")  # when this replica gives up its wish for a copy
        self.models: Models | None = None  # the latency models, once they can be copied
        self.adopted = 0  # how often this replica took over the model of another replica
        self._slices_left = 2 * (index.schema.buckets // SLICE_BUCKETS + 1 + pools)  # for two senders, because the first may die
        self._sending: dict[str, Iterator[bytes]] = {}  # name of the joining replica -> the remaining slices
        self._begun: deque[tuple[str, float]] = deque()

    def begin(self, now: float) -> None:
        """Notes that other replicas receive the messages of this replica from now on."""
        self._until = now + COPY_S

    def look(self, now: float) -> None:
        """Gives up the wish for a copy if no replica sends one."""
        if self.wants and now > self._until:
            self.wants = False

    def take(self, data: bytes, now: float, tick: int) -> None:
        """Merges one part of another replica's copy, if this replica wants a copy."""
        if not self.wants or self._slices_left <= 0:
            return
        self._slices_left -= 1
        try:
            part = read(data)
            if isinstance(part, Model):
                if self.models is not None and take_over(part, self.models, self._places):
                    self.adopted += 1
                return
            added, last = merge(part, self._index, self._places, self._secret, tick)
        except NotUsable as refused:
            self._others.refused[refused.why] += 1
            return
        self.entries += added
        self._until = now + COPY_S
        self.wants = not last

    def asked(self, message: Message, now: float, tick: int) -> None:
        """Begins a copy for the sender of a message that asks for one, if this replica is the one that sends."""
        name = message.name
        if not message.wants or name in self._sending or not self._first(message):
            return
        while self._begun and now - self._begun[0][1] >= COPIES_S:
            self._begun.popleft()
        if any(name == other and now - at < AGAIN_S for other, at in self._begun):
            return  # the replica may have sent this before it got the last slice
        if len(self._begun) >= COPIES_MAX:
            self._others.refused["copies"] += 1
            return
        self._begun.append((name, now))
        index = slices(self._index, self._places, self._secret, tick)
        self._sending[name] = index if self.models is None else chain(model_parts(self.models, self._places), index)

    def next_slice(self) -> tuple[str, bytes] | None:
        """Returns the next slice and the name of its receiver. Returns None if no replica waits, or if the next buckets are empty."""
        if not self._sending:
            return None
        name = next(iter(self._sending))
        left = self._sending.pop(name)
        if name not in self._others.live or (part := next(left, None)) is None:
            return None
        self._sending[name] = left  # at the end of the queue
        return (name, part) if part else None

    def _first(self, message: Message) -> bool:
        """Returns whether this replica is the one that sends copies."""
        if self.wants or message.secret != self._secret:
            return False
        return all(
            self._others.name < name or other.wants or other.secret != self._secret
            for name, other in self._others.live.items()
            if name != message.name
        )
