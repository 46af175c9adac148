"""Targets for bytes on the ext_proc port, below the messages: frames, header blocks, gRPC framing.

The engine gets the bytes twice, in one read and in several, and must behave the same. The handlers check the contract of
`workers.transport.interface`: exactly one of two endings, once, and no call after it.
"""

import gzip
import zlib
from collections.abc import Mapping, Sequence

import hpack

from epp.protocol import grpc_frames
from epp.protocol.grpc_frames import Frames
from tests.fuzz.target import Target, borders
from tests.workers.transport.helpers import block, frame, framed, setting, word
from workers.transport.frames import PREFACE
from workers.transport.headers import BrokenBlock, FieldKinds, HeaderDecoder, field_kind, request_head
from workers.transport.http2 import Connection
from workers.transport.interface import Handler, Metadata, Stream
from workers.transport.limits import Budget, Limits

LIMITS = Limits(message=32 * 1024, stream_output=1 << 17, connection_held=1 << 18, burst=50)
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
LARGE = b"x" * 40_000


class Held:
    """A handler that answers by its path, and checks the calls that it gets."""

    def __init__(self, path: str, stream: Stream, log: list[tuple[object, ...]]) -> None:
        self.path, self.stream, self.log = path, stream, log
        self.over = self.half = False

    def message(self, message: bytes) -> None:
        assert not self.over and not self.half, "a message after the end"
        assert type(message) is bytes
        self.log.append((self.path, len(message), zlib.crc32(message)))
        if self.path == "/echo":
            self.stream.send(message)
        elif self.path == "/large":
            self.stream.send(LARGE)
        elif self.path == "/raises":
            raise ZeroDivisionError
        elif self.path == "/ends":
            self.over = True
            self.stream.end(len(message), "said: %" + message[:50].decode("latin-1"))

    def half_closed(self) -> None:
        assert not self.over and not self.half
        self.half = True
        self.log.append((self.path, "half closed"))
        if self.path != "/silent":
            self.over = True
            self.stream.end()

    def closed(self) -> None:
        assert not self.over, "two endings"
        self.over = True
        self.log.append((self.path, "closed"))


