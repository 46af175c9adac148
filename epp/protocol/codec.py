"""Envoy's ext_proc messages: bytes <-> what the stream machine needs. The only file that knows protobuf.

Source: envoy/service/ext_proc/v3/external_processor.proto. Request messages are walked in place; only header maps are decoded,
and only metadata of the subset hint goes through the protobuf library. A body piece is never decoded: `HttpBody{body,
end_of_stream}` has the same bytes as the `StreamedBodyResponse` that answers it, so the answer is the received slice behind
new length prefixes.
"""

import enum
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

from epp.decision import SERVED
from epp.errors import ProtocolViolation
from epp.protocol.proto import ext_proc_pb2 as pb

PIECE_BYTES_MAX: Final = 62_000  # Envoy takes streamed body pieces up to 64 KiB
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_SUBSET_NAMESPACE: Final = SUBSET_NAMESPACE.encode()
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
DESTINATION: Final = "x-gateway-destination-endpoint"
SCORES: Final = "x-gateway-destination-endpoint-scores"
METADATA_NAMESPACE: Final = "envoy.lb"
_METADATA_NAMESPACE: Final = METADATA_NAMESPACE.encode()
# Between gateway and picker these are metadata. As headers only a client can have sent them: every answer to request headers
# removes them, whatever their case and number. The destination itself is overwritten.
NEVER_PASSED: Final = (SUBSET_KEY, SERVED, SCORES)


class Kind(enum.IntEnum):
    """The oneof of a ProcessingRequest, by field number."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7


FIELDS_MAX: Final = 1024  # of one message: gateways send a few; walking takes 0.3 us for each, which may have two bytes
HEADERS_MAX: Final = 1000  # of one message: Envoy takes 100 by default
SURE_BYTES: Final = 2 * HEADERS_MAX  # of headers that are not too many
# Of a member of an enum each look costs 0.1 us, and a request takes thirty; these are the plain numbers.
REQUEST_HEADERS, RESPONSE_HEADERS, REQUEST_BODY, RESPONSE_BODY, REQUEST_TRAILERS, RESPONSE_TRAILERS = map(int, Kind)
_TRUE: Final = b"\x10\x01"


def varint(value: int) -> bytes:
    """Protobuf's base-128 form of a non-negative integer."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ProtocolViolation("malformed message: a varint is longer than 10 bytes")


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def split(message: bytes) -> tuple[int, int, int]:
    """(kind, start, end): which oneof the message holds and where its payload stands. Raises ProtocolViolation."""
    try:
        tag = message[0]
        length = message[1]
        at = 2
        if length > 0x7F:
            more = message[2]
            if more > 0x7F:
                length, at = _read_varint(message, 1)
            else:  # up to 16 KiB: without the call, 0.3 us less
                length, at = length & 0x7F | more << 7, 3
        if 0x12 <= tag <= 0x3A and at + length == len(message) and tag & 7 == 2:
            return tag >> 3, at, len(message)
        return _split_slowly(message)
    except IndexError:
        raise ProtocolViolation("malformed message: it is cut off") from None


def _split_slowly(message: bytes) -> tuple[int, int, int]:
    """Any order of fields; of a oneof given twice the last one counts, as protobuf says."""
    found = None
    for tag, start, end in _fields(message, 0, len(message)):
        if tag & 7 == 2 and 2 <= tag >> 3 <= 7:
            found = (tag >> 3, start, end)
    if found is None:
        raise ProtocolViolation("a message holds neither headers, body nor trailers")
    return found


def _fields(data: bytes, at: int, end: int) -> Iterable[tuple[int, int, int]]:
    """(tag, start, end) of each field; of scalars, of their value. A known number with another wire type is another field."""
    try:
        for _ in range(FIELDS_MAX):
            if at >= end:
                return
            tag, at = _read_varint(data, at)
            if not 8 <= tag < 1 << 32:
                raise ProtocolViolation(f"malformed message: there is no field {tag >> 3}")
            kind = tag & 7
            if kind == 2:
                length, at = _read_varint(data, at)
                stop = at + length
            elif kind == 0:
                stop = _read_varint(data, at)[1]
            elif kind == 1:
                stop = at + 8
            elif kind == 5:
                stop = at + 4
            else:
                raise ProtocolViolation(f"malformed message: wire type {kind}")
            if stop > end:
                raise ProtocolViolation("malformed message: a field is longer than the message")
            yield tag, at, stop
            at = stop
    except IndexError:
        raise ProtocolViolation("malformed message: it is cut off") from None
    if at < end:
        raise ProtocolViolation(f"malformed message: more than {FIELDS_MAX} fields")


