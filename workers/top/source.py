"""Where looks come from: the segments of one instance, mapped read-only.

A look copies what it needs, row by row; figures of two processes may be a moment apart. Entries of a large prefix index are
counted in an evenly spread part of its buckets, so that a look costs the same for every size.

What this does not do: compare looks, or decide what a terminal shows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from epp.candidates import Endpoint
from epp.metrics import ATTEMPTS, ISOLATION, PREDICTION, SCHEDULER_ATTEMPTS
from epp.prefix.divergence import Sums
from shm import observe
from shm.documents import DocumentReader, DocumentSchema
from shm.flow_lanes import FlowLanes, FlowSchema
from shm.lanes import Lanes, LaneSchema
from shm.layout import Schema
from shm.observe import Life, Part, Seen
from shm.prefix_index import (
    DROPPED,
    EVICTIONS,
    FAR_MARK,
    OWNER_LIVE,
    OWNER_MASK,
    OWNER_RETIRED,
    WAYS,
    IndexSchema,
)
from shm.segment import Region, SegmentError
from shm.series import SeriesReader, SeriesSchema
from shm.table import TableCopy, TableReader, TableSchema
from workers.documents import EndpointsView
from workers.honesty import sums
from workers.objectives import ObjectivesView
from workers.top.figures import BandLook, CachedLook, EndpointLook, IndexLook, LaneLook, Look

COUNTED_BUCKETS_MAX = 1 << 17  # of the prefix index, at each look

S = TypeVar("S", bound=Schema)
PickKey = tuple[str, str, str]


class Counted(NamedTuple):
    """Entries of the prefix index; `factor` is 1 when all buckets were looked at."""

    used: int
    by_owner: list[int]
    factor: float


class Source:
    """One instance. Raises SegmentError where it cannot be attached or read."""

    def __init__(self, seen: Seen, run_dir: str) -> None:
        self.seen = seen
        self._run_dir = run_dir
        try:
            self._segments, parts = observe.attach(seen.segments)
        except SegmentError as refused:
            if seen.life is not Life.STARTING:
                raise
            raise SegmentError(f"instance {seen} is not complete yet ({refused}): try again in a moment") from refused
        table, rows = self._part(parts, TableSchema)
        documents, blobs = self._part(parts, DocumentSchema)
        lanes, words = self._part(parts, LaneSchema)
        self._table = TableReader(table, rows)
        reader = DocumentReader(documents, blobs)
        self._endpoints = EndpointsView(reader)
        self._objectives = ObjectivesView(reader, ())
        self._lanes = Lanes(lanes, words)
        self._index_schema, self._index = self._part(parts, IndexSchema)
        self._flow = self._flow_of(parts)
        self._attempts = self._series_of(parts, ATTEMPTS.name)
        self._predictions = self._series_of(parts, PREDICTION.name)
        self._isolation = self._series_of(parts, ISOLATION.name)

    def close(self) -> None:
        """Unmap, as soon as nothing looks any more."""
        for segment in self._segments:
            segment.close()

    def look(self, now: float) -> Look:
        """Everything, now."""
        lanes = self._lanes
        seats = zip(lanes.ages(now), lanes.successions(), strict=True)
        counted = self._count_index()
        return Look(
            at=now,
            lanes=tuple(self._lane(index, age, starts) for index, (age, starts) in enumerate(seats)),
            counters=lanes.counters(),
            histograms={name: counts for name, (counts, _) in lanes.histograms().items()},
            bounds=dict(lanes.schema.histograms),
            endpoints=tuple(self._endpoint_looks(now, counted)),
            index=self._index_look(counted),
            bands=self._bands(now),
            left_out=self._left_out(),
        )

    def ended(self, now: float) -> str:
        """Why there is nothing more to come; empty while the instance lives."""
        there = observe.instance(self._run_dir, self.seen.name)
        name = f"{self.seen.name} (pid {self.seen.pid})"
        if there is None:
            return f"{name} has stopped"
        if (there.pid, there.segments) != (self.seen.pid, self.seen.segments):
            return f"{name} has stopped; another one runs under its name"
        if observe.life(self.seen.pid, self.seen.segments, now) is Life.DEAD:
            return f"{name} has died"
        return ""

    def _lane(self, index: int, age: float, starts: int) -> LaneLook:
        lane, schema = self._lanes.lane(index), self._lanes.schema
        return LaneLook(
            serving=self._lanes.serving(index),
            beat_age_s=age,
            starts=starts,
            gauges=dict(zip(schema.scalar, lane.scalars.tolist(), strict=True)),
            counters=dict(zip(schema.counter, lane.counters.tolist(), strict=True)),
            inflight=int(np.asarray(lane.inflight).sum()),
        )

    def _endpoint_looks(self, now: float, counted: Counted) -> list[EndpointLook]:
        copy, endpoints = self._table.copy(), self._known()
        rows = len(copy.rows)
        requests, tokens = self._lanes.inflight(rows).tolist(), self._lanes.tokens(rows).tolist()
        picks = self._picks()
        compared = sums(self._predictions) if self._predictions is not None else {}
        found = []
        for e in endpoints:
            if e.slot >= rows or int(copy.generation[e.slot]) != e.generation:
                continue
            updated_at = float(copy.updated_at[e.slot])
            entries = counted.by_owner[e.owner] if e.owner < len(counted.by_owner) else 0
            found.append(
                EndpointLook(
                    name=e.name,
                    namespace=e.namespace,
                    address=e.address,
                    state=int(copy.state[e.slot]),
                    flags=int(copy.flags[e.slot]),
                    age_s=now - updated_at if updated_at else None,
                    scraped=self._scraped(copy, e.slot),
                    inflight_requests=requests[e.slot],
                    inflight_tokens=tokens[e.slot],
                    index_entries=round(entries * counted.factor),
                    picks=None if picks is None else picks[(e.name, e.namespace, str(e.port))],
                    cached=_cached(compared.get((e.name, e.namespace, str(e.port)))),
                )
            )
        return found

    def _known(self) -> Sequence[Endpoint]:
        try:
            return self._endpoints.current()
        except msgspec.MsgspecError as strange:
            raise SegmentError(
                f"the endpoints of {self.seen.name} cannot be read ({strange}): it runs another version"
            ) from strange

    def _scraped(self, copy: TableCopy, slot: int) -> Mapping[str, float]:
        present = int(copy.present[slot])
        columns = enumerate(self._table.schema.columns)
        return {name: float(copy.column(index)[slot]) for index, name in columns if present >> index & 1}

    def _picks(self) -> Counter[PickKey] | None:
        """Decisions so far per endpoint; endpoints beyond what the series hold have none."""
        if self._attempts is None:
            return None
        places = [ATTEMPTS.labels.index(label) for label in ("endpoint_name", "namespace", "port")]
        counter = list(self._attempts.schema.counter_at).index(SCHEDULER_ATTEMPTS.name)
        found: Counter[PickKey] = Counter()
        for labels, values in self._attempts.rows().items():
            name, namespace, port = (labels[place] for place in places)
            found[name, namespace, port] += values.counters[counter]
        return found

    def _left_out(self) -> Mapping[str, int]:
        """Plugins that workers do without for a while -> how many workers."""
        if self._isolation is None:
            return {}
        rows = self._isolation.rows().items()
        return {labels[0]: values.gauges[0] for labels, values in rows if values.gauges[0]}

    def _count_index(self) -> Counted:
        """Entries per owner; all buckets, or every n-th of them."""
        schema, region = self._index_schema, self._index
        buckets = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        step = -(-schema.buckets // COUNTED_BUCKETS_MAX)
        part = buckets[::step]
        owners = np.bincount((part[part != 0] & np.uint64(OWNER_MASK)).astype(np.intp), minlength=FAR_MARK + 1)
        return Counted(int(owners.sum()), owners.tolist(), schema.buckets / len(part))

    def _index_look(self, counted: Counted) -> IndexLook:
        schema, words = self._index_schema, self._index.words
        states = self._index.array(np.uint8, schema.owners_at, schema.entries_at - schema.owners_at)
        return IndexLook(
            entries=schema.entries,
            used=round(counted.used * counted.factor),
            estimated=counted.factor > 1,
            owners_live=int(np.count_nonzero(states == OWNER_LIVE)),
            owners_retired=int(np.count_nonzero(states == OWNER_RETIRED)),
            evictions=words[EVICTIONS],
            dropped=words[DROPPED],
        )

    def _flow_of(self, parts: Mapping[str, Part]) -> FlowLanes | None:
        """None: flow control is off."""
        for part in parts.values():
            if isinstance(part.schema, FlowSchema):
                return FlowLanes(part.schema, part.region, self._lanes)
        return None

    def _bands(self, now: float) -> list[BandLook] | None:
        flow = self._flow
        if flow is None:
            return None
        self._objectives.look()
        cells = [(priority, flow.band(place)) for priority, place in self._objectives.places.items()]
        return [
            BandLook(
                priority=priority,
                requests=cell.requests,
                bytes=cell.bytes,
                oldest_age_s=max(0.0, now - cell.oldest) if cell.oldest else None,
            )
            for priority, cell in cells
        ]

    def _series_of(self, parts: Mapping[str, Part], name: str) -> SeriesReader | None:
        """None: this instance has no series of that name."""
        part = parts.get(name)
        if part is None or not isinstance(part.schema, SeriesSchema):
            return None
        lanes = self._lanes
        return SeriesReader(part.schema, part.region, serving=lambda index: lanes.serving(index + 1))  # lane 0 has none

    def _part(self, parts: Mapping[str, Part], kind: type[S]) -> tuple[S, Region]:
        for part in parts.values():
            if isinstance(part.schema, kind):
                return part.schema, part.region
        raise SegmentError(
            f"instance {self.seen} is not complete: no {kind.__name__} in its segments; try again in a moment"
        )


def _cached(found: Sums | None) -> CachedLook | None:
    return (
        None if found is None else CachedLook(prompt=found.prompt, predicted=found.predicted, reported=found.reported)
    )
