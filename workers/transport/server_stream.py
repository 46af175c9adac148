"""One stream of a connection: makes gRPC messages from DATA payloads. `sending` makes frames from answers.

While `deliver` is set, the connection's loop delivers each DATA frame that is exactly one message. All other payloads come to
`gather`, which collects the pieces of a message and joins them at its end. The connection counts these bytes as held.
"""

from collections.abc import Callable
from typing import Final

from epp.protocol.inflate import TooLong, gunzip, reach
from workers.transport.answer_blocks import RESPONSE_BLOCK, TRAILERS_OK_BLOCK, refusal_block, trailers_block
from workers.transport.interface import Handler, Status
from workers.transport.sending import NO_WINDOW, Link, SendingSide, block_frame
from workers.transport.wrong_protocol import WHAT

SMALL: Final = 1024  # bytes; smaller pieces are joined at once, so that no object per piece is kept


class Pieces:
    """The pieces of a message's body. One bytearray for all of them would be copied several times while it grows."""

    __slots__ = ("_large", "_small", "received")

    def __init__(self) -> None:
        self._large: list[bytes] = []
        self._small = bytearray()  # the small pieces since the last one in `_large`
        self.received = 0  # bytes of all pieces

    def add(self, piece: bytes) -> None:
        self.received += len(piece)
        if len(piece) < SMALL:
            self._small += piece
            return
        if self._small:
            self._large.append(bytes(self._small))
            self._small.clear()
        self._large.append(piece)

    def joined(self) -> bytes:
        return b"".join((*self._large, self._small))


STREAM_CREDIT: Final = 1 << 24  # bytes: the window that we give the peer on each stream


