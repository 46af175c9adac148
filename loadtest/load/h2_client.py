"""A minimal gRPC client: many ext_proc streams over one HTTP/2 connection, with little CPU time, so that the picker has the rest.

The client calls a `Caller` with each message, and the caller calls the client to send; no call blocks. Data beyond the peer's flow-control
windows, and streams beyond its limit, wait here in order. The client announces a header table of size 0, so no header block depends on
earlier ones: equal blocks mean equal headers, and each distinct block is decoded once.

Use it only to measure: it trusts the peer, and a broken connection fails all its streams.
"""

import asyncio
from collections import deque
from struct import Struct
from typing import Final, Protocol, cast

import hpack

DATA, HEADERS, _, RST, SETTINGS, _, PING, GOAWAY, WINDOW_UPDATE = range(9)
END_STREAM: Final = 1
END_HEADERS: Final = 4
ACK: Final = 1
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW: Final = (1 << 31) - 1
FRAME_BYTES: Final = 16_384
FRAME_HEADER: Final = 9
MESSAGE_HEADER: Final = 5
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = range(1, 6)
WINDOW_LOW: Final = 1 << 30
BLOCKS_KEPT: Final = 1024

_HEAD: Final = Struct(">HBBBI")  # length (16 bits of 24), its low byte, type, flags, stream
_SETTING: Final = Struct(">HI")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


class Caller(Protocol):
    """The object that opened a stream, and that the client calls."""

    def message(self, message: bytes) -> None:
        """Called with each whole gRPC message."""

    def ended(self, status: str, text: str) -> None:
        """Called exactly once, at the end. `status`: the gRPC status, "0" for success. `text`: its message, or what broke the stream."""


class ClientStream:
    """One stream. Call `send` for any number of messages, then `half_close`."""

    __slots__ = ("_buffer", "_out", "caller", "connection", "finished", "number", "window")

    def __init__(self, connection: "ClientConnection", number: int, caller: Caller, window: int) -> None:
        self.connection = connection
        self.number = number
        self.caller = caller
        self.window = window
        self.finished = False
        self._buffer = b""
        self._out: deque[bytes | None] = deque()  # data that the windows do not allow yet; None is the end

    def send(self, message: bytes) -> None:
        self._queue(b"\0" + len(message).to_bytes(4, "big") + message)

    def half_close(self) -> None:
        self._queue(None)

    def reset(self) -> None:
        """Cancels the stream (RST_STREAM with CANCEL)."""
        if not self.finished:
            self.connection.write(frame(RST, 0, self.number, (8).to_bytes(4, "big")))
            self.connection.finished(self, "1", "cancelled here")

    def _queue(self, data: bytes | None) -> None:
        if self.finished:
            return
        self._out.append(data)
        if len(self._out) == 1:
            self.flush()

    def flush(self) -> None:
        """Sends as much of the waiting data as the windows allow."""
        connection, out = self.connection, self._out
        while out:
            data = out[0]
            if data is None:
                connection.write(frame(DATA, END_STREAM, self.number))
                out.popleft()
                return
            size = min(len(data), self.window, connection.window, FRAME_BYTES)
            if size <= 0:
                connection.stuck.add(self)
                return
            connection.write(frame(DATA, 0, self.number, data[:size]))
            self.window -= size
            connection.window -= size
            if size == len(data):
                out.popleft()
            else:
                out[0] = data[size:]

    def data(self, payload: bytes) -> None:
        buffer = self._buffer + payload if self._buffer else payload
        at, end = 0, len(buffer)
        while end - at >= MESSAGE_HEADER:
            stop = at + MESSAGE_HEADER + int.from_bytes(buffer[at + 1 : at + MESSAGE_HEADER], "big")
            if stop > end:
                break
            self.caller.message(buffer[at + MESSAGE_HEADER : stop])
            at = stop
        self._buffer = buffer[at:]


