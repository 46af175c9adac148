"""Reads the gateway's metadata of a message, and writes dynamic metadata: both are google.protobuf.Struct.

    ProcessingRequest.metadata_context (8)   Metadata.filter_metadata (1): name (1), Struct (2)
    Struct.fields (1)                        name (1), Value (2)
    Value                                    null 1, number 2, text 3, bool 4, Struct 5, ListValue 6
    ListValue                                Value (1)

If a field occurs several times, the last occurrence applies. The generated classes of protobuf are not used, because they would take 3 MiB
of each picker.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from epp.errors import ProtocolViolation
from epp.protocol.codec.fields import field, read_varint, walk

DEPTH_MAX: Final = 32  # values inside values
EXACT_MAX: Final = 2.0**53  # whole numbers below this are exact
CONTEXT: Final = 0x42  # tags: field number << 3 | wire type
FIRST: Final = 0x0A
SECOND: Final = 0x12
NULL: Final = 0x08
NUMBER: Final = 0x11
TEXT: Final = 0x1A
BOOL: Final = 0x20
STRUCT: Final = 0x2A
LIST: Final = 0x32

Place = tuple[int, int]  # where a message begins and ends


def filter_metadata(message: bytes, name: bytes) -> Mapping[str, Place] | None:
    """Returns name -> place of the value, for the fields of the Struct `name` in a message's metadata. Returns None without this Struct.

    Raises ProtocolViolation.
    """
    found: Place | None = None
    for tag, start, end in walk(message, 0, len(message)):
        if tag == CONTEXT:
            for key, place in _pairs(message, (start, end)):
                found = place if message[key[0] : key[1]] == name else found
    return None if found is None else {text(message, key): place for key, place in _pairs(message, found)}


def value(message: bytes, place: Place, depth: int = 0) -> object:
    """Decodes a Value: None, a float, text, a bool, a list, or a dictionary. Raises ProtocolViolation."""
    if depth > DEPTH_MAX:
        raise ProtocolViolation(f"malformed metadata: values are nested more than {DEPTH_MAX} deep")
    tag, start, end = _kind(message, place)
    if tag == TEXT:
        return text(message, (start, end))
    if tag == NUMBER:
        number: float = struct.unpack("<d", message[start:end])[0]
        return number
    if tag == BOOL:
        return read_varint(message, start)[0] != 0
    if tag == LIST:
        return [value(message, item, depth + 1) for item in _entries(message, start, end)]
    if tag == STRUCT:
        pairs = _pairs(message, (start, end))
        return {text(message, key): value(message, inner, depth + 1) for key, inner in pairs}
    return None


def text_below(message: bytes, place: Place, path: Sequence[bytes]) -> str:
    """Returns the text at a path of names below a Value, or a whole number as text, or "". Raises ProtocolViolation."""
    for name in path:
        tag, start, end = _kind(message, place)
        if tag != STRUCT:
            return ""
        found: Place | None = None
        for key, inner in _pairs(message, (start, end)):
            found = inner if message[key[0] : key[1]] == name else found
        if found is None:
            return ""
        place = found
    tag, start, end = _kind(message, place)
    if tag == TEXT:
        return text(message, (start, end))
    if tag == NUMBER and end - start == 8:
        number: float = struct.unpack("<d", message[start:end])[0]
        return str(int(number)) if number.is_integer() and abs(number) < EXACT_MAX else ""
    return ""


def texts(message: bytes, place: Place, most: int) -> list[str] | None:
    """Returns the texts in a Value that is a list, without other items. Returns None if the Value is no list.

    Raises ProtocolViolation, also for a list of more than `most` items.
    """
    tag, at, end = _kind(message, place)
    if tag != LIST:
        return None
    items = _items(message, at, end)
    if len(items) > most:
        raise ProtocolViolation(f"subset hint of {len(items)} endpoints: at most {most} are read")
    kinds = [_kind(message, item) for item in items]
    return [text(message, (start, stop)) for kind, start, stop in kinds if kind == TEXT]


def _items(message: bytes, at: int, end: int) -> list[Place]:
    """Returns the places of the items of a ListValue, however many. Raises ProtocolViolation."""
    items: list[Place] = []
    try:
        while at < end:
            if message[at] != FIRST:
                raise ProtocolViolation("malformed metadata: a list has a field that is no item")
            size, start = read_varint(message, at + 1)
            at = start + size
            items.append((start, at))
    except IndexError:
        raise ProtocolViolation("malformed message: it is cut off") from None
    if at > end:
        raise ProtocolViolation("malformed message: a field is longer than the message")
    return items


def text(message: bytes, place: Place) -> str:
    """Decodes a text. Raises ProtocolViolation if it is not UTF-8."""
    try:
        return message[place[0] : place[1]].decode()
    except UnicodeDecodeError:
        raise ProtocolViolation("malformed message: a text is not UTF-8") from None


def _entries(message: bytes, start: int, end: int) -> Iterator[Place]:
    return ((at, stop) for tag, at, stop in walk(message, start, end) if tag == FIRST)


def _pairs(message: bytes, place: Place) -> Iterator[tuple[Place, Place]]:
    """Yields the places of key and value for each entry of a map that is field 1 of a message."""
    for entry in _entries(message, *place):
        name, found = (0, 0), (0, 0)
        for tag, start, end in walk(message, *entry):
            if tag == FIRST:
                name = start, end
            elif tag == SECOND:
                found = start, end
        yield name, found


def _kind(message: bytes, place: Place) -> tuple[int, int, int]:
    """Returns (tag, start, end) of the field that is set in a Value; tag 0 if no field is set."""
    at, end = place
    if end - at >= 2 and message[at] == TEXT and message[at + 1] == end - at - 2 < 0x80:
        return TEXT, at + 2, end
    found = 0, 0, 0
    for tag, start, stop in walk(message, at, end):
        if tag in (NULL, NUMBER, TEXT, BOOL, STRUCT, LIST):
            found = tag, start, stop
    return found


def encoded(fields: Mapping[str, object]) -> bytes:
    """Encodes a Struct. Raises ValueError for a value that it cannot hold."""
    return b"".join(field(1, field(1, name.encode()) + field(2, _encoded(inner))) for name, inner in fields.items())


def _encoded(inner: object) -> bytes:
    if inner is None:
        return b"\x08\x00"
    if isinstance(inner, bool):
        return b"\x20\x01" if inner else b"\x20\x00"
    if isinstance(inner, int | float):
        return b"\x11" + struct.pack("<d", inner)
    if isinstance(inner, str):
        return field(3, inner.encode())
    if isinstance(inner, Mapping):
        return field(5, encoded(inner))
    if isinstance(inner, Sequence):
        return field(6, b"".join(field(1, _encoded(item)) for item in inner))
    raise ValueError(f"metadata cannot hold {type(inner).__name__}: give numbers, texts, booleans, lists or mappings")
