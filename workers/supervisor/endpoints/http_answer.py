"""Decodes the answers to scrapes: takes bytes, in pieces of any size, and gives a page or an `HttpError`. Does no I/O.

    received  | status line | header lines | blank | body                   one allocation per page
    body ends | chunked: its last chunk | Content-Length | the connection's end

- Only 200 is accepted. Up to INTERIM_MAX interim answers (1xx) may precede it.
- Everything is bounded: head, body (before and after decompression), chunk headers, trailers.
- An answer with more bytes than it announced is an error, because client and server are out of step.
- Most answers have a plain head and arrive at once. They are recognised first, because reading all headers takes as long as reading the
  page.
"""

import contextlib
from typing import Final

from compiled.calls import plain_head
from epp.protocol.inflate import TooLong, gunzip

HEAD_BYTES_MAX: Final = 16 << 10
INTERIM_MAX: Final = 8
NO_SUCH_PAGE: Final = (b"http/1.1 4", b"http/1.0 4", b"http/1.1 501", b"http/1.0 501")  # llama.cpp without --metrics answers 501
PAGE_BYTES_MAX: Final = 8 << 20
CHUNK_LINE_BYTES_MAX: Final = 1 << 10
CHUNKS_MAX: Final = 1 << 14  # limit per page, because each chunk takes 2 us
TRAILER_BYTES_MAX: Final = 8 << 10
SIZE: Final = 0  # SIZE to TRAILER: what the decoder of chunks expects next
DATA: Final = 1
DATA_END: Final = 2
TRAILER: Final = 3


class HttpError(Exception):
    """Raised for an answer that cannot be used. `cause`: one word, for counters. `serves`: whether it is the answer of a server that works
    and does not have the page (NO_SUCH_PAGE).
    """

    def __init__(self, cause: str, text: str, *, serves: bool = False) -> None:
        super().__init__(text)
        self.cause = cause
        self.serves = serves


class Chunks:
    """Decodes a chunked body piece by piece."""

    __slots__ = ("_body", "_chunks", "_left", "_line", "_state", "_trailer_bytes")

    def __init__(self) -> None:
        self._body = bytearray()
        self._chunks = 0
        self._left = 0
        self._line = b""
        self._state = SIZE
        self._trailer_bytes = 0

    def receive(self, data: bytes, at: int = 0) -> bytes | None:
        """Takes the bytes `data[at:]`. Returns the body when it is complete, else None.

        Raises HttpError if a chunk is malformed, the body is too large, or bytes follow the body.
        """
        end = len(data)
        while at < end:
            if self._state == DATA:
                taken = min(self._left, end - at)
                self._body += data[at : at + taken]
                self._left -= taken
                at += taken
                if not self._left:
                    self._state = DATA_END
                continue
            stop = data.find(b"\n", at)
            self._line += data[at : stop if stop >= 0 else end]
            if len(self._line) > CHUNK_LINE_BYTES_MAX:
                raise HttpError("chunks", f"a chunk header over {CHUNK_LINE_BYTES_MAX} bytes")
            if stop < 0:
                return None
            at = stop + 1
            line, self._line = self._line.rstrip(b"\r"), b""
            if self._line_done(line):
                if at < end:
                    raise HttpError("length", f"{end - at} bytes after the last chunk")
                return bytes(self._body)
        return None

    def _line_done(self, line: bytes) -> bool:
        if self._state == SIZE:
            size = _hex(line.split(b";", 1)[0].strip())
            if size + len(self._body) > PAGE_BYTES_MAX:
                raise HttpError("too-large", f"a page over {PAGE_BYTES_MAX} bytes")
            self._chunks += 1
            if self._chunks > CHUNKS_MAX:
                raise HttpError("too-large", f"a page in more than {CHUNKS_MAX} chunks")
            self._left = size
            self._state = DATA if size else TRAILER
        elif self._state == DATA_END:
            if line:
                raise HttpError("chunks", "a chunk is longer than its header says")
            self._state = SIZE
        else:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > TRAILER_BYTES_MAX:
                raise HttpError("chunks", f"trailers over {TRAILER_BYTES_MAX} bytes")
            return not line
        return False


