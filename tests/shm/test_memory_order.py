"""Tests of shared structures in every order of loads and stores that the Arm memory model allows (`tests/weak_memory.py`)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from compiled.kernels.index_reference import far_bucket, first_far_bucket, match, near_buckets
from shm import fence, seqlock
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.prefix_index import FAR_MARK, WAYS, IndexSchema
from shm.table import DRAINING, Handle, TableReader, TableSchema, TableWriter
from tests.interleave import Grid
from tests.weak_memory import FENCE, Access, Memory, judged, outcomes, stores

# The changes of the first two words cancel out in the XOR of a row, and so do those of the last two. So the check word alone cannot
# detect every row that mixes OLD and NEW.
OLD = (8, 16, 32, 8 ^ 16 ^ 32)
NEW = (8 ^ 1, 16 ^ 1, 32 ^ 2, 8 ^ 16 ^ 32 ^ 2)
WIDTH = 1 + len(OLD)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[Memory, Callable[[], Any]], list[Access]]:
    """Runs code on a memory, and returns its accesses and fences."""

    def accesses(memory: Memory, code: Callable[[], Any]) -> list[Access]:
        monkeypatch.setattr(fence, "order", memory.fence)
        del memory.accesses[:]
        code()
        return list(memory.accesses)

    return accesses


def without(accesses: Sequence[Access], number: int) -> list[Access]:
    """The accesses without their fence of this number."""
    at = [i for i, access in enumerate(accesses) if access == FENCE][number]
    return [*accesses[:at], *accesses[at + 1 :]]


class Row:
    """A row that is written while it is read. `writer`, `reader`: the accesses of both."""

    def __init__(self, record: Callable) -> None:
        self.cells = (0, *OLD)
        memory = Memory(self.cells)
        self.writer = stores(record(memory, lambda: seqlock.write_row(memory.words, 0, NEW)))
        self.memory = Memory(self.cells)
        self.reader = record(self.memory, self.read)

    def read(self) -> tuple[int, ...] | None:
        """Reads the row. Returns None if it counts as torn."""
        rows, torn = seqlock.reference_read_rows(Grid(self.memory.words, 0, 1, WIDTH))
        return None if torn[0] else tuple(rows[0, 1:].tolist())

    def accepted(self, writer: Sequence[Access], reader: Sequence[Access]) -> set[tuple[int, ...]]:
        found = outcomes(self.cells, [writer, reader])
        return {row for _, row in judged(self.memory, self.reader, found, self.read) if row is not None}


def test_a_row_is_read_as_it_was_written_in_every_order_that_arm_allows(record: Callable) -> None:
    row = Row(record)
    assert row.writer.count(FENCE) == row.reader.count(FENCE) == 2
    assert row.accepted(row.writer, row.reader) == {OLD, NEW}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("side", ["writer", "reader"])
def test_without_one_of_its_fences_a_torn_row_is_accepted(record: Callable, side: str, number: int) -> None:
    row = Row(record)
    programs = {"writer": row.writer, "reader": row.reader}
    programs[side] = without(programs[side], number)
    assert row.accepted(**programs) > {OLD, NEW}


def test_two_writes_in_a_row_never_mix(record: Callable) -> None:
    cells, third = (0, 1, 1), (3, 3)
    memory = Memory(cells)
    writer = record(memory, lambda: [seqlock.write_row(memory.words, 0, body) for body in ((2, 2), third)])
    memory = Memory(cells)

    def read() -> tuple[int, ...] | None:
        rows, torn = seqlock.reference_read_rows(Grid(memory.words, 0, 1, len(cells)))
        return None if torn[0] else tuple(rows[0, 1:].tolist())

    reader = record(memory, read)
    found = outcomes(cells, [stores(writer), reader])
    assert {row for _, row in judged(memory, reader, found, read)} == {(1, 1), (2, 2), third, None}


class Copied:
    """A table of one endpoint that `change` alters, and publishes, while a reader copies it."""

    def __init__(self, record: Callable, change: Callable[[TableWriter, Handle], object]) -> None:
        schema = TableSchema(("waiting",), 2)
        memory = Memory([0] * (schema.bytes // 8))
        writer = TableWriter(schema, memory)
        handle = writer.take(7, lambda slot: True)
        writer.publish()
        self.cells = list(memory.cells)
        self.memory = Memory(self.cells)
        self.table = TableReader(schema, self.memory)
        self.before = self.table.epoch()
        self.reader = record(self.memory, self.copy)
        self.writer = stores(record(memory, lambda: (change(writer, handle), writer.publish())))

    def copy(self) -> tuple[bool, int, int]:
        """Whether the copy has the new epoch, the number of its rows, and the flags of the first one."""
        copy = self.table.copy()
        return copy.epoch != self.before, len(copy.rows), int(copy.flags[0])

    def copies(self, reader: Sequence[Access]) -> set[tuple[bool, int, int]]:
        found = outcomes(self.cells, [self.writer, reader])
        return {copy for _, copy in judged(self.memory, self.reader, found, self.copy) if copy is not None}


def drain(writer: TableWriter, handle: Handle) -> None:
    writer.mark(handle, flags=DRAINING)


def join(writer: TableWriter, handle: Handle) -> None:
    writer.take(8, lambda slot: True)


def test_a_copy_with_a_new_epoch_has_the_changed_rows(record: Callable) -> None:
    table = Copied(record, drain)
    assert table.copies(table.reader) == {(False, 1, 0), (False, 1, DRAINING), (True, 1, DRAINING)}


def test_a_copy_with_a_new_epoch_has_the_new_endpoint(record: Callable) -> None:
    table = Copied(record, join)
    assert table.copies(table.reader) == {(False, 1, 0)}  # with two rows the reader takes another path


def test_without_the_fences_of_rows_a_copy_with_a_new_epoch_misses_a_change(record: Callable) -> None:
    table = Copied(record, drain)
    assert (True, 1, 0) in table.copies([access for access in table.reader if access != FENCE])


def test_without_the_fence_behind_the_epoch_a_copy_misses_the_new_endpoint(record: Callable) -> None:
    table = Copied(record, join)
    assert (True, 1, 0) in table.copies(without(table.reader, 0))


class Written:
    """A document that is written several times while it is read. `version`: the one at which the reader's path was recorded."""

    BLOBS = (b"oldest..", b"middle..", b"youngest")

    def __init__(self, record: Callable, version: int, writes: int) -> None:
        schema = DocumentSchema((8,))
        memory = Memory([0] * (schema.bytes // 8))
        writer = DocumentWriter(schema, memory)
        writer.write(0, self.BLOBS[0])
        self.cells = list(memory.cells)
        self.writer = stores(record(memory, lambda: [writer.write(0, blob) for blob in self.BLOBS[1 : 1 + writes]]))
        self.memory = Memory(self.cells)
        other = DocumentWriter(schema, self.memory)
        for blob in self.BLOBS[1:version]:
            other.write(0, blob)
        self.reading = DocumentReader(schema, self.memory)
        self.reader = record(self.memory, self.read)

    def read(self) -> tuple[int, bytes] | None:
        return self.reading.read(0)

    def results(self, *unfenced: str) -> dict[tuple[int, ...], tuple[int, bytes] | None]:
        """The result for each outcome of the loads. `unfenced`: the sides without fences, "writer" or "reader"."""
        programs = {"writer": self.writer, "reader": self.reader}
        for side in unfenced:
            programs[side] = [access for access in programs[side] if access != FENCE]
        return dict(judged(self.memory, self.reader, outcomes(self.cells, list(programs.values())), self.read))


@pytest.mark.parametrize("unfenced", [(), ("writer", "reader")])
@pytest.mark.parametrize("version", [1, 2])
def test_a_document_is_read_as_it_was_written_even_without_fences(record: Callable, version: int, unfenced: tuple[str, ...]) -> None:
    read = set(Written(record, version, writes=2).results(*unfenced).values()) - {None}
    assert read <= set(enumerate(Written.BLOBS, start=1))
    assert (version, Written.BLOBS[version - 1]) in read


@pytest.mark.parametrize("unfenced", [(), ("writer",), ("reader",)])
def test_the_current_version_of_a_document_is_readable_at_once_if_both_sides_have_fences(
    record: Callable, unfenced: tuple[str, ...]
) -> None:
    results = Written(record, version=2, writes=1).results(*unfenced)
    unreadable = [values for values, result in results.items() if values[0] == 2 and result is None]
    assert bool(unreadable) == bool(unfenced)


class Entries:
    """A prefix index with two hashes that share their near buckets."""

    def __init__(self) -> None:
        self.schema = IndexSchema(256)
        self.hashes = np.array([0x1234 << 40 | 1 << 20, 0x1234 << 40 | 2 << 20], np.uint64)
        self.near = self.schema.entries_at // 8 + near_buckets(int(self.hashes[0]), self.schema.buckets)[0] * WAYS
        self.memory = Memory([0] * (self.schema.bytes // 8))

    def entry(self, block: int, owner: int) -> int:
        return int(self.hashes[block]) >> 16 << 16 | owner

    def place(self, block: int, owner: int) -> int:
        """The first place of an owner's far bucket."""
        bucket = first_far_bucket(int(self.hashes[block]), self.schema.buckets) + far_bucket(owner)
        return self.schema.entries_at // 8 + bucket * WAYS

    def holders(self, block: int, memory: Memory | None = None) -> set[int]:
        table = (memory or self.memory).array(np.uint64, self.schema.entries_at, (self.schema.buckets, WAYS))
        return set(match(table, self.hashes[block : block + 1]))


@pytest.mark.parametrize("block", [0, 1])
def test_a_replaced_entry_never_gives_its_owner_the_block_of_another(record: Callable, block: int) -> None:
    index = Entries()
    index.memory.cells[index.near] = index.entry(0, owner=5)
    reader = record(index.memory, lambda: index.holders(block))
    writer = [Access(index.near, 0), Access(index.near, index.entry(1, owner=6))]
    found = outcomes(index.memory.cells, [writer, reader])
    seen = [held for _, held in judged(index.memory, reader, found, lambda: index.holders(block))]
    assert set().union(*seen) == {5 + block}


def test_entries_that_move_to_far_buckets_are_found_or_missed_but_never_wrong(record: Callable) -> None:
    index, owners = Entries(), (5, 6)
    for way, owner in enumerate(owners):
        index.memory.cells[index.near + way] = index.entry(0, owner)
    moved = [Access(index.place(0, owner), index.entry(0, owner)) for owner in owners]
    writer = [*moved, FENCE, Access(index.near, index.entry(0, FAR_MARK)), FENCE, Access(index.near + 1, 0)]
    after = Memory(index.memory.cells)
    for access in writer:
        if access != FENCE:
            after.cells[access.address] = access.value
    reader = record(after, lambda: index.holders(0, after))
    found = outcomes(index.memory.cells, [writer, reader])
    seen = [held for _, held in judged(after, reader, found, lambda: index.holders(0, after)) if held is not None]
    assert set().union(*seen) == set(owners)
