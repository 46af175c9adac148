"""Attaches the shared memory of one instance, and makes the readers of its parts."""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import numpy as np

from shm import observe
from shm.areas import Areas
from shm.documents import DocumentReader, DocumentSchema
from shm.flow_areas import FlowAreas, FlowSchema
from shm.layout import Schema
from shm.observe import Life, Seen
from shm.prefix_index import DROPPED, EVICTIONS, FAR_MARK, OWNER_LIVE, OWNER_MASK, OWNER_RETIRED, WAYS, IndexSchema
from shm.remote_area import RemoteArea, RemoteSchema
from shm.segment import Region, Segment, SegmentError
from shm.series import SeriesSchema
from shm.series_reader import SeriesReader
from shm.stream_positions import StreamPositions, StreamPositionsSchema
from workers.supervisor.pages.kv_events import KvFigures
from workers.supervisor.pages.state.look import IndexLook

S = TypeVar("S", bound=Schema)


class Attached:
    """The segments of one instance. Raises SegmentError if they cannot be attached."""

    def __init__(self, seen: Seen, segments: Iterable[Segment] | None) -> None:
        """`segments`: the segments that this process has mapped already; None: maps them by their names."""
        self._seen = seen
        self._mapped: list[Segment] = []
        try:
            if segments is None:
                self._mapped, self._parts = observe.attach(seen.segments)
            else:
                self._parts = observe.every_part(segments)
        except SegmentError as refused:
            if seen.life is not Life.STARTING:
                raise
            raise SegmentError(f"instance {seen} is not complete yet ({refused}): try again in a moment") from refused

    def close(self) -> None:
        """Unmaps the segments that this object has mapped."""
        for segment in self._mapped:
            segment.close()

    def required(self, kind: type[S]) -> tuple[S, Region]:
        """Returns the first part with this kind of schema. Raises SegmentError without such a part."""
        for part in self._parts.values():
            if isinstance(part.schema, kind):
                return part.schema, part.region
        raise SegmentError(f"instance {self._seen} is not complete: no {kind.__name__} in its segments; try again in a moment")

    def document(self, name: str) -> DocumentReader | None:
        """Returns the reader of the documents with this name, or None."""
        part = self._parts.get(name)
        return DocumentReader(part.schema, part.region) if part is not None and isinstance(part.schema, DocumentSchema) else None

    def series(self, name: str, areas: Areas) -> SeriesReader | None:
        """Returns the reader of the series with this name, or None."""
        part = self._parts.get(name)
        if part is None or not isinstance(part.schema, SeriesSchema):
            return None
        # area 0 is the supervisor's
        return SeriesReader(part.schema, part.region, serving=lambda index: areas.serving(index + 1))

    def streams(self) -> KvFigures | None:
        """Returns the reader of the event streams' figures, or None if the picker follows no streams."""
        documents, positions = self.document("kv_documents"), self._parts.get("kv_positions")
        if documents is None or positions is None:
            return None
        assert isinstance(positions.schema, StreamPositionsSchema)
        return KvFigures(documents, StreamPositions(positions.schema, positions.region))

    def flows(self, areas: Areas) -> list[FlowAreas]:
        """Returns the areas of flow control of each pool."""
        return [FlowAreas(part.schema, part.region, areas) for part in self._parts.values() if isinstance(part.schema, FlowSchema)]

    def remotes(self) -> list[RemoteArea]:
        """Returns the areas of other replicas: one per pool, and the first one has the load of all. Empty without a replica store."""
        parts = [part for name, part in self._parts.items() if name.startswith("remote")]
        return [RemoteArea(part.schema, part.region) for part in parts if isinstance(part.schema, RemoteSchema)]


class Counted(NamedTuple):
    """The entries in the counted buckets of the prefix index. `factor`: all buckets divided by counted buckets."""

    used: int
    by_owner: list[int]
    factor: float


class IndexCounts:
    """Counts in one prefix index. `buckets_max`: the largest number of counted buckets."""

    def __init__(self, schema: IndexSchema, region: Region, buckets_max: int) -> None:
        self._schema = schema
        self._region = region
        self._buckets_max = buckets_max

    def counted(self) -> Counted:
        """Counts the entries per owner, in all buckets or in every n-th bucket."""
        schema = self._schema
        buckets = self._region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        step = -(-schema.buckets // self._buckets_max)
        part = buckets[::step]
        owners = np.bincount((part[part != 0] & np.uint64(OWNER_MASK)).astype(np.intp), minlength=FAR_MARK + 1)
        return Counted(int(owners.sum()), owners.tolist(), schema.buckets / len(part))

    def look(self, counted: Counted) -> IndexLook:
        """Returns the figures of the whole index. `counted`: the result of `counted`."""
        schema, words = self._schema, self._region.words
        states = self._region.array(np.uint8, schema.owners_at, schema.entries_at - schema.owners_at)
        used = round(counted.used * counted.factor)
        return IndexLook(
            entries=schema.entries,
            used=used,
            used_share=used / schema.entries,
            estimated=counted.factor > 1,
            owners_live=int(np.count_nonzero(states == OWNER_LIVE)),
            owners_retired=int(np.count_nonzero(states == OWNER_RETIRED)),
            evictions=words[EVICTIONS],
            dropped=words[DROPPED],
        )
