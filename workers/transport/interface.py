"""What a transport and the application say to each other, whatever carries the bytes.

A transport accepts gRPC streams. For each it calls the `Application` once, which returns the `Handler` of that stream or
None (answered with UNIMPLEMENTED). All calls happen on the thread of the event loop, never two at a time.

Life of a stream: `message()` any number of times, `half_closed()` at most once and after the last message, and then one of
two endings: the handler calls `Stream.end()`, or the transport calls `Handler.closed()`. Exactly one of the two happens, once.
What a handler writes to a stream that is gone is dropped without a word: the loss was told by `closed()`.
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

    def end(self, status: int = 0, text: str = "") -> None:
        """Send the trailers: a gRPC status and its text. Nothing can be sent after it."""


Application = Callable[[str, Metadata, Stream], Handler | None]


class Status:
    """The gRPC status codes that a transport gives of itself."""

    OK = 0
    UNKNOWN = 2
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
