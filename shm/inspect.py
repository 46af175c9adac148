"""`python -m shm.inspect NAME | --list`: print a live segment, read-only.

A segment says in its description which parts it has and what they are called, so nothing but the
name is needed. What is printed is one moment per row, not one moment for all.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from shm import fence
from shm.documents import DocumentReader, DocumentSchema
from shm.lanes import Lanes, LaneSchema
from shm.layout import HEADER_BYTES, MAGIC, WORD
from shm.prefix_index import DROPPED, EVICTIONS, OWNER_LIVE, OWNER_RETIRED, IndexSchema
from shm.segment import SHM_DIRECTORY, Region, Segment, SegmentError
from shm.table import State, TableReader, TableSchema

BLOB_BYTES_SHOWN = 60


def names() -> Iterator[str]:
    """Segments on this machine that carry our magic and may be read."""
    for entry in sorted(os.scandir(SHM_DIRECTORY), key=lambda entry: entry.name):
        if entry.is_file() and os.access(entry.path, os.R_OK):
            with open(entry.path, "rb") as segment:
                if segment.read(HEADER_BYTES)[:WORD] == MAGIC.to_bytes(WORD, "little"):
                    yield "/" + entry.name


def report(segment: Segment) -> Iterator[str]:
    """The segment in lines of text."""
    yield (f"{segment.name}: {segment.size} bytes, layout {segment.layout_hash:016x}, generation {segment.generation}")
    yield fence.promise()
    for name, part in json.loads(segment.description or b"{}").items():
        yield f"{name}: {part['kind']}, {part['size']} bytes at {part['at']}"
        region = segment.part(part["at"], part["size"])
        for line in PRINTERS[part["kind"]](part, region):
            yield "  " + line


def _table(part: dict[str, Any], region: Region) -> Iterator[str]:
    schema = TableSchema(tuple(part["columns"]), part["slots"])
    copy = TableReader(schema, region).copy()
    yield f"epoch {copy.epoch}, {len(copy.rows)} of {schema.slots} slots looked at"
    for slot in range(len(copy.rows)):
        values = " ".join(
            f"{name}={copy.column(index)[slot]:g}"
            for index, name in enumerate(schema.columns)
            if int(copy.present[slot]) >> index & 1
        )
        yield (
            f"slot {slot} generation {copy.generation[slot]} owner {copy.owner[slot]} "
            f"{State(int(copy.state[slot])).name} flags {copy.flags[slot]} "
            f"updated_at {copy.updated_at[slot]:.3f} {values}".rstrip()
        )


def _documents(part: dict[str, Any], region: Region) -> Iterator[str]:
    schema = DocumentSchema(tuple(part["capacities"]))
    reader = DocumentReader(schema, region)
    for index, capacity in enumerate(schema.capacities):
        found = reader.read(index)
        if found is None:
            yield f"document {index}: nothing readable, capacity {capacity}"
        else:
            version, blob = found
            shown = blob[:BLOB_BYTES_SHOWN]
            yield f"document {index}: version {version}, {len(blob)} of {capacity} bytes, {shown!r}"


def _lanes(part: dict[str, Any], region: Region) -> Iterator[str]:
    histograms = tuple((name, tuple(bounds)) for name, bounds in part["histograms"])
    schema = LaneSchema(
        part["slots"],
        tuple(part["scalars"]),
        tuple(part["counters"]),
        histograms,
        lanes=part["lanes"],
    )
    lanes = Lanes(schema, region)
    for index, successions in enumerate(lanes.successions()):
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


def _index(part: dict[str, Any], region: Region) -> Iterator[str]:
    schema = IndexSchema(part["entries"])
    entries = region.array(np.uint64, schema.entries_at, schema.entries)
    states = region.array(np.uint8, schema.owners_at, schema.entries_at - schema.owners_at)
    live, retired = (np.count_nonzero(states == s) for s in (OWNER_LIVE, OWNER_RETIRED))
    yield f"{np.count_nonzero(entries)} of {schema.entries} entries used"
    yield f"{live} owners live, {retired} retired"
    yield f"{region.words[EVICTIONS]} evictions, {region.words[DROPPED]} blocks dropped"


PRINTERS = {"table": _table, "documents": _documents, "lanes": _lanes, "index": _index}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m shm.inspect", description=__doc__)
    parser.add_argument("name", nargs="?", help="a segment's name, as --list prints it")
    parser.add_argument("--list", action="store_true", help="print the names of all segments")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(names()))
        return 0
    if options.name is None:
        parser.error("give a segment's name, or --list")
    try:
        segment = Segment.attach(options.name, None, writable=False)
    except SegmentError as refusal:
        print(refusal, file=sys.stderr)
        return 1
    for line in report(segment):
        print(line)
    segment.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
