"""An HTTP/1.1 client for scrapes: one GET at a time on one connection.

`ServerAnswer` does no I/O: it takes bytes, in pieces of any size, and gives a page or an `HttpError`. `Connection` joins it with a
transport. `Dialer` opens connections. It starts a task only after a server has accepted, because attempts that are refused or get no answer
are frequent and must be cheap.

    received  | status line | header lines | blank | body                   one allocation per page
    body ends | chunked: its last chunk | Content-Length | the connection's end

- Only 200 is accepted. Redirects are not followed, and no proxy is used.
- Everything is bounded: head, body (before and after decompression), chunk headers, trailers.
- An answer with more bytes than it announced is an error, because client and server are out of step.

What this does not do: handle time-outs (the caller has the clock), pipeline requests, or resolve names (it takes addresses only).
"""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import zlib
from collections.abc import Callable
from typing import Final, Protocol, cast

from epp.protocol.inflate import reach

HEAD_BYTES_MAX: Final = 16 << 10
PAGE_BYTES_MAX: Final = 8 << 20
CHUNK_LINE_BYTES_MAX: Final = 1 << 10
CHUNKS_MAX: Final = 1 << 14  # limit per page, because each chunk takes 2 us
TRAILER_BYTES_MAX: Final = 8 << 10
SIZE: Final = 0  # SIZE to TRAILER: what the decoder of chunks expects next
DATA: Final = 1
DATA_END: Final = 2
TRAILER: Final = 3

REFUSED: Final = frozenset((errno.ECONNREFUSED, errno.EHOSTUNREACH))


class HttpError(Exception):
    """Raised for an answer that cannot be used. `cause`: one word, for counters."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


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

    __slots__ = ("_chunks", "_got", "_gzip", "_parts", "_total", "_until_close", "keep_alive")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets the last answer, so that the next one can be received."""
        self._parts: list[bytes] = []
        self._got = 0
        self._total = -1  # bytes of head and body; -1 until the head is complete
        self._chunks: Chunks | None = None
        self._gzip = False
        self._until_close = False
        self.keep_alive = True

    @property
    def started(self) -> bool:
        """Whether a part of the answer has arrived."""
        return self._got > 0

    def receive(self, data: bytes) -> bytes | None:
        """Takes bytes. Returns the page when it is complete, else None. Raises HttpError if the answer cannot be used."""
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
        if not head.startswith((b"http/1.1 200", b"http/1.0 200")):
            shown = data[: data.find(b"\r\n")][:60].decode("ascii", "replace")
            raise HttpError("status", f"the answer is {shown!r}, not 200")
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
        unpack = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            limit = reach(len(page), PAGE_BYTES_MAX)
            plain = unpack.decompress(page, limit + 1)
        except zlib.error as failure:
            raise HttpError("gzip", f"the gzip body cannot be decompressed: {failure}") from None
        if len(plain) > limit:
            raise HttpError("too-large", f"a page over {limit} bytes after decompression")
        if not unpack.eof:
            raise HttpError("gzip", "the gzip body is truncated")
        return plain


def get_request(host: str, port: int, path: str) -> bytes:
    """Returns the bytes of a GET request. It has no Accept-Encoding, so that servers send pages uncompressed."""
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return (
        f"GET {path} HTTP/1.1\r\nHost: {authority}\r\nAccept: text/plain;version=0.0.4\r\nUser-Agent: epp\r\n\r\n"
    ).encode("ascii")


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


class Connected(Protocol):
    """The methods of a connection that a `Caller` uses."""

    answers: int

    @property
    def started(self) -> bool: ...
    @property
    def usable(self) -> bool: ...
    def get(self, request: bytes) -> None: ...
    def close(self) -> None: ...


class Caller(Protocol):
    """The owner of a connection. Its methods are called from the event loop, never within a call that the owner makes itself.

    `server`: the name in the server's certificate. "" means the address.
    """

    server: str

    def connected(self, connection: Connected) -> None: ...
    def unreachable(self, failure: OSError) -> None: ...
    def answered(self, connection: Connected, page: bytes) -> None: ...
    def garbled(self, connection: Connected, failure: HttpError) -> None: ...
    def lost(self, connection: Connected, failure: Exception | None) -> None: ...


