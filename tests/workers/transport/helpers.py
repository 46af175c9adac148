"""Peers for tests of the engine: functions that write raw frames, and a correct client over the h2 library."""

from collections.abc import Callable

import h2.config
import h2.connection
import h2.events
import hpack
from hyperframe.frame import Frame

from workers.transport.frames import FRAME, PREFACE
from workers.transport.http2 import Connection
from workers.transport.interface import Handler, Metadata, Stream
from workers.transport.limits import Budget, Limits

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test/Record"),
    (":authority", "picker"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return FRAME.pack(len(payload) << 8 | kind, flags, number) + payload


def framed(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def word(value: int) -> bytes:
    return value.to_bytes(4, "big")


def setting(name: int, value: int) -> bytes:
    return name.to_bytes(2, "big") + word(value)


def block(headers=REQUEST, **changes: str) -> bytes:
    """A header block that doesn't change the HPACK table. `content_type="x"` changes a field, None removes it."""
    named = {name.replace("_", "-"): value for name, value in changes.items()}
    out = []
    for name, value in headers:
        value = named.pop(name.lstrip(":"), value)
        if value is not None:
            out.append((name, value))
    out += [(name, value) for name, value in named.items() if value is not None]
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(name, value) for name, value in out])


class Recorder:
    """A handler that records its calls. `on_message` may answer."""

    def __init__(self, path: str, metadata: Metadata, stream: Stream) -> None:
        self.path, self.metadata, self.stream = path, metadata, stream
        self.events: list[tuple[str, bytes]] = []
        self.on_message: Callable[[bytes], None] | None = None
        self.on_half_closed: Callable[[], None] | None = None

    def message(self, message: bytes) -> None:
        assert type(message) is bytes
        self.events.append(("message", message))
        if self.on_message is not None:
            self.on_message(message)

    def half_closed(self) -> None:
        self.events.append(("half_closed", b""))
        if self.on_half_closed is not None:
            self.on_half_closed()

    def closed(self) -> None:
        self.events.append(("closed", b""))

    @property
    def messages(self) -> list[bytes]:
        return [message for kind, message in self.events if kind == "message"]

    def count(self, kind: str) -> int:
        return sum(1 for event, _ in self.events if event == kind)


class Echo(Recorder):
    def message(self, message: bytes) -> None:
        super().message(message)
        self.stream.send(message)

    def half_closed(self) -> None:
        super().half_closed()
        self.stream.end()


class Engine:
    """A connection and its application. Tests feed it with raw bytes."""

    def __init__(
        self,
        make: Callable[[str, Metadata, Stream], Handler | None] = Recorder,
        limits: Limits | None = None,
        budget: Budget | None = None,
        hello: bool = True,
        acknowledged: bool = True,
    ) -> None:
        self.make = make
        self.handlers: list[Recorder] = []
        self.abuses: list[str] = []
        self.errors: list[BaseException] = []
        self.wakes = 0
        self.connection = Connection(self._application, 0.0, self._wake, limits, budget, self.abuses.append, self.errors.append)
        if hello:
            self.greeting = self.receive(PREFACE + frame(SETTINGS, 0, 0))
            if acknowledged:
                self.receive(frame(SETTINGS, 1, 0))

    def _application(self, path, metadata, stream):
        handler = self.make(path, metadata, stream)
        if handler is not None:
            self.handlers.append(handler)
        return handler

    def _wake(self) -> None:
        self.wakes += 1

    def receive(self, data: bytes) -> list[Frame]:
        """The frames that the engine answers with."""
        self.connection.receive(data)
        while self.connection.behind:
            self.connection.now = max(self.connection.now, self.connection.slow_until)
            self.connection.go_on()
        return self.output()

    def output(self) -> list[Frame]:
        return parse(self.connection.output())

    def open(self, number: int = 1, flags: int = 4, **changes) -> list[Frame]:
        return self.receive(frame(HEADERS, flags, number, block(**changes)))

    def send(self, message: bytes, number: int = 1, flags: int = 0) -> list[Frame]:
        return self.receive(frame(DATA, flags, number, framed(message)))

    @property
    def handler(self) -> Recorder:
        return self.handlers[-1]


def parse(data: bytes) -> list[Frame]:
    frames = []
    view = memoryview(data)
    while view:
        parsed, length = Frame.parse_frame_header(view[:9])
        parsed.parse_body(view[9 : 9 + length])
        frames.append(parsed)
        view = view[9 + length :]
    return frames


def names(frames: list[Frame]) -> list[str]:
    return [type(f).__name__.removesuffix("Frame") for f in frames]


def fields(parsed: Frame) -> dict[str, str]:
    return dict(hpack.Decoder().decode(parsed.data))


def messages(data: bytes) -> list[bytes]:
    """The gRPC messages in the payloads of DATA frames."""
    out = []
    while data:
        length = int.from_bytes(data[1:5], "big")
        assert len(data) >= 5 + length
        out.append(data[5 : 5 + length])
        data = data[5 + length :]
    return out


def payload(frames: list[Frame], number: int = 1) -> bytes:
    return b"".join(f.data for f in frames if type(f).__name__ == "DataFrame" and f.stream_id == number)


class Client:
    """A client that obeys HTTP/2, and raises when the engine doesn't."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.events: list[h2.events.Event] = []
        self.exchange()

    def exchange(self) -> list[h2.events.Event]:
        """Carries bytes back and forth until neither side sends. Returns the new events."""
        events: list[h2.events.Event] = []
        while True:
            to_server = self.h2.data_to_send()
            if to_server:
                self.engine.connection.receive(to_server)
            to_client = self.engine.connection.output()
            if to_client:
                events += self.h2.receive_data(to_client)
            if not to_server and not to_client:
                self.events += events
                return events

    def request(self, end: bool = False, path: str = "/test/Record", **extra: str) -> int:
        number = self.h2.get_next_available_stream_id()
        headers = [(n, path if n == ":path" else v) for n, v in REQUEST] + list(extra.items())
        self.h2.send_headers(number, headers, end_stream=end)
        self.exchange()
        return number

    def send(self, number: int, data: bytes, end: bool = False) -> None:
        while data:
            size = min(len(data), self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            assert size > 0
            self.h2.send_data(number, data[:size])
            data = data[size:]
            self.exchange()
        if end:
            self.h2.end_stream(number)
            self.exchange()

    def received(self, number: int) -> bytes:
        return b"".join(e.data for e in self.events if isinstance(e, h2.events.DataReceived) and e.stream_id == number)

    def trailers(self, number: int) -> dict[str, str]:
        for event in reversed(self.events):
            kinds = (h2.events.TrailersReceived, h2.events.ResponseReceived)
            if isinstance(event, kinds) and event.stream_id == number:
                return dict(event.headers)
        return {}