class ServerAnswer:
    """Decodes the answer to one GET. `keep_alive`: whether the connection can be used for another request."""

    __slots__ = ("_chunks", "_got", "_gzip", "_interim", "_parts", "_total", "_until_close", "keep_alive")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the last answer, so that the next one can be received."""
        self._parts: list[bytes] = []
        self._got = 0
        self._interim = 0
        self._total = -1  # bytes of head and body; -1 until the head is complete
        self._chunks: Chunks | None = None
        self._gzip = False
        self._until_close = False
        self.keep_alive = True

    @property
    def started(self) -> bool:
        """Whether a part of the answer has arrived."""
        return self._got > 0 or self._interim > 0

    def receive(self, received: bytes | memoryview) -> bytes | None:
        """Takes bytes. Returns the page when it is complete, else None. Raises HttpError if the answer cannot be used."""
        if not self._got and (page := _plain_page(received)) is not None:
            self._got = len(received)
            return page
        data = bytes(received)
        self._got += len(data)
        if self._chunks is not None:
            return self._unpacked(self._chunks.receive(data))
        self._parts.append(data)
        if self._total < 0 and not self._until_close:
            return self._head()
        if self._got < self._total:
            return None
        if self._until_close:
            if self._got > PAGE_BYTES_MAX:
                raise HttpError("too-large", f"a page over {PAGE_BYTES_MAX} bytes")
            return None
        return self._whole(b"".join(self._parts), len(self._parts[0]))

    def end(self) -> bytes:
        """Returns the page, now that the connection has ended. Raises HttpError unless the end of the connection ends the answer."""
        if not self._until_close:
            raise HttpError("closed", "the connection ended inside the answer")
        page = self._unpacked(b"".join(self._parts))
        assert page is not None
        return page

    def _head(self) -> bytes | None:
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        end = data.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        if end < 0:
            if len(data) >= HEAD_BYTES_MAX:
                raise HttpError("head", f"no end of the header within {HEAD_BYTES_MAX} bytes")
            self._parts = [data]
            return None
        head = data[: end + 2].lower()
        if head.startswith(b"http/1.1 1") and not head.startswith(b"http/1.1 101"):
            self._interim += 1
            if self._interim > INTERIM_MAX:
                raise HttpError("head", f"more than {INTERIM_MAX} interim answers")
            self._parts = [data[end + 4 :]]
            self._got = len(self._parts[0])
            return self._head()
        if not head.startswith((b"http/1.1 200", b"http/1.0 200")):
            shown = data[: data.find(b"\r\n")][:60].decode("ascii", "replace")
            raise HttpError("status", f"the answer is {shown!r}, not 200", serves=head.startswith(NO_SUCH_PAGE))
        self._read_headers(head)
        body = end + 4
        if self._chunks is not None:
            self._parts = []
            return self._unpacked(self._chunks.receive(data, body))
        length = _header(head, b"\r\ncontent-length:")
        if length is None:
            self._until_close, self.keep_alive = True, False
            self._parts = [data[body:]]
            return None
        if not length.isdigit() or len(length) > 19:
            raise HttpError("length", f"Content-Length {length[:30]!r} is not a number")
        if int(length) > PAGE_BYTES_MAX:
            raise HttpError("too-large", f"a page of {length.decode()} bytes, over {PAGE_BYTES_MAX}")
        self._total = body + int(length)
        if len(data) >= self._total:
            return self._whole(data, body)
        self._parts = [data[:body], data[body:]]
        return None

    def _read_headers(self, head: bytes) -> None:
        coding = _header(head, b"\r\ntransfer-encoding:")
        if coding is not None:
            if coding != b"chunked":
                raise HttpError("coding", f"Transfer-Encoding {coding[:30]!r} is not chunked")
            self._chunks = Chunks()
        packing = _header(head, b"\r\ncontent-encoding:")
        if packing not in (None, b"", b"identity"):
            if packing not in (b"gzip", b"x-gzip"):
                raise HttpError("coding", f"Content-Encoding {packing[:30]!r} is not gzip")
            self._gzip = True
        connection = _header(head, b"\r\nconnection:")
        if head.startswith(b"http/1.0"):
            self.keep_alive = connection is not None and b"keep-alive" in connection
        else:
            self.keep_alive = connection is None or b"close" not in connection

    def _whole(self, data: bytes, body: int) -> bytes | None:
        if len(data) > self._total:
            raise HttpError("length", f"{len(data) - self._total} bytes beyond Content-Length")
        return self._unpacked(data[body:])

    def _unpacked(self, page: bytes | None) -> bytes | None:
        if page is None or not self._gzip:
            return page
        try:
            return gunzip(page, PAGE_BYTES_MAX)
        except TooLong as longer:
            raise HttpError("too-large", f"a page of {longer}") from None
        except ValueError as failure:
            raise HttpError("gzip", f"the gzip body cannot be decompressed: {failure}") from None


def _plain_page(received: bytes | memoryview) -> bytes | None:
    """Returns the page if these bytes are a whole answer with a plain head. Returns None if the general decoder must read them."""
    plain = plain_head(received, HEAD_BYTES_MAX)
    if plain is None or plain[1] > PAGE_BYTES_MAX or plain[0] + plain[1] != len(received):
        return None
    return bytes(received[plain[0] :])


def _header(head: bytes, name: bytes) -> bytes | None:
    at = head.find(name)
    if at < 0:
        return None
    at += len(name)
    return head[at : head.find(b"\r\n", at)].strip()


def _hex(digits: bytes) -> int:
    with contextlib.suppress(ValueError):
        if 0 < len(digits) <= 16 and digits.isalnum():
            return int(digits, 16)
    raise HttpError("chunks", f"{digits[:30]!r} is not a chunk size")
