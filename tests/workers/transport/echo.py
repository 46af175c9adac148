"""An ext_proc echo on the transport: measures what the transport alone costs, and is a server for tests.

    python -m tests.workers.transport.echo PORT [--tls]

It answers like a picker in FULL_DUPLEX_STREAMED mode that always picks the same endpoint: request headers and body when the body is
complete, everything of the response phase at once. It never decodes bodies.
"""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable

import uvloop

from workers.transport.interface import Handler, Metadata, Stream
from workers.transport.native import Server
from workers.transport.tls import server_context

PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
REQUEST_HEADERS, REQUEST_BODY = 0x12, 0x22
RESPONSE_HEADERS, RESPONSE_BODY = 0x1A, 0x2A


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


def body_answer(tag: int, body: bytes) -> bytes:
    """A received HttpBody as a streamed BodyResponse, with its gRPC prefix."""
    size = len(body)
    if size < 100:
        head = bytes((tag, size + 6, 0x0A, size + 4, 0x1A, size + 2, 0x1A, size))
    elif 128 <= size < 16_000:  # all four lengths take two bytes
        part, body_mutation, common = size + 3, size + 6, size + 9
        head = bytes(
            (
                *(tag, common & 127 | 128, common >> 7),
                *(0x0A, body_mutation & 127 | 128, body_mutation >> 7),
                *(0x1A, part & 127 | 128, part >> 7),
                *(0x1A, size & 127 | 128, size >> 7),
            )
        )
    else:
        head = b"\x1a" + varint(size)
        for number in (0x1A, 0x0A, tag):
            head = bytes((number,)) + varint(size + len(head)) + head
    return b"\0" + (len(head) + size).to_bytes(4, "big") + head + body


_CHOICE = field(1, b"x-gateway-destination-endpoint") + field(3, b"127.0.1.1:8000")
REQUEST_HEADERS_ANSWER = field(1, field(1, field(2, field(1, field(1, _CHOICE)))))
RESPONSE_HEADERS_ANSWER = field(2, field(1, b""))


class Echo:
    """Serves one stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._bodies: list[bytes] = []

    def message(self, message: bytes) -> None:
        kind = message[0]
        length, at = message[1], 2
        if length > 127:
            length &= 127
            shift = 7
            while True:
                byte = message[at]
                at += 1
                length |= (byte & 127) << shift
                if byte < 128:
                    break
                shift += 7
        body = message[at : at + length]  # Envoy writes more fields after it
        if kind == RESPONSE_BODY:
            self._stream.send_raw(body_answer(0x22, body))
        elif kind == REQUEST_BODY:
            self._bodies.append(body)
            if body[-2:] == b"\x10\x01":
                self._stream.send(REQUEST_HEADERS_ANSWER)
                for part in self._bodies:
                    self._stream.send_raw(body_answer(0x1A, part))
                self._bodies.clear()
        elif kind == RESPONSE_HEADERS:
            self._stream.send(RESPONSE_HEADERS_ANSWER)

    def half_closed(self) -> None:
        self._stream.end()

    def closed(self) -> None:
        self._bodies.clear()


class Mirror:
    """Sends every message back unchanged, for tests of the transport alone."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def message(self, message: bytes) -> None:
        self._stream.send(message)

    def half_closed(self) -> None:
        self._stream.end()

    def closed(self) -> None:
        """Nothing to release."""


def application(path: str, metadata: Metadata, stream: Stream) -> Handler | None:
    makers: dict[str, Callable[[Stream], Handler]] = {PATH: Echo, "/test/Mirror": Mirror}
    make = makers.get(path)
    return None if make is None else make(stream)


async def serve(port: int, tls: bool) -> None:
    listening = socket.create_server(("127.0.0.1", port), backlog=512)
    server = Server(asyncio.get_running_loop(), on_abuse=lambda cause: print(cause, flush=True))
    server.serve(listening, application, server_context(None) if tls else None)
    print("up", os.getpid(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    gc.disable()
    uvloop.run(serve(int(sys.argv[1]), "--tls" in sys.argv))