def headers(message: bytes, start: int, end: int) -> tuple[dict[str, str], bool]:
    """HttpHeaders -> (names in lower case -> values as Latin-1 text, end_of_stream). Of duplicates the last one wins.

    Raises ProtocolViolation.
    """
    # Two tags of each are this byte, and two of its lengths may be; no value has it.
    if end - start > SURE_BYTES and message.count(b"\x0a", start, end) > 4 * HEADERS_MAX:
        raise ProtocolViolation(f"malformed headers: more than {HEADERS_MAX}")
    try:
        if message[start] == 0x0A:
            length, at = _read_varint(message, start + 1)
            stop = at + length
            rest = message[stop:end]
            if not rest or rest == b"\x18\x01":
                found = _header_map(message, at, stop)
                if found is not None:
                    return found, bool(rest)
    except IndexError:
        pass
    return _headers_slowly(message[start:end])


class Headers(Mapping[str, str]):
    """A message's headers, decoded when somebody reads them: names in lower case -> values as Latin-1 text.

    `find` looks for one header without decoding the others. Malformed ones are none at all, whoever reads them first, and `problem`
    says so from then on: the stream is to end by it.
    """

    __slots__ = ("_end", "_found", "_message", "_start", "problem")

    def __init__(self, message: bytes, start: int, end: int) -> None:
        self._message = message
        self._start = start
        self._end = end
        self._found: dict[str, str] | None = None
        self.problem: ProtocolViolation | None = None

    def find(self, needle: bytes) -> str | None:
        """The value of the header that `needle(name)` was made for; None: there is none."""
        message = self._message
        key = message.find(needle, self._start, self._end)
        if key >= 2:
            at = key + len(needle)
            size = message[at] if at < self._end else 0x80
            # The entry's own length vouches for the place: tag, length, key, tag, length, value.
            if size < 0x80 and message[key - 2] == 0x0A and message[key - 1] == len(needle) + 1 + size:
                return message[at + 1 : at + 1 + size].decode("latin-1")
        return self._all().get(needle[2:-1].decode())

    def mentions(self, text: bytes) -> bool:
        """Whether this text stands anywhere among names and values: a cheap look before a costly one."""
        return self._message.find(text, self._start, self._end) >= 0

    def _all(self) -> dict[str, str]:
        found = self._found
        if found is None:
            found = self._found = self._decoded()
        return found

    def _decoded(self) -> dict[str, str]:
        try:
            return headers(self._message, self._start, self._end)[0]
        except ProtocolViolation as problem:
            self.problem = problem
            return {}

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class Unseen(Headers):
    """Headers without some of them: as if nobody had sent those."""

    __slots__ = ("_hidden",)

    def __init__(self, message: bytes, start: int, end: int, hidden: Collection[str]) -> None:
        super().__init__(message, start, end)
        self._hidden = hidden

    def find(self, needle: bytes) -> str | None:
        return self._all().get(needle[2:-1].decode())

    def _all(self) -> dict[str, str]:
        found = self._found
        if found is None:
            everything = self._decoded()
            found = self._found = {name: value for name, value in everything.items() if name not in self._hidden}
        return found


def needle(name: str) -> bytes:
    """What stands in front of the value of a header in a HeaderMap: key and tag of raw_value."""
    return b"\x0a" + bytes((len(name),)) + name.encode() + b"\x1a"


def end_of_stream(message: bytes, start: int, end: int) -> bool:
    """Whether HttpHeaders say that no body follows."""
    if start == end or (message[start] == 0x0A and message[end - 2 : end] != b"\x18\x01"):
        return False  # the flag would stand behind the headers
    return headers(message, start, end)[1]


