"""Attaches the shared memory of one instance, and makes the readers of its parts."""

from collections.abc import Iterable
from typing import TypeVar

from shm import observe
from shm.areas import Areas
from shm.documents import DocumentReader, DocumentSchema
from shm.flow_areas import FlowAreas, FlowSchema
from shm.layout import Schema
from shm.observe import Life, Seen
from shm.remote_area import RemoteArea, RemoteSchema
from shm.segment import Region, Segment, SegmentError
from shm.series import SeriesSchema
from shm.series_reader import SeriesReader
from shm.stream_positions import StreamPositions, StreamPositionsSchema
from workers.supervisor.pages.kv_events import KvFigures

S = TypeVar("S", bound=Schema)


class Attached:
    """The segments of one instance. Raises SegmentError if they cannot be attached."""

    def __init__(self, seen: Seen, segments: Iterable[Segment] | None) -> None:
        """`segments`: those that this process has mapped already; None: maps them by their names."""
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
        """Unmaps the segments that were mapped here."""
        for segment in self._mapped:
            segment.close()

    def required(self, kind: type[S]) -> tuple[S, Region]:
        """Returns the first part with this kind of schema. Raises SegmentError if there is none."""
        for part in self._parts.values():
            if isinstance(part.schema, kind):
                return part.schema, part.region
        raise SegmentError(f"instance {self._seen} is not complete: no {kind.__name__} in its segments; try again in a moment")

    def document(self, name: str) -> DocumentReader | None:
        """Returns the reader of these documents; None if the instance has none with this name."""
        part = self._parts.get(name)
        return DocumentReader(part.schema, part.region) if part is not None and isinstance(part.schema, DocumentSchema) else None

    def series(self, name: str, areas: Areas) -> SeriesReader | None:
        """Returns the reader of the series with this name; None if the instance has no such series."""
        part = self._parts.get(name)
        if part is None or not isinstance(part.schema, SeriesSchema):
            return None
        # area 0 is the supervisor's
        return SeriesReader(part.schema, part.region, serving=lambda index: areas.serving(index + 1))

    def streams(self) -> KvFigures | None:
        """Returns the reader of the event streams' figures; None if the picker follows no streams."""
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
