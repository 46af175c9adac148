"""`python -m shm.inspect`: print live segments, read-only.

    python -m shm.inspect NAME                  one segment, as --list names it
    python -m shm.inspect --metrics-port 9090   all segments of the running picker with that port; or --instance NAME
    python -m shm.inspect --list                the names of all segments

The description of a segment names its parts, columns and counters, so the name of the segment is
enough. Each row is printed as of one moment, but different rows may be of different moments. Lanes
that no process has used yet are omitted.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator

import numpy as np

from shm import fence, observe
from shm.documents import DocumentReader, DocumentSchema
from shm.flow_lanes import DISPATCHED, PENDING, FlowLanes, FlowSchema
from shm.lanes import Lanes, LaneSchema
from shm.layout import HEADER_BYTES, MAGIC, WORD
from shm.observe import Part
from shm.prefix_index import DROPPED, EVICTIONS, OWNER_LIVE, OWNER_RETIRED, IndexSchema
from shm.remote_lane import HEARTBEAT, RemoteLane, RemoteSchema
from shm.segment import SHM_DIRECTORY, Region, Segment, SegmentError
from shm.series import SeriesSchema
from shm.series_reader import SeriesReader
from shm.table import State, TableReader, TableSchema

BLOB_BYTES_SHOWN = 60
SERIES_SHOWN = 1000


def names() -> Iterator[str]:
    """Returns the names of all segments on this machine that this program made (by the magic in their header) and this user may read."""
    for entry in sorted(os.scandir(SHM_DIRECTORY), key=lambda entry: entry.name):
        if entry.is_file() and os.access(entry.path, os.R_OK):
            with open(entry.path, "rb") as segment:
                if segment.read(HEADER_BYTES)[:WORD] == MAGIC.to_bytes(WORD, "little"):
                    yield "/" + entry.name


def report(segment: Segment) -> Iterator[str]:
    """Yields the contents of the segment as lines of text. Raises LayoutError."""
    yield (f"{segment.name}: {segment.size} bytes, layout {segment.layout_hash:016x}, generation {segment.generation}")
    yield fence.promise()
    parts = observe.parts(segment)
    lanes = next((part for part in parts.values() if isinstance(part.schema, LaneSchema)), None)
    for name, part in parts.items():
        yield f"{name}: {part.kind}, {part.region.size} bytes at {part.at}"
        for line in _lines(part, lanes):
            yield "  " + line


def _lines(part: Part, lanes: Part | None) -> Iterator[str]:
    match part.schema:
        case TableSchema() as table:
            yield from _table(table, part.region)
        case DocumentSchema() as documents:
            yield from _documents(documents, part.region)
        case LaneSchema() as schema:
            yield from _lanes(schema, part.region)
        case SeriesSchema() as series:
            yield from _series(series, part.region, lanes)
        case IndexSchema() as index:
            yield from _index(index, part.region)
        case FlowSchema() as flow:
            yield from _flow(flow, part.region, lanes)
        case RemoteSchema() as remote:
            yield from _remote(remote, part.region)
        case _:
            yield f"this version does not know parts of kind {part.kind}"


def _table(schema: TableSchema, region: Region) -> Iterator[str]:
    copy = TableReader(schema, region).copy()
    yield f"epoch {copy.epoch}, {len(copy.rows)} of {schema.slots} slots read"
    for slot in range(len(copy.rows)):
        values = " ".join(
            f"{name}={copy.column(index)[slot]:g}" for index, name in enumerate(schema.columns) if int(copy.present[slot]) >> index & 1
        )
        yield (
            f"slot {slot} generation {copy.generation[slot]} owner {copy.owner[slot]} "
            f"{State(int(copy.state[slot])).name} flags {copy.flags[slot]} "
            f"updated_at {copy.updated_at[slot]:.3f} {values}".rstrip()
        )


def _documents(schema: DocumentSchema, region: Region) -> Iterator[str]:
    reader = DocumentReader(schema, region)
    for index, capacity in enumerate(schema.capacities):
        document = reader.read(index)
        if document is None:
            yield f"document {index}: nothing readable, capacity {capacity}"
        else:
            version, blob = document
            shown = blob[:BLOB_BYTES_SHOWN]
            yield f"document {index}: version {version}, {len(blob)} of {capacity} bytes, {shown!r}"


def _lanes(schema: LaneSchema, region: Region) -> Iterator[str]:
    lanes = Lanes(schema, region)
    for index, successions in enumerate(lanes.successions()):
        if not successions and not lanes.serving(index):
            continue
        gauges = " ".join(f"{name}={lanes.scalars(name)[index]}" for name in schema.scalar)
        serving = "serving" if lanes.serving(index) else "not serving"
        yield f"lane {index}: {serving}, taken over {successions} times {gauges}".rstrip()
    inflight = lanes.inflight(schema.slots)
    for slot in np.flatnonzero(inflight).tolist():
        yield f"slot {slot}: {inflight[slot]} requests in flight"
    for name, value in lanes.counters().items():
        yield f"{name} {value}"
    for name, (counts, total) in lanes.histograms().items():
        yield f"{name} {counts} sum {total:g}"


def _remote(schema: RemoteSchema, region: Region) -> Iterator[str]:
    remote = RemoteLane(schema, region)
    yield f"{remote.replicas} other replicas, heartbeat at {remote.floats[HEARTBEAT]:.3f}"
    for slot in np.flatnonzero(remote.requests).tolist():
        yield f"slot {slot}: {remote.requests[slot]} requests and {remote.tokens[slot]} tokens in flight"


def _series(schema: SeriesSchema, region: Region, lanes: Part | None) -> Iterator[str]:
    reader = SeriesReader(schema, region, serving=_serving(lanes, schema))
    rows = reader.rows()
    yield f"{len(rows)} label tuples, up to {schema.blocks} per lane, {reader.overflowed()} times labels were replaced"
    for labels, values in list(rows.items())[:SERIES_SHOWN]:
        named = " ".join(f"{name}={label!r}" for name, label in zip(schema.labels, labels, strict=True))
        gauges = [f"{name}={value}" for name, value in zip(schema.gauge_at, values.gauges, strict=True)]
        counters = [f"{name}={value}" for name, value in zip(schema.counter_at, values.counters, strict=True)]
        sums = [f"{name}={counts} sum {total:g}" for (name, _), (counts, total) in zip(schema.histograms, values.histograms, strict=True)]
        yield f"{named}: {', '.join((*gauges, *counters, *sums))}"
    if len(rows) > SERIES_SHOWN:
        yield f"… and {len(rows) - SERIES_SHOWN} more"


def _flow(schema: FlowSchema, region: Region, lanes: Part | None) -> Iterator[str]:
    if lanes is None or not isinstance(lanes.schema, LaneSchema):
        return
    flow = FlowLanes(schema, region, Lanes(lanes.schema, lanes.region))
    for worker in flow.serving():
        base, words = flow.base(worker), flow.words
        yield f"worker {worker}: {words[base + DISPATCHED]} dispatched, {words[base + PENDING]} of them without an endpoint yet"
        for band in range(schema.bands):
            cell, asked = flow.cell(worker, band), flow.asked(worker, band)
            if cell.requests or asked != (0, 0):
                yield (
                    f"worker {worker} band {band}: {cell.requests} requests, {cell.bytes} bytes, oldest {cell.oldest:.3f}, "
                    f"to displace {asked[0]} requests, {asked[1]} bytes"
                )


def _serving(part: Part | None, series: SeriesSchema) -> Callable[[int], bool]:
    """Returns a function that says whether the gauges of a lane of `series` count, that is, whether the lane's process serves.

    `part`: the part with the lanes of all processes. Without one, all gauges count.
    """
    if part is None or not isinstance(part.schema, LaneSchema):
        return lambda _lane: True
    lanes = Lanes(part.schema, part.region)
    # 1 for series that only workers write: they have no lane of the supervisor
    first = part.schema.lanes - series.lanes
    return lambda lane: lanes.serving(first + lane)


def _index(schema: IndexSchema, region: Region) -> Iterator[str]:
    entries = region.array(np.uint64, schema.entries_at, schema.entries)
    states = region.array(np.uint8, schema.owners_at, schema.entries_at - schema.owners_at)
    live, retired = (np.count_nonzero(states == s) for s in (OWNER_LIVE, OWNER_RETIRED))
    yield f"{np.count_nonzero(entries)} of {schema.entries} entries used"
    yield f"{live} owners live, {retired} retired"
    yield f"{region.words[EVICTIONS]} evictions, {region.words[DROPPED]} blocks dropped"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shm.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="the name of a segment, as --list prints it")
    parser.add_argument("--list", action="store_true", help="print the names of all segments")
    parser.add_argument("--metrics-port", type=int, help="print the segments of the picker with this port")
    parser.add_argument("--instance", default="", help="print the segments of the picker with this name")
    parser.add_argument("--run-dir", default=observe.RUN_DIR, help="directory of the instance files (%(default)s)")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(names()))
        return 0
    if options.name is None and options.metrics_port is None and not options.instance:
        parser.error("give the name of a segment, --metrics-port, --instance, or --list")
    try:
        for name in [options.name] if options.name else _of_instance(options):
            _print(name)
    except SegmentError as refusal:
        print(refusal, file=sys.stderr)
        return 1
    return 0


def _of_instance(options: argparse.Namespace) -> tuple[str, ...]:
    instance = observe.find(options.run_dir, metrics_port=options.metrics_port, name=options.instance)
    print(f"instance {instance}")
    return instance.segments


def _print(name: str) -> None:
    segment = Segment.attach(name, None, writable=False)
    try:
        for line in report(segment):
            print(line)
    finally:
        segment.close()


def run(arguments: list[str]) -> int:
    """Runs `main`. Ends without an error message when the reader of the output, such as `head`, closes the pipe."""
    try:
        status = main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its exit
        return 0
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