def _header_map(message: bytes, at: int, end: int) -> dict[str, str] | None:
    """HeaderMap as Envoy writes it: each entry a key of up to 127 bytes and then a value. None: not of that form."""
    text = message.decode("latin-1")
    found: dict[str, str] = {}
    while at < end:
        if message[at] != 0x0A:
            return None
        length = message[at + 1]
        if length < 0x80:
            at += 2
        else:
            length, at = _read_varint(message, at + 1)
        stop = at + length
        value = at + 2 + message[at + 1]
        if message[at] != 0x0A or message[at + 1] > 0x7F or stop > end or value > stop:
            return None
        if value == stop:
            found[text[at + 2 : value]] = ""
        else:
            tag = message[value]
            size = message[value + 1]
            if size < 0x80:
                begin = value + 2
            else:
                size, begin = _read_varint(message, value + 1)
            if tag not in (0x12, 0x1A) or begin + size != stop:
                return None
            found[text[at + 2 : value]] = text[begin:stop]
        at = stop
    return found


def _headers_slowly(payload: bytes) -> tuple[dict[str, str], bool]:
    try:
        decoded = pb.HttpHeaders.FromString(payload)
    except DecodeError as error:
        raise ProtocolViolation(f"malformed headers: {error}") from None
    pairs = {h.key.lower(): (h.raw_value or h.value.encode()).decode("latin-1") for h in decoded.headers.headers}
    return pairs, decoded.end_of_stream


def body(message: bytes, start: int, end: int) -> tuple[int, int, bool]:
    """HttpBody -> (where its bytes start, where they end, end_of_stream)."""
    if start == end:
        return start, start, False
    try:
        if message[start] == 0x0A:
            length = message[start + 1]
            at = start + 2
            if length > 0x7F:
                length, at = _read_varint(message, start + 1)
            stop = at + length
            if stop == end:
                return at, stop, False
            if stop + 2 == end and message[stop:end] == _TRUE:
                return at, stop, True
        elif message[start:end] == _TRUE:
            return start, start, True
    except IndexError:
        raise ProtocolViolation("malformed body: it is cut off") from None
    return _body_slowly(message, start, end)


def _body_slowly(message: bytes, start: int, end: int) -> tuple[int, int, bool]:
    begin = stop = start
    last = False
    for tag, at, until in _fields(message, start, end):
        if tag == 0x0A:
            begin, stop = at, until
        elif tag == 0x10:
            last = message[at] != 0
    return begin, stop, last


def subset(message: bytes) -> Sequence[str] | None:
    """The gateway's subset hint in the message's metadata: a list of `ip:port` or `ip`; None where there is none."""
    if _SUBSET_NAMESPACE not in message:
        return None
    try:
        metadata = pb.ProcessingRequest.FromString(message).metadata_context.filter_metadata
    except DecodeError as error:
        raise ProtocolViolation(f"malformed metadata: {error}") from None
    if SUBSET_NAMESPACE not in metadata:
        return None
    hint = metadata[SUBSET_NAMESPACE].fields.get(SUBSET_KEY)
    if hint is None or hint.WhichOneof("kind") != "list_value":
        return None
    return [v.string_value for v in hint.list_value.values if v.WhichOneof("kind") == "string_value"]


def gateway_metadata(message: bytes) -> Mapping[str, object] | None:
    """What the gateway says of its balancing in the message's metadata: key -> value; None: it says nothing."""
    if _METADATA_NAMESPACE not in message:
        return None
    try:
        metadata = pb.ProcessingRequest.FromString(message).metadata_context.filter_metadata
    except DecodeError as error:
        raise ProtocolViolation(f"malformed metadata: {error}") from None
    if METADATA_NAMESPACE not in metadata:
        return None
    fields = metadata[METADATA_NAMESPACE].fields
    return {
        name: value.string_value if value.WhichOneof("kind") == "string_value" else value
        for name, value in fields.items()
    }


def _framed(message: bytes) -> bytes:
    """One gRPC message: flag and length in front."""
    return b"\0" + struct.pack(">I", len(message)) + message


def _set_header(name: str, value: bytes) -> bytes:
    """HeaderMutation.set_headers with one HeaderValueOption{header{key, raw_value}}."""
    return field(1, field(1, field(1, name.encode()) + field(3, value)))


_CONTENT_LENGTH: Final = field(1, b"content-length")
_CLEAR_ROUTE_CACHE: Final = b"\x28\x01"