class ServerStream(SendingSide):
    """The transport's side of a stream. Its handler uses it as a `Stream`."""

    __slots__ = (
        "_body",
        "_expected",
        "_gathered",
        "authority",
        "born",
        "compressed",
        "credit",
        "deliver",
        "encoding",
        "handler",
        "head_length",
        "kept",
        "padding",
        "received",
        "refusal",
        "remote_open",
    )

    def __init__(self, link: Link, number: int, window: int, now: float) -> None:
        super().__init__(link, number, window)
        self.credit = STREAM_CREDIT  # bytes that we let the peer send now
        self.received = 0  # bytes of credit that we have given back so far
        self.padding = 0  # bytes of padding received
        self.born = now
        self.remote_open = True  # whether the peer may send more
        self.handler: Handler | None = None  # None if further messages are dropped
        self.deliver: Callable[[bytes], None] | None = None  # `handler.message`; None while a message is in pieces
        self.encoding = b"identity"
        self.authority = ""
        self.head_length = -1  # the request's content-length, or -1
        self.refusal = 0  # the HTTP status of the answer to a request that is not gRPC; 0 for gRPC
        self._gathered: bytearray | None = None  # the bytes so far of the prefix of a message in pieces
        self._body: Pieces | None = None  # the body of that message; None while the prefix is incomplete
        self._expected = 0  # length of that body
        self.compressed = 0  # the compressed flag in that prefix
        self.kept = 0  # bytes that the handler keeps

    # Calls of the handler, see `interface.Stream`.

    def hold(self, count: int) -> bool:
        if self.window <= NO_WINDOW:
            return False  # the stream is gone, and `drop` has released its held bytes
        self.kept += count
        return self._link.keep(count) and not self.ended()

    def release(self) -> None:
        kept, self.kept = self.kept, 0
        if kept:
            self._link.hold(-kept)

    def end(self, status: int = 0, text: str = "") -> None:
        if self.ended():
            return
        self.handler = self.deliver = None
        if status == Status.INVALID_ARGUMENT:
            self._link.blame(text)
        block = trailers_block(status, text) if status or text else TRAILERS_OK_BLOCK
        if not self.opened:
            self.opened = True
            block = RESPONSE_BLOCK + block  # a "Trailers-Only" response: one header block
        self._ending = block
        if not self.queued:
            self._finish()

    # Calls of the connection.

    def refuse(self) -> None:
        """Answers a request that is not gRPC with an HTTP status and a text."""
        text = f"This is {WHAT}; POST with content-type application/grpc.\n".encode()
        self._link.out.append(block_frame(0, self.number, refusal_block(self.refusal)))
        self.opened = True
        self._enqueue((text,), len(text))
        self._ending = b""
        # With a window of NO_WINDOW, the budget was used up and the stream is reset already.
        if not self.queued and self.window > NO_WINDOW:
            self._finish()

    def fail(self, status: int, text: str) -> None:
        """Ends the stream before its handler does, and tells the handler."""
        if self.window <= NO_WINDOW:
            return  # the stream has ended, and its handler knows
        handler = self.handler
        self.end(status, text)
        if handler is not None:
            self._link.tell_closed(handler)

    def reject(self, status: int, text: str) -> None:
        """Ends the stream because of an error of the peer."""
        self._link.provoked()
        self.fail(status, text)

    def handler_failed(self, error: Exception) -> None:
        """Ends the stream because its handler raised an exception, or because the application did when it created the handler."""
        self._link.report(error)
        self.fail(Status.INTERNAL, "the handler of this stream failed")

    def content_bytes(self) -> int:
        """Returns how many bytes of DATA the peer has sent, without padding."""
        return self.received + STREAM_CREDIT - self.credit - self.padding

    def unfinished(self) -> bool:
        """Whether only a part of a message has arrived."""
        return self._gathered is not None

    def peer(self) -> str:
        return self._link.host

    def port(self) -> int:
        return self._link.port

    def gathered(self) -> int:
        if self._body is not None:
            return self._body.received
        return len(self._gathered) if self._gathered is not None else 0

    def gather(self, data: bytes, at: int, end: int) -> None:
        """Handles a payload that is not exactly one message: a part of a message, or several messages."""
        while at < end and self.handler is not None:
            gathered = self._gathered
            if gathered is None:
                self._gathered = gathered = bytearray()
                self.deliver = None
            body = self._body
            if body is None:
                more = min(5 - len(gathered), end - at)
                gathered += data[at : at + more]
                at += more
                if len(gathered) < 5:
                    return
                if not self._begin(gathered[0], int.from_bytes(gathered[1:], "big")):
                    return
                body = self._body = Pieces()
            take = min(self._expected - body.received, end - at)
            if take == self._expected:  # the payload has the whole body, so it need not be collected
                self._complete(data[at : at + take])
            else:
                body.add(data[at : at + take])
                if not self._link.keep(take) or self.handler is None:
                    # Not `reject`, which would count this as an error of the peer: the limit is ours. `keep` may have given up
                    # this very stream; then `fail` does nothing.
                    self.fail(Status.RESOURCE_EXHAUSTED, "too many bytes of unfinished messages are held")
                    return
                if body.received == self._expected:
                    self._link.hold(-self._expected)
                    self._complete(body.joined())
            at += take

    def _begin(self, flag: int, length: int) -> bool:
        """Checks the prefix of a message. Returns False if the stream was ended."""
        limit = self._link.limits.message
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
        self._gathered = self._body = None
        self.deliver = handler.message
        if self.compressed:
            unpacked = self._unpack(message)
            if unpacked is None:
                return
            message = unpacked
        try:
            handler.message(message)
        except Exception as error:
            self.handler_failed(error)

    def _unpack(self, message: bytes) -> bytes | None:
        """Decompresses a message with gzip. Returns None if this has failed and so ended the stream."""
        limit = self._link.limits.message
        try:
            return gunzip(message, limit)
        except TooLong:
            text = f"message is larger than the limit of {reach(len(message), limit)} bytes when decompressed"
            self.reject(Status.RESOURCE_EXHAUSTED, text)
        except ValueError:
            self.reject(Status.INTERNAL, "message is marked as gzip but can't be decompressed, or not to its end")
        return None

    def drop(self) -> int:
        """Drops queued and incomplete messages. Returns how many bytes were held for the stream."""
        held = self.counted + self.kept
        self._link.unread -= self.counted
        if self._body is not None:
            held += self._body.received
        self.window = NO_WINDOW
        self.handler = self.deliver = self.queue = self._gathered = self._body = None
        self.queued = self.counted = self.kept = 0
        return held
