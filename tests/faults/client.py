"""A small gateway: ext_proc streams over raw HTTP/2, on as many connections as its streams need, each known by its local port.

It keeps the rules that matter to a picker that dies or drains: no more streams on a connection than the picker allows, none
after a GOAWAY; a stream that the GOAWAY says was not looked at is asked anew elsewhere. It sends little, so it does not count
windows. Every stream ends in one `Ending`.
"""

import asyncio
import contextlib
import enum
import itertools
import json
import struct
from typing import Any

import hpack

from epp.protocol.proto import ext_proc_pb2 as pb

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DATA, HEADERS, _, RST, SETTINGS, _, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 0x20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HUGE = (1 << 31) - 1
FRAME_MAX = 16384
VARIANTS = 64
LIMIT_UNKNOWN = 8  # streams of a connection that has not said how many it takes
CANCEL = 8
CONNECT_S = 10.0


class Ending(enum.Enum):
    """How a stream ended, for its client."""

    OK = "ok"
    REFUSED = "refused"  # an error answer, or a gRPC status
    LOST = "lost"  # the connection went, or the stream was reset
    CANCELLED = "cancelled"  # by us


class Lost(Exception):
    """The stream is gone."""


class Untouched(Lost):
    """The stream is gone, and the server never looked at it."""


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, number) + payload


def framed(message: Any) -> bytes:
    data = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def header_block(path: str = METHOD) -> bytes:
    """A block that changes no table, so that it serves all streams."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "picker"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("user-agent", "storm"),
    )
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(name, value) for name, value in fields])


def request(number: int) -> bytes:
    """Headers and body of a completion."""
    head, body = pb.ProcessingRequest(), pb.ProcessingRequest()
    for name, value in ((":method", "POST"), (":path", "/v1/completions"), ("x-request-id", f"storm-{number}")):
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    body.request_body.body = json.dumps({"model": "sim-model", "prompt": f"{number} storm " * 20}).encode()
    body.request_body.end_of_stream = True
    return framed(head) + framed(body)


def response() -> bytes:
    """Headers and body of the model server's answer."""
    head, body = pb.ProcessingRequest(), pb.ProcessingRequest()
    head.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    body.response_body.body = json.dumps({"usage": {"prompt_tokens": 40, "completion_tokens": 7}}).encode()
    body.response_body.end_of_stream = True
    return framed(head) + framed(body)


BLOCK = header_block()
REQUESTS = [request(number) for number in range(VARIANTS)]
RESPONSE = response()


