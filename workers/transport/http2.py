"""Sans-I/O HTTP/2 server for gRPC: the bytes of one connection in, calls to handlers and bytes out.

`receive(data)` works through all frames of a read in one loop; what has to be sent gathers in `out`, and the driver takes it
with `output()` for one write. Nothing here reads a clock or touches a socket: the driver sets `now` before it calls, calls
`tick()` about twice a second, and hands in `wake`, which is called when a handler writes while the driver isn't looking.

Errors are of three kinds. The peer breaks the protocol: GOAWAY with the code and `closing`, or RST_STREAM for one stream.
The peer is legal but costs too much (`abuse`): the same, with ENHANCE_YOUR_CALM or CANCEL, and `on_abuse(cause)`. A handler
raises: its stream ends with INTERNAL and `on_error` gets the exception. A stream leaves the table only when its handler was
told; handlers stop all work at once, so what is not in the table costs nothing, and resets buy no work beyond the limit.

Flow control towards us: windows are large and given back as soon as bytes arrive, since messages are handed on at once;
what unfinished messages and untaken answers may hold is bounded by `Limits` and `Budget` instead. Our own greeting waits for
the peer's, so that a peer which speaks something else is answered in words it may know. Not done here: server push,
priorities, HTTP/1 upgrade.
"""

from collections.abc import Callable

from workers.transport.abuse import BYTES_PER_TOKEN, CAUSES, Buckets
from workers.transport.deadlines import Deadlines
from workers.transport.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADER_LIST,
    HEADERS,
    INITIAL_WINDOW,
    MAX_FRAME,
    MAX_STREAMS,
    OVERSIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITISED,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_MAX,
    WINDOW_UPDATE,
    WORD,
    ConnectionFault,
    Error,
    settings,
    unpadded,
)
from workers.transport.headers import BrokenBlock, ClientKind, HeaderDecoder, RequestHead, TooManyHeaders, client_kind
from workers.transport.interface import Application, Handler, Status
from workers.transport.limits import Budget, Limits
from workers.transport.output import Output
from workers.transport.strangers import http1_answer, speaks_http1
from workers.transport.stream import FRAME, FRAMED_MESSAGE, NO_WINDOW, ServerStream

SENT_FRAME_MAX = 65536  # however large the peer's are: streams take turns frame by frame
STREAM_CREDIT = 1 << 24
LOW_CREDIT = STREAM_CREDIT // 2  # a stream with less gets more
CONNECTION_CREDIT = 1 << 30
RECENT_STREAMS = 256
FULL_GAP = 0.005  # a place that is taken again so soon was waited for

_DRAIN_PING = b"draining"
_LIFE_PING = b"are you?"


