"""The sending side of a stream (`SendingSide`), which makes frames from answers, and the part of the connection that it uses (`Link`).

Sending has two paths. The direct path serves nearly every message: if a message fits into one frame, the stream's window, the connection's
window and the connection's `room`, it goes to the connection's output at once. Otherwise `_enqueue` queues it without copying, `pump` cuts
the queue into frames as far as windows allow, and the connection pumps the rest later. The direct path does not look at the queue. This is
correct because of an invariant: **a stream has queued bytes only while its window, the connection's window or the connection's room is used
up.** All code that changes a window or the room keeps this invariant. A stream that may send no more has a window of NO_WINDOW, so the
direct path excludes it, too.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Final

from compiled.calls import data_header, numbered
from workers.transport.answer_blocks import RESPONSE_BLOCK, TRAILERS_OK_BLOCK
from workers.transport.frames import DATA, END_HEADERS, END_STREAM, FRAME, FRAME_MAX, HEADERS, WINDOW_FIRST
from workers.transport.interface import Buffer, Handler
from workers.transport.limits import Limits


class Link(ABC):
    """The sending state that all streams of a connection share, and the methods that streams call.

    Streams read and change the attributes themselves, so that a message that can be sent at once reaches `out` without a call.
    """

    __slots__ = ("host", "idle", "limits", "now", "out", "port", "ring", "room", "unread", "window")

    def __init__(self, now: float, limits: Limits) -> None:
        self.host = ""  # the address of the peer
        self.port = 0  # the local port
        self.limits = limits
        self.now = now  # monotonic seconds
        self.out: list[Buffer] = []  # frames to be written
        self.idle = False  # whether the driver looks at `out` only after `wake`
        self.window = WINDOW_FIRST  # bytes of DATA that the peer accepts on this connection now
        self.room = FRAME_MAX  # largest DATA payload that may be sent now, in bytes; 0 while the socket is blocked
        self.ring: deque[int] = deque()  # numbers of the streams that wait for their turn to send
        self.unread = 0  # bytes that wait in streams for the peer's windows or for the socket

    @abstractmethod
    def wake(self) -> None:
        """Asks the driver to take the output."""

    @abstractmethod
    def hold(self, count: int) -> bool:
        """Counts bytes as held in memory for the peer. A negative count releases them. Returns False if too many are held now."""

    @abstractmethod
    def keep(self, count: int) -> bool:
        """Counts bytes of an unfinished message, as `hold` does. At the limit, gives up unfinished requests, perhaps also this one."""

    @abstractmethod
    def watch_hoarding(self) -> None:
        """Notes that `unread` has changed and is above `limits.hoard`."""

    @abstractmethod
    def give_up(self, number: int, cause: str) -> None:
        """Resets a stream because the peer does not read what we send."""

    @abstractmethod
    def provoked(self) -> None:
        """Counts a stream that ends because of the peer's error. It is counted like a reset stream, because the answer costs us as much."""

    @abstractmethod
    def blame(self, text: str) -> None:
        """Reports that a handler has ended its stream because the peer broke the application's protocol."""

    @abstractmethod
    def leave(self, number: int) -> None:
        """Removes a stream that has sent all of its answer."""

    @abstractmethod
    def report(self, error: Exception) -> None:
        """Reports an exception that a handler has raised."""

    def tell_closed(self, handler: Handler) -> None:
        try:
            handler.closed()
        except Exception as error:
            self.report(error)


NO_WINDOW: Final = -(1 << 62)
_ALL_FRAMES: Final = 1 << 30


def block_frame(flags: int, number: int, block: bytes) -> bytes:
    """Encodes a HEADERS frame with a whole header block."""
    return FRAME.pack(len(block) << 8 | HEADERS, flags | END_HEADERS, number) + block


# Two frames that nearly every stream sends, for stream 0.
_RESPONSE: Final = block_frame(0, 0, RESPONSE_BLOCK)
_TRAILERS: Final = block_frame(END_STREAM, 0, TRAILERS_OK_BLOCK)


