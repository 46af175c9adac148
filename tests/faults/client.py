"""A small gateway: sends ext_proc streams over raw HTTP/2, and opens more connections when its streams need them.

It follows the rules that matter when a picker dies or drains: it opens no more streams on a connection than the picker allows, and none
after a GOAWAY. If the GOAWAY says that the picker did not process a stream, the gateway repeats the stream on another connection. It
sends little data, so it ignores the peer's windows. Every stream has one `Ending`.
"""

import asyncio
import contextlib
import enum
import itertools
import json
import ssl
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import hpack

from epp.protocol.codec.answers import DESTINATION
from epp.request.client_headers import FAIRNESS_ID
from loadtest.load.proto import ext_proc_pb2 as pb

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DATA, HEADERS, _, RST, SETTINGS, _, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 0x20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HUGE = (1 << 31) - 1
FRAME_MAX = 16384
VARIANTS = 64
LIMIT_UNKNOWN = 8  # streams of a connection before its limit is known
CANCEL = 8
CONNECT_S = 10.0


class Ending(enum.Enum):
    """How a stream ended, as the client saw it."""

    OK = "ok"
    REFUSED = "refused"  # an error answer, or a gRPC status other than 0
    LOST = "lost"  # the connection was lost, or the stream was reset
    CANCELLED = "cancelled"  # by this client


class Lost(Exception):
    """The stream was lost."""


class Unprocessed(Lost):
    """The stream was lost, and the server never processed it."""


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, number) + payload


def framed(message: Any) -> bytes:
    data = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def header_block(path: str = METHOD) -> bytes:
    """Encodes a header block that changes no header table, so that all streams can send the same bytes."""
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


def completion(prompt: str, name: str = "storm-0", *, tenant: str = "", piece: int = 64 << 10, **fields: Any) -> list[bytes]:
    """Encodes headers, and the body of a completion request in pieces, as gateways send it.

    `name`: the request's id. `tenant`: its fairness id; "": none. `fields`: further fields of the body.
    """
    head = pb.ProcessingRequest()
    headers = {":method": "POST", ":path": "/v1/completions", "x-request-id": name}
    for key, value in (headers | ({FAIRNESS_ID[0]: tenant} if tenant else {})).items():
        head.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    body = json.dumps({"model": "sim-model", "prompt": prompt, **fields}).encode()
    pieces = [pb.HttpBody(body=body[at : at + piece], end_of_stream=at + piece >= len(body)) for at in range(0, len(body), piece)]
    return [framed(head), *(framed(pb.ProcessingRequest(request_body=each)) for each in pieces)]


def request_messages(number: int) -> list[bytes]:
    """Encodes headers and body of a completion request."""
    return completion(f"{number} storm " * 20, f"storm-{number}")


def request(number: int) -> bytes:
    """Encodes the same, together."""
    return b"".join(request_messages(number))


def response() -> bytes:
    """Encodes headers and body of the model server's answer."""
    head, body = pb.ProcessingRequest(), pb.ProcessingRequest()
    head.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    body.response_body.body = json.dumps({"usage": {"prompt_tokens": 40, "completion_tokens": 7}}).encode()
    body.response_body.end_of_stream = True
    return framed(head) + framed(body)


