"""Tests of documents: a reader gets a whole version at any interleaving."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.documents import DocumentReader, DocumentSchema, DocumentTooLarge, DocumentView, DocumentWriter, slot_bytes
from shm.layout import CACHE_LINE
from tests.examples import examples
from tests.interleave import Killed, Memory, every_point, kill
from tests.shm.memory import region_for

SCHEMA = DocumentSchema((100, 200))
BLOBS = [bytes([n]) * (20 + 3 * n) for n in range(6)]


def test_an_unwritten_document_reads_as_none_with_version_0() -> None:
    reader = DocumentReader(SCHEMA, region_for(SCHEMA))
    assert reader.version(0) == 0
    assert reader.read(0) is None


@given(st.lists(st.tuples(st.integers(0, 1), st.binary(max_size=100)), max_size=20))
@examples(50)
def test_the_last_write_is_read_and_versions_count_writes(writes: list) -> None:
    region = region_for(SCHEMA)
    writer, reader = DocumentWriter(SCHEMA, region), DocumentReader(SCHEMA, region)
    last: dict[int, tuple[int, bytes]] = {}
    for index, blob in writes:
        writer.write(index, blob)
        last[index] = (last.get(index, (0, b""))[0] + 1, blob)
        assert all(reader.read(i) == found for i, found in last.items())
        assert all(reader.version(i) == version for i, (version, _) in last.items())


def test_a_document_that_is_too_large_is_refused_and_the_old_one_stays() -> None:
    region = region_for(SCHEMA)
    writer, reader = DocumentWriter(SCHEMA, region), DocumentReader(SCHEMA, region)
    writer.write(0, b"old")
    with pytest.raises(DocumentTooLarge, match=r"document 0 has 101 bytes, its slots hold 100: .*"):
        writer.write(0, b"x" * 101)
    assert reader.read(0) == (1, b"old")


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_writes_at_any_point_of_a_read_leave_a_whole_document(writes: int) -> None:
    def scenario(n: int) -> bool:
        memory = Memory(SCHEMA.bytes)
        writer = DocumentWriter(SCHEMA, memory)
        writer.write(0, BLOBS[1])
        memory.words.arm(n, lambda: [writer.write(0, BLOBS[2 + i]) for i in range(writes)])
        version, blob = DocumentReader(SCHEMA, memory).read(0)
        assert blob == BLOBS[version]
        return memory.words.fired

    assert every_point(scenario) > 5


def test_a_reader_at_any_point_of_a_write_sees_the_old_or_the_new_document() -> None:
    def scenario(n: int) -> bool:
        memory, seen = Memory(SCHEMA.bytes), []
        writer, reader = DocumentWriter(SCHEMA, memory), DocumentReader(SCHEMA, memory)
        writer.write(0, BLOBS[1])
        writer.write(0, BLOBS[2])
        memory.words.arm(n, lambda: seen.append(reader.read(0)))
        writer.write(0, BLOBS[3])
        assert all(found in ((2, BLOBS[2]), (3, BLOBS[3])) for found in seen)
        return memory.words.fired

    assert every_point(scenario) > 5


def test_a_writer_killed_at_any_point_leaves_a_whole_document_and_its_successor_continues() -> None:
    def scenario(n: int) -> bool:
        memory = Memory(SCHEMA.bytes)
        writer, reader = DocumentWriter(SCHEMA, memory), DocumentReader(SCHEMA, memory)
        writer.write(0, BLOBS[1])
        memory.words.arm(n, kill)
        with contextlib.suppress(Killed):
            writer.write(0, BLOBS[2])
        memory.words.disarm()
        version, blob = reader.read(0)
        assert blob == BLOBS[version]
        DocumentWriter(SCHEMA, memory).write(0, BLOBS[5])
        assert reader.read(0) == (version + 1, BLOBS[5])
        return memory.words.fired

    assert every_point(scenario) > 5


@pytest.mark.parametrize("at", [0, 19, 60])
def test_a_flipped_bit_is_never_read_as_the_document(at: int) -> None:
    region = region_for(SCHEMA)
    DocumentWriter(SCHEMA, region).write(0, bytes(61))
    position = bytes(region.bytes).index(bytes(61), 64 + 128 + 64 + 64)
    region.bytes[position + at] ^= 4
    assert DocumentReader(SCHEMA, region).read(0) is None


@pytest.mark.parametrize("capacities", [(), (0,), (5, -1)])
def test_an_impossible_capacity_is_refused(capacities: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="capacity"):
        DocumentSchema(capacities)


@given(st.binary(min_size=SCHEMA.bytes, max_size=SCHEMA.bytes) | st.sampled_from([b"\xff" * SCHEMA.bytes, bytes(SCHEMA.bytes)]))
@examples(50)
def test_documents_that_another_program_has_overwritten_are_found_and_can_be_written_again(garbage: bytes) -> None:
    region = region_for(SCHEMA)
    writer, reader = DocumentWriter(SCHEMA, region), DocumentReader(SCHEMA, region)
    writer.write(0, b"old")
    assert writer.overwritten() == writer.repair() == []
    region.bytes[:] = garbage
    versions = [reader.version(index) for index in (0, 1)]
    assert writer.overwritten() == writer.repair() == [index for index in (0, 1) if versions[index] or index == 0]
    assert writer.overwritten() == []
    for index in (0, 1):
        assert reader.read(index) is None
        DocumentWriter(SCHEMA, region).write(index, b"new")
        assert reader.read(index) == (reader.version(index), b"new")
    assert writer.overwritten() == []
    region.bytes[:] = b"\x55" * SCHEMA.bytes
    assert writer.overwritten() == [0, 1]


def test_a_view_decodes_each_version_once_and_keeps_the_last_one_that_could_be_read() -> None:
    region, decoded = region_for(SCHEMA), []
    writer = DocumentWriter(SCHEMA, region)

    def decode(blob: bytes) -> bytes:
        decoded.append(blob)
        return blob.upper()

    view = DocumentView(DocumentReader(SCHEMA, region), 0, decode, b"none")
    assert (view.look(), view.current(), view.version) == (False, b"none", 0)
    writer.write(0, b"a")
    assert view.look() and not view.look()
    assert (view.current(), view.version) == (b"A", 1)
    writer.write(0, b"b")
    region.bytes[SCHEMA.offsets[0] + CACHE_LINE :][: slot_bytes(100)] = bytes(slot_bytes(100))  # another program overwrites it
    assert (view.look(), view.content, view.version, decoded) == (False, b"A", 1, [b"a"])
