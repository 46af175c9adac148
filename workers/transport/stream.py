"""One stream of a connection: gRPC messages out of DATA payloads, and answers into frames within the peer's windows.

Writing has two ways. The direct one, for nearly everything: the message fits into one frame, into the stream's window, the
connection's window and its `room`; then it goes to the connection's output at once. Else it is queued as pieces (nothing is
joined) and cut into frames as far as windows allow, the rest waiting for the connection to pump it. What makes the direct way
need no look at the queue is this invariant, kept by whoever changes one of the three: **a stream has queued bytes only while
its window, the connection's window or the connection's room is used up.** A stream that can send no more has a window far
below zero, so it leaves the direct way too.

Reading: the connection's loop delivers a DATA frame that is one whole message by itself, as long as `deliver` is set; all
other payloads come to `gather`. A message in pieces grows in one bytearray, and its bytes count as held by the connection.
"""

from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING

from epp.protocol.inflate import TooLong, gunzip, reach
from workers.transport.headers import (
    RESPONSE_BLOCK,
    TRAILERS_OK_BLOCK,
    refusal_block,
    trailers_block,
)
from workers.transport.interface import Buffer, Handler, Status
from workers.transport.strangers import WHAT

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.transport.http2 import Connection

DATA, HEADERS = 0, 1
END_STREAM, END_HEADERS = 1, 4
NO_WINDOW = -(1 << 62)

FRAME = Struct(">IBI")  # length and type in one word, flags, stream
FRAMED_MESSAGE = Struct(">IBIBI")  # a DATA frame's header and the prefix of the one message in it


def block_frame(flags: int, number: int, block: bytes) -> bytes:
    return FRAME.pack(len(block) << 8 | HEADERS, flags | END_HEADERS, number) + block


_RESPONSE = FRAME.pack(len(RESPONSE_BLOCK) << 8 | HEADERS, END_HEADERS, 0)[:5]
_TRAILERS = FRAME.pack(len(TRAILERS_OK_BLOCK) << 8 | HEADERS, END_HEADERS | END_STREAM, 0)[:5]


