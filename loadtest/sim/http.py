"""Parses and encodes HTTP/1.1 for the simulated servers. Does no I/O.

`RequestReader` takes the bytes of a connection, in pieces of any size, and returns one request at a
time. Later bytes stay in its buffer until the caller asks for the next request. Bodies have a
Content-Length or are chunked; trailers are dropped. Heads are limited to HEAD_MAX bytes and bodies to
BODY_MAX. If the peer breaks a rule, the reader raises `BadHttp`; the caller answers with the status
of this exception and then closes the connection.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_MAX = 64 * 1024
BODY_MAX = 64 * 1024 * 1024
CHUNK_LINE_MAX = 1024

REASONS = {
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    405: b"Method Not Allowed",
    413: b"Content Too Large",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    505: b"HTTP Version Not Supported",
}


class BadHttp(Exception):
    """The peer broke HTTP/1.1 or exceeded a limit."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One whole request. Header names are in lower case. If a header is repeated, its last value is used."""

    method: bytes
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes
    http10: bool

    @property
    def keep_alive(self) -> bool:
        """Returns whether the connection stays open after the answer."""
        option = self.headers.get(b"connection", b"").lower()
        return option == b"keep-alive" if self.http10 else option != b"close"


@dataclass(slots=True)
class _Head:
    """A parsed head. The body has `length` bytes, or is chunked if `length` is None."""

    request: HttpRequest
    length: int | None


class RequestReader:
    """Reads the requests of one connection from its bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: _Head | None = None
        self._body = bytearray()
        self._searched = 0
        # The last request without a body: its bytes, then the parsed request. Scrapers send the same bytes again and again.
        self._repeat = (b"", HttpRequest(b"", b"", b"", {}, b"", False))

    @property
    def buffered(self) -> int:
        """Returns the number of bytes that were received and do not belong to a returned request."""
        return len(self._buffer) + len(self._body)

    @property
    def expects_continue(self) -> bool:
        """Returns whether a head asked for `100 Continue` and no byte of its body has arrived."""
        head = self._head
        if head is None or self._buffer or self._body:
            return False
        return head.request.headers.get(b"expect", b"").lower() == b"100-continue"

    def receive(self, data: bytes) -> HttpRequest | None:
        """Adds `data` to the buffer. Returns the next request, or None while it is incomplete. Raises BadHttp."""
        fresh = not self._buffer and self._head is None
        if fresh and data and data == self._repeat[0]:
            return self._repeat[1]
        self._buffer += data
        if self._head is None:
            self._head = self._read_head()
            if self._head is None:
                return None
        request = self._read_body(self._head)
        if request is not None:
            self._head = None
            if fresh and not self._buffer and request.method == b"GET" and not request.body:
                self._repeat = (bytes(data), request)
        return request

    def hold(self, data: bytes) -> None:
        """Adds `data` to the buffer for a later call of `receive`."""
        self._buffer += data

    def _read_head(self) -> _Head | None:
        end = self._buffer.find(b"\r\n\r\n", max(0, self._searched - 3))
        if end < 0:
            self._searched = len(self._buffer)
            if self._searched > HEAD_MAX:
                raise BadHttp(431, f"the request head is longer than {HEAD_MAX} bytes")
            return None
        if end > HEAD_MAX:
            raise BadHttp(431, f"the request head is longer than {HEAD_MAX} bytes")
        raw = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        self._searched = 0
        return parse_head(raw)

    def _read_body(self, head: _Head) -> HttpRequest | None:
        if head.length is None:
            if not self._read_chunks():
                return None
            body = bytes(self._body)
            self._body.clear()
        elif len(self._buffer) < head.length:
            return None
        else:
            body = bytes(memoryview(self._buffer)[: head.length])
            del self._buffer[: head.length]
        bare = head.request
        if not body:
            return bare
        return HttpRequest(bare.method, bare.path, bare.query, bare.headers, body, http10=bare.http10)

    def _read_chunks(self) -> bool:
        """Moves whole chunks from the buffer into the body. Returns whether the last chunk and its trailers were read."""
        buffer = self._buffer
        while (line_end := buffer.find(b"\r\n", 0, CHUNK_LINE_MAX)) >= 0:
            size = _chunk_size(bytes(buffer[:line_end]))
            if size == 0:
                return self._end_chunks(line_end)
            if len(self._body) + size > BODY_MAX:
                raise BadHttp(413, f"the body is longer than {BODY_MAX} bytes")
            start = line_end + 2
            if len(buffer) < start + size + 2:
                return False
            self._body += memoryview(buffer)[start : start + size]
            if buffer[start + size : start + size + 2] != b"\r\n":
                raise BadHttp(400, "a chunk does not end where its size says")
            del buffer[: start + size + 2]
        if len(buffer) > CHUNK_LINE_MAX:
            raise BadHttp(400, "a chunk size line is too long")
        return False

    def _end_chunks(self, line_end: int) -> bool:
        buffer = self._buffer
        if buffer[line_end + 2 : line_end + 4] == b"\r\n":
            del buffer[: line_end + 4]
            return True
        end = buffer.find(b"\r\n\r\n", line_end)
        if end >= 0:
            del buffer[: end + 4]
            return True
        if len(buffer) > HEAD_MAX:
            raise BadHttp(431, f"the trailers are longer than {HEAD_MAX} bytes")
        return False


def _chunk_size(line: bytes) -> int:
    digits = line.split(b";", 1)[0].strip()
    if not digits or digits.strip(b"0123456789abcdefABCDEF"):
        raise BadHttp(400, "a chunk size is not a hexadecimal number")
    return int(digits, 16)


def parse_head(raw: bytes) -> _Head:
    """Parses the request line and headers, without the blank line. Raises BadHttp."""
    lines = raw.split(b"\r\n")
    words = lines[0].split(b" ")
    if len(words) != 3:
        raise BadHttp(400, "the request line is not 'METHOD target HTTP/1.1'")
    method, target, version = words
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadHttp(505, "this server supports only HTTP/1.1 and HTTP/1.0")
    headers: dict[bytes, bytes] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise BadHttp(400, "a header line is not 'name: value'")
        headers[name.lower()] = value.strip()
    path, _, query = target.partition(b"?")
    request = HttpRequest(method, path, query, headers, b"", http10=version == b"HTTP/1.0")
    return _Head(request, _body_length(headers))


def _body_length(headers: dict[bytes, bytes]) -> int | None:
    coding = headers.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked":
            raise BadHttp(501, "the only supported transfer coding is chunked")
        return None
    text = headers.get(b"content-length", b"0")
    if not text.isdigit():
        raise BadHttp(400, "Content-Length is not a number")
    if int(text) > BODY_MAX:
        raise BadHttp(413, f"the body is longer than {BODY_MAX} bytes")
    return int(text)


def head(status: int, kind: bytes, extra: bytes, *, length: int | None, close: bool) -> bytes:
    """Returns the head of an answer. `kind`: content type. `extra`: whole header lines. `length`: that of the body; None if chunked."""
    size = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
    end = b"Connection: close\r\n\r\n" if close else b"\r\n"
    line = b"HTTP/1.1 %d %s\r\nContent-Type: %s\r\n%s\r\n" % (status, REASONS.get(status, b"Error"), kind, size)
    return line + extra + end


def chunk(data: bytes) -> bytes:
    """Encodes `data` as one chunk. `data` must not be empty."""
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