class Connection:
    """One HTTP connection, an asyncio protocol. `answers`: the number of pages that it has received."""

    __slots__ = ("_answer", "_caller", "_transport", "_waiting", "answers")

    def __init__(self, caller: Caller) -> None:
        self._caller: Caller | None = caller
        self._transport: asyncio.Transport | None = None
        self._answer = ServerAnswer()
        self._waiting = False
        self.answers = 0

    @property
    def started(self) -> bool:
        """Whether a part of the expected answer has arrived."""
        return self._answer.started

    def get(self, request: bytes) -> None:
        """Sends a request. The answer to the previous one must have arrived."""
        assert self._transport is not None
        self._answer.reset()
        self._waiting = True
        self._transport.write(request)

    def close(self) -> None:
        """Closes the connection. Its caller gets no more calls."""
        self._caller = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._caller is None:
            self._transport.abort()
        else:
            self._caller.connected(self)

    def data_received(self, data: bytes) -> None:
        if self._caller is None:
            return
        try:
            if not self._waiting:
                raise HttpError("length", f"{len(data)} bytes without a request")
            page = self._answer.receive(data)
        except HttpError as failure:
            self._caller.garbled(self, failure)
            return
        if page is not None:
            self._done(page)

    def eof_received(self) -> bool:
        return False  # so that asyncio closes the connection

    def pause_writing(self) -> None:
        """Does nothing: a request fits into the buffer of any transport."""

    def resume_writing(self) -> None:
        """Does nothing: no request waits to be written."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        caller = self._caller
        if caller is None:
            return
        if self._waiting and exc is None and self._answer.started:
            try:
                page = self._answer.end()
            except HttpError as failure:
                caller.garbled(self, failure)
            else:
                self._done(page)
        else:
            caller.lost(self, exc)

    def _done(self, page: bytes) -> None:
        caller = self._caller
        assert caller is not None
        self._waiting = False
        self.answers += 1
        keep_alive = self._answer.keep_alive
        if not keep_alive:
            self.close()
        caller.answered(self, page)

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on the connection."""
        return self._caller is not None and self._transport is not None


class Attempt(Protocol):
    """An attempt to open a connection."""

    def cancel(self) -> None:
        """Cancels the attempt. Its caller gets no more calls."""


class Dialer:
    """Opens TCP or TLS connections to addresses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tls: ssl.SSLContext | None = None) -> None:
        self._loop = loop
        self._tls = tls

    def dial(self, host: str, port: int, caller: Caller) -> Attempt:
        """Starts to connect. Calls `caller.connected` or `caller.unreachable` later, never before it returns."""
        return _Dial(self._loop, self._tls, (host, port), caller)


class _Dial:
    """One attempt to connect. It connects a bare socket first, and starts a task only when the socket is connected."""

    __slots__ = ("_address", "_caller", "_connection", "_handle", "_loop", "_socket", "_task", "_tls")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tls: ssl.SSLContext | None,
        address: tuple[str, int],
        caller: Caller,
    ) -> None:
        self._loop, self._tls, self._address, self._caller = loop, tls, address, caller
        self._task: asyncio.Task[None] | None = None
        self._handle: asyncio.Handle | None = None
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            code = self._socket.connect_ex(address)
        except OSError as failure:  # no descriptor left, or no such address family
            code = failure.errno or errno.EINVAL
        if code == errno.EINPROGRESS and self._socket is not None:
            loop.add_writer(self._socket.fileno(), self._writable)
        else:
            self._handle = loop.call_soon(self._settled, code)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.close()  # the loop may complete the connection before the task gets its cancellation
        self._drop()

    def _writable(self) -> None:
        assert self._socket is not None
        self._loop.remove_writer(self._socket.fileno())
        self._settled(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _settled(self, code: int) -> None:
        if code:
            self._drop()
            self._caller.unreachable(OSError(code, os.strerror(code)))
            return
        assert self._socket is not None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._task = self._loop.create_task(self._open())

    async def _open(self) -> None:
        connected, self._socket = self._socket, None  # the transport owns the socket now
        connection = self._connection = Connection(self._caller)
        name = (self._caller.server or self._address[0]) if self._tls is not None else None
        try:
            await self._loop.create_connection(
                lambda: cast("asyncio.Protocol", connection), sock=connected, ssl=self._tls, server_hostname=name
            )
        except OSError as failure:
            connection.close()
            self._caller.unreachable(failure)

    def _drop(self) -> None:
        if self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None


Connect = Callable[[str, int, Caller], Attempt]
