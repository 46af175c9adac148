"""HPACK and the meaning of header blocks: what a request says, and the constant blocks of our answers.

Decoding is our own because the `hpack` library takes 17 µs for a block of grpc-go, whose `grpc-timeout` differs in every
stream, where this takes a third; the tests hold the two against each other, and Huffman tables are the library's. Blocks that
leave the dynamic table as it is (all of Envoy's but the first) are remembered by their bytes, until the table changes.

What comes out of a table is bounded: a block's bytes by the connection, fields and their total size here. The dynamic
table has HPACK's default size of 4,096; we never announce another. Our own blocks use no dynamic table, so the peer's
SETTINGS_HEADER_TABLE_SIZE never matters to us.
"""

import re
from urllib.parse import quote

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from workers.transport.limits import Limits

Field = tuple[bytes, bytes]

TABLE_SIZE = 4096
REMEMBERED_BLOCKS = 64
REMEMBERED_BYTES = 1024  # longer blocks are decoded each time
STATUS_TEXT_MAX = 1024

_STATIC: tuple[Field | None, ...] = (None, *((n, v) for n, v in HeaderTable.STATIC_TABLE))
_DYNAMIC = len(_STATIC)  # the first index of the dynamic table: its newest entry
_NAMES = re.compile(rb"(?::?[!#$%&'*+\-.^_`|~0-9a-z]+\n)*")
_BAD_VALUE = re.compile(rb"[\x00\r\n]")
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_CONNECTION_FIELDS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)


class BrokenBlock(Exception):
    """The block can't be decoded, or not within the limits; the connection has lost its state."""


class RequestHead:
    """What a header block asks for. `problem`: why the request is malformed, as HTTP/2 means it.
    `refusal`: the HTTP status for what is HTTP/2 but not gRPC, else 0."""

    __slots__ = ("content_length", "encoding", "metadata", "path", "problem", "refusal")

    def __init__(self) -> None:
        self.path = ""
        self.metadata: tuple[Field, ...] = ()
        self.encoding = b"identity"
        self.content_length = -1
        self.refusal = 0
        self.problem = ""


class HeaderDecoder:
    """The receiving half of HPACK for one connection."""

    def __init__(self, limits: Limits) -> None:
        self._fields_max = limits.header_fields
        self._list_max = limits.header_list
        self._table: list[Field] = []  # newest last
        self._table_used = 0
        self._table_max = TABLE_SIZE
        self._remembered: dict[bytes, RequestHead] = {}
        self._changed = False

    def request(self, block: bytes) -> RequestHead:
        head = self._remembered.get(block)
        if head is None:
            head = request_head(self.fields(block))
            if self._changed:
                self._remembered.clear()
            elif len(block) <= REMEMBERED_BYTES:
                if len(self._remembered) >= REMEMBERED_BLOCKS:
                    self._remembered.clear()
                self._remembered[block] = head
        return head

    def trailers(self, block: bytes) -> str:
        """Decode and drop the trailers of a peer; says what is wrong with them, or nothing."""
        fields = self.fields(block)
        if self._changed:
            self._remembered.clear()
        if any(name[:1] == b":" for name, _ in fields):
            return "pseudo-header field in trailers"
        return _field_problem(fields)

    def fields(self, block: bytes) -> list[Field]:
        """Decode one whole block. One long function because each call costs as much as a field."""
        self._changed = False
        table = self._table
        fields: list[Field] = []
        at, size, total = 0, len(block), 0
        try:
            while at < size:
                first = block[at]
                at += 1
                if first & 0x80:  # a whole field of a table
                    index = first & 0x7F
                    if index == 0x7F:
                        index, at = _integer(block, at, index)
                    field = _STATIC[index] if index < _DYNAMIC else table[_DYNAMIC - 1 - index]
                    if field is None:
                        raise BrokenBlock(f"no header table entry {index}")
                elif first & 0x60 == 0x20:
                    if fields:
                        raise BrokenBlock("header table size update after a field")
                    limit, at = _integer(block, at, 31) if first == 0x3F else (first & 31, at)
                    if limit > TABLE_SIZE:
                        raise BrokenBlock(f"header table size {limit} is above {TABLE_SIZE}")
                    self._resize(limit)
                    continue
                else:
                    mask = 0x3F if first & 0x40 else 0x0F
                    index = first & mask
                    if index == mask:
                        index, at = _integer(block, at, index)
                    if index:
                        known = _STATIC[index] if index < _DYNAMIC else table[_DYNAMIC - 1 - index]
                        name = known[0] if known else b""
                    else:
                        name, at = _string(block, at)
                    value, at = _string(block, at)
                    field = (name, value)
                    if first & 0x40:
                        self._add(field)
                fields.append(field)
                total += len(field[0]) + len(field[1]) + 32
                if total > self._list_max or len(fields) > self._fields_max:
                    raise BrokenBlock(
                        f"more than {self._fields_max} header fields or {self._list_max} bytes of them"
                    )
        except (IndexError, HPACKDecodingError) as error:
            raise BrokenBlock(f"undecodable header block: {error}") from None
        return fields

    def _add(self, field: Field) -> None:
        self._changed = True
        self._table.append(field)
        self._table_used += len(field[0]) + len(field[1]) + 32
        if self._table_used > self._table_max:
            self._evict()

    def _resize(self, limit: int) -> None:
        self._changed = True
        self._table_max = limit
        self._evict()

    def _evict(self) -> None:
        while self._table_used > self._table_max:
            name, value = self._table.pop(0)
            self._table_used -= len(name) + len(value) + 32