@lru_cache(maxsize=64)  # what is removed is fixed by the configuration
def _remove_headers(names: tuple[str, ...]) -> bytes:
    """HeaderMutation.remove_headers."""
    return b"".join([field(2, name.encode()) for name in names])


_NEVER_PASSED: Final = _remove_headers(NEVER_PASSED)


class Destination:
    """The answer to request headers for one target list: bytes around the one part that differs, the content length."""

    __slots__ = ("_around", "_entry", "metadata", "option")

    def __init__(self, addresses: str) -> None:
        target = addresses.encode()
        self.option = _set_header(DESTINATION, target)
        self._entry = _entry(DESTINATION, field(3, target))  # google.protobuf.Value.string_value
        self.metadata = _dynamic_metadata(self._entry)
        self._around: dict[int, tuple[bytes, bytes]] = {}  # number of digits -> before, after

    def answer(self, content_length: int) -> bytes:
        """The whole framed answer; content_length 0 sends none."""
        if not content_length:
            return self.compose(b"")
        digits = b"%d" % content_length
        around = self._around.get(len(digits))
        if around is None:
            before, _, after = self.compose(_content_length(b"#" * len(digits))).partition(b"#" * len(digits))
            around = self._around[len(digits)] = (before, after)
        return around[0] + digits + around[1]

    def with_scores(self, scores: Mapping[str, float]) -> bytes:
        """The dynamic metadata with the score of each address besides."""
        numbers = b"".join([_entry(address, b"\x11" + struct.pack("<d", score)) for address, score in scores.items()])
        return _dynamic_metadata(self._entry + _entry(SCORES, field(5, numbers)))

    def compose(self, more: bytes, metadata: bytes | None = None) -> bytes:
        """ProcessingResponse{request_headers{response{header_mutation}}, dynamic_metadata} with `more` of the mutation."""
        options = self.option + more + _NEVER_PASSED
        common = b"\x12" + varint(len(options)) + options + _CLEAR_ROUTE_CACHE
        response = b"\x0a" + varint(len(common)) + common
        return _framed(b"\x0a" + varint(len(response)) + response + (metadata or self.metadata))


def _entry(key: str, value: bytes) -> bytes:
    """Struct.fields{key, Value}."""
    return field(1, field(1, key.encode()) + field(2, value))


def _dynamic_metadata(entries: bytes) -> bytes:
    """ProcessingResponse.dynamic_metadata{METADATA_NAMESPACE: entries}."""
    return field(8, _entry(METADATA_NAMESPACE, field(5, entries)))


def _content_length(digits: bytes) -> bytes:
    header = _CONTENT_LENGTH + field(3, digits)
    return field(1, field(1, header))


def request_headers_answer(
    destination: Destination,
    content_length: int,
    extra: Mapping[str, str],
    scores: Mapping[str, float] | None = None,
    removed: tuple[str, ...] = (),
) -> bytes:
    """The framed answer that routes the request. Raises ValueError for a header value that is not Latin-1."""
    if not extra and not removed and scores is None:
        return destination.answer(content_length)
    more = _content_length(b"%d" % content_length) if content_length else b""
    metadata = destination.with_scores(scores) if scores is not None else None
    added = b"".join([_set_header(n, v.encode("latin-1")) for n, v in extra.items()])
    return destination.compose(more + added + _remove_headers(removed), metadata)


def response_headers_answer(set_headers: Mapping[str, str], removed: tuple[str, ...] = ()) -> bytes:
    """The framed answer to response headers that changes them. Raises ValueError for a value that is not Latin-1."""
    mutation = b"".join([_set_header(n, v.encode("latin-1")) for n, v in set_headers.items()]) + _remove_headers(
        removed
    )
    return _framed(field(2, field(1, field(2, mutation))))


RESPONSE_HEADERS_ANSWER: Final = _framed(field(2, field(1, b"")))
REQUEST_TRAILERS_ANSWER: Final = _framed(field(5, b""))
RESPONSE_TRAILERS_ANSWER: Final = _framed(field(6, b""))

_REQUEST_BODY: Final = b"\x1a"
_RESPONSE_BODY: Final = b"\x22"
_PREFIXES_MAX: Final = 4096
_prefixes: dict[int, bytes] = {}  # size (of request bodies: its complement) -> prefix; answers repeat their sizes


