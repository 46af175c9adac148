"""Frames on the bus: updates survive encoding and decoding, and any other bytes are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.prefix.updates import (
    FORGET,
    FRAME_BYTES_MAX,
    HASH_BYTES,
    LEARN,
    RECORDS_MAX,
    SINGLE_BYTES_MAX,
    CorruptFrame,
    decode,
    frames,
    single,
)  # fmt: skip

owners = st.integers(0, 65535)
hashes = st.integers(0, 1200).flatmap(lambda n: st.binary(min_size=n * HASH_BYTES, max_size=n * HASH_BYTES))
short = st.integers(1, 8).flatmap(lambda n: st.binary(min_size=n * HASH_BYTES, max_size=n * HASH_BYTES))
updates = st.lists(st.tuples(owners, hashes), max_size=6) | st.lists(st.tuples(owners, short), max_size=400)


def pairs(sent: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """(owner, hash) one by one, in order."""
    return [(owner, data[at : at + HASH_BYTES]) for owner, data in sent for at in range(0, len(data), HASH_BYTES)]


@given(st.sampled_from([LEARN, FORGET]), updates)
def test_updates_survive_encoding_and_decoding_in_order_and_frames_fit(kind: int, sent: list[tuple[int, bytes]]) -> None:
    received: list[tuple[int, bytes]] = []
    for data in frames(kind, sent):
        assert len(data) <= FRAME_BYTES_MAX
        frame = decode(data)
        assert frame.kind == kind
        at = 0
        for owner, count in zip(frame.owners, frame.counts, strict=True):
            received.append((owner, frame.hashes[at : at + count * HASH_BYTES]))
            at += count * HASH_BYTES
        assert at == len(frame.hashes)
    assert pairs(received) == pairs(sent)


@given(owners, short)
def test_both_encoders_give_the_same_frame_for_a_single_update(owner: int, data: bytes) -> None:
    assert [single(owner, data)] == list(frames(LEARN, [(owner, data)]))


def test_the_longest_single_update_fills_a_frame() -> None:
    data = bytes(SINGLE_BYTES_MAX & -HASH_BYTES)
    assert len(single(1, data)) <= FRAME_BYTES_MAX < len(single(1, data)) + HASH_BYTES
    assert len(list(frames(LEARN, [(1, data)]))) == 1


def test_updates_use_the_smallest_number_of_frames() -> None:
    assert len(list(frames(LEARN, [(n, bytes(HASH_BYTES)) for n in range(RECORDS_MAX)]))) == 1
    assert len(list(frames(LEARN, [(n, bytes(HASH_BYTES)) for n in range(RECORDS_MAX + 1)]))) == 2
    assert len(list(frames(LEARN, [(1, bytes(1600 * HASH_BYTES))]))) == 4


@given(updates.filter(lambda sent: any(data for _, data in sent)), st.data())
def test_a_changed_byte_is_refused(sent: list[tuple[int, bytes]], data: st.DataObject) -> None:
    frame = bytearray(next(iter(frames(LEARN, sent))))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptFrame):
        decode(bytes(frame))


@given(st.binary(max_size=FRAME_BYTES_MAX + 10))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptFrame):
        decode(data)


@given(short, st.integers(1, 60))
def test_a_truncated_or_extended_frame_is_refused(data: bytes, extra: int) -> None:
    frame = single(7, data)
    with pytest.raises(CorruptFrame):
        decode(frame[:-extra])
    with pytest.raises(CorruptFrame):
        decode(frame + bytes(extra))


@pytest.mark.parametrize(
    ("version", "kind", "count", "why"), [(2, 1, 1, "version 2"), (1, 6, 1, "kind 6"), (1, 1, 0, "0 records"), (1, 1, 9, "do not fit")]
)
def test_frames_with_a_good_checksum_and_invalid_content_are_refused(version: int, kind: int, count: int, why: str) -> None:
    from struct import pack
    from zlib import crc32

    content = pack("=BBH", version, kind, count) + bytes(12)
    with pytest.raises(CorruptFrame, match=why):
        decode(pack("=I", crc32(content)) + content)


def test_records_that_announce_another_number_of_hashes_are_refused() -> None:
    from struct import pack
    from zlib import crc32

    content = pack("=BBHHH", 1, LEARN, 1, 5, 3) + bytes(16)
    with pytest.raises(CorruptFrame, match="announce 3 hashes, 16 bytes"):
        decode(pack("=I", crc32(content)) + content)