def _integer(block: bytes, at: int, value: int) -> tuple[int, int]:
    """The rest of an integer whose prefix was full; IndexError at the end of the block."""
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 21:
            raise BrokenBlock("integer too long in a header block")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    first = block[at]
    at += 1
    length = first & 0x7F
    if length == 0x7F:
        length, at = _integer(block, at, length)
    end = at + length
    if end > len(block):
        raise BrokenBlock("string longer than its header block")
    text = block[at:end]
    return (decode_huffman(text) if first & 0x80 else text), end


def _field_problem(fields: list[Field]) -> str:
    names = b"\n".join([name for name, _ in fields]) + b"\n"
    if fields and not _NAMES.fullmatch(names):
        return "field name with a forbidden character"
    if _BAD_VALUE.search(b"".join([value for _, value in fields])):
        return "field value with a forbidden character"
    return ""


def request_head(fields: list[Field]) -> RequestHead:
    """Check a request's fields against RFC 9113 section 8 and find what gRPC needs."""
    head = RequestHead()
    head.problem = _field_problem(fields)
    pseudo: dict[bytes, bytes] = {}
    count = 0
    for name, value in fields:
        if name[:1] != b":":
            break
        if name in pseudo or name not in _PSEUDO:
            head.problem = "repeated or unknown pseudo-header field"
        pseudo[name] = value
        count += 1
    head.metadata = tuple(fields[count:])
    content_type = b""
    for name, value in head.metadata:
        if name == b"content-type":
            content_type = value
        elif name == b"grpc-encoding":
            head.encoding = value
        elif name == b"content-length":
            if not value.isdigit() or len(value) > 18:
                head.problem = "content-length is not a number"
            else:
                head.content_length = int(value)
        elif name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
            head.problem = "connection-specific header field"
        elif name[:1] == b":":
            head.problem = "pseudo-header field after a regular one"
    if not (pseudo.get(b":method") and pseudo.get(b":scheme") and pseudo.get(b":path")):
        head.problem = head.problem or "missing pseudo-header field"
        return head
    head.path = pseudo[b":path"].decode("latin-1")
    if pseudo[b":method"] != b"POST":
        head.refusal = 405
    elif content_type != b"application/grpc" and not content_type.startswith(
        (b"application/grpc+", b"application/grpc;")
    ):
        head.refusal = 415
    return head


def _literal(name: bytes, value: bytes) -> bytes:
    """One field that no table remembers, its name spelt out."""
    return b"\0" + _sized(name) + _sized(value)


def _sized(text: bytes) -> bytes:
    length = len(text)
    if length < 0x7F:
        return bytes((length,)) + text
    length -= 0x7F
    prefix = bytearray(b"\x7f")
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + text


RESPONSE_BLOCK = b"\x88" + b"\x0f\x10" + _sized(b"application/grpc")  # :status 200, content-type
TRAILERS_OK_BLOCK = _literal(b"grpc-status", b"0")


def trailers_block(status: int, text: str) -> bytes:
    """A gRPC status and its percent-encoded text."""
    if not status and not text:
        return TRAILERS_OK_BLOCK
    block = _literal(b"grpc-status", b"%d" % status)
    if text:
        printable = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
        encoded = quote(text[:STATUS_TEXT_MAX], safe=printable, errors="replace")
        block += _literal(b"grpc-message", encoded.encode())
    return block


def refusal_block(status: int) -> bytes:
    """The header block of an HTTP answer to a request that is not gRPC."""
    return b"\x08" + _sized(b"%d" % status) + b"\x0f\x10" + _sized(b"text/plain")
