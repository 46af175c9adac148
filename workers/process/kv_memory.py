"""Describes the shared memory that the kv-events process writes: index of held blocks, links, positions and documents.

part           content                                                  read by
kv_index       which endpoint holds which block, in which tier          workers
kv_links       engine's hash of a block -> picker's key of it           only a successor of the process
kv_positions       how far each stream has come, the process's heartbeat         workers, parent, pages
kv_documents   streams: which endpoints are precise, and why; counts    workers, pages
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from shm.documents import DocumentSchema
from shm.held_blocks import HeldWriter, schemas
from shm.layout import Schema
from shm.segment import Region
from shm.stream_positions import StreamPositions, StreamPositionsSchema

STREAMS, COUNTS = range(2)  # documents
STREAM_BYTES: Final = 1024  # per endpoint
ADAPTERS_BYTES: Final = 64 << 10
COUNTS_BYTES: Final = 4 << 10
CURRENT: Final = 4  # the number of fields of `KvCounts` that are current numbers


class KvCounts(msgspec.Struct, array_like=True, frozen=True):
    """The counts of the kv-events process and its predecessors since the start of the picker.

    The last CURRENT fields, such as `entries`, are current numbers.
    """

    messages: int = 0
    malformed: int = 0
    stored: int = 0
    removed: int = 0
    stores_skipped: int = 0
    removals_skipped: int = 0
    suppressed: int = 0
    forwarded: int = 0
    evictions: int = 0
    reconnections: int = 0
    gaps: int = 0
    restarts: int = 0
    replays_failed: int = 0
    dropped: int = 0
    errors: int = 0
    waiting: int = 0
    subscribers: int = 0
    entries: int = 0
    links: int = 0

    def plus(self, other: "KvCounts") -> "KvCounts":
        """Returns the sums of the counts of both, except for the last CURRENT fields, which come from `other`."""
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        sums = [a + b for a, b in zip(mine, theirs, strict=True)]
        return KvCounts(*sums[:-CURRENT], *theirs[-CURRENT:])


class KvLayout:
    """Computes the schemas of the parts. `blocks`: how many blocks index and links can hold. `slots`: the rows of the endpoint table."""

    def __init__(self, blocks: int, slots: int) -> None:
        self.blocks = blocks
        self.index, self.links = schemas(blocks)
        self.positions = StreamPositionsSchema(slots)
        self.documents = DocumentSchema((STREAM_BYTES * slots + ADAPTERS_BYTES, COUNTS_BYTES))

    @property
    def parts(self) -> Mapping[str, Schema]:
        return {"kv_index": self.index, "kv_links": self.links, "kv_positions": self.positions, "kv_documents": self.documents}


class KvMemory:
    """Gives access to the mapped parts."""

    def __init__(self, layout: KvLayout, parts: Mapping[str, Region]) -> None:
        self.layout = layout
        self.index = parts["kv_index"]
        self.documents = parts["kv_documents"]
        self.positions = StreamPositions(layout.positions, parts["kv_positions"])
        self._links = parts["kv_links"]

    def writer(self) -> HeldWriter:
        """Returns the writer of the index and the links, for the kv-events process."""
        return HeldWriter(self.layout.index, self.index, self.layout.links, self._links)
