"""Sans-I/O HTTP/2 server for gRPC: the bytes of one connection in, calls to handlers and bytes out.

`receive(data)` works through all frames of a read in one loop; what has to be sent gathers in `out`, and the driver takes it
with `output()` for one write. Nothing here reads a clock or touches a socket: the driver sets `now` before it calls, calls
`tick()` about once a second, and hands in `wake`, which is called when a handler writes while the driver isn't looking.

Errors are of three kinds. The peer breaks the protocol: GOAWAY with the code and `closing`, or RST_STREAM for one stream.
The peer is legal but costs too much (floods, queues it never takes): the same, with ENHANCE_YOUR_CALM or CANCEL, and
`on_abuse(cause)`. A handler raises: its stream ends with INTERNAL and `on_error` gets the exception.

Flow control towards us: windows are large and given back as soon as bytes arrive, since messages are handed on at once;
what unfinished messages and untaken answers may hold is bounded by `Limits` and `Budget` instead. Not done here: server
push, priorities, HTTP/1 upgrade.
"""

from collections import deque
from collections.abc import Callable
from struct import Struct

from workers.transport.headers import BrokenBlock, ClientKind, HeaderDecoder, RequestHead, client_kind
from workers.transport.interface import Application, Handler, Status
from workers.transport.limits import Bucket, Budget, Limits
from workers.transport.stream import FRAME, FRAMED_MESSAGE, NO_WINDOW, ServerStream

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 1
END_HEADERS, PADDED, PRIORITISED = 4, 8, 32

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0, 1, 2, 3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = 5, 6, 7, 8, 9
ENHANCE_YOUR_CALM = 11

MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = 3, 4, 5  # settings
FRAME_MAX = 16384  # ours: larger frames are not worth it, Envoy and grpc-go send no larger ones
SENT_FRAME_MAX = 65536  # however large the peer's are: streams take turns frame by frame
OVERSIZE = FRAME_MAX << 8 | 255
WINDOW_MAX = (1 << 31) - 1
STREAM_CREDIT = 1 << 24
CONNECTION_CREDIT = 1 << 30
RECENT_STREAMS = 256
FULL_GAP = 0.005  # a place that is taken again so soon was waited for

_SETTING = Struct(">HI")
_WORD = Struct(">I")
_DRAIN_PING = b"draining"


class ConnectionFault(Exception):
    """The connection can't go on; args: error code, text."""


