"""Reads single fields of protobuf messages without generated classes, for APIs of other projects.

A message is read field by field, and each length is checked against the bytes that exist. A message with more than FIELDS_MAX fields,
including fields of nested messages, is refused: a field may take only two bytes, and to read a field takes half a microsecond, during
which the event loop waits. Proper messages of these APIs have tens of fields, because encoders pack lists of numbers into one field.
Malformed input raises ValueError. No bytes are copied: submessages are views.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

FIELDS_MAX: Final = 1 << 12
VARINT_BYTES_MAX: Final = 10
STEP: Final = 1 << 16  # bytes of packed numbers that are decoded at once, so that the arrays stay in the CPU cache
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_SIZES: Final = {FIXED64: 8, FIXED32: 4}


class Walk:
    """Reads a message and its nested messages: call `fields` for each message. Together the messages may have at most FIELDS_MAX fields."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = FIELDS_MAX

    def fields(self, message: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
        """Yields (number, value) of each field, in order. The value is an int for a varint, else its bytes. Raises ValueError."""
        view = memoryview(message)
        at, end = 0, len(view)
        while at < end:
            if not self._left:
                raise ValueError(f"more than {FIELDS_MAX} fields")
            self._left -= 1
            key, at = _varint(view, at)
            number, kind = key >> 3, key & 7
            if not number:
                raise ValueError("field number 0")
            if kind == VARINT:
                value, at = _varint(view, at)
                yield number, value
                continue
            if kind == BYTES:
                size, at = _varint(view, at)
            elif kind in _SIZES:
                size = _SIZES[kind]
            else:
                raise ValueError(f"wire type {kind} of field {number}")
            if size > end - at:
                raise ValueError(f"field {number} is cut off")
            yield number, view[at : at + size]
            at += size


def fields(message: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields the fields of one message, with its own limit. Raises ValueError."""
    return Walk().fields(message)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    for byte in view[at : at + VARINT_BYTES_MAX]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number is cut off")


def uint32s(values: list[int | memoryview]) -> NDArray[np.uint32]:
    """Reads a repeated uint32 field: packed, one by one, or both. Raises ValueError."""
    arrays: list[NDArray[np.uint32]] = []
    for kind, run in groupby(values, type):
        if kind is int:
            arrays.append(np.array([value & 0xFFFFFFFF for value in cast("Iterator[int]", run)], np.uint32))
        else:
            views = [view for view in cast("Iterator[memoryview]", run) if len(view)]
            if any(view[-1] >= 0x80 for view in views):
                raise ValueError("a number is cut off")
            arrays.append(_packed(views[0] if len(views) == 1 else memoryview(b"".join(views))))
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.empty(0, np.uint32)


def first_uint32s(values: list[int | memoryview], most: int) -> tuple[NDArray[np.uint32], memoryview | None]:
    """Does what `uint32s` does, but decodes only the first `most` numbers of a long packed list.

    Returns these numbers, and the bytes of the rest; None if there is no rest.
    """
    only = values[0] if len(values) == 1 else None
    if isinstance(only, memoryview) and len(only) > most:
        reach = only[: most * VARINT_BYTES_MAX]
        ends = np.flatnonzero(np.frombuffer(reach, np.uint8) < 0x80)
        if len(ends) >= most and len(only) > int(ends[most - 1]) + 1:
            if only[-1] >= 0x80:
                raise ValueError("a number is cut off")
            cut = int(ends[most - 1]) + 1
            return _packed(only[:cut]), only[cut:]
    return uint32s(values), None


def _packed(view: memoryview) -> NDArray[np.uint32]:
    """Decodes adjacent varints with NumPy. Bits above 32 are dropped, as protobuf does. Raises ValueError."""
    if len(view) <= STEP:
        return _packed_step(view)
    parts, at = [], 0
    while at < len(view):
        end = min(at + STEP, len(view))
        while end < len(view) and end < at + STEP + VARINT_BYTES_MAX and view[end - 1] >= 0x80:
            end += 1  # skip to the end of a varint
        parts.append(_packed_step(view[at:end]))
        at = end
    return np.concatenate(parts)


def _packed_step(view: memoryview) -> NDArray[np.uint32]:
    codes = np.frombuffer(view, np.uint8)
    ends = np.flatnonzero(codes < 0x80)
    if not len(codes):
        return np.empty(0, np.uint32)
    if not len(ends) or ends[-1] != len(codes) - 1:
        raise ValueError("a number is cut off")
    starts = np.concatenate(([0], ends[:-1] + 1))
    sizes = ends - starts + 1
    if sizes.max() > VARINT_BYTES_MAX:
        raise ValueError(f"a number of more than {VARINT_BYTES_MAX} bytes")
    low = codes & np.uint8(0x7F)
    values = low[starts].astype(np.uint64)
    for place in range(1, min(int(sizes.max()), 5)):
        longer = np.flatnonzero(sizes > place)
        values[longer] |= low[starts[longer] + place].astype(np.uint64) << np.uint64(7 * place)
    return values.astype(np.uint32)


def text(value: int | memoryview) -> str:
    """Returns the value of a string field. Raises ValueError for another type."""
    if isinstance(value, int):
        raise ValueError("a number where a text belongs")
    return bytes(value).decode()


def submessage(value: int | memoryview) -> memoryview:
    """Returns the value of a message field. Raises ValueError for another type."""
    if isinstance(value, int):
        raise ValueError("a number where a message belongs")
    return value


def number(value: int | memoryview) -> int:
    """Returns the value of a uint32 or bool field. Raises ValueError for another type."""
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value & 0xFFFFFFFF