class ServerStream:
    """The transport's side of a stream; its handler sees the `Stream` protocol of it."""

    __slots__ = (
        "_connection",
        "_ending",
        "_expected",
        "_gathered",
        "born",
        "compressed",
        "counted",
        "credit",
        "deliver",
        "encoding",
        "handler",
        "head_length",
        "in_ring",
        "kept",
        "number",
        "opened",
        "padding",
        "progress",
        "queue",
        "queued",
        "received",
        "refusal",
        "remote_open",
        "window",
    )

    def __init__(self, connection: "Connection", number: int, window: int, credit: int, now: float) -> None:
        self._connection = connection
        self.number = number
        self.window = window  # what the peer lets us send
        self.credit = credit  # what we let the peer send
        self.received = 0  # bytes of credit given back: payload received = received + initial - credit
        self.padding = 0
        self.born = now
        self.opened = False  # response headers were sent
        self.remote_open = True
        self.handler: Handler | None = None  # None: what comes in is dropped
        self.deliver: Callable[[bytes], None] | None = None  # handler.message while no message is in pieces
        self.encoding = b"identity"
        self.head_length = -1  # the request's content-length
        self.refusal = 0  # the HTTP status that a request other than gRPC's gets
        self._gathered: bytearray | None = None  # prefix, then body of a message in pieces
        self._expected = -1  # bytes of its body; -1: the prefix is incomplete
        self.compressed = 0
        self.queue: deque[Buffer] | None = None
        self.queued = 0
        self._ending: bytes | None = None  # block to send after the queue
        self.counted = 0  # bytes of the queue that count as held by the connection
        self.kept = 0  # bytes that the handler holds
        self.in_ring = False
        self.progress = 0.0  # when something of the queue was last sent

    # What the handler calls.

    def send(self, message: bytes) -> None:
        self.send_raw(b"\0" + len(message).to_bytes(4, "big") + message)

    def send_raw(self, framed: bytes) -> None:
        connection = self._connection
        size = len(framed)
        if size <= self.window and size <= connection.window and size <= connection.room:
            self.window -= size
            connection.window -= size
            out = connection.out
            if not self.opened:
                self.opened = True
                out.append(_RESPONSE + self.number.to_bytes(4, "big") + RESPONSE_BLOCK)
            out.append(FRAME.pack(size << 8, 0, self.number))
            out.append(framed)
            if connection.idle:
                connection.wake()
        else:
            self._enqueue((framed,), size)

    def hold(self, count: int) -> bool:
        if self.window <= NO_WINDOW:
            return False  # the stream is gone, and what it held is released
        self.kept += count
        return self._connection.hold(count)

    def release(self) -> None:
        kept, self.kept = self.kept, 0
        if kept:
            self._connection.hold(-kept)

    def end(self, status: int = 0, text: str = "") -> None:
        if self.ended():
            return
        self.handler = self.deliver = None
        block = trailers_block(status, text) if status or text else TRAILERS_OK_BLOCK
        if not self.opened:
            self.opened = True
            block = RESPONSE_BLOCK + block  # trailers only: one header block says all
        self._ending = block
        if not self.queued:
            self._finish()

    # What the connection calls.

    def ended(self) -> bool:
        """The handler needs to hear nothing more."""
        return self._ending is not None or self.window <= NO_WINDOW

    def refuse(self) -> None:
        """Answer a request that is not gRPC, in the words of HTTP."""
        text = f"This is {WHAT}; POST with content-type application/grpc.\n".encode()
        self._connection.out.append(block_frame(0, self.number, refusal_block(self.refusal)))
        self.opened = True
        self._enqueue((text,), len(text))
        self._ending = b""
        if not self.queued:
            self._finish()

    def fail(self, status: int, text: str) -> None:
        """End the stream of ourselves, and tell the handler that it is gone."""
        if self.window <= NO_WINDOW:
            return  # gone meanwhile, and told
        handler = self.handler
        self.end(status, text)
        if handler is not None:
            self._connection.tell_closed(handler)

    def reject(self, status: int, text: str) -> None:
        """End the stream for a fault of the peer."""
        self._connection.provoked()
        self.fail(status, text)

    def gather(self, data: bytes, at: int, end: int) -> None:
        """Take a payload that isn't one whole message: parts of one, or several."""
        while at < end and self.handler is not None:
            gathered = self._gathered
            if gathered is None:
                self._gathered = gathered = bytearray()
                self._expected = -1
                self.deliver = None
            if self._expected < 0:
                more = min(5 - len(gathered), end - at)
                gathered += data[at : at + more]
                at += more
                if len(gathered) < 5:
                    return
                if not self._begin(gathered[0], int.from_bytes(gathered[1:], "big")):
                    return
                gathered.clear()
            take = min(self._expected - len(gathered), end - at)
            if take == self._expected:  # all of it is here: no detour through the bytearray
                self._complete(data[at : at + take])
            else:
                gathered += memoryview(data)[at : at + take]
                if not self._connection.hold(take):
                    text = "too many bytes of unfinished messages on one connection"
                    self.reject(Status.RESOURCE_EXHAUSTED, text)
                    return
                if len(gathered) == self._expected:
                    self._connection.hold(-self._expected)
                    self._complete(bytes(gathered))
            at += take

    def _begin(self, flag: int, length: int) -> bool:
        limit = self._connection.limits.message
        if length > limit:
            text = f"message of {length} bytes is larger than the limit of {limit}"
            self.reject(Status.RESOURCE_EXHAUSTED, text)
        elif flag > 1 or (flag and self.encoding == b"identity"):
            self.reject(Status.INTERNAL, f"message flag {flag} without a grpc-encoding for it")
        elif flag and self.encoding != b"gzip":
            name = self.encoding[:32].decode("latin-1")
            self.reject(Status.UNIMPLEMENTED, f"grpc-encoding {name} is not supported: use gzip")
        else:
            self._expected = length
            self.compressed = flag
            return True
        return False

    def _complete(self, message: bytes) -> None:
        handler = self.handler
        assert handler is not None
        self._gathered = None
        self.deliver = handler.message
        if self.compressed:
            unpacked = self._unpack(message)
            if unpacked is None:
                return
            message = unpacked
        try:
            handler.message(message)
        except Exception as error:
            self._connection.handler_failed(self, error)

    def _unpack(self, message: bytes) -> bytes | None:
        limit = self._connection.limits.message
        try:
            return gunzip(message, limit)
        except TooLong:
            text = f"message is larger than the limit of {reach(len(message), limit)} bytes when decompressed"
            self.reject(Status.RESOURCE_EXHAUSTED, text)
        except ValueError:
            self.reject(Status.INTERNAL, "message is marked as gzip but can't be decompressed, or not to its end")
        return None

    def unfinished(self) -> bool:
        """The peer has sent a part of a message."""
        return self._gathered is not None

    def _enqueue(self, parts: Sequence[Buffer], size: int) -> None:
        """Queue bytes and send what windows allow."""
        connection = self._connection
        if self.ended():
            return  # the stream is gone, and its handler knows
        if not self.opened:
            self.opened = True
            connection.out.append(block_frame(0, self.number, RESPONSE_BLOCK))
        if self.queue is None:
            self.queue = deque()
        if not self.queued:
            self.progress = connection.now
        self.queue.extend(parts)
        self.queued += size
        if not self.in_ring:
            self.pump()
        if self.queued:
            connection.enter_ring(self)
            self._recount()
        if connection.idle:
            connection.wake()

    def pump(self, frames: int = 1 << 30) -> None:
        """Send up to so many frames of the queue."""
        connection = self._connection
        queue = self.queue
        assert queue is not None
        out = connection.out
        number = self.number
        while self.queued and frames:
            size = min(self.queued, self.window, connection.window, connection.room)
            if size <= 0:
                break
            frames -= 1
            self.window -= size
            connection.window -= size
            self.queued -= size
            out.append(FRAME.pack(size << 8, 0, number))
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
            self.progress = connection.now
        if self.counted:
            self._recount()
        if not self.queued and self._ending is not None and self.window > NO_WINDOW:
            self._finish()

    def _recount(self) -> None:
        """Count what stays queued as held, and give up on a peer that lets too much pile up."""
        grown = self.queued - self.counted
        if grown:
            connection = self._connection
            self.counted = self.queued
            connection.unread += grown
            within = connection.hold(grown)
            limits = connection.limits
            if grown > 0 and not (within and self.queued <= limits.stream_output):
                connection.give_up(self, "output_limit")
            elif connection.unread > limits.hoard:
                connection.watch_hoarding()

    def drop(self) -> int:
        """Forget all that is queued or in pieces, for good; returns how many bytes were held for it."""
        held = self.counted + self.kept
        self._connection.unread -= self.counted
        if self._gathered is not None and self._expected >= 0:
            held += len(self._gathered)
        self.window = NO_WINDOW
        self.handler = self.deliver = self.queue = self._gathered = None
        self.queued = self.counted = self.kept = 0
        return held

    def _finish(self) -> None:
        """Everything was sent: write the trailers and leave."""
        connection = self._connection
        number = self.number
        block = self._ending
        if block is TRAILERS_OK_BLOCK:
            connection.out.append(_TRAILERS + number.to_bytes(4, "big") + TRAILERS_OK_BLOCK)
        elif block:
            connection.out.append(block_frame(END_STREAM, number, block))
        else:
            connection.out.append(FRAME.pack(DATA, END_STREAM, number))
        connection.leave(self)