class Site:
    """An engine with its handlers."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.handlers: list[Held] = []
        self.errors: list[BaseException] = []
        self.budget = Budget()
        self.out = bytearray()
        self.connection = Connection(self._open, 0.0, lambda: None, LIMITS, self.budget, lambda cause: None, self.errors.append)

    def _open(self, path: str, metadata: Metadata, stream: Stream) -> Handler | None:
        if path == "/none":
            return None
        self.log.append((path, tuple(metadata)))
        self.handlers.append(Held(path, stream, self.log))
        return self.handlers[-1]

    def read(self, data: bytes) -> None:
        self.connection.receive(data)
        self.out += self.connection.output()

    def finish(self) -> None:
        """Ends the connection and checks that everything was released and every handler got its ending."""
        connection = self.connection
        for now in (3.0, 40.0):
            connection.tick(now)
            self.out += connection.output()
        connection.pause()
        connection.resume()
        self.out += connection.output()
        connection.lost()
        assert not connection.streams and connection.held == 0 and self.budget.used == 0
        assert all(handler.over for handler in self.handlers)
        assert all(type(error) is ZeroDivisionError for error in self.errors), self.errors


def frames(data: bytes) -> None:
    """Any bytes in place of HTTP/2."""
    whole, cut = Site(), Site()
    whole.read(data)
    for chunk in borders(data):
        cut.read(chunk)
    assert whole.log == cut.log and whole.connection.closing == cut.connection.closing
    whole.finish()
    cut.finish()
    if not data.startswith(PREFACE):  # the answer to another protocol depends on the bytes so far, and is short
        assert not whole.handlers and len(whole.out) < 1024
        return
    assert whole.out == cut.out
    sent = _check_output(bytes(whole.out))
    assert sent <= _granted(data), "more DATA than the connection's window"
    assert len(whole.out) < 64 * len(data) + (1 << 18) + sent


def _check_output(out: bytes) -> int:
    """Checks that the output consists of whole frames. Returns the number of DATA bytes."""
    at = sent = 0
    while at < len(out):
        assert len(out) - at >= 9
        length, kind = int.from_bytes(out[at : at + 3], "big"), out[at + 3]
        assert at + 9 + length <= len(out) and kind <= CONTINUATION and kind != PUSH
        sent += length if kind == DATA else 0
        at += 9 + length
    return sent


def _granted(data: bytes) -> int:
    """The largest connection window that the peer has granted."""
    at, window = len(PREFACE), 65535
    while len(data) - at >= 9:
        length, kind = int.from_bytes(data[at : at + 3], "big"), data[at + 3]
        if kind == WINDOW and length == 4:
            window += int.from_bytes(data[at + 9 : at + 13], "big") & 0x7FFFFFFF
        at += 9 + length
    return window


def frame_parts(data: bytes) -> list[bytes]:
    """The preface and whole frames, then the rest."""
    if not data.startswith(PREFACE):
        return [data]
    parts, at = [PREFACE], len(PREFACE)
    while len(data) - at >= 9:
        end = at + 9 + int.from_bytes(data[at : at + 3], "big")
        parts.append(data[at:end])
        at = end
    return parts if at >= len(data) else [*parts, data[at:]]


def of_frames(parts: Sequence[bytes]) -> bytes:
    """Joins frames, with corrected lengths."""
    fixed = []
    for part in parts:
        right = 9 <= len(part) < 1 << 24 and part is not PREFACE and not part.startswith(b"PRI ")
        fixed.append((len(part) - 9).to_bytes(3, "big") + part[3:] if right else part)
    return b"".join(fixed)


def call(path: str, number: int = 1, *messages: bytes, flags: int = 4, **more: str) -> bytes:
    sent = [frame(DATA, 0, number, framed(message)) for message in messages]
    return frame(HEADERS, flags, number, block(path=path, **more)) + b"".join(sent)


HELLO = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
END = frame(DATA, 1, 1)


def frame_seeds() -> Mapping[str, bytes]:
    packed = gzip.compress(b"m" * 100)
    head = block(path="/echo")
    windows = setting(4, 0) + setting(5, 16384) + setting(1, 0) + setting(3, 100)
    return {
        "echo": HELLO + call("/echo", 1, b"one", b"", b"x" * 300) + END,
        "two-streams": HELLO + call("/echo", 1, b"a") + call("/ends", 3, b"b") + call("/none", 5, b"c") + END,
        "pieces": HELLO + call("/echo") + frame(DATA, 0, 1, b"\0\0\0") + frame(DATA, 1, 1, b"\0\5hello"),
        "large": HELLO + call("/large", 1, b"1", b"2", b"3") + frame(WINDOW, 0, 0, word(1 << 20)) + END,
        "small-window": PREFACE + frame(SETTINGS, 0, 0, windows) + call("/echo", 1, b"x" * 50) + END,
        "opens-window": HELLO
        + frame(SETTINGS, 0, 0, setting(4, 5))
        + call("/large", 1, b"1")
        + frame(WINDOW, 0, 1, word(70_000)) * 3
        + frame(WINDOW, 0, 0, word(9)),
        "gzip": HELLO + call("/echo", 1, grpc_encoding="gzip") + frame(DATA, 1, 1, framed(packed, 1)),
        "continuation": HELLO + frame(HEADERS, 0, 1, head[:9]) + frame(CONTINUATION, 4, 1, head[9:]) + END,
        "padded": HELLO + frame(HEADERS, 12, 1, b"\3" + head + b"\0\0\0") + frame(DATA, 9, 1, b"\1" + framed(b"a") + b"\0"),
        "priority": HELLO + frame(HEADERS, 36, 1, word(0) + b"\x10" + head) + frame(PRIORITY, 0, 3, word(1) + b"\1"),
        "resets": HELLO + call("/silent") + frame(RST, 0, 1, word(8)) + call("/raises", 3, b"x") + frame(RST, 0, 3, word(8)),
        "trailers": HELLO + call("/echo", 1, b"x") + frame(HEADERS, 5, 1, b"\x40\1a\1b"),
        "pings": HELLO + frame(PING, 0, 0, b"12345678") * 2 + frame(PING, 1, 0, b"draining"),
        "get": HELLO + frame(HEADERS, 5, 1, b"\x82\x86\x84"),
        "length": HELLO + call("/echo", 1, content_length="8") + frame(DATA, 1, 1, framed(b"abc")),
        "goaway": HELLO + call("/echo", 1, b"x") + frame(GOAWAY, 0, 0, word(0) * 2) + END,
        "unknown": HELLO + frame(0x42, 255, 7, b"any") + call("/echo", 1, b"x"),
        "not-http2": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    }


HTTP2 = Target(
    "http2",
    frames,
    frame_seeds,
    frame_parts,
    of_frames,
    words=(*(frame(kind, 0, 1) for kind in range(11)), word(1), word(0x7FFFFFFF), PREFACE, block(path="/echo")),
    modules=(
        "workers.transport.http2",
        "workers.transport.header_blocks",
        "workers.transport.control_frames",
        "workers.transport.session",
        "workers.transport.output",
        "workers.transport.server_stream",
        "workers.transport.headers",
    ),
    allowance=3 << 20,  # answers of /large
    bytes_max=1 << 14,
)


# Header blocks.


def header_blocks(data: bytes) -> None:
    """Decodes a list of blocks on one connection. Two bytes before each block are its length."""
    decoder, cached, reference = HeaderDecoder(LIMITS), HeaderDecoder(LIMITS), hpack.Decoder(LIMITS.header_list)
    for part in block_parts(data)[:32]:
        encoded = part[2:]
        try:
            fields = decoder.fields(encoded)
        except BrokenBlock:
            return
        listed = sum(len(name) + len(value) + 32 for name, value in fields)
        assert listed <= LIMITS.header_list and len(fields) <= LIMITS.header_fields
        used = sum(len(name) + len(value) + 32 for name, value in decoder._table)
        assert used == decoder._table_used <= decoder._table_max <= 4096
        head = cached.request(encoded)
        fresh = request_head(fields, FieldKinds())
        assert (head.path, head.metadata, head.problem, head.refusal) == (fresh.path, fresh.metadata, fresh.problem, fresh.refusal)
        assert all(field_kind(field) for field in fields)
        try:
            expected = [tuple(field) for field in reference.decode(encoded, raw=True)]
        except hpack.HPACKError:
            raise AssertionError("the hpack library refuses a block that HeaderDecoder accepts") from None
        assert fields == expected


def block_parts(data: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(data):
        end = at + 2 + int.from_bytes(data[at : at + 2], "big")
        parts.append(data[at:end])
        at = end
    return parts


def of_blocks(parts: Sequence[bytes]) -> bytes:
    return b"".join([min(65535, len(part) - 2).to_bytes(2, "big") + part[2:65537] for part in parts if len(part) >= 2])


def block_seeds() -> Mapping[str, bytes]:
    encoder = hpack.Encoder()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/a/B"), ("content-type", "application/grpc"), ("te", "trailers")]
    blocks = [encoder.encode([*fields, ("grpc-timeout", f"{n}m"), ("x", "y" * n)], huffman=n % 2 == 0) for n in range(6)]
    encoder.header_table_size = 100
    blocks.append(encoder.encode([("x-long", "v" * 90), *fields]))

    def sized(*encoded: bytes) -> bytes:
        return b"".join([len(b).to_bytes(2, "big") + b for b in encoded])

    return {
        "blocks": sized(*blocks),
        "one": sized(block()),
        "get": sized(b"\x82\x86\x84", b"\x82\x87\x85"),
        "bomb": sized(b"\x40\x01a\x7f\x81\x1e" + b"v" * 4000, b"\xbe" * 15),
        "resize": sized(b"\x3f\xe1\x1f\x40\1a\1b", b"\x20\x3f\x45\xbe"),
        "huffman": sized(b"\0\x82\x9f\xff\x83\xff\xff\xfe"),
    }


HPACK = Target(
    "hpack",
    header_blocks,
    block_seeds,
    block_parts,
    of_blocks,
    words=(b"\x40", b"\x82", b"\x20", b"\x3f\xe1\x1f", b"\xbe", b"\xff\x80\x01", b"\x7f\x80\x7f", b"\x85", b"\x0f\x10"),
    modules=("workers.transport.headers",),
)


# gRPC framing.


def grpc_framing(data: bytes) -> None:
    """Reads DATA payloads, and the same bytes as the body of an answer. The first byte chooses the encoding."""
    encoding = (b"identity", b"gzip", b"br")[data[0] % 3] if data else b"gzip"
    body = data[1:]
    opening = HELLO + call("/silent", 1, grpc_encoding=encoding.decode())
    logs = []
    for chunks in ([body], borders(body)):
        site = Site()
        site.read(opening)
        for chunk in chunks:
            for at in range(0, len(chunk), 16384):
                site.read(frame(DATA, 0, 1, chunk[at : at + 16384]))
        site.read(END)
        _check_output(bytes(site.out))
        site.finish()
        logs.append(site.log)
    assert logs[0] == logs[1]
    try:
        message = grpc_frames.only(body)
    except ValueError:
        pass
    else:
        assert len(message) <= grpc_frames.MESSAGE_BYTES_MAX
    whole, cut = Frames(), Frames()
    checksums = [zlib.crc32(message) for message in whole.feed(body)]
    assert checksums == [zlib.crc32(message) for chunk in borders(body) for message in cut.feed(chunk)]


def grpc_parts(data: bytes) -> list[bytes]:
    parts, at = [data[:1]], 1
    while at < len(data):
        end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
        parts.append(data[at:end])
        at = end
    return parts


def of_grpc(parts: Sequence[bytes]) -> bytes:
    fixed = [part[:1] + (len(part) - 5).to_bytes(4, "big") + part[5:] if len(part) >= 5 else part for part in parts]
    return b"".join(fixed)


def grpc_seeds() -> Mapping[str, bytes]:
    packed = gzip.compress(b"message " * 20)
    return {
        "plain": b"\0" + framed(b"one") + framed(b"") + framed(b"x" * 2000),
        "gzip": b"\1" + framed(packed, 1) + framed(b"plain"),
        "gzip-unsaid": b"\0" + framed(packed, 1),
        "bomb": b"\1" + framed(gzip.compress(bytes(40_000)), 1),
        "members": b"\1" + framed(packed * 3, 1),
        "cut": b"\0" + framed(b"hello")[:7],
        "long": b"\0\0\xff\xff\xff\xff" + b"x" * 50,
    }


GRPC = Target(
    "grpc",
    grpc_framing,
    grpc_seeds,
    grpc_parts,
    of_grpc,
    words=(b"\0\0\0\0\0", b"\1\0\0\0\1", b"\x1f\x8b\x08\0\0\0\0\0", b"\0\x10\0\0", b"\xff\xff\xff\xff"),
    modules=("workers.transport.server_stream", "epp.protocol.grpc_frames", "epp.protocol.inflate"),
    allowance=4 << 20,
)