class Connection(Output):
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
        on_deadline: Callable[[], None] = lambda: None,
    ) -> None:
        limits = limits or Limits()
        super().__init__(now, wake, limits, budget or Budget())
        self.closing = False  # nothing more will be read; close once the output is written
        self.stream_limit = limits.streams_first
        self.full_since: float | None = None  # see `full`
        self.client = ClientKind.UNKNOWN
        self.idle_since = now
        self.used = False  # a first request came
        self._application = application
        self._on_abuse = on_abuse
        self._on_error = on_error
        self._on_deadline = on_deadline
        self._granted = 65535  # all window we ever got: granted - window = DATA bytes sent
        self._credit = CONNECTION_CREDIT
        self._decoder = HeaderDecoder(limits)
        self._last = 0  # the highest stream the peer opened
        self._finished = 0  # streams that ended properly
        self._recent: dict[int, bool] = {}  # lately closed streams; True: we reset them, frames may follow
        self._limit_known = False  # the peer acknowledged our settings
        self._rest = bytearray()  # the beginning of a frame
        self._hoards: tuple[float, int] | None = None  # since when much has been unread, and DATA bytes sent until then
        self._later = b""  # of the last read, what was put off
        self._begun = 0  # streams that this read has begun; -1: nothing was read since the last tick
        self._block: _Block | None = None
        self._expecting = True  # a certain frame must come next: the first SETTINGS, or a CONTINUATION
        self._preface = True
        self._began = now
        self._freed_at = -FULL_GAP  # when the connection was last not full any more
        self._goaway: int | None = None  # the last stream we promised to serve
        self._drain_until: float | None = None
        self._buckets = Buckets(limits)
        self._deadlines = Deadlines(self.streams)
        self._greeted = False
        self._heard_at = now
        self._asked_at: float | None = None  # when the peer was asked whether it lives, and has said nothing since

    # What the driver calls.

    def receive(self, data: bytes) -> None:
        """Take what was read; the caller takes `output()` afterwards."""
        if self.closing:
            return
        self.idle = False
        if self._later:
            self._later += data
            return
        self._begun = 0
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

    @property
    def behind(self) -> bool:
        """A part of the last read was put off; `go_on` in the next turn of the loop, and read nothing until then."""
        return bool(self._later)

    def go_on(self) -> None:
        """Take what was put off, or the next part of it."""
        data, self._later = self._later, b""
        self.receive(data)

    def tick(self, now: float) -> None:
        """Enforce what has to happen within some time; called about twice a second."""
        self.now = now
        limits = self.limits
        if self._preface and now - self._began > limits.preface_seconds:
            self._abuse("preface_timeout", Error.PROTOCOL)
        elif self._block is not None and now - self._block.began > limits.header_seconds:
            self._abuse("header_timeout", Error.CALM)
        elif self.blocked_since is not None:
            if now - self.blocked_since > limits.stall_seconds:
                self._abuse("output_stalled", Error.CALM)
        elif self._drain_until is not None and now >= self._drain_until:
            self._last_goaway()
        else:
            self._keep_alive(now)
        if self.held:
            self._give_up_stalled(now)

    def expire(self, now: float) -> bool:
        """End what has to end on time: streams whose deadline has passed, a peer that hoards; True: there is more to look after."""
        self.now = now
        if self._hoards is not None:
            self.watch_hoarding()
        for stream in self._deadlines.due(now):
            text = "the deadline of this call (grpc-timeout) has passed"
            if stream.ended() or stream.queued:  # what waits for the peer won't arrive in time either
                self._cancel(stream)
            else:
                stream.fail(Status.DEADLINE_EXCEEDED, text)
        return bool(self._deadlines) or self._hoards is not None

    def lost(self) -> None:
        """The transport is gone."""
        self.closing = True
        self._close_streams()
        self.out.clear()

    def full(self) -> float | None:
        """Since when all places have been taken, apart from short gaps; None: there is a free one."""
        return self.full_since if len(self.streams) >= self.stream_limit else None

    def raise_limit(self) -> None:
        """Let the peer open twice as many streams."""
        limit = min(2 * self.stream_limit, self.limits.streams_max)
        if limit > self.stream_limit and not self.closing:
            self.stream_limit = limit
            self.full_since = None
            self.send_frame(SETTINGS, 0, 0, SETTING.pack(MAX_STREAMS, limit))

    @property
    def leaving(self) -> bool:
        """No new streams will be served."""
        return self.closing or self._goaway is not None

    def displace(self) -> None:
        """Close in favour of other connections."""
        self._abuse("connections", Error.CALM)

    def drain(self) -> None:
        """Graceful shutdown: streams that are open or on their way are served, then the connection closes."""
        if self._goaway is None and not self.closing:
            self._greet()
            self._goaway = WINDOW_MAX
            self._drain_until = self.now + self.limits.drain_ping_seconds
            self.send_frame(GOAWAY, 0, 0, WORD.pack(WINDOW_MAX) + WORD.pack(Error.NONE))
            self.send_frame(PING, 0, 0, _DRAIN_PING)

    # What streams call.

    def give_up(self, stream: ServerStream, cause: str) -> None:
        """Reset a stream whose peer doesn't take what we send."""
        self._on_abuse(cause)
        self._cancel(stream)

    def watch_hoarding(self) -> None:
        """A peer with much to read has to read it at a pace that comes to an end; a burst of large answers is no fault."""
        limits, sent = self.limits, self._granted - self.window
        if self.unread <= limits.hoard:
            self._hoards = None
            return
        if self._hoards is None:
            self._hoards = (self.now, sent)
            self._on_deadline()
            return
        since, before = self._hoards
        if self.now - since >= (limits.hoard_seconds if before < limits.hoard_read else limits.hoard_busy_seconds):
            if sent - before >= limits.hoard_read:
                self._hoards = (self.now, sent)
            else:
                self._hoards = None
                self._abuse("output_limit", Error.CALM)

    def provoked(self) -> None:
        """The peer's error is about to end a stream, by an answer that costs us as much as a reset."""
        self._finished -= 1  # this end earns nothing
        self._charge("provoked_resets", self._finished)

    def leave(self, stream: ServerStream) -> None:
        """The stream's trailers were written."""
        if stream.remote_open:  # the peer needs to send no more; it may have done so already
            self.send_frame(RST_STREAM, 0, stream.number, WORD.pack(Error.NONE))
        if stream.credit != STREAM_CREDIT or stream.received:  # one without a byte of DATA earns nothing
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
            length = word >> 8
            start = at + 9
            end = start + length
            if end > size or word > OVERSIZE:
                if word > OVERSIZE:
                    raise ConnectionFault(Error.FRAME_SIZE, f"frame of {length} bytes")
                break
            at = end
            if not word & 255:
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
                    if stream.credit < LOW_CREDIT and not self._give_credit(stream):
                        if self.closing:
                            return
                        continue
                    try:
                        deliver(data[start + 5 : at])
                    except Exception as error:
                        self.handler_failed(stream, error)
                    if flags:
                        self._half_close(stream)
                        if self.closing:
                            return
                    continue
            self._frame(word & 255, flags, number & WINDOW_MAX, data, start, at)
            if self.closing:
                return
            lookup = self.streams.get if not self._expecting else _nothing
            if self._begun > 1 and at < size and self._begun >= self.limits.streams_at_once:
                self._later = data[at:]
                size = at
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
            if not speaks_http1(rest):
                raise ConnectionFault(Error.PROTOCOL, "this is an HTTP/2 port: wrong preface")
            self.out.append(http1_answer(rest))
            self.closing = True
        elif len(rest) == len(PREFACE):
            self._preface = False
            rest.clear()
            self._greet()
        return len(PREFACE) - known

    def _greet(self) -> None:
        """Our own preface."""
        if not self._greeted:
            self._greeted = True
            said = (
                (MAX_STREAMS, self.stream_limit),
                (INITIAL_WINDOW, STREAM_CREDIT),
                (HEADER_LIST, self.limits.header_list),
            )
            self.send_frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*setting) for setting in said))
            self.send_frame(WINDOW_UPDATE, 0, 0, WORD.pack(CONNECTION_CREDIT - 65535))

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
            raise ConnectionFault(Error.FRAME_SIZE, f"frame of {word >> 8} bytes")
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
                    raise ConnectionFault(Error.PROTOCOL, "the first frame is not SETTINGS")
                self._expecting = False
            elif kind != CONTINUATION or number != self._block.number:
                raise ConnectionFault(Error.PROTOCOL, "frame inside a header block")
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
            raise ConnectionFault(Error.PROTOCOL, "PUSH_PROMISE from a client")
        elif kind == GOAWAY:
            if number or end - start < 8:
                raise ConnectionFault(Error.PROTOCOL if number else Error.FRAME_SIZE, "bad GOAWAY")
            if not self._charge("goaways"):
                return
            if self._goaway is None:
                self._goaway = WINDOW_MAX
            self._last_goaway()
        else:
            self._charge("unknown_frames")

    def _data(self, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        stream = self.streams.get(number)
        if stream is None:
            self._no_such_stream(number, "DATA", Error.STREAM_CLOSED)
            return
        stream.credit -= end - start
        if stream.credit < LOW_CREDIT and not self._give_credit(stream):
            return
        if flags & PADDED:
            begin, stop = start, end
            start, end = unpadded(data, start, end)
            stream.padding += stop - begin - (end - start)
        if not stream.remote_open:
            self._reset(stream, Error.STREAM_CLOSED)
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
                self._reset(stream, Error.PROTOCOL)
                return
        if stream.refusal:
            stream.refuse()
        elif stream.handler is None:
            return
        elif stream.unfinished():
            stream.reject(Status.INTERNAL, "the stream ended within a message")
        else:
            try:
                stream.handler.half_closed()
            except Exception as error:
                self.handler_failed(stream, error)

    def _give_credit(self, stream: ServerStream | None) -> bool:
        """Give the peer its window back; False: it had overrun it."""
        if stream is None:
            if self._credit < 0:
                raise ConnectionFault(Error.FLOW_CONTROL, "more DATA than the connection's window")
            self.send_frame(WINDOW_UPDATE, 0, 0, WORD.pack(CONNECTION_CREDIT - self._credit))
            self._credit = CONNECTION_CREDIT
            return True
        if stream.credit < 0:
            self._reset(stream, Error.FLOW_CONTROL)
            return False
        given = STREAM_CREDIT - stream.credit
        stream.credit = STREAM_CREDIT
        stream.received += given
        if stream.remote_open:
            self.send_frame(WINDOW_UPDATE, 0, stream.number, WORD.pack(given))
        return True

    # Headers.

    def _headers(self, flags: int, number: int, data: bytes, start: int, end: int) -> None:
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
        else:
            block = self._block = _Block(number, flags & END_STREAM, depends_on_itself, self.now)
            block.bytes += memoryview(data)[start:end]
            self._expecting = True

    def _continuation(self, flags: int, data: bytes, start: int, end: int) -> None:
        block = self._block
        if block is None:
            raise ConnectionFault(Error.PROTOCOL, "CONTINUATION without HEADERS")
        block.frames += 1
        block.bytes += memoryview(data)[start:end]
        if block.frames > self.limits.continuations or len(block.bytes) > self.limits.header_block:
            self._abuse("header_block", Error.CALM)
        elif flags & END_HEADERS:
            self._block = None
            self._expecting = False
            self._end_block(block.number, block.end_stream, block.depends_on_itself, bytes(block.bytes))

    def _end_block(self, number: int, end_stream: int, depends_on_itself: bool, data: bytes) -> None:
        """A header block is whole: a request, or trailers. It is decoded whatever becomes of it: the table must follow."""
        stream = self.streams.get(number)
        try:
            if number > self._last:
                self._open(number, end_stream, depends_on_itself, self._decoder.request(data))
                return
            malformed = self._decoder.bad_trailers(data)
        except TooManyHeaders:
            self._abuse("header_list", Error.CALM)
            return
        except BrokenBlock as error:
            raise ConnectionFault(Error.COMPRESSION, str(error)) from None
        if stream is None:
            self._no_such_stream(number, "HEADERS", Error.STREAM_CLOSED)
        elif not stream.remote_open:
            self._reset(stream, Error.STREAM_CLOSED)
        elif malformed or not end_stream or depends_on_itself:
            self._reset(stream, Error.PROTOCOL)
        else:
            self._half_close(stream)

    def _open(self, number: int, end_stream: int, depends_on_itself: bool, head: RequestHead) -> None:
        if self._is_late(number):
            return  # told before: we don't serve it, and it is safe to try elsewhere
        self._last = number
        self._begun += 1
        if head.problem or depends_on_itself:
            self._reset_unknown(number, Error.PROTOCOL)
            self._charge("provoked_resets", self._finished)
            return
        streams = self.streams
        limit = self.stream_limit if self._limit_known else self.limits.streams_max
        if len(streams) >= limit:
            self._reset_unknown(number, Error.REFUSED_STREAM)
            self._charge("refused_streams", self._finished)
            return
        stream = ServerStream(self, number, self.initial_window, STREAM_CREDIT, self.now)
        streams[number] = stream
        if len(streams) == self.stream_limit and (self.full_since is None or self.now - self._freed_at > FULL_GAP):
            self.full_since = self.now
        stream.head_length = head.content_length
        stream.refusal = head.refusal
        if not head.refusal:
            stream.encoding = head.encoding
            self._start(stream, head)
        else:
            self._charge("refused_requests", self._finished)
        if end_stream and self._charge("empty_streams", self._finished):
            self._half_close(stream)

    def _start(self, stream: ServerStream, head: RequestHead) -> None:
        """Ask the application for a handler."""
        if not self.used:
            self.used = True
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
            self._charge("refused_requests", self._finished)
            return
        stream.handler = handler
        stream.deliver = handler.message
        if head.timeout is not None:
            self._deadlines.add(self.now + head.timeout, stream.number)
            self._on_deadline()

    # Other frames.

    def _settings(self, flags: int, number: int, data: bytes) -> None:
        if number:
            raise ConnectionFault(Error.PROTOCOL, "SETTINGS on a stream")
        if flags & ACK:
            if data:
                raise ConnectionFault(Error.FRAME_SIZE, "SETTINGS acknowledgement with a payload")
            self._limit_known = True
            return
        if not self._charge("settings"):
            return
        if len(data) > self.limits.settings_entries * SETTING.size:
            self._abuse("settings", Error.CALM)
            return
        found = settings(data)
        if INITIAL_WINDOW in found:
            self.change_initial_window(found[INITIAL_WINDOW])
        if MAX_FRAME in found:
            self.frame_max = min(found[MAX_FRAME], SENT_FRAME_MAX)
            self.room = self.frame_max if self.room else 0
        self.send_frame(SETTINGS, ACK, 0, b"")
        self.pump()

    def _window_update(self, number: int, data: bytes, start: int, end: int) -> None:
        if end - start != 4:
            raise ConnectionFault(Error.FRAME_SIZE, "WINDOW_UPDATE of a wrong size")
        increment = WORD.unpack_from(data, start)[0] & WINDOW_MAX
        if not self._charge("window_updates", self._taken()):
            return
        if not number:
            if not increment:
                raise ConnectionFault(Error.PROTOCOL, "WINDOW_UPDATE of 0")
            self.window += increment
            self._granted += increment
            if self.window > WINDOW_MAX:
                raise ConnectionFault(Error.FLOW_CONTROL, "connection window above 2^31-1")
            if self.ring:
                self.pump()
            return
        stream = self.streams.get(number)
        if stream is None:
            if number > self._last and not self._is_late(number):
                raise ConnectionFault(Error.PROTOCOL, "WINDOW_UPDATE on an idle stream")
        elif not increment:
            self._reset(stream, Error.PROTOCOL)
        elif stream.window + increment > WINDOW_MAX:
            self._reset(stream, Error.FLOW_CONTROL)
        else:
            stream.window += increment
            if stream.queued:
                self.enter_ring(stream)
                self.pump()

    def _rst_stream(self, number: int, length: int) -> None:
        if length != 4:
            raise ConnectionFault(Error.FRAME_SIZE, "RST_STREAM of a wrong size")
        stream = self.streams.get(number)
        if stream is None:
            if not number or (number > self._last and not self._is_late(number)):
                raise ConnectionFault(Error.PROTOCOL, f"RST_STREAM on idle stream {number}")
            self._charge("stray_frames", self._last)
            return
        unanswered = not stream.opened and self.now - stream.born < self.limits.young_stream_seconds
        self._discard(stream, False)
        if unanswered:  # what a rapid-reset attack consists of
            self._charge("resets", self._finished)

    def _ping(self, flags: int, number: int, data: bytes) -> None:
        if number:
            raise ConnectionFault(Error.PROTOCOL, "PING on a stream")
        if len(data) != 8:
            raise ConnectionFault(Error.FRAME_SIZE, "PING of a wrong size")
        if flags & ACK:
            if data == _DRAIN_PING and self._drain_until is not None:
                self._last_goaway()
        elif self._charge("pings", self._taken()):
            self.send_frame(PING, ACK, 0, data)

    def _taken(self) -> int:
        """What the peer has let us send earns the frames that go with it."""
        return (self._granted - self.window) // BYTES_PER_TOKEN

    def _priority(self, number: int, data: bytes, start: int, end: int) -> None:
        """No use is made of priorities, but a wrong one is an error."""
        if not number:
            raise ConnectionFault(Error.PROTOCOL, "PRIORITY on stream 0")
        wrong = 0
        if end - start != 5:
            wrong = Error.FRAME_SIZE
        elif WORD.unpack_from(data, start)[0] & WINDOW_MAX == number:
            wrong = Error.PROTOCOL
        stream = self.streams.get(number)
        if wrong and stream is not None:
            self._reset(stream, wrong)
        elif wrong:
            raise ConnectionFault(wrong, "bad PRIORITY")
        else:
            self._charge("priorities")

    # Endings.

    def _no_such_stream(self, number: int, what: str, code: int) -> None:
        """A frame on a stream that isn't open."""
        if self._is_late(number):
            return
        if not number or number > self._last or not number & 1:
            raise ConnectionFault(Error.PROTOCOL, f"{what} on stream {number}, which was never opened")
        ours = self._recent.get(number)
        if ours is None and what == "HEADERS":
            raise ConnectionFault(Error.PROTOCOL, f"HEADERS on stream {number} after {self._last}")
        if ours is False and what == "HEADERS":
            raise ConnectionFault(Error.STREAM_CLOSED, f"HEADERS on closed stream {number}")
        if ours:
            return  # sent before the peer saw our RST_STREAM
        if self._charge("stray_frames", self._last):
            self._reset_unknown(number, code)

    def _is_late(self, number: int) -> bool:
        """The stream was opened after we said that we serve no more."""
        return self._goaway is not None and number > self._goaway

    def _reset(self, stream: ServerStream, code: int) -> None:
        """End a stream for the peer's error. Who makes us reset streams gets no more by it than by resetting them."""
        self.send_frame(RST_STREAM, 0, stream.number, WORD.pack(code))
        self._discard(stream, True)
        self._charge("provoked_resets", self._finished)

    def _cancel(self, stream: ServerStream) -> None:
        """End a stream that can't go on, with no word of an error."""
        self.send_frame(RST_STREAM, 0, stream.number, WORD.pack(Error.CANCEL))
        self._discard(stream, True)

    def _reset_unknown(self, number: int, code: int) -> None:
        self._remember(number, True)
        self.send_frame(RST_STREAM, 0, number, WORD.pack(code))

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
        """Take a token for what could be a flood; without one the connection ends."""
        if self._buckets.take(cause, self.now, earned):
            return True
        self._abuse(cause, Error.CALM)
        return False

    def _abuse(self, cause: str, code: int) -> None:
        if not self.closing:
            self._on_abuse(cause)
            self._fail(code, CAUSES[cause])

    def _give_up_stalled(self, now: float) -> None:
        """Streams that can send nothing are reset; a connection that can send nothing, or has many of those, is closed."""
        before = now - self.limits.stall_seconds
        for stream in list(self.streams.values()):
            if stream.queued and stream.progress < before:
                if self.window <= 0:
                    self._abuse("output_stalled", Error.CALM)
                elif self._charge("output_stalled", self._finished):
                    self.give_up(stream, "output_stalled")

    def _keep_alive(self, now: float) -> None:
        """Ask a silent peer whether it lives; one that is gone without a word would keep its streams for ever."""
        if self._begun >= 0:
            self._begun = -1
            self._heard_at, self._asked_at = now, None
        elif self._asked_at is None:
            if now - self._heard_at >= self.limits.keepalive_seconds and not self._preface:
                self._asked_at = now
                self.send_frame(PING, 0, 0, _LIFE_PING)
        elif now - self._asked_at > self.limits.keepalive_ack_seconds:
            self._abuse("dead_peer", Error.NONE)

    def _last_goaway(self) -> None:
        """The peer knows that we leave: promise only what it has opened."""
        self._drain_until = None
        if self._goaway == WINDOW_MAX:
            self._goaway = self._last
            self.send_frame(GOAWAY, 0, 0, WORD.pack(self._last) + WORD.pack(Error.NONE))
        if not self.streams:
            self.closing = True

    def _fail(self, code: int, text: str) -> None:
        if not self.closing:
            self._greet()
            self.closing = True
            payload = WORD.pack(self._last) + WORD.pack(code) + text.encode()
            self.send_frame(GOAWAY, 0, 0, payload)
            self._close_streams()

    def _close_streams(self) -> None:
        streams = list(self.streams.values())
        for stream in streams:
            self._discard(stream, True)
        self.ring.clear()


class _Block:
    """A header block that comes in several frames."""

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