def _prefix(tag: bytes, size: int) -> bytes:
    """Everything in front of a StreamedBodyResponse of `size` bytes, gRPC frame header included."""
    inner = b"\x1a" + varint(size)
    inner = b"\x1a" + varint(len(inner) + size) + inner
    inner = b"\x0a" + varint(len(inner) + size) + inner
    inner = tag + varint(len(inner) + size) + inner
    return b"\0" + struct.pack(">I", len(inner) + size) + inner


def _remember(key: int, tag: bytes, size: int) -> bytes:
    if len(_prefixes) >= _PREFIXES_MAX:
        _prefixes.clear()
    prefix = _prefixes[key] = _prefix(tag, size)
    return prefix


class Chunk(NamedTuple):
    """How a ProcessingRequest of one size looks that holds a response body piece and nothing else, and its answer."""

    head: bytes  # tags and lengths in front of the piece's bytes; they fill the message
    prefix: bytes  # of the answer
    start: int  # of the HttpBody
    begin: int  # of the piece's bytes


_chunks: dict[int, Chunk | None] = {}
chunk_of_size: Final = _chunks.get


def learn_chunk(size: int) -> None:
    """Remember the form of whole messages of `size` bytes: streamed answers repeat their sizes."""
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
    """How many of `size` bytes are tag and length of the field that fills them; 0: no field can."""
    return next((n for n in range(2, 6) if size >= n and 1 + len(varint(size - n)) == n), 0)


def response_body_answer(message: bytes, start: int, end: int) -> bytes:
    """The framed answer that passes on an HttpBody of at most PIECE_BYTES_MAX bytes as it stands at start..end."""
    size = end - start
    prefix = _prefixes.get(size) or _remember(size, _RESPONSE_BODY, size)
    return prefix + message[start:end]


def request_body_answer(message: bytes, start: int, end: int) -> bytes:
    """Like `response_body_answer`, for request bodies."""
    size = end - start
    prefix = _prefixes.get(~size) or _remember(~size, _REQUEST_BODY, size)
    return prefix + message[start:end]


def as_body(data: bytes, end_of_stream: bool) -> tuple[bytes, int]:
    """An HttpBody of these bytes as a gateway would send it, and where the bytes start in it."""
    head = b"\x0a" + varint(len(data))
    return head + data + (_TRUE if end_of_stream else b""), len(head)


def body_pieces(data: bytes | memoryview, end_of_stream: bool, *, request: bool) -> bytes:
    """Any bytes as framed answers of at most PIECE_BYTES_MAX each, one after the other; the last one ends the stream."""
    tag = _REQUEST_BODY if request else _RESPONSE_BODY
    size = len(data)
    if not size:
        return _prefix(tag, 2) + _TRUE if end_of_stream else _prefix(tag, 0)
    parts: list[bytes | memoryview] = []
    view = memoryview(data)
    for at in range(0, size, PIECE_BYTES_MAX):
        piece = view[at : at + PIECE_BYTES_MAX]
        ends = end_of_stream and at + PIECE_BYTES_MAX >= size
        head = b"\x0a" + varint(len(piece))
        parts += (_prefix(tag, len(head) + len(piece) + (2 if ends else 0)) + head, piece)
        if ends:
            parts.append(_TRUE)
    return b"".join(parts)


def last_pieces(data: bytes | memoryview, metadata: Mapping[str, Mapping[str, object]]) -> bytes:
    """The last piece of a response body with dynamic metadata: the bytes, then an empty piece that ends and carries it."""
    struct_ = Struct()
    struct_.update(dict(metadata))  # type: ignore[arg-type]  # the stub knows no nested mappings
    ending = field(1, field(3, field(3, _TRUE)))  # CommonResponse.body_mutation.streamed_response
    last = _framed(field(4, ending) + field(8, struct_.SerializeToString()))
    return body_pieces(data, False, request=False) + last if len(data) else last


def immediate_answer(status: int, headers_: Mapping[str, str], body_: bytes) -> bytes:
    """The framed ProcessingResponse{immediate_response}; the stream ends after it."""
    mutation = b"".join(_set_header(name, value.encode("latin-1")) for name, value in headers_.items())
    payload = field(1, b"\x08" + varint(status))
    if mutation:
        payload += field(2, mutation)
    payload += field(3, body_)
    return _framed(field(7, payload))
