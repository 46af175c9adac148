"""Reading protobuf without generated classes agrees with the protobuf library, and survives arbitrary bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.protocol import wire
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.epp.plugins.parser_bodies import field, packed, varint

UINT32 = st.integers(0, 2**32 - 1)


@given(st.binary(max_size=300), st.booleans())
def test_messages_of_the_protobuf_library_are_read(body: bytes, last: bool) -> None:
    message = pb.HttpBody(body=body, end_of_stream=last).SerializeToString()
    found = {number: value if isinstance(value, int) else bytes(value) for number, value in wire.fields(message)}
    assert found == ({1: body} if body else {}) | ({2: 1} if last else {})


@given(st.lists(UINT32, max_size=200), st.integers(0, 200))
def test_repeated_numbers_are_read_packed_one_by_one_or_both(numbers: list[int], cut: int) -> None:
    message = packed(2, numbers[:cut]) + b"".join(field(2, number) for number in numbers[cut:])
    found = wire.uint32s([value for _, value in wire.fields(message)])
    assert found.dtype == np.uint32 and found.tolist() == numbers


def test_numbers_above_32_bits_are_truncated_like_in_protobuf() -> None:
    assert wire.uint32s(list(dict(wire.fields(packed(1, [2**64 - 1, 2**40 + 5]))).values())).tolist() == [2**32 - 1, 5]
    assert wire.number(2**40 + 5) == 5


def test_fixed_fields_are_skipped() -> None:
    message = varint(3 << 3 | 1) + bytes(8) + varint(4 << 3 | 5) + bytes(4) + field(5, 9)
    assert [number for number, _ in wire.fields(message)] == [3, 4, 5]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (b"\x0a\x05abc", "field 1 is cut off"),
        (b"\x80", "a number is cut off"),
        (b"\xff" * 11, "a number is cut off"),
        (b"\x0b", "wire type 3 of field 1"),
        (b"\x00\x01", "field number 0"),
        (b"\x0d\x00", "field 1 is cut off"),
        (field(1, 1) * (wire.FIELDS_MAX + 1), f"more than {wire.FIELDS_MAX} fields"),
    ],
    ids=["bytes", "varint", "long varint", "group", "zero", "fixed", "many"],
)
def test_malformed_messages_are_refused_with_the_problem(message: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        list(wire.fields(message))


def test_fields_of_nested_messages_count_too() -> None:
    walk = wire.Walk()
    nested = [value for number, value in walk.fields(field(1, field(2, 7) * wire.FIELDS_MAX))]
    with pytest.raises(ValueError, match="more than"):
        list(walk.fields(wire.submessage(nested[0])))


def test_packed_parts_are_not_joined_in_the_middle_of_a_number() -> None:
    with pytest.raises(ValueError, match="cut off"):
        wire.uint32s([memoryview(b"\x01\x80"), memoryview(b"\x01")])
    assert wire.uint32s([memoryview(b"\x01"), memoryview(b""), memoryview(b"\x80\x01")]).tolist() == [1, 128]


@pytest.mark.parametrize("data", [b"\x80", b"\x01\x80", b"\x80" * 10 + b"\x01"])
def test_truncated_or_endless_packed_numbers_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a number"):
        wire.uint32s([memoryview(data)])


def test_a_field_of_another_type_is_refused() -> None:
    for read, value in ((wire.text, 5), (wire.submessage, 5), (wire.number, memoryview(b"x"))):
        with pytest.raises(ValueError, match="belongs"):
            read(value)  # type: ignore[operator]
    with pytest.raises(ValueError, match="utf-8"):
        wire.text(memoryview(b"\xff"))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        values = [value for _, value in wire.fields(data)]
        wire.uint32s(values)
    except ValueError:
        return
