"""An HTTP/1.1 client for scrapes: one GET at a time on one connection.

`Connection` joins the decoder of answers (`http_answer`) with a transport. `Dialer` opens connections. It starts a task only after a server
has accepted, because attempts that are refused or get no answer are frequent and must be cheap. Redirects are not followed, and no proxy is
used.

This module does not handle time-outs (the caller has the clock), pipeline requests, or resolve names (it takes addresses only).
"""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, cast

from workers.supervisor.endpoints.http_answer import HttpError, ServerAnswer

CONNECT_S_MAX: Final = 0.2  # limit for opening a TCP connection
RECEIVE_BYTES: Final = 1 << 18
REFUSED: Final = frozenset((errno.ECONNREFUSED, errno.EHOSTUNREACH))


def get_request(host: str, port: int, path: str) -> bytes:
    """Returns the bytes of a GET request. It has no Accept-Encoding, so that servers send pages uncompressed."""
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return (f"GET {path} HTTP/1.1\r\nHost: {authority}\r\nAccept: text/plain;version=0.0.4\r\nUser-Agent: epp\r\n\r\n").encode("ascii")


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
    """One HTTP connection, a buffered protocol of uvloop. `answers`: the number of pages that it has received.

    `buffer`: where bytes are received. Connections of one event loop share it, because each takes its bytes in the same turn.
    """

    __slots__ = ("_answer", "_buffer", "_caller", "_transport", "_waiting", "answers")

    def __init__(self, caller: Caller, buffer: memoryview) -> None:
        self._caller: Caller | None = caller
        self._buffer = buffer
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

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._caller is None:
            return
        try:
            if not self._waiting:
                raise HttpError("length", f"{nbytes} bytes without a request")
            page = self._answer.receive(self._buffer[:nbytes])
        except HttpError as failure:
            self._caller.garbled(self, failure)
            return
        if page is not None:
            self._done(page)

    def eof_received(self) -> bool:
        return False  # so that asyncio closes the connection

    def pause_writing(self) -> None:
        """Does nothing, because a request fits into the buffer of any transport."""

    def resume_writing(self) -> None:
        """Does nothing, because no request waits to be written."""

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
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))

    def dial(self, host: str, port: int, caller: Caller) -> Attempt:
        """Starts to connect. Calls `caller.connected` or `caller.unreachable` later, never before `dial` returns."""
        return _Dial(self._loop, self._tls, (host, port), caller, self._buffer)

    def knock(self, host: str, port: int, answered: Callable[[int], object]) -> Attempt:
        """Finds out whether an address accepts connections. Calls `answered` later, with 0 or an error number. Sends nothing."""
        return _Knock(self._loop, (host, port), answered)


class _Reach:
    """Connects a bare socket, and calls `_settled`. Subclasses define the next step."""

    __slots__ = ("_address", "_handle", "_loop", "_socket")

    def __init__(self, loop: asyncio.AbstractEventLoop, address: tuple[str, int]) -> None:
        self._loop, self._address = loop, address
        self._handle: asyncio.Handle | None = None
        self._socket: socket.socket | None = None
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
        self._drop()

    def _settled(self, code: int) -> None:
        """Takes the result: 0, or an error number."""
        raise NotImplementedError

    def _writable(self) -> None:
        assert self._socket is not None
        self._loop.remove_writer(self._socket.fileno())
        self._settled(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _drop(self) -> None:
        if self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None


class _Knock(_Reach):
    """One attempt to connect, without a use for the connection."""

    __slots__ = ("_answered",)

    def __init__(self, loop: asyncio.AbstractEventLoop, address: tuple[str, int], answered: Callable[[int], object]) -> None:
        self._answered = answered
        super().__init__(loop, address)

    def _settled(self, code: int) -> None:
        self._drop()
        self._answered(code)


class _Dial(_Reach):
    """One attempt to open a connection. It starts a task only when the bare socket is connected."""

    __slots__ = ("_buffer", "_caller", "_connection", "_task", "_tls")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tls: ssl.SSLContext | None, address: tuple[str, int], caller: Caller, buffer: memoryview
    ) -> None:
        self._tls, self._caller, self._buffer = tls, caller, buffer
        self._task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        super().__init__(loop, address)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.close()  # the loop may complete the connection before the task gets its cancellation
        super().cancel()

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
        connection = self._connection = Connection(self._caller, self._buffer)
        name = (self._caller.server or self._address[0]) if self._tls is not None else None
        try:
            await self._loop.create_connection(
                lambda: cast("asyncio.Protocol", connection), sock=connected, ssl=self._tls, server_hostname=name
            )
        except OSError as failure:
            connection.close()
            self._caller.unreachable(failure)


Connect = Callable[[str, int, Caller], Attempt]
Knock = Callable[[str, int, Callable[[int], object]], Attempt]


class Dialing(NamedTuple):
    """How to open connections, and how many seconds that may take."""

    connect: Connect
    knock: Knock
    s_max: float = CONNECT_S_MAX
