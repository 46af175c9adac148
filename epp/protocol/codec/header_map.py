"""Reads HttpHeaders: decodes names and values at the first read. One header can be found without decoding the others."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final

from compiled.calls import header, header_values, mentions
from epp.errors import ProtocolViolation
from epp.protocol.codec.fields import field, read_varint, walk
from epp.protocol.codec.structs import text

HEADERS_MAX: Final = 1000  # headers in one message; Envoy accepts 100 by default
SURE_BYTES: Final = 2 * HEADERS_MAX  # fewer bytes cannot hold too many headers


def headers(message: bytes, start: int, end: int) -> tuple[dict[str, str], bool]:
    """Returns, for HttpHeaders, (names in lower case -> values as Latin-1 text, end_of_stream).

    If a name occurs several times, its last value applies. Raises ProtocolViolation.
    """
    # The byte 0x0A occurs twice among the tags of each header, and may occur twice among its lengths. No value contains this byte.
    if end - start > SURE_BYTES and message.count(b"\x0a", start, end) > 4 * HEADERS_MAX:
        raise ProtocolViolation(f"malformed headers: more than {HEADERS_MAX}")
    try:
        if message[start] == 0x0A:
            length, at = read_varint(message, start + 1)
            stop = at + length
            if stop == end or (stop < end and message[stop:end] == b"\x18\x01"):
                found = _header_map(message, at, stop)
                if found is not None:
                    return found, stop < end
    except IndexError:
        pass
    return _headers_slowly(message[start:end])


class Headers(Mapping[str, str]):
    """Holds a message's headers, decoded at the first read: names in lower case -> values as Latin-1 text.

    `find` looks for one header without decoding the others. If the headers are malformed, they read as empty, and the first read sets
    `problem`; the reader then has to end the stream.
    """

    __slots__ = ("_end", "_found", "_message", "_start", "problem")

    def __init__(self, message: bytes, start: int, end: int) -> None:
        self._message = message
        self._start = start
        self._end = end
        self._found: dict[str, str] | None = None
        self.problem: ProtocolViolation | None = None

    def find(self, needle: bytes) -> str | None:
        """Returns the value of one header, or None without the header. `needle`: the result of the function `needle(name)`."""
        value = header(self._message, needle, self._start, self._end)
        return self._all().get(needle[2:-1].decode()) if value is None else value

    def sent(self, name: str) -> str | None:
        """Returns the value of a header even if it is hidden, or None without the header."""
        return self._all().get(name)

    def mentions(self, text: bytes) -> bool:
        """Returns whether names and values contain this text anywhere, in any case: a cheap check before an expensive one.

        `text` is in lower case.
        """
        return mentions(self._message, text, self._start, self._end)

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
    """Hides some headers, as if the client had not sent them. These headers, and those of `sent`, are found without decoding the others."""

    __slots__ = ("_every", "_hidden", "_hides", "_listed")

    def __init__(self, message: bytes, start: int, end: int, hidden: frozenset[str]) -> None:
        super().__init__(message, start, end)
        self._every: dict[str, str] | None = None  # all headers, hidden ones included
        self._hidden = hidden
        self._listed = _sorted(hidden)
        self._hides = False  # whether there is a hidden header
        for value in self._values(self._listed):
            if value is not None:
                self._hides = True

    def find(self, needle: bytes) -> str | None:
        if (self._hides or self.problem is not None) and needle[2:-1].decode() in self._hidden:
            return None
        return super().find(needle)

    def sent(self, name: str) -> str | None:
        return self._values((name,))[0]

    def removed(self) -> tuple[str, ...]:
        """Returns the names of headers to remove before the request goes on: all names to hide, if one of these headers is present."""
        return self._listed if self._hides else ()

    def _values(self, names: tuple[str, ...]) -> Sequence[str | None]:
        """Returns the values of these headers, hidden or not; None for each missing header."""
        values = header_values(self._message, names, self._start, self._end)
        if values is not None:
            return values
        every = self._whole()
        return [every.get(name) for name in names]

    def _whole(self) -> dict[str, str]:
        every = self._every
        if every is None:
            every = self._every = self._decoded()
        return every

    def _all(self) -> dict[str, str]:
        found = self._found
        if found is None:
            found = self._whole()
            if self._hides:
                found = {name: value for name, value in found.items() if name not in self._hidden}
            self._found = found
        return found


@lru_cache(maxsize=64)  # the configuration determines the names
def _sorted(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names))


def headers_of(values: Mapping[str, str]) -> Headers:
    """Makes headers from names and values, encoded as a gateway encodes them. A value that is not Latin-1 is encoded as UTF-8."""
    encoded = b""
    for name, value in values.items():
        try:
            raw = value.encode("latin-1")
        except UnicodeEncodeError:
            raw = value.encode()
        encoded += field(1, field(1, name.lower().encode()) + (field(3, raw) if raw else b""))
    message = field(1, encoded) if encoded else b""
    return Headers(message, 0, len(message))


def needle(name: str) -> bytes:
    """Returns the bytes before the length and value of a header in a HeaderMap: its key, and the tag of raw_value."""
    return b"\x0a" + bytes((len(name),)) + name.encode() + b"\x1a"


def end_of_stream(message: bytes, start: int, end: int) -> bool:
    """Returns whether HttpHeaders announce that no body follows. Raises ProtocolViolation."""
    if start == end or (message[start] == 0x0A and message[end - 2 : end] != b"\x18\x01"):
        return False  # the flag, if present, stands behind the headers
    return headers(message, start, end)[1]


def _header_map(message: bytes, at: int, end: int) -> dict[str, str] | None:
    """Reads a HeaderMap as Envoy writes it: each entry is a key of up to 127 bytes, then a value. Returns None for another form."""
    text = message.decode("latin-1")
    names = message.lower().decode("latin-1")
    found: dict[str, str] = {}
    while at < end:
        if message[at] != 0x0A:
            return None
        length = message[at + 1]
        if length < 0x80:
            at += 2
        else:
            length, at = read_varint(message, at + 1)
        stop = at + length
        value = at + 2 + message[at + 1]
        if message[at] != 0x0A or message[at + 1] > 0x7F or stop > end or value > stop:
            return None
        if value == stop:
            found[names[at + 2 : value]] = ""
        else:
            tag = message[value]
            size = message[value + 1]
            if size < 0x80:
                begin = value + 2
            else:
                size, begin = read_varint(message, value + 1)
            if tag not in (0x12, 0x1A) or begin + size != stop:
                return None
            found[names[at + 2 : value]] = text[begin:stop]
        at = stop
    return found


def _headers_slowly(payload: bytes) -> tuple[dict[str, str], bool]:
    found: dict[str, str] = {}
    ends = False
    for tag, start, end in walk(payload, 0, len(payload)):
        if tag == 0x0A:
            for inner, at, stop in walk(payload, start, end):
                if inner == 0x0A:
                    name, value = _header(payload, at, stop)
                    found[name] = value
        elif tag == 0x18:
            ends = read_varint(payload, start)[0] != 0
    return found, ends


def _header(payload: bytes, at: int, stop: int) -> tuple[str, str]:
    """Returns name and value of a HeaderValue: the value is its field `raw_value`, or else its field `value`."""
    name = value = raw = ""
    for tag, start, end in walk(payload, at, stop):
        if tag == 0x0A:
            name = text(payload, (start, end)).lower()
        elif tag == 0x12:
            value = text(payload, (start, end)).encode().decode("latin-1")
        elif tag == 0x1A:
            raw = payload[start:end].decode("latin-1")
    return name, raw or value
