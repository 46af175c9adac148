"""The interface between a transport and the application. It does not depend on the protocol that carries the bytes.

A transport accepts gRPC streams. It calls the `Application` once per stream, and gets the `Handler` of the stream. If it gets None, it
answers UNIMPLEMENTED. All calls happen on the thread of the event loop, never two at a time.

The life of a stream: `message()` any number of times, then `half_closed()` at most once, then one of two endings: the handler calls
`Stream.end()`, or the transport calls `Handler.closed()`. Exactly one ending happens, once, and it may happen at any time. Writes of a
handler after `closed()` are dropped silently. After either ending, a handler does no more work for its stream. So a limit on streams is
also a limit on work.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

Buffer = bytes | memoryview
Metadata = Sequence[tuple[bytes, bytes]]


class Handler(Protocol):
    """Serves one stream. The application creates it."""

    def message(self, message: bytes) -> None:
        """Handles one whole gRPC message. `message`: without its prefix, and decompressed."""

    def half_closed(self) -> None:
        """Handles the end of the peer's messages."""

    def closed(self) -> None:
        """Handles the loss of the stream before the handler has ended it: reset, connection lost, or limit exceeded."""


class Stream(Protocol):
    """A stream as its handler writes to it. No method blocks: bytes that the peer does not take yet are queued, up to a limit.

    `authority`: the `:authority` of its request; empty if it is unknown.
    """

    authority: str

    def send(self, message: bytes) -> None:
        """Sends one gRPC message."""

    def send_raw(self, framed: bytes) -> None:
        """Sends one or more whole messages that already have their 5-byte prefixes."""

    def send_parts(self, parts: Sequence[Buffer]) -> None:
        """Does the same as `send_raw` with the joined parts, without joining them. The parts must not change any more."""

    def hold(self, count: int) -> bool:
        """Counts bytes that the handler keeps for an unfinished request. Returns False if there are too many bytes, for this peer or in
        total.

        At the limit, the transport first gives up other unfinished requests. If this stream is one of them, it has ended.
        """

    def release(self) -> None:
        """Releases all bytes that `hold` has counted. The end of the stream does the same."""

    def peer(self) -> str:
        """The address of the peer, for the log; empty if it is unknown."""

    def port(self) -> int:
        """The local port of the connection; 0 if it is unknown."""

    def gathered(self) -> int:
        """Returns how many bytes of an incomplete message have arrived."""

    def end(self, status: int = 0, text: str = "") -> None:
        """Sends the trailers: a gRPC status and its text. Nothing can be sent after them. INVALID_ARGUMENT blames the peer."""


Application = Callable[[str, Metadata, Stream], Handler | None]


class Clock:
    """The time of the current read, in monotonic seconds. The transport sets it before it calls handlers.

    All messages of one read have arrived together, so they share one reading of the system's clock.
    """

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now


class Server(Protocol):
    """A running transport, as its worker uses it. Each transport has its own constructor and start method."""

    @property
    def connections(self) -> int: ...

    @property
    def streams(self) -> int:
        """The number of open streams."""

    def handlers(self) -> Sequence[Handler]:
        """Returns the handlers of open streams."""

    def load(self) -> int:
        """Returns the load of the worker. The worker with the smallest load takes the next connection."""

    def stop_accepting(self) -> None:
        """Accepts no new connections. Open streams continue."""

    def drain(self) -> None:
        """Sends GOAWAY. Each connection closes when its last stream has ended."""

    def abort(self) -> None:
        """Cuts all connections now."""

    async def closed(self) -> None:
        """Waits until no connection is left, after `drain` or `abort`."""


class Status:
    """The gRPC status codes that transports send without the application."""

    OK: Final = 0
    INVALID_ARGUMENT: Final = 3
    DEADLINE_EXCEEDED: Final = 4
    RESOURCE_EXHAUSTED: Final = 8
    UNIMPLEMENTED: Final = 12
    INTERNAL: Final = 13