class ClientConnection(asyncio.Protocol):
    """One connection. `opened`: a future that is done when the peer's SETTINGS have arrived."""

    def __init__(self, path: str, authority: str) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.window = 65_535
        self.stuck: set[ClientStream] = set()
        self._block = _request_block(path, authority)
        self._transport: asyncio.Transport
        self._out: list[bytes] = []
        self._flushing = False
        self._buffer = b""
        self._streams: dict[int, ClientStream] = {}
        self._waiting: deque[tuple[Caller, asyncio.Future[ClientStream]]] = deque()
        self._next = 1
        self._limit = 100
        self._initial = 65_535
        self._received = 0
        self._blocks: dict[bytes, dict[str, str]] = {}
        self._decoder = hpack.Decoder()
        self._lost: str = ""

    # What callers use.

    def open(self, caller: Caller) -> "ClientStream | asyncio.Future[ClientStream]":
        """Opens a stream at once. If the peer's limit of streams is reached, returns a future of the stream."""
        if len(self._streams) < self._limit and not self._waiting and not self._lost:
            return self._open(caller)
        future: asyncio.Future[ClientStream] = asyncio.get_running_loop().create_future()
        if self._lost:
            future.set_exception(ConnectionError(self._lost))
        else:
            self._waiting.append((caller, future))
        return future

    def write(self, data: bytes) -> None:
        """Sends `data` together with all other writes of this turn of the event loop."""
        self._out.append(data)
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it
        settings = ((HEADER_TABLE_SIZE, 0), (ENABLE_PUSH, 0), (INITIAL_WINDOW, WINDOW))
        payload = b"".join(_SETTING.pack(*setting) for setting in settings)
        self._transport.write(PREFACE + frame(SETTINGS, 0, 0, payload) + self._window_update(WINDOW - 65_535))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        at, end = 0, len(buffer)
        while end - at >= FRAME_HEADER:
            high, low, kind, flags, number = _HEAD.unpack_from(buffer, at)
            start = at + FRAME_HEADER
            stop = start + (high << 8 | low)
            if stop > end:
                break
            self._frame(kind, flags, number & WINDOW, buffer[start:stop])
            at = stop
        self._buffer = buffer[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc or 'closed by the peer'}")

    # Frames.

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == DATA:
            self._received += len(payload)
            if self._received > WINDOW_LOW:
                self.write(self._window_update(self._received))
                self._received = 0
            stream = self._streams.get(number)
            if stream is not None:
                stream.data(payload)
                if flags & END_STREAM:
                    self.finished(stream, "2", "the stream ended without a status")
        elif kind == HEADERS:
            self._headers(number, payload, last=bool(flags & END_STREAM))
        elif kind == WINDOW_UPDATE:
            self._widen(number, int.from_bytes(payload, "big"))
        elif kind == SETTINGS:
            if not flags & ACK:
                self._settings(payload)
        elif kind == PING:
            if not flags & ACK:
                self.write(frame(PING, ACK, 0, payload))
        elif kind == RST:
            stream = self._streams.get(number)
            if stream is not None:
                self.finished(stream, "2", f"reset by the peer, error {int.from_bytes(payload, 'big')}")
        elif kind == GOAWAY:
            self._fail(f"the peer sent GOAWAY: error {int.from_bytes(payload[4:8], 'big')} {payload[8:].decode(errors='replace')}")

    def _headers(self, number: int, block: bytes, *, last: bool) -> None:
        headers = self._blocks.get(block)
        if headers is None:
            if len(self._blocks) >= BLOCKS_KEPT:
                self._blocks.clear()
            headers = self._blocks[block] = {str(name): str(value) for name, value in self._decoder.decode(block)}
        stream = self._streams.get(number)
        if last and stream is not None:
            self.finished(stream, headers.get("grpc-status", "2"), headers.get("grpc-message", ""))

    def _settings(self, payload: bytes) -> None:
        for name, value in _SETTING.iter_unpack(payload):
            if name == MAX_STREAMS:
                self._limit = value
            elif name == INITIAL_WINDOW:
                for stream in self._streams.values():
                    stream.window += value - self._initial
                self._initial = value
        self.write(frame(SETTINGS, ACK, 0))
        self._unstick()
        self._admit()
        if not self.opened.done():
            self.opened.set_result(None)

    def _widen(self, number: int, more: int) -> None:
        if number == 0:
            self.window += more
        elif (stream := self._streams.get(number)) is not None:
            stream.window += more
        self._unstick()

    def _unstick(self) -> None:
        stuck, self.stuck = self.stuck, set()
        for stream in stuck:
            if not stream.finished:
                stream.flush()

    # Streams.

    def _open(self, caller: Caller) -> ClientStream:
        number = self._next
        self._next += 2
        stream = self._streams[number] = ClientStream(self, number, caller, self._initial)
        self.write(frame(HEADERS, END_HEADERS, number, self._block))
        return stream

    def finished(self, stream: ClientStream, status: str, text: str) -> None:
        """Forgets a stream that has ended, and tells its caller."""
        if stream.finished:
            return
        stream.finished = True
        del self._streams[stream.number]
        stream.caller.ended(status, text)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and not self._lost and len(self._streams) < self._limit:
            caller, future = self._waiting.popleft()
            if not future.done():
                future.set_result(self._open(caller))

    def _fail(self, why: str) -> None:
        self._lost = self._lost or why
        if not self.opened.done():
            self.opened.set_exception(ConnectionError(why))
        for stream in list(self._streams.values()):
            self.finished(stream, "14", why)
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ConnectionError(why))

    def _flush(self) -> None:
        self._flushing = False
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    def _window_update(self, more: int) -> bytes:
        return frame(WINDOW_UPDATE, 0, 0, more.to_bytes(4, "big"))


def _request_block(path: str, authority: str) -> bytes:
    headers = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("user-agent", "grpc-driver/1"),  # other gRPC libraries queue streams beyond the limit; so does this client
    )
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def _text(value: str) -> bytes:
    data = value.encode()
    assert len(data) < 127, value
    return bytes((len(data),)) + data
