"""`python -m tests.shm.hammer --reads N`: one writing and two reading processes per structure.

Every value identifies what it belongs to, so a reader can detect a torn, stale or wrong value alone:

- table: the owner is a function of slot and generation, and all values of a row are equal. The writer
  takes, writes, marks and releases rows continuously.
- documents: all bytes are equal, and length and byte are functions of the version.
- index: a hash belongs to exactly one owner. The table is far too small for all hashes, so the writer
  overwrites entries continuously. The owners of one popular hash come and go, near and far.

A read is one row, one document or one block. The exit code says whether a reader saw a bad value.
`unguarded_torn` counts torn rows in copies taken without a check of the versions. It shows that the
writer does disturb the readers.
"""

import argparse
import itertools
import json
import mmap
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.prefix_index import EVICTIONS, IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter
from shm.segment import Region
from shm.table import COLUMNS, GENERATION, State, TableReader, TableSchema, TableWriter

READERS = 2

TABLE = TableSchema(tuple(f"c{i}" for i in range(12)), 64)
DOCUMENTS = DocumentSchema((4000,))
INDEX = IndexSchema(4096)
OWNERS = 50

Writer = Callable[[Region], None]
Reader = Callable[[Region, int], dict[str, int]]


def write_table(region: Region) -> None:
    writer = TableWriter(TABLE, region)
    # A take takes unused slots in order, whatever slot is wanted. Claim each slot once, so every owner is correct from the start.
    handles = {slot: writer.take(1000 + slot, lambda _: True) for slot in range(TABLE.slots)}
    for serial in itertools.count(1):
        slot = serial * 7 % TABLE.slots
        handle = handles.pop(slot, None)
        if handle is None or serial % 11 == 0:
            if handle is not None:
                writer.release(handle)
            generation = int(writer._words[writer._row(slot) + GENERATION]) + 1
            taken = writer.take(generation * 1000 + slot, lambda free, slot=slot: free == slot)
            if taken is None or taken.slot != slot:
                if taken is not None:
                    writer.release(taken)
                continue
            handle = taken
        handles[slot] = handle
        value = float(serial)
        writer.write(
            handle, state=State.FRESH, flags=0, updated_at=value, inflight_at_scrape=value, values=(value,) * len(TABLE.columns), present=1
        )
        writer.mark(handle, flags=serial & 3)
        writer.publish()


def read_table(region: Region, reads: int) -> dict[str, int]:
    reader, seen, torn, stale, previous = TableReader(TABLE, region), 0, 0, 0, None
    first, unguarded = reader.epoch(), 0
    while seen < reads:
        copy = reader.copy(previous)
        live = copy.state != State.FREE
        owner = copy.generation * np.uint64(1000) + np.arange(len(copy.rows), dtype=np.uint64)
        stale += int(np.count_nonzero(live & (copy.owner != owner)))
        values = copy.rows.view(np.float64)[:, COLUMNS:-1]
        same = (values == copy.updated_at[:, None]).all(axis=1)
        torn += int(np.count_nonzero(live & ~(same & (copy.updated_at == copy.inflight_at_scrape))))
        seen += len(copy.rows)
        previous = copy
        raw = reader._rows[:, COLUMNS:-1].copy()
        unguarded += int(np.count_nonzero((raw != raw[:, :1]).any(axis=1)))
    moved = reader.epoch() - first
    return {"reads": seen, "torn": torn, "stale": stale, "unguarded_torn": unguarded, "writes": moved}


def document(version: int) -> bytes:
    return bytes([version % 251]) * (200 + version * 37 % 3000)


def write_documents(region: Region) -> None:
    writer = DocumentWriter(DOCUMENTS, region)
    for version in itertools.count(1):
        writer.write(0, document(version))


def read_documents(region: Region, reads: int) -> dict[str, int]:
    reader, seen, torn, nothing, last = DocumentReader(DOCUMENTS, region), 0, 0, 0, 0
    while seen < reads:
        found = reader.read(0)
        seen += 1
        if found is None:
            nothing += 1
            continue
        version, blob = found
        torn += blob != document(version) or version < last
        last = version
    return {"reads": seen, "torn": torn, "kept_last": nothing, "writes": last}


