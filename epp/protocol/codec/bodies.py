"""Reads HttpBody messages (pieces of a body) and writes the answers that pass the pieces on.

`HttpBody{body, end_of_stream}` has the same encoding as the `StreamedBodyResponse` that answers it. So the answer has new length prefixes,
and then the received bytes, which are not decoded.
"""

import struct
from typing import Final, NamedTuple

from epp.errors import ProtocolViolation
from epp.protocol.codec.fields import read_varint, varint, walk

PIECE_BYTES_MAX: Final = 62_000  # Envoy accepts streamed body pieces of up to 64 KiB
END_OF_STREAM: Final = b"\x10\x01"
_REQUEST_BODY: Final = b"\x1a"
_RESPONSE_BODY: Final = b"\x22"
_PREFIXES_MAX: Final = 4096
# Size -> prefix (for request bodies the key is the size's complement); cached, because answers repeat their sizes.
_prefixes: Final[dict[int, bytes]] = {}
# (bytes of a piece, whether it ends the body, tag) -> the bytes before the piece.
_leads: Final[dict[tuple[int, bool, bytes], bytes]] = {}


def body(message: bytes, start: int, end: int) -> tuple[int, int, bool]:
    """Returns, for an HttpBody, (where its bytes start, where they end, end_of_stream)."""
    if start == end:
        return start, start, False
    try:
        if message[start] == 0x0A:
            length = message[start + 1]
            at = start + 2
            if length > 0x7F:
                length, at = read_varint(message, start + 1)
            stop = at + length
            if stop == end:
                return at, stop, False
            if stop + 2 == end and message[stop:end] == END_OF_STREAM:
                return at, stop, True
        elif message[start:end] == END_OF_STREAM:
            return start, start, True
    except IndexError:
        raise ProtocolViolation("malformed body: it is cut off") from None
    return _body_slowly(message, start, end)


def _body_slowly(message: bytes, start: int, end: int) -> tuple[int, int, bool]:
    begin = stop = start
    last = False
    for tag, at, until in walk(message, start, end):
        if tag == 0x0A:
            begin, stop = at, until
        elif tag == 0x10:
            last = message[at] != 0
    return begin, stop, last


def _prefix(tag: bytes, size: int, behind: int = 0) -> bytes:
    """Returns all bytes before a StreamedBodyResponse of `size` bytes, including the gRPC frame header.

    `behind`: bytes of further fields of the message, behind the StreamedBodyResponse.
    """
    inner = b"\x1a" + varint(size)
    inner = b"\x1a" + varint(len(inner) + size) + inner
    inner = b"\x0a" + varint(len(inner) + size) + inner
    inner = tag + varint(len(inner) + size) + inner
    return b"\0" + struct.pack(">I", len(inner) + size + behind) + inner


def _remember(key: int, tag: bytes, size: int) -> bytes:
    if len(_prefixes) >= _PREFIXES_MAX:
        _prefixes.clear()
    prefix = _prefixes[key] = _prefix(tag, size)
    return prefix


class Chunk(NamedTuple):
    """Describes two messages: a ProcessingRequest of a certain size that holds only a piece of a response body, and the answer to it."""

    head: bytes  # tags and lengths before the piece, which fills the rest of the message
    prefix: bytes  # all bytes of the answer before the piece
    start: int  # where the HttpBody starts in the message
    begin: int  # where the piece's bytes start in the message


_chunks: Final[dict[int, Chunk | None]] = {}
chunk_of_size: Final = _chunks.get


def learn_chunk(size: int) -> None:
    """Stores in `_chunks` the `Chunk` for messages of `size` bytes, because streamed answers repeat their sizes.

    Stores None if a message of this size cannot be a piece of a response body alone.
    """
    if size in _chunks:
        return
    if len(_chunks) >= _PREFIXES_MAX:
        _chunks.clear()
    outer = _head_of(size)
    payload = size - outer
    inner = _head_of(payload)
    if not outer or not inner or payload > PIECE_BYTES_MAX:
        _chunks[size] = None
        return
    head = b"\x2a" + varint(payload) + b"\x0a" + varint(payload - inner)
    _chunks[size] = Chunk(head, _prefix(_RESPONSE_BODY, payload), outer, outer + inner)


