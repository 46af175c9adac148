"""gzip never unpacks to more than the limits."""

import base64
import gzip
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import Cause, Refused
from epp.protocol.inflate import FREE_BYTES, MEMBERS_MAX, RATIO_MAX, STEP_BYTES, TooLong, at_once, body_slices, gunzip, reach


def unpacked(body: bytes, coding: str, limit: int) -> bytes:
    steps = body_slices(body, coding, limit)
    return body if steps is None else at_once(steps)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_packed_content_is_unpacked(members: list[bytes]) -> None:
    data = b"".join(gzip.compress(member) for member in members)
    whole = b"".join(members)
    assert gunzip(memoryview(data), len(whole)) == whole
    if whole:
        with pytest.raises(TooLong):
            gunzip(data, len(whole) - 1)


@pytest.mark.parametrize("data", [b"", b"plain", gzip.compress(b"hello", mtime=0)[:-3], gzip.compress(b"hello", mtime=0) + b"tail"])
def test_incomplete_or_other_data_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="gzip"):
        gunzip(data, 1000)


def test_too_many_members_are_refused() -> None:
    with pytest.raises(ValueError, match="members"):
        gunzip(gzip.compress(b"") * (MEMBERS_MAX + 1), 1000)


def test_a_bomb_is_limited_by_the_ratio_whatever_the_limit_of_the_caller() -> None:
    bomb = gzip.compress(bytes(FREE_BYTES + (1 << 20)))
    assert reach(len(bomb), 1 << 30) == FREE_BYTES + RATIO_MAX * len(bomb)
    with pytest.raises(TooLong):
        gunzip(bomb, 1 << 30)
    with pytest.raises(Refused) as refused:
        unpacked(bomb, "gzip", 1 << 30)
    assert refused.value.cause is Cause.BODY_TOO_LARGE


def test_long_content_is_unpacked_in_steps_and_short_content_at_once() -> None:
    text = base64.b16encode(random.Random(1).randbytes(2 * STEP_BYTES))
    for size in (1000, 4 * STEP_BYTES):
        steps = body_slices(gzip.compress(text[:size], 1), "gzip", size)
        assert steps is not None
        taken = len(list(steps))
        assert taken == 0 if size == 1000 else taken > 4
        assert unpacked(gzip.compress(text[:size], 1), "gzip", size) == text[:size]


def test_short_content_may_have_any_ratio() -> None:
    assert gunzip(gzip.compress(bytes(FREE_BYTES)), 1 << 30) == bytes(FREE_BYTES)


def test_a_body_is_unpacked_by_its_coding() -> None:
    packed = gzip.compress(b"hello", mtime=0)
    for coding in ("gzip", " GZIP ", "x-gzip"):
        assert unpacked(packed, coding, 5) == b"hello"
    for coding in ("", "identity"):
        assert unpacked(b"hello", coding, 5) == b"hello"


@pytest.mark.parametrize(
    ("body", "coding", "cause", "text"),
    [
        (gzip.compress(b"hello!", mtime=0), "gzip", Cause.BODY_TOO_LARGE, "5"),
        (b"hello", "gzip", Cause.INVALID_BODY, "invalid request body: not gzip"),
        (b"hello", "br", Cause.INVALID_BODY, "content-encoding 'br' is not supported: send the body plain or as gzip"),
        (b"hello", "gzip, gzip", Cause.INVALID_BODY, "content-encoding 'gzip, gzip' is not supported"),
    ],
)
def test_other_bodies_are_refused(body: bytes, coding: str, cause: Cause, text: str) -> None:
    with pytest.raises(Refused) as refused:
        unpacked(body, coding, 5)
    assert refused.value.cause is cause and refused.value.detail.startswith(text)
