"""What a transport and the application say to each other, whatever carries the bytes.

A transport accepts gRPC streams. For each it calls the `Application` once, which returns the `Handler` of that stream or
None (answered with UNIMPLEMENTED). All calls happen on the thread of the event loop, never two at a time.

Life of a stream: `message()` any number of times, `half_closed()` at most once and after the last message, and then one of
two endings: the handler calls `Stream.end()`, or the transport calls `Handler.closed()`. Exactly one of the two happens, once.
What a handler writes to a stream that is gone is dropped without a word: the loss was told by `closed()`. A handler that was
told, or has ended its stream, does no more work for it: that is what makes limits on streams limits on work.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

Buffer = bytes | memoryview
Metadata = Sequence[tuple[bytes, bytes]]


class Handler(Protocol):
    """Serves one stream; made by the application."""

    def message(self, message: bytes) -> None:
        """One whole gRPC message, without its prefix, decompressed."""

    def half_closed(self) -> None:
        """The peer has sent all it will send."""

    def closed(self) -> None:
        """The stream is gone before it was ended (reset, connection lost, limit exceeded)."""


class Stream(Protocol):
    """What a handler writes to. Nothing here blocks: what the peer doesn't take yet is queued, up to a limit."""

    def send(self, message: bytes) -> None:
        """Send one gRPC message."""

    def send_raw(self, framed: bytes) -> None:
        """Send one or more whole messages that carry their 5-byte prefixes already."""

    def hold(self, count: int) -> bool:
        """Count bytes that the handler keeps because the peer hasn't finished; False: too many, for this peer or for all."""

    def release(self) -> None:
        """The handler keeps none of them any more. The stream's end does the same."""

    def end(self, status: int = 0, text: str = "") -> None:
        """Send the trailers: a gRPC status and its text. Nothing can be sent after it."""


Application = Callable[[str, Metadata, Stream], Handler | None]


class Clock:
    """The time of the read that is being handled, in monotonic seconds. The transport sets it before it calls handlers.

    One look at the system's clock serves all messages of a read: they have come in together.
    """

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now


class Server(Protocol):
    """A transport that serves, as its worker sees it. Made and started in ways of its own."""

    @property
    def connections(self) -> int: ...

    @property
    def streams(self) -> int:
        """Those that are open."""

    def handlers(self) -> Sequence[Handler]:
        """Those of open streams."""

    def load(self) -> int:
        """What workers compare to decide who takes the next connection."""

    def stop_accepting(self) -> None:
        """No new connections; open streams go on."""

    def drain(self) -> None:
        """Say goodbye gracefully: each connection closes when its last stream has ended."""

    def abort(self) -> None:
        """Cut all connections now."""

    async def closed(self) -> None:
        """Wait until a server that drains, or was aborted, has no connection left."""


class Status:
    """The gRPC status codes that a transport gives of itself."""

    OK = 0
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