def _head_of(size: int) -> int:
    """Returns how many bytes tag and length take if one field fills `size` bytes; 0 if no field can fill them."""
    return next((n for n in range(2, 6) if size >= n and 1 + len(varint(size - n)) == n), 0)


def response_body_answer(message: bytes, start: int, end: int) -> bytes:
    """Returns the framed answer that passes on the HttpBody at start..end, of at most PIECE_BYTES_MAX bytes, without changes."""
    size = end - start
    prefix = _prefixes.get(size) or _remember(size, _RESPONSE_BODY, size)
    return prefix + message[start:end]


def request_body_answer(message: bytes, start: int, end: int) -> bytes:
    """Does what `response_body_answer` does, for request bodies."""
    size = end - start
    prefix = _prefixes.get(~size) or _remember(~size, _REQUEST_BODY, size)
    return prefix + message[start:end]


def as_body(data: bytes, end_of_stream: bool) -> tuple[bytes, int]:
    """Returns (an HttpBody of these bytes, encoded as a gateway encodes it; where the bytes start in it)."""
    head = b"\x0a" + varint(len(data))
    # joined at once, because each copy of a long body costs as much as its parsing
    return b"".join((head, data, END_OF_STREAM if end_of_stream else b"")), len(head)


def _lead(size: int, last: bool, tag: bytes) -> bytes:
    """Returns all bytes before a piece of `size` bytes. If it is the last piece, END_OF_STREAM follows the piece."""
    lead = _leads.get((size, last, tag))
    if lead is None:
        if len(_leads) >= _PREFIXES_MAX:
            _leads.clear()
        head = b"\x0a" + varint(size)
        lead = _leads[size, last, tag] = _prefix(tag, len(head) + size + len(END_OF_STREAM) * last) + head
    return lead


def request_body_behind(front: bytes, message: bytes, begin: int, stop: int, last: bool) -> bytes:
    """Returns the framed answer that sends message[begin:stop] behind `front`, together at most PIECE_BYTES_MAX, as a piece of a request.

    `last`: whether this piece ends the body.
    """
    lead = _lead(len(front) + stop - begin, last, _REQUEST_BODY)
    return b"".join((lead, front, message[begin:stop], END_OF_STREAM if last else b""))


def body_pieces(
    data: bytes | memoryview, end_of_stream: bool, *, request: bool, front: bytes = b"", metadata: bytes = b""
) -> list[bytes | memoryview]:
    """Returns framed answers that send `data` in pieces of at most PIECE_BYTES_MAX. With `end_of_stream`, the last answer ends the stream.

    To get the answers, join the parts of the list. Parts of the body are views of `data`: a large body is not copied. `front`: bytes to
    send before `data`, less than PIECE_BYTES_MAX. `metadata`: encoded dynamic metadata, which goes with the piece that ends the stream.
    """
    tag = _REQUEST_BODY if request else _RESPONSE_BODY
    size, ending = len(data), END_OF_STREAM + metadata
    if not size and not front:
        return [_prefix(tag, 2, len(metadata)) + ending if end_of_stream else _prefix(tag, 0)]
    parts: list[bytes | memoryview] = []
    view = memoryview(data)
    at = 0
    while at < size or front:
        piece = view[at : at + PIECE_BYTES_MAX - len(front)]
        at += len(piece)
        length = len(front) + len(piece)
        last = end_of_stream and at == size
        if last and metadata:
            head = b"\x0a" + varint(length)
            parts.append(_prefix(tag, len(head) + length + len(END_OF_STREAM), len(metadata)) + head + front)
        else:
            parts.append(_lead(length, last, tag) + front)
        parts.append(piece)
        if last:
            parts.append(ending)
        front = b""
    return parts