def universe() -> tuple[np.ndarray, np.ndarray]:
    """Chains of hashes and the one owner of each; twice as many as the table holds."""
    hashes = np.random.default_rng(3).integers(1, 2**64, (200, 40), dtype=np.uint64)
    return hashes, (np.arange(200) % OWNERS + 2).astype(np.uint16)


def write_index(region: Region) -> None:
    writer = IndexWriter(INDEX, region)
    hashes, owner = universe()
    popular = np.full(1, 0x0123456789ABCDEF, dtype=np.uint64)
    while writer.new_owner() < OWNERS + 1:
        pass
    crowd = [writer.new_owner() for _ in range(40)]
    rng = np.random.default_rng(os.getpid())
    for age in itertools.count(1):
        chosen = rng.integers(0, len(hashes), 4)
        writer.insert(hashes[chosen].reshape(-1), np.repeat(owner[chosen], 40), age)
        writer.forget(hashes[chosen[0]][:20], int(owner[chosen[0]]))
        writer.insert(popular, crowd[age % len(crowd)], age)
        if age % 50 == 0:
            writer.retire(crowd.pop(0))
            writer.sweep_step(INDEX.buckets)
            crowd.append(writer.new_owner())


def read_index(region: Region, reads: int) -> dict[str, int]:
    reader, seen, false, hits, far = IndexReader(INDEX, region), 0, 0, 0, 0
    hashes, owner = universe()
    rng = np.random.default_rng(os.getpid())
    popular = np.full(1, 0x0123456789ABCDEF, dtype=np.uint64)
    unknown = rng.integers(1, 2**64, 40, dtype=np.uint64)
    while seen < reads:
        which = int(rng.integers(len(hashes)))
        for found in (reader.match(hashes[which]), reader.match(hashes[which][:7])):
            false += bool(found.keys() - {int(owner[which])})
            hits += bool(found)
        false += bool(reader.match(unknown))
        crowd = reader.match(popular)
        false += sum(not OWNERS + 1 < holder < OWNERS + 50 for holder in crowd)
        far += len(crowd) > 16
        seen += 40 + 7 + 2 + 1
    writes = int(region.words[EVICTIONS])
    return {"reads": seen, "false": false, "hits": hits, "far": far, "evictions": writes}


BAD = ("torn", "stale", "false")
STRUCTURES: dict[str, tuple[int, Writer, Reader]] = {
    "table": (TABLE.bytes, write_table, read_table),
    "documents": (DOCUMENTS.bytes, write_documents, read_documents),
    "index": (INDEX.bytes, write_index, read_index),
}


def fork(work: Callable[[], object]) -> tuple[int, int]:
    """Fork a child that runs `work` and writes its result into a pipe, as JSON."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    return child, read_end


def hammer(name: str, reads: int) -> dict[str, float]:
    size, write, read = STRUCTURES[name]
    region = Region(memoryview(mmap.mmap(-1, size)))
    started = time.monotonic()
    writer, writer_pipe = fork(lambda: write(region))
    readers = [fork(lambda: read(region, reads // READERS)) for _ in range(READERS)]
    total: dict[str, float] = {}
    for child, pipe in readers:
        result = json.loads(os.read(pipe, 1 << 16))
        total = {key: total.get(key, 0) + value for key, value in result.items()}
        os.close(pipe)
        os.waitpid(child, 0)
    os.kill(writer, 9)
    os.waitpid(writer, 0)
    os.close(writer_pipe)
    total["seconds"] = round(time.monotonic() - started, 1)
    return total


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.shm.hammer")
    parser.add_argument("--reads", type=int, default=1_000_000)
    parser.add_argument("--only", choices=STRUCTURES)
    options = parser.parse_args(arguments)
    bad = 0.0
    for name in [options.only] if options.only else STRUCTURES:
        total = hammer(name, options.reads)
        bad += sum(total.get(key, 0) for key in BAD)
        print(name, json.dumps(total), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