class Stream:
    """One stream, as its client sees it."""

    def __init__(self, connection: "Connection", number: int) -> None:
        self.connection = connection
        self.number = number
        self.status: str | None = None  # gRPC's, once the stream has ended
        self.messages: list[bytes] = []
        self._rest = b""
        self._lost: Lost | None = None
        self._changed = asyncio.Event()

    def send(self, data: bytes, *, last: bool = False) -> None:
        for at in range(0, max(1, len(data)), FRAME_MAX):
            end = last and at + FRAME_MAX >= len(data)
            self.connection.write(frame(DATA, END_STREAM if end else 0, self.number, data[at : at + FRAME_MAX]))

    async def take(self, count: int) -> list[bytes]:
        """So many messages, or fewer if the stream ended. Raises Lost."""
        while len(self.messages) < count and self.status is None:
            await self._change()
        taken, self.messages = self.messages[:count], self.messages[count:]
        return taken

    async def end(self) -> str:
        """The gRPC status. Raises Lost."""
        while self.status is None:
            await self._change()
        return self.status

    def cancel(self) -> None:
        self.connection.streams.pop(self.number, None)
        self.connection.write(frame(RST, 0, self.number, struct.pack(">I", CANCEL)))

    async def _change(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._changed.clear()
        await self._changed.wait()

    # What the connection calls.

    def fed(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= 5 and len(self._rest) >= 5 + (size := int.from_bytes(self._rest[1:5], "big")):
            self.messages.append(self._rest[5 : 5 + size])
            self._rest = self._rest[5 + size :]
        self._changed.set()

    def ended(self, status: str) -> None:
        self.status = status
        self._changed.set()

    def lost(self, lost: Lost) -> None:
        self._lost = lost
        self._changed.set()


class Connection(asyncio.Protocol):
    """One connection; `port` is ours, and says which worker has the other end."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.limit = LIMIT_UNKNOWN
        self.closing = False
        self.port = 0
        self.gone = asyncio.Event()
        self._numbers = itertools.count(1, 2)
        self._decoder = hpack.Decoder()
        self._rest = b""
        self._block = b""

    @property
    def room(self) -> bool:
        return not self.closing and len(self.streams) < self.limit

    def open(self, path_block: bytes = BLOCK) -> Stream:
        stream = Stream(self, next(self._numbers))
        self.streams[stream.number] = stream
        self.write(frame(HEADERS, END_HEADERS, stream.number, path_block))
        return stream

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    async def close(self) -> None:
        """At once, and wait until it is."""
        self.closing = True
        self._transport.abort()
        await self.gone.wait()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]
        settings = struct.pack(">HIHI", 4, HUGE, 1, 0)  # windows as large as can be; no header table
        self.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW, 0, 0, struct.pack(">I", HUGE - 65535)))

    def connection_lost(self, error: Exception | None) -> None:
        self.closing = True
        self.gone.set()
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.lost(Lost(str(error or "closed")))

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while len(data) - at >= 9:
            head, flags, number = struct.unpack_from(">IBI", data, at)
            end = at + 9 + (head >> 8)
            if len(data) < end:
                break
            self._frame(head & 0xFF, flags, number & HUGE, data[at + 9 : end])
            at = end
        self._rest = data[at:]

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        stream = self.streams.get(number)
        if kind == DATA:
            if stream is not None:
                stream.fed(payload)
        elif kind in (HEADERS, CONTINUATION):
            self._block += payload
            if flags & END_HEADERS:
                block, self._block = self._block, b""
                self._headers(stream, dict(self._decoder.decode(block)))
        elif kind == RST and stream is not None:
            del self.streams[number]
            if stream.status is None:
                stream.lost(Lost(f"reset with code {int.from_bytes(payload, 'big')}"))
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == 3:
                    self.limit = value
            self.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.write(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self._goaway(int.from_bytes(payload[:4], "big") & HUGE)
        if self.closing and not self.streams:
            self._transport.close()

    def _headers(self, stream: Stream | None, fields: dict[str, str]) -> None:
        if stream is not None and "grpc-status" in fields:
            self.streams.pop(stream.number, None)
            stream.ended(fields["grpc-status"])

    def _goaway(self, last: int) -> None:
        self.closing = True
        for number in [number for number in self.streams if number > last]:
            self.streams.pop(number).lost(Untouched("not looked at before GOAWAY"))


class Gateway:
    """Connections to one picker, opened when all others are full."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port, self.host = port, host
        self.connections: list[Connection] = []  # that may take streams
        self._all: list[Connection] = []
        self.refused = 0  # connections that nobody took
        self._opening = asyncio.Lock()

    async def stream(self) -> Stream:
        while True:
            self.connections = [connection for connection in self.connections if not connection.closing]
            for connection in self.connections:
                if connection.room:
                    return connection.open()
            async with self._opening:
                if not any(connection.room for connection in self.connections):
                    await self._connect()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(Connection, self.host, self.port)
        except OSError:
            self.refused += 1
            await asyncio.sleep(0.05)
        else:
            self.connections.append(connection)
            self._all = [known for known in self._all if not known.gone.is_set()] + [connection]

    async def close(self) -> None:
        for connection in self._all:
            await connection.close()

    async def exchange(self, number: int, *, hold_s: float = 0.0, cancelled: bool = False) -> tuple[Ending, Stream]:
        """One request from its headers to the end of its answer; asked anew when the picker never looked at it."""
        while True:
            stream = await self.stream()
            with contextlib.suppress(Untouched):
                try:
                    return await self._exchange(stream, number, hold_s, cancelled), stream
                except Untouched:
                    raise
                except Lost:
                    return Ending.LOST, stream

    async def _exchange(self, stream: Stream, number: int, hold_s: float, cancelled: bool) -> Ending:
        stream.send(REQUESTS[number % VARIANTS])
        answers = [pb.ProcessingResponse.FromString(message) for message in await stream.take(2)]
        if [answer.WhichOneof("response") for answer in answers] != ["request_headers", "request_body"]:
            return Ending.REFUSED
        if hold_s:
            await asyncio.sleep(hold_s)
        if cancelled:
            stream.cancel()
            return Ending.CANCELLED
        stream.send(RESPONSE)
        await stream.take(2)
        stream.send(b"", last=True)
        return Ending.OK if await stream.end() == "0" else Ending.REFUSED