def long_request(size: int, end: str = "") -> list[bytes]:
    """Encodes headers, and a completion request of about `size` bytes in pieces. `end`: of its prompt."""
    return completion("long word " * (size // 10) + end)


def event_stream(events: int) -> list[bytes]:
    """Encodes headers and events of a streamed answer."""
    head = pb.ProcessingRequest()
    for name, value in ((":status", b"200"), ("content-type", b"text/event-stream")):
        head.response_headers.headers.headers.add(key=name, raw_value=value)
    event = b'data: {"choices":[{"text":" token"}]}\n\n'
    bodies = [pb.HttpBody(body=event, end_of_stream=number == events - 1) for number in range(events)]
    return [framed(head), *(framed(pb.ProcessingRequest(response_body=body)) for body in bodies)]


BLOCK = header_block()
REQUESTS = [request(number) for number in range(VARIANTS)]
RESPONSE = response()


Answering = Callable[[str], Awaitable[Sequence[bytes]]]  # the address of an endpoint -> the messages of its answer


class Stream:
    """The client's side of one stream."""

    def __init__(self, connection: "Connection", number: int) -> None:
        self.connection = connection
        self.number = number
        self.status: str | None = None  # the gRPC status, once the stream has ended
        self.messages: list[bytes] = []
        self._rest = b""
        self._lost: Lost | None = None
        self._changed = asyncio.Event()

    def send(self, data: bytes, *, last: bool = False) -> None:
        for at in range(0, max(1, len(data)), FRAME_MAX):
            end = last and at + FRAME_MAX >= len(data)
            self.connection.write(frame(DATA, END_STREAM if end else 0, self.number, data[at : at + FRAME_MAX]))

    async def take(self, count: int) -> list[bytes]:
        """Waits for the next `count` messages and returns them. Returns fewer if the stream ended. Raises Lost."""
        while len(self.messages) < count and self.status is None:
            await self._change()
        taken, self.messages = self.messages[:count], self.messages[count:]
        return taken

    async def end(self) -> str:
        """Waits for the end of the stream. Returns the gRPC status. Raises Lost."""
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

    # Called by the connection.

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
    """One connection. `port`: the local port; by it tests find the worker at the other end."""

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
        """Aborts the connection and waits until it is closed."""
        self.closing = True
        self._transport.abort()
        await self.gone.wait()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]
        settings = struct.pack(">HIHI", 4, HUGE, 1, 0)  # the largest windows, and no header table
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
            self.streams.pop(number).lost(Unprocessed("not processed before GOAWAY"))


class Gateway:
    """Keeps connections to one picker, with TLS if there is a context. Opens a new one when all others are full."""

    def __init__(self, port: int, host: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> None:
        self.port, self.host = port, host
        self._context = context
        self.connections: list[Connection] = []  # connections that may take streams
        self._all: list[Connection] = []
        self.refused = 0  # connections that were refused
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
                _, connection = await loop.create_connection(Connection, self.host, self.port, ssl=self._context)
        except OSError:
            self.refused += 1
            await asyncio.sleep(0.05)
        else:
            self.connections.append(connection)
            self._all = [old for old in self._all if not old.gone.is_set()] + [connection]

    async def whole(self, pieces: Sequence[bytes], answer: Sequence[bytes] | Answering) -> Ending:
        """Runs one request. `pieces`: its messages. `answer`: those of its answer, or a function that returns them for the picked
        endpoint. Repeats a request that the picker never processed.
        """
        while True:
            with contextlib.suppress(Unprocessed):
                try:
                    stream = await self.stream()
                    return await _whole(stream, pieces, answer)
                except Unprocessed:
                    raise
                except Lost:
                    return Ending.LOST

    async def close(self) -> None:
        for connection in self._all:
            await connection.close()

    async def exchange(self, number: int, *, hold_s: float = 0.0, cancelled: bool = False) -> tuple[Ending, Stream]:
        """Runs one request from its headers to the end of its answer. Repeats a request that the picker never processed."""
        while True:
            stream = await self.stream()
            with contextlib.suppress(Unprocessed):
                try:
                    return await self._exchange(stream, number, hold_s, cancelled), stream
                except Unprocessed:
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


async def _whole(stream: Stream, pieces: Sequence[bytes], answer: Sequence[bytes] | Answering) -> Ending:
    for piece in pieces:
        stream.send(piece)
    answers = [pb.ProcessingResponse.FromString(message) for message in await stream.take(len(pieces))]
    if [each.WhichOneof("response") for each in answers] != ["request_headers"] + ["request_body"] * (len(pieces) - 1):
        return Ending.REFUSED
    for piece in await answer(_target(answers[0])) if callable(answer) else answer:
        stream.send(piece)
        await stream.take(1)
    stream.send(b"", last=True)
    return Ending.OK if await stream.end() == "0" else Ending.REFUSED


def _target(answer: pb.ProcessingResponse) -> str:
    """Returns the address that the picker has picked."""
    set_headers = answer.request_headers.response.header_mutation.set_headers
    return next(each.header.raw_value.decode() for each in set_headers if each.header.key == DESTINATION)


class OneConnection(Gateway):
    """A gateway with a single connection, as gRPC libraries have. Requests wait until the connection has room for a stream."""

    async def stream(self) -> Stream:
        while True:
            if not self.connections or self.connections[0].closing:
                self.connections.clear()
                await super()._connect()
            elif self.connections[0].room:
                return self.connections[0].open()
            else:
                await asyncio.sleep(0.001)