class Connection:
    """One HTTP/2 connection."""

    def __init__(
        self,
        application: Application,
        now: float,
        wake: Callable[[], None],
        limits: Limits | None = None,
        budget: Budget | None = None,
        on_abuse: Callable[[str], None] = lambda cause: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.limits = limits = limits or Limits()
        self.now = now
        self.wake = self._wake
        self.out: list[bytes | memoryview] = []
        self.idle = False  # True: nobody will look at `out` unless woken
        self.closing = False  # nothing more will be read; close once the output is written
        self.window = 65535  # what the peer lets us send
        self.room = FRAME_MAX  # the largest DATA frame that may be sent now; 0 while the socket is blocked
        self.streams: dict[int, ServerStream] = {}
        self.stream_limit = limits.streams_first
        self.full_since: float | None = None  # see `full`
        self.client = ClientKind.UNKNOWN
        self.idle_since = now
        self.held = 0
        self._application = application
        self._driver_wake = wake
        self._budget = budget or Budget()
        self._on_abuse = on_abuse
        self._on_error = on_error
        self._frame_max = FRAME_MAX  # the peer's
        self._initial_window = 65535  # the peer's, for new streams
        self._granted = 65535  # all window we ever got: granted - window = DATA bytes sent
        self._credit = CONNECTION_CREDIT
        self._ring: deque[ServerStream] = deque()  # streams with queued bytes and a window of their own
        self._decoder = HeaderDecoder(limits)
        self._last = 0  # the highest stream the peer opened
        self._started = False  # a first request came
        self._finished = 0  # streams that ended properly
        self._recent: dict[int, bool] = {}  # lately closed streams; True: we reset them, frames may follow
        self._limit_known = False  # the peer acknowledged our settings
        self._rest = bytearray()  # the beginning of a frame
        self._block: _Block | None = None
        self._expecting = True  # a certain frame must come next: the first SETTINGS, or a CONTINUATION
        self._preface = True
        self._began = now
        self._freed_at = -FULL_GAP  # when the connection was last not full any more
        self._blocked_since: float | None = None
        self._goaway: int | None = None  # the last stream we promised to serve
        self._drain_until: float | None = None
        self._buckets: dict[str, Bucket] = {}
        settings = _SETTING.pack(MAX_STREAMS, self.stream_limit) + _SETTING.pack(INITIAL_WINDOW, STREAM_CREDIT)
        self._send_frame(SETTINGS, 0, 0, settings)
        self._send_frame(WINDOW_UPDATE, 0, 0, _WORD.pack(CONNECTION_CREDIT - 65535))

    # What the driver calls.

    def receive(self, data: bytes) -> None:
        """Take what was read; the caller takes `output()` afterwards."""
        if self.closing:
            return
        self.idle = False
        try:
            at = 0
            if self._preface:
                at = self._read_preface(data)
            elif self._rest:
                at = self._complete_frame(data)
            if at < len(data) and not self.closing:
                self._parse(data, at)
        except ConnectionFault as fault:
            self._fail(*fault.args)

    def output(self) -> bytes:
        """Everything to be written now."""
        self.idle = True
        out = self.out
        data = b"".join(out)
        out.clear()
        return data

    def tick(self, now: float) -> None:
        """Enforce what has to happen within some time; called about once a second."""
        self.now = now
        limits = self.limits
        if self._preface and now - self._began > limits.preface_seconds:
            self._abuse("preface_timeout", PROTOCOL_ERROR)
        elif self._block is not None and now - self._block.began > limits.header_seconds:
            self._abuse("header_timeout", ENHANCE_YOUR_CALM)
        elif self._blocked_since is not None and now - self._blocked_since > limits.stall_seconds:
            self._abuse("output_stalled", ENHANCE_YOUR_CALM)
        elif self._drain_until is not None and now >= self._drain_until:
            self._last_goaway()
        if self.held:
            for stream in list(self.streams.values()):
                if stream.queued and now - stream.progress > limits.stall_seconds:
                    self.give_up(stream, "output_stalled")

    def lost(self) -> None:
        """The transport is gone."""
        self.closing = True
        self._close_streams()
        self.out.clear()

    def pause(self) -> None:
        """The socket takes no more: answers wait in their streams until `resume()`."""
        self._blocked_since = self.now
        self.room = 0

    def resume(self) -> None:
        self._blocked_since = None
        self.room = self._frame_max
        for stream in self.streams.values():
            self.enter_ring(stream)
        self._pump()

    def full(self) -> float | None:
        """Since when all places have been taken, apart from short gaps; None: there is a free one."""
        return self.full_since if len(self.streams) >= self.stream_limit else None

    def raise_limit(self) -> None:
        """Let the peer open twice as many streams."""
        limit = min(2 * self.stream_limit, self.limits.streams_max)
        if limit > self.stream_limit and not self.closing:
            self.stream_limit = limit
            self.full_since = None
            self._send_frame(SETTINGS, 0, 0, _SETTING.pack(MAX_STREAMS, limit))

    def drain(self) -> None:
        """Graceful shutdown: streams that are open or on their way are served, then the connection closes."""
        if self._goaway is None and not self.closing:
            self._goaway = WINDOW_MAX
            self._drain_until = self.now + self.limits.drain_ping_seconds
            self._send_frame(GOAWAY, 0, 0, _WORD.pack(WINDOW_MAX) + _WORD.pack(NO_ERROR))
            self._send_frame(PING, 0, 0, _DRAIN_PING)

    # What streams call.

    def hold(self, count: int) -> bool:
        """Count bytes as held for this peer; False: too many now."""
        self.held += count
        self._budget.used += count
        return self.held <= self.limits.connection_held and self._budget.used <= self._budget.limit

    def give_up(self, stream: ServerStream, cause: str) -> None:
        """Reset a stream whose peer doesn't take what we send."""
        self._on_abuse(cause)
        self._reset(stream, CANCEL)

    def enter_ring(self, stream: ServerStream) -> None:
        """The stream has something queued, and may have a window to send it."""
        if stream.queued and stream.window > 0 and not stream.in_ring:
            stream.in_ring = True
            self._ring.append(stream)

    def leave(self, stream: ServerStream) -> None:
        """The stream's trailers were written."""
        if stream.remote_open:  # the peer needs to send no more; it may have done so already
            self._send_frame(RST_STREAM, 0, stream.number, _WORD.pack(NO_ERROR))
        self._finished += 1
        self._remove(stream, stream.remote_open)

    def tell_closed(self, handler: Handler) -> None:
        try:
            handler.closed()
        except Exception as error:
            self._on_error(error)

    def handler_failed(self, stream: ServerStream, error: Exception) -> None:
        self._on_error(error)
        stream.fail(Status.INTERNAL, "the handler of this stream failed")

    # Reading.

    def _parse(self, data: bytes, at: int) -> None:
        """All frames of `data`. DATA frames that are one whole message are served here, others in `_frame`."""
        unpack = FRAME.unpack_from
        unpack_with_prefix = FRAMED_MESSAGE.unpack_from
        lookup = self.streams.get if not self._expecting else _nothing
        size = len(data)
        credit = self._credit
        while size - at >= 9:
            if size - at >= 14:  # the frame's header, and the prefix of a message if it is DATA
                word, flags, number, packed, body = unpack_with_prefix(data, at)
            else:
                word, flags, number = unpack(data, at)
                packed = 1
            start = at + 9
            at = start + (word >> 8)
            if at > size or word > OVERSIZE:
                at = start - 9
                if word > OVERSIZE:
                    raise ConnectionFault(FRAME_SIZE_ERROR, f"frame of {word >> 8} bytes")
                break
            if not word & 255:
                length = word >> 8
                credit -= length
                stream = lookup(number)
                if (
                    stream is not None
                    and flags < 2
                    and not packed
                    and body == length - 5  # exactly one message
                    and (deliver := stream.deliver) is not None
                ):
                    stream.credit -= length
                    if stream.credit < STREAM_CREDIT // 2 and not self._give_credit(stream):
                        continue
                    try:
                        deliver(data[start + 5 : at])
                    except Exception as error:
                        self.handler_failed(stream, error)
                    if flags:
                        self._half_close(stream)
                    continue
            self._frame(word & 255, flags, number & WINDOW_MAX, data, start, at)
            if self.closing:
                return
            lookup = self.streams.get if not self._expecting else _nothing
        self._credit = credit
        if credit < CONNECTION_CREDIT // 2:
            self._give_credit(None)
        if at < size:
            self._rest += memoryview(data)[at:]

    def _read_preface(self, data: bytes) -> int:
        rest = self._rest
        known = len(rest)
        rest += data[: len(PREFACE) - known]
        if not PREFACE.startswith(rest):
            raise ConnectionFault(PROTOCOL_ERROR, "this is an HTTP/2 port: wrong preface")
        if len(rest) == len(PREFACE):
            self._preface = False
            rest.clear()
        return len(PREFACE) - known

    def _complete_frame(self, data: bytes) -> int:
        """Finish the frame that the last read began, without copying the rest of this one."""
        rest = self._rest
        at = 0
        if len(rest) < 9:
            at = 9 - len(rest)
            rest += data[:at]
            if len(rest) < 9:
                return at
        word = int.from_bytes(rest[:4], "big")
        if word > OVERSIZE:
            raise ConnectionFault(FRAME_SIZE_ERROR, f"frame of {word >> 8} bytes")
        more = 9 + (word >> 8) - len(rest)
        rest += memoryview(data)[at : at + more]
        at += more
        if at <= len(data):
            frame = bytes(rest)
            rest.clear()
            self._parse(frame, 0)
        return at

    def _frame(self, kind: int, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        if self._expecting:
            if self._block is None:
                if kind != SETTINGS or flags & ACK:
                    raise ConnectionFault(PROTOCOL_ERROR, "the first frame is not SETTINGS")
                self._expecting = False
            elif kind != CONTINUATION or number != self._block.number:
                raise ConnectionFault(PROTOCOL_ERROR, "frame inside a header block")
        if kind == DATA:
            self._data(flags, number, data, start, end)
        elif kind == HEADERS:
            self._headers(flags, number, data, start, end)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, data, start, end)
        elif kind == RST_STREAM:
            self._rst_stream(number, end - start)
        elif kind == SETTINGS:
            self._settings(flags, number, data[start:end])
        elif kind == PING:
            self._ping(flags, number, data[start:end])
        elif kind == CONTINUATION:
            self._continuation(flags, data, start, end)
        elif kind == PRIORITY:
            self._priority(number, data, start, end)
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        elif kind == GOAWAY:
            if number or end - start < 8:
                raise ConnectionFault(PROTOCOL_ERROR if number else FRAME_SIZE_ERROR, "bad GOAWAY")
            if self._goaway is None:
                self._goaway = WINDOW_MAX
            self._last_goaway()
        else:
            self._charge("unknown_frames")

    def _data(self, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        stream = self.streams.get(number)
        if stream is None:
            self._no_such_stream(number, "DATA", STREAM_CLOSED)
            return
        stream.credit -= end - start
        if stream.credit < STREAM_CREDIT // 2 and not self._give_credit(stream):
            return
        if flags & PADDED:
            begin, stop = start, end
            start, end = _unpadded(data, start, end)
            stream.padding += stop - begin - (end - start)
        if not stream.remote_open:
            self._reset(stream, STREAM_CLOSED)
            return
        if start < end:
            if stream.handler is not None:
                stream.gather(data, start, end)
        elif not flags & END_STREAM:
            self._charge("empty_frames")
        if flags & END_STREAM:
            self._half_close(stream)

    def _half_close(self, stream: ServerStream) -> None:
        """The peer has sent END_STREAM."""
        stream.remote_open = False
        stream.deliver = None
        if stream.window <= NO_WINDOW:
            return  # ended by its handler meanwhile
        if stream.head_length >= 0:
            taken = stream.received + STREAM_CREDIT - stream.credit - stream.padding
            if taken != stream.head_length:
                self._reset(stream, PROTOCOL_ERROR)
                return
        if stream.refusal:
            stream.refuse()
        elif stream.handler is None:
            return
        elif stream.unfinished():
            stream.fail(Status.INTERNAL, "the stream ended within a message")
        else:
            try:
                stream.handler.half_closed()
            except Exception as error:
                self.handler_failed(stream, error)

    def _give_credit(self, stream: ServerStream | None) -> bool:
        """Give the peer its window back; False: it had overrun it."""
        if stream is None:
            if self._credit < 0:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "more DATA than the connection's window")
            self._send_frame(WINDOW_UPDATE, 0, 0, _WORD.pack(CONNECTION_CREDIT - self._credit))
            self._credit = CONNECTION_CREDIT
            return True
        if stream.credit < 0:
            self._reset(stream, FLOW_CONTROL_ERROR)
            return False
        given = STREAM_CREDIT - stream.credit
        stream.credit = STREAM_CREDIT
        stream.received += given
        if stream.remote_open:
            self._send_frame(WINDOW_UPDATE, 0, stream.number, _WORD.pack(given))
        return True

    # Headers.

    def _headers(self, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        if not number & 1:
            raise ConnectionFault(PROTOCOL_ERROR, f"HEADERS on stream {number}")
        if flags & PADDED:
            start, end = _unpadded(data, start, end)
        depends_on_itself = False
        if flags & PRIORITISED:
            if end - start < 5:
                raise ConnectionFault(FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            depends_on_itself = _WORD.unpack_from(data, start)[0] & WINDOW_MAX == number
            start += 5
        block = _Block(number, flags & END_STREAM, depends_on_itself, self.now)
        if flags & END_HEADERS:
            self._end_block(block, data[start:end])
        else:
            block.bytes += memoryview(data)[start:end]
            self._block = block
            self._expecting = True

    def _continuation(self, flags: int, data: bytes, start: int, end: int) -> None:
        block = self._block
        if block is None:
            raise ConnectionFault(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block.frames += 1
        block.bytes += memoryview(data)[start:end]
        if block.frames > self.limits.continuations or len(block.bytes) > self.limits.header_block:
            self._abuse("header_block", ENHANCE_YOUR_CALM)
        elif flags & END_HEADERS:
            self._block = None
            self._expecting = False
            self._end_block(block, bytes(block.bytes))

    def _end_block(self, block: "_Block", data: bytes) -> None:
        """A header block is whole: a request, or trailers. It is decoded whatever becomes of it: the table must follow."""
        number = block.number
        stream = self.streams.get(number)
        try:
            if number > self._last:
                self._open(block, self._decoder.request(data))
                return
            malformed = self._decoder.bad_trailers(data)
        except BrokenBlock as error:
            raise ConnectionFault(COMPRESSION_ERROR, str(error)) from None
        if stream is None:
            self._no_such_stream(number, "HEADERS", STREAM_CLOSED)
        elif not stream.remote_open:
            self._reset(stream, STREAM_CLOSED)
        elif malformed or not block.end_stream or block.depends_on_itself:
            self._reset(stream, PROTOCOL_ERROR)
        else:
            self._half_close(stream)

    def _open(self, block: "_Block", head: RequestHead) -> None:
        number = block.number
        if self._is_late(number):
            return  # told before: we don't serve it, and it is safe to try elsewhere
        self._last = number
        if head.problem or block.depends_on_itself:
            self._reset_unknown(number, PROTOCOL_ERROR)
            self._charge("resets")
            return
        streams = self.streams
        limit = self.stream_limit if self._limit_known else self.limits.streams_max
        if len(streams) >= limit:
            self._reset_unknown(number, REFUSED_STREAM)
            self._charge("refused_streams", self._finished)
            return
        stream = ServerStream(self, number, self._initial_window, STREAM_CREDIT, self.now)
        streams[number] = stream
        if len(streams) == self.stream_limit and (self.full_since is None or self.now - self._freed_at > FULL_GAP):
            self.full_since = self.now
        stream.head_length = head.content_length
        stream.refusal = head.refusal
        if not head.refusal:
            stream.encoding = head.encoding
            self._start(stream, head)
        if block.end_stream:
            self._half_close(stream)

    def _start(self, stream: ServerStream, head: RequestHead) -> None:
        """Ask the application for a handler."""
        if not self._started:
            self._started = True
            self.client = client_kind(head)
        try:
            handler = self._application(head.path, head.metadata, stream)
        except Exception as error:
            self.handler_failed(stream, error)
            return
        if stream.ended():
            return
        if handler is None:
            stream.end(Status.UNIMPLEMENTED, f"unknown method {head.path[:200]}")
        else:
            stream.handler = handler
            stream.deliver = handler.message

    # Other frames.

    def _settings(self, flags: int, number: int, data: bytes) -> None:
        if number:
            raise ConnectionFault(PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & ACK:
            if data:
                raise ConnectionFault(FRAME_SIZE_ERROR, "SETTINGS acknowledgement with a payload")
            self._limit_known = True
            return
        if len(data) % 6:
            raise ConnectionFault(FRAME_SIZE_ERROR, "SETTINGS of a wrong size")
        if not self._charge("settings"):
            return
        for name, value in _SETTING.iter_unpack(data):
            if name == INITIAL_WINDOW:
                self._change_initial_window(value)
            elif name == MAX_FRAME:
                if not FRAME_MAX <= value < 1 << 24:
                    raise ConnectionFault(PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE {value}")
                self._frame_max = min(value, SENT_FRAME_MAX)
                self.room = self._frame_max if self.room else 0
            elif name == 2 and value > 1:
                raise ConnectionFault(PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH {value}")
        self._send_frame(SETTINGS, ACK, 0, b"")
        self._pump()

    def _change_initial_window(self, value: int) -> None:
        if value > WINDOW_MAX:
            raise ConnectionFault(FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE {value}")
        change = value - self._initial_window
        self._initial_window = value
        for stream in self.streams.values():
            stream.window += change
            if stream.window > WINDOW_MAX:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "window above 2^31-1 by SETTINGS")
            self.enter_ring(stream)

    def _window_update(self, number: int, data: bytes, start: int, end: int) -> None:
        if end - start != 4:
            raise ConnectionFault(FRAME_SIZE_ERROR, "WINDOW_UPDATE of a wrong size")
        increment = _WORD.unpack_from(data, start)[0] & WINDOW_MAX
        if not self._charge("window_updates", self._granted - self.window):
            return
        if not number:
            if not increment:
                raise ConnectionFault(PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self.window += increment
            self._granted += increment
            if self.window > WINDOW_MAX:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "connection window above 2^31-1")
            if self._ring:
                self._pump()
            return
        stream = self.streams.get(number)
        if stream is None:
            if number > self._last and not self._is_late(number):
                raise ConnectionFault(PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
        elif not increment:
            self._reset(stream, PROTOCOL_ERROR)
        elif stream.window + increment > WINDOW_MAX:
            self._reset(stream, FLOW_CONTROL_ERROR)
        else:
            stream.window += increment
            if stream.queued:
                self.enter_ring(stream)
                self._pump()

    def _rst_stream(self, number: int, length: int) -> None:
        if length != 4:
            raise ConnectionFault(FRAME_SIZE_ERROR, "RST_STREAM of a wrong size")
        stream = self.streams.get(number)
        if stream is None:
            if not number or (number > self._last and not self._is_late(number)):
                raise ConnectionFault(PROTOCOL_ERROR, f"RST_STREAM on idle stream {number}")
            self._charge("stray_frames", self._last)
            return
        unanswered = not stream.opened and self.now - stream.born < self.limits.young_stream_seconds
        self._discard(stream, False)
        if unanswered:  # what a rapid-reset attack consists of
            self._charge("resets", self._finished)

    def _ping(self, flags: int, number: int, data: bytes) -> None:
        if number:
            raise ConnectionFault(PROTOCOL_ERROR, "PING on a stream")
        if len(data) != 8:
            raise ConnectionFault(FRAME_SIZE_ERROR, "PING of a wrong size")
        if flags & ACK:
            if data == _DRAIN_PING and self._drain_until is not None:
                self._last_goaway()
        elif self._charge("pings", self._granted - self.window):
            self._send_frame(PING, ACK, 0, data)

    def _priority(self, number: int, data: bytes, start: int, end: int) -> None:
        """No use is made of priorities, but a wrong one is an error."""
        if not number:
            raise ConnectionFault(PROTOCOL_ERROR, "PRIORITY on stream 0")
        wrong = 0
        if end - start != 5:
            wrong = FRAME_SIZE_ERROR
        elif _WORD.unpack_from(data, start)[0] & WINDOW_MAX == number:
            wrong = PROTOCOL_ERROR
        stream = self.streams.get(number)
        if wrong and stream is not None:
            self._reset(stream, wrong)
        elif wrong:
            raise ConnectionFault(wrong, "bad PRIORITY")
        self._charge("priorities")

    # Writing.

    def _send_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        self.out.append(FRAME.pack(len(payload) << 8 | kind, flags, number) + payload)
        if self.idle:
            self.wake()

    def _wake(self) -> None:
        self.idle = False
        self._driver_wake()

    def _pump(self) -> None:
        """Send what is queued, one frame of each stream in turn, until a window of the connection is used up."""
        ring = self._ring
        while ring and self.window > 0 and self.room:
            stream = ring.popleft()
            stream.in_ring = False
            if stream.queued:
                stream.pump(1)
                self.enter_ring(stream)
        if self.out and self.idle:
            self.wake()

    # Endings.

    def _no_such_stream(self, number: int, what: str, code: int) -> None:
        """A frame on a stream that isn't open."""
        if self._is_late(number):
            return
        if not number or number > self._last or not number & 1:
            raise ConnectionFault(PROTOCOL_ERROR, f"{what} on stream {number}, which was never opened")
        ours = self._recent.get(number)
        if ours is None and what == "HEADERS":
            raise ConnectionFault(PROTOCOL_ERROR, f"HEADERS on stream {number} after {self._last}")
        if ours is False and what == "HEADERS":
            raise ConnectionFault(STREAM_CLOSED, f"HEADERS on closed stream {number}")
        if ours:
            return  # sent before the peer saw our RST_STREAM
        if self._charge("stray_frames", self._last):
            self._reset_unknown(number, code)

    def _is_late(self, number: int) -> bool:
        """The stream was opened after we said that we serve no more."""
        return self._goaway is not None and number > self._goaway

    def _reset(self, stream: ServerStream, code: int) -> None:
        self._send_frame(RST_STREAM, 0, stream.number, _WORD.pack(code))
        self._discard(stream, True)

    def _reset_unknown(self, number: int, code: int) -> None:
        self._remember(number, True)
        self._send_frame(RST_STREAM, 0, number, _WORD.pack(code))

    def _discard(self, stream: ServerStream, by_us: bool) -> None:
        """The stream is gone, whatever was still to be sent."""
        handler = stream.handler
        self._remove(stream, by_us)
        if handler is not None:
            self.tell_closed(handler)

    def _remove(self, stream: ServerStream, by_us: bool) -> None:
        streams = self.streams
        if streams.pop(stream.number, None) is None:
            return
        held = stream.drop()
        if held:
            self.hold(-held)
        self._remember(stream.number, by_us)
        if len(streams) == self.stream_limit - 1:
            self._freed_at = self.now
        if not streams:
            self.idle_since = self.now
            if self._goaway is not None and self._drain_until is None:
                self.closing = True

    def _remember(self, number: int, by_us: bool) -> None:
        recent = self._recent
        recent[number] = by_us
        if len(recent) > RECENT_STREAMS:
            del recent[next(iter(recent))]

    def _charge(self, cause: str, earned: int = 0) -> bool:
        """Take a token for a frame that could be a flood; without one the connection ends."""
        bucket = self._buckets.get(cause)
        if bucket is None:
            bucket = self._buckets[cause] = Bucket(self.limits, self.now)
        if bucket.take(self.now, earned):
            return True
        self._abuse(cause, ENHANCE_YOUR_CALM)
        return False

    def _abuse(self, cause: str, code: int) -> None:
        self._on_abuse(cause)
        self._fail(code, cause)

    def _last_goaway(self) -> None:
        """The peer knows that we leave: promise only what it has opened."""
        self._drain_until = None
        if self._goaway == WINDOW_MAX:
            self._goaway = self._last
            self._send_frame(GOAWAY, 0, 0, _WORD.pack(self._last) + _WORD.pack(NO_ERROR))
        if not self.streams:
            self.closing = True

    def _fail(self, code: int, text: str) -> None:
        if not self.closing:
            self.closing = True
            payload = _WORD.pack(self._last) + _WORD.pack(code) + text.encode()
            self._send_frame(GOAWAY, 0, 0, payload)
            self._close_streams()

    def _close_streams(self) -> None:
        streams = list(self.streams.values())
        for stream in streams:
            self._discard(stream, True)
        self._ring.clear()


class _Block:
    """A header block being received."""

    __slots__ = ("began", "bytes", "depends_on_itself", "end_stream", "frames", "number")

    def __init__(self, number: int, end_stream: int, depends_on_itself: bool, now: float) -> None:
        self.number = number
        self.end_stream = end_stream
        self.depends_on_itself = depends_on_itself
        self.began = now
        self.bytes = bytearray()
        self.frames = 0


def _nothing(number: int) -> ServerStream | None:
    """Stands for the table of streams while only one kind of frame is allowed."""
    return None


def _unpadded(data: bytes, start: int, end: int) -> tuple[int, int]:
    if start == end:
        raise ConnectionFault(FRAME_SIZE_ERROR, "padded frame without its padding length")
    padding = data[start]
    if padding > end - start - 1:
        raise ConnectionFault(PROTOCOL_ERROR, "more padding than frame")
    return start + 1, end - padding
