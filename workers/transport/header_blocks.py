"""Reads the peer's header blocks: HEADERS and CONTINUATION frames. A block is either a request, which opens a stream, or trailers."""

from collections.abc import Callable

from workers.transport.frames import END_HEADERS, END_STREAM, PADDED, PRIORITISED, WINDOW_MAX, WORD, ConnectionFault, Error, unpadded
from workers.transport.headers import BrokenBlock, ClientKind, HeaderDecoder, RequestHead, TooManyHeaders, client_kind
from workers.transport.interface import Application, Status
from workers.transport.server_stream import ServerStream
from workers.transport.session import Session
from workers.transport.timeouts import Deadlines


class UnfinishedBlock:
    """A header block of which more frames must come."""

    __slots__ = ("began", "depends_on_itself", "end_stream", "frames", "number", "received")

    def __init__(self, number: int, end_stream: int, depends_on_itself: bool, now: float) -> None:
        self.number = number
        self.end_stream = end_stream
        self.depends_on_itself = depends_on_itself
        self.began = now
        self.received = bytearray()
        self.frames = 0


class HeaderBlocks:
    """Reads the header blocks of one connection, and opens its streams."""

    __slots__ = ("_application", "_deadlines", "_decoder", "_on_deadline", "_session", "begun", "client", "unfinished", "used")

    def __init__(
        self, session: Session, application: Application, deadlines: Deadlines[ServerStream], on_deadline: Callable[[], None]
    ) -> None:
        self._session = session
        self._application = application
        self._deadlines = deadlines
        self._on_deadline = on_deadline
        self._decoder = HeaderDecoder(session.limits)
        self.unfinished: UnfinishedBlock | None = None
        self.begun = 0  # the number of streams that the current read has begun
        self.used = False  # whether a first request has arrived
        self.client = ClientKind.UNKNOWN

    def headers(self, flags: int, number: int, data: bytes, start: int, end: int) -> bool:
        """Handles a HEADERS frame. Returns True if a CONTINUATION frame must follow. Raises ConnectionFault."""
        if not number & 1:
            raise ConnectionFault(Error.PROTOCOL, f"HEADERS on stream {number}")
        if flags & PADDED:
            start, end = unpadded(data, start, end)
        depends_on_itself = False
        if flags & PRIORITISED:
            if end - start < 5:
                raise ConnectionFault(Error.FRAME_SIZE, "HEADERS too short for its priority")
            depends_on_itself = WORD.unpack_from(data, start)[0] & WINDOW_MAX == number
            start += 5
        if flags & END_HEADERS:
            self._end_block(number, flags & END_STREAM, depends_on_itself, data[start:end])
            return False
        block = self.unfinished = UnfinishedBlock(number, flags & END_STREAM, depends_on_itself, self._session.now)
        block.received += memoryview(data)[start:end]
        return True

    def continuation(self, flags: int, data: bytes, start: int, end: int) -> bool:
        """Handles a CONTINUATION frame. Returns True if another one must follow. Raises ConnectionFault."""
        block = self.unfinished
        if block is None:
            raise ConnectionFault(Error.PROTOCOL, "CONTINUATION without HEADERS")
        block.frames += 1
        block.received += memoryview(data)[start:end]
        session = self._session
        if block.frames > session.limits.continuations or len(block.received) > session.limits.header_block:
            session.abuse("header_block", Error.CALM)
        elif flags & END_HEADERS:
            self.unfinished = None
            self._end_block(block.number, block.end_stream, block.depends_on_itself, bytes(block.received))
            return False
        return True

    def _end_block(self, number: int, end_stream: int, depends_on_itself: bool, data: bytes) -> None:
        """Handles a whole header block. Decodes it even if it has no effect, because every block changes the HPACK table."""
        session = self._session
        stream = session.streams.get(number)
        try:
            if number > session.last_opened:
                self._open(number, end_stream, depends_on_itself, self._decoder.request(data))
                return
            malformed = self._decoder.bad_trailers(data)
        except TooManyHeaders:
            session.abuse("header_list", Error.CALM)
            return
        except BrokenBlock as error:
            raise ConnectionFault(Error.COMPRESSION, str(error)) from None
        if stream is None:
            session.no_such_stream(number, "HEADERS")
        elif not stream.remote_open:
            session.reset(stream, Error.STREAM_CLOSED)
        elif malformed or not end_stream or depends_on_itself:
            session.reset(stream, Error.PROTOCOL)
        else:
            session.half_close(stream)

    def _open(self, number: int, end_stream: int, depends_on_itself: bool, head: RequestHead) -> None:
        session = self._session
        if session.is_late(number):
            return  # the peer knows that we do not serve this stream, and that it can safely send it elsewhere
        session.last_opened = number
        self.begun += 1
        if head.problem or depends_on_itself:
            session.reset_unknown(number, Error.PROTOCOL)
            session.charge_stream("provoked_resets")
            return
        limit = session.stream_limit if session.limit_known else session.limits.streams_max
        if len(session.streams) >= limit:
            session.reset_unknown(number, Error.REFUSED_STREAM)
            session.charge_stream("refused_streams")
            return
        stream = session.open(number)
        stream.head_length = head.content_length
        stream.refusal = head.refusal
        if not head.refusal:
            stream.encoding = head.encoding
            stream.authority = head.authority
            self._start(stream, head)
        else:
            session.charge_stream("refused_requests")
        if end_stream and session.charge_stream("empty_streams"):
            session.half_close(stream)

    def _start(self, stream: ServerStream, head: RequestHead) -> None:
        if not self.used:
            self.used = True
            self.client = client_kind(head)
        try:
            handler = self._application(head.path, head.metadata, stream)
        except Exception as error:
            stream.handler_failed(error)
            return
        if stream.ended():
            return
        if handler is None:
            stream.end(Status.UNIMPLEMENTED, f"unknown method {head.path[:200]}")
            self._session.charge_stream("refused_requests")
            return
        stream.handler = handler
        stream.deliver = handler.message
        if head.timeout is not None:
            self._deadlines.add(self._session.now + head.timeout, stream.number)
            self._on_deadline()
