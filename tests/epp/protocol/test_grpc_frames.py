"""gRPC messages are found whatever the chunk borders of a body."""

import gzip
import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.protocol.grpc_frames import ANSWER_BYTES_MAX, MESSAGE_BYTES_MAX, Frames, only
from epp.protocol.inflate import FREE_BYTES, RATIO_MAX
from tests.epp.plugins.parser_bodies import frame


def feed(data: bytes, cuts: list[int]) -> list[bytes]:
    frames = Frames()
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [bytes(message) for a, b in itertools.pairwise(borders) for message in frames.feed(data[a:b])]


@given(st.lists(st.tuples(st.binary(max_size=40), st.booleans()), max_size=8), st.lists(st.integers(0, 10_000), max_size=40))
def test_all_messages_are_found_whatever_the_chunk_borders(messages: list[tuple[bytes, bool]], cuts: list[int]) -> None:
    data = b"".join(frame(gzip.compress(m), flag=1) if packed else frame(m) for m, packed in messages)
    assert feed(data, cuts) == [m for m, _ in messages]
    assert feed(data, list(range(len(data)))) == [m for m, _ in messages]


def test_a_message_that_is_too_long_is_skipped_with_bounded_memory() -> None:
    frames = Frames()
    data = frame(bytes(3 * ANSWER_BYTES_MAX)) + frame(b"after")
    found: list[bytes] = []
    for at in range(0, len(data), 50_000):
        found += [bytes(message) for message in frames.feed(data[at : at + 50_000])]
        assert len(frames._rest) <= 50_000
    assert found == [b"after"]


def test_a_long_message_in_tiny_pieces_takes_memory_in_proportion_to_its_size() -> None:
    data = frame(bytes(ANSWER_BYTES_MAX // 4))
    frames = Frames()
    tracemalloc.start()
    try:
        for at in range(0, len(data) - 2, 2):
            assert list(frames.feed(data[at : at + 2])) == []
        assert tracemalloc.get_traced_memory()[0] < 2 * len(data)
    finally:
        tracemalloc.stop()
    assert list(map(len, frames.feed(data[at + 2 :]))) == [len(data) - 5]


def test_nothing_is_found_after_an_invalid_message() -> None:
    frames = Frames()
    assert list(frames.feed(frame(b"x", flag=7) + frame(b"y"))) == []
    assert list(frames.feed(frame(b"z"))) == []


def test_a_message_that_unpacks_to_too_much_is_invalid() -> None:
    assert feed(frame(gzip.compress(bytes(ANSWER_BYTES_MAX + 1)), flag=1), []) == []


def test_all_messages_together_have_one_limit_for_unpacking() -> None:
    bomb = frame(gzip.compress(bytes(ANSWER_BYTES_MAX)), flag=1)
    found = list(Frames().feed(bomb * 50))
    assert sum(map(len, found)) <= FREE_BYTES + RATIO_MAX * 50 * len(bomb) < 4 * ANSWER_BYTES_MAX
    text = frame(gzip.compress(b"an ordinary short text " * 2), flag=1)
    assert len(list(Frames().feed(text * 3000))) == 3000


def test_the_first_message_of_a_request_counts() -> None:
    assert bytes(only(frame(b"one") + b"more")) == b"one"
    assert bytes(only(memoryview(frame(gzip.compress(b"one"), flag=1)))) == b"one"


def test_a_request_never_unpacks_to_more_than_the_limit() -> None:
    with pytest.raises(ValueError, match=f"more than {MESSAGE_BYTES_MAX} bytes"):
        only(frame(gzip.compress(bytes(MESSAGE_BYTES_MAX + 1), compresslevel=0), flag=1))


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_arbitrary_bytes_are_harmless(chunks: list[bytes]) -> None:
    frames = Frames()
    for chunk in chunks:
        list(frames.feed(chunk))