class SendingSide:
    """The messages that a stream sends, and its end."""

    __slots__ = ("_ending", "_link", "counted", "in_ring", "number", "opened", "progress", "queue", "queued", "window")

    def __init__(self, link: Link, number: int, window: int) -> None:
        self._link = link
        self.number = number
        self.window = window  # bytes that the peer lets us send now
        self.opened = False  # whether we have sent response headers
        self.queue: deque[Buffer] | None = None  # parts of answers that wait for windows
        self.queued = 0  # bytes in the queue
        self._ending: bytes | None = None  # the header block to send after the queue; None if the stream has not ended
        self.counted = 0  # bytes of the queue that the connection treats as held
        self.in_ring = False  # whether the stream waits in the connection's ring, which will call `pump`
        self.progress = 0.0  # when a part of the queue was last sent

    def send(self, message: bytes) -> None:
        self.send_raw(b"\0" + len(message).to_bytes(4, "big") + message)

    def send_raw(self, framed: bytes) -> None:
        link = self._link
        size = len(framed)
        if size <= self.window and size <= link.window and size <= link.room:
            self.window -= size
            link.window -= size
            out = link.out
            if not self.opened:
                self.opened = True
                out.append(numbered(_RESPONSE, self.number))
            out.append(data_header(size, self.number))
            out.append(framed)
            if link.idle:
                link.wake()
        else:
            self._enqueue((framed,), size)

    def send_parts(self, parts: Sequence[Buffer]) -> None:
        self._enqueue(parts, sum(map(len, parts)))

    def ended(self) -> bool:
        """Whether the stream has ended, so that its handler gets no more calls."""
        return self._ending is not None or self.window <= NO_WINDOW

    def _enqueue(self, parts: Sequence[Buffer], size: int) -> None:
        """Queues `size` bytes in parts, and sends as many as windows allow."""
        link = self._link
        if self.ended():
            return  # the stream is gone, and its handler knows
        if not self.opened:
            self.opened = True
            link.out.append(block_frame(0, self.number, RESPONSE_BLOCK))
        if self.queue is None:
            self.queue = deque()
        if not self.queued:
            self.progress = link.now
        self.queue.extend(parts)
        self.queued += size
        if not self.in_ring:
            self.pump()
        if self.queued:
            self.enter_ring()
            self._recount()
        if link.idle:
            link.wake()

    def enter_ring(self) -> None:
        """Adds the stream to the connection's ring, whose streams send in turn.

        Does nothing if the stream is in the ring already, has nothing to send, or its HTTP/2 window is used up.
        """
        if self.queued and self.window > 0 and not self.in_ring:
            self.in_ring = True
            self._link.ring.append(self.number)

    def pump(self, frames: int = _ALL_FRAMES) -> None:
        """Sends at most `frames` frames of the queue."""
        link = self._link
        queue = self.queue
        assert queue is not None
        out = link.out
        number = self.number
        while self.queued and frames:
            size = min(self.queued, self.window, link.window, link.room)
            if size <= 0:
                break
            frames -= 1
            self.window -= size
            link.window -= size
            self.queued -= size
            out.append(data_header(size, number))
            while size:
                part = queue.popleft()
                length = len(part)
                if length <= size:
                    out.append(part)
                    size -= length
                else:
                    view = memoryview(part)
                    out.append(view[:size])
                    queue.appendleft(view[size:])
                    break
            self.progress = link.now
        if self.counted:
            self._recount()
        if not self.queued and self._ending is not None and self.window > NO_WINDOW:
            self._finish()

    def _recount(self) -> None:
        """Counts the bytes that stay queued as held. Gives up on a peer that leaves too many bytes unread."""
        grown = self.queued - self.counted
        if grown:
            link = self._link
            self.counted = self.queued
            link.unread += grown
            within = link.hold(grown)
            limits = link.limits
            if grown > 0 and not (within and self.queued <= limits.stream_output):
                link.give_up(self.number, "output_limit")
            elif link.unread > limits.hoard:
                link.watch_hoarding()

    def _finish(self) -> None:
        """Sends the trailers and leaves the connection's table. Called when the queue is sent."""
        link = self._link
        number = self.number
        block = self._ending
        if block is TRAILERS_OK_BLOCK:
            link.out.append(numbered(_TRAILERS, number))
        elif block:
            link.out.append(block_frame(END_STREAM, number, block))
        else:
            link.out.append(FRAME.pack(DATA, END_STREAM, number))
        link.leave(number)
