"""An HTTP/2 server for gRPC without I/O: takes the bytes of one connection, calls handlers, and returns the bytes to be written.

`receive(data)` handles all frames of a read in one loop. The bytes to be sent gather in `out`, and the driver takes them with `output()`
for one write. No part reads a clock or touches a socket: the driver sets `now` before it calls, and calls `tick()` about twice a second.
`wake` is called if a handler writes while the driver is not looking.

    Link                 what a stream needs of its connection
    Output(Link)         sends: frames to be written, the peer's windows, streams that take turns to send
    Session(Output)      the table of streams, and the ways in which they and the connection end
    Connection(Session)  reads frames, handles DATA, and is what the driver calls; it gives the other frames to
        HeaderBlocks     requests and trailers: opens streams
        ControlFrames    SETTINGS, WINDOW_UPDATE, RST_STREAM, PING, PRIORITY, GOAWAY
        Timeouts         silent peers, unread answers, deadlines

The windows that we give the peer are large, and the peer gets them back as soon as bytes arrive, because messages are handed on at once.
Instead of windows, `Limits` and `Budget` bound the memory of unfinished messages and unread answers. Our preface is sent only after the
peer's, so that a peer that speaks another protocol gets an answer that it may understand.

This module does not support server push, priorities or HTTP/1 upgrade.
"""

from collections.abc import Callable
from typing import Final

from compiled.calls import framed_message
from workers.transport.control_frames import ControlFrames
from workers.transport.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_STREAM,
    FRAME,
    GOAWAY,
    HEADERS,
    OVERSIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_MAX,
    WINDOW_UPDATE,
    WORD,
    ConnectionFault,
    Error,
    unpadded,
)
from workers.transport.header_blocks import HeaderBlocks
from workers.transport.headers import ClientKind
from workers.transport.interface import Application
from workers.transport.limits import SLOW_SLACK, Budget, Limits
from workers.transport.server_stream import STREAM_CREDIT, ServerStream
from workers.transport.session import CONNECTION_CREDIT, Session
from workers.transport.timeouts import Deadlines, Timeouts
from workers.transport.wrong_protocol import TLS_PEER, TLS_RECORD, http1_answer, speaks_http1

ENOUGH: Final = 1 << 30  # more streams than a read can begin: with this count, the rest of the read waits
STREAM_CREDIT_LOW: Final = STREAM_CREDIT // 2  # if less is left, the peer gets all of it back
CONNECTION_CREDIT_LOW: Final = CONNECTION_CREDIT // 2


class Connection(Session):
    """One HTTP/2 connection: reads its frames. The driver calls its methods."""

    __slots__ = ("_began", "_blocks", "_control", "_credit", "_expecting", "_later", "_preface", "_rest", "_timeouts")

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
        super().__init__(now, wake, limits or Limits(), budget or Budget(), on_abuse, on_error)
        deadlines: Deadlines[ServerStream] = Deadlines(self.streams)
        self._blocks = HeaderBlocks(self, application, deadlines, on_deadline)
        self._control = ControlFrames(self)
        self._timeouts = Timeouts(self, deadlines, on_deadline)
        self._began = now
        self._preface = True  # whether the peer's preface is incomplete
        self._expecting = True  # whether only a certain frame may come next: the first SETTINGS, or a CONTINUATION
        self._rest = bytearray()  # the beginning of the preface or of a frame that is incomplete
        self._later = b""  # the part of the last read that waits for the next turn
        self._credit = CONNECTION_CREDIT  # bytes of DATA that we let the peer send now

    # Calls of the driver.

    def receive(self, data: bytes) -> None:
        """Handles bytes that were read. The driver takes `output()` afterwards."""
        if self.closing:
            return
        self.idle = False
        if self._later:
            self._later += data
            return
        self.heard = True
        self._blocks.begun = 0
        try:
            at = 0
            if self._preface:
                at = self._read_preface(data)
            elif self._rest:
                at = self._complete_frame(data)
            if at < len(data) and not self.closing:
                self._parse(data, at)
        except ConnectionFault as fault:
            self.fail(*fault.args)

    def put_off(self, data: bytes) -> None:
        """Keeps bytes that were read. The next `go_on` handles them."""
        self._later += data

    @property
    def behind(self) -> bool:
        """Whether the driver must stop reading, because a part of the last read waits or the peer is slowed down.

        The driver then calls `go_on` in the next turn of the loop, or at `slow_until` if that is later.
        """
        return bool(self._later) or self.slow_until > self.now + SLOW_SLACK

    def go_on(self) -> None:
        """Handles the waiting part of the last read, or as much of it as one turn allows."""
        data, self._later = self._later, b""
        if data:
            self.receive(data)

    def tick(self, now: float) -> None:
        """Enforces the time limits. Call this about twice a second."""
        self.now = now
        limits = self.limits
        block = self._blocks.unfinished
        if self._preface and now - self._began > limits.preface_seconds:
            self.abuse("preface_timeout", Error.PROTOCOL)
        elif block is not None and now - block.began > limits.header_seconds:
            self.abuse("header_timeout", Error.CALM)
        else:
            self._timeouts.tick(now, greeted=not self._preface)
        if self.held:
            self._timeouts.give_up_stalled(now)

    def expire(self, now: float) -> bool:
        """Enforces the short time limits. Returns True if the driver must call this again at the next heartbeat for deadlines."""
        self.now = now
        return self._timeouts.expire(now)

    @property
    def client(self) -> ClientKind:
        return self._blocks.client

    @property
    def used(self) -> bool:
        """Whether a first request has arrived."""
        return self._blocks.used

    # Calls of streams, see `Link`.

    def watch_hoarding(self) -> None:
        self._timeouts.watch_hoarding()

    # Reading.

    def _parse(self, data: bytes, at: int) -> None:
        """Handles all frames of `data` from `at` on. DATA frames that are exactly one message are served here, all others by `_frame`."""
        streams = self.streams
        blocks = self._blocks
        size = len(data)
        credit = self._credit
        word: int  # typed, because compiled code computes with typed numbers without making objects
        flags: int
        number: int
        packed: int
        body: int
        while size - at >= 9:
            if size - at >= 14:  # the frame's header, and the prefix of a message if it is DATA
                word, flags, number, packed, body = framed_message(data, at)
            else:
                word, flags, number = FRAME.unpack_from(data, at)
                packed = body = 1
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
                if (
                    flags < 2
                    and not packed
                    and body == length - 5  # exactly one message
                    and not self._expecting
                    and (stream := streams.get(number)) is not None
                    and (deliver := stream.deliver) is not None
                ):
                    stream.credit -= length
                    if stream.credit < STREAM_CREDIT_LOW and not self._give_stream_credit(stream):
                        if self.closing:
                            return
                        continue
                    try:
                        deliver(data[start + 5 : at])
                    except Exception as error:
                        stream.handler_failed(error)
                    if flags:
                        self.half_close(stream)
                        if self.closing:
                            return
                    continue
            self._frame(word & 255, flags, number & WINDOW_MAX, data, start, at)
            if self.closing:
                return
            if blocks.begun > 1 and at < size and blocks.begun >= self.limits.streams_at_once:
                self._later = data[at:]
                size = at
        self._credit = credit
        if credit < CONNECTION_CREDIT_LOW:
            self._give_credit()
        if at < size:
            self._rest += memoryview(data)[at:]

    def _read_preface(self, data: bytes) -> int:
        """Reads the peer's preface, or the next part of it. Returns where the frames begin."""
        rest = self._rest
        known = len(rest)
        rest += data[: len(PREFACE) - known]
        if not PREFACE.startswith(rest):
            if rest.startswith(TLS_RECORD):
                self._on_abuse(TLS_PEER)
            if not speaks_http1(rest):
                raise ConnectionFault(Error.PROTOCOL, "this is an HTTP/2 port: wrong preface")
            self.out.append(http1_answer(rest))
            self.closing = True
        elif len(rest) == len(PREFACE):
            self._preface = False
            rest.clear()
            self.greet()
        return len(PREFACE) - known

    def _complete_frame(self, data: bytes) -> int:
        """Completes the frame that the last read began, without copying the rest of this read. Returns where the next frame begins."""
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
        """Handles one frame. Its payload is data[start:end]."""
        if self._expecting:
            block = self._blocks.unfinished
            if block is None:
                if kind != SETTINGS or flags & ACK:
                    raise ConnectionFault(Error.PROTOCOL, "the first frame is not SETTINGS")
                self._expecting = False
            elif kind != CONTINUATION or number != block.number:
                raise ConnectionFault(Error.PROTOCOL, "frame inside a header block")
        if kind == DATA:
            self._data(flags, number, data, start, end)
        elif kind == HEADERS:
            self._expecting = self._blocks.headers(flags, number, data, start, end)
        elif kind == WINDOW_UPDATE:
            self._control.window_update(number, data, start, end)
        elif kind == RST_STREAM:
            self._control.rst_stream(number, end - start)
            if self.slow_until > self.now + SLOW_SLACK:
                self._blocks.begun = ENOUGH
        elif kind == SETTINGS:
            self._control.settings(flags, number, data[start:end])
        elif kind == PING:
            self._control.ping(flags, number, data[start:end])
        elif kind == CONTINUATION:
            self._expecting = self._blocks.continuation(flags, data, start, end)
        elif kind == PRIORITY:
            self._control.priority(number, data, start, end)
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(Error.PROTOCOL, "PUSH_PROMISE from a client")
        elif kind == GOAWAY:
            self._control.goaway(number, end - start)
        else:
            self.charge("unknown_frames")

    # DATA, and the windows that we give for it.

    def _data(self, flags: int, number: int, data: bytes, start: int, end: int) -> None:
        stream = self.streams.get(number)
        if stream is None:
            self.no_such_stream(number, "DATA")
            return
        stream.credit -= end - start
        if stream.credit < STREAM_CREDIT_LOW and not self._give_stream_credit(stream):
            return
        if flags & PADDED:
            begin, stop = start, end
            start, end = unpadded(data, start, end)
            stream.padding += stop - begin - (end - start)
        if not stream.remote_open:
            self.reset(stream, Error.STREAM_CLOSED)
            return
        if start < end:
            if stream.handler is not None:
                stream.gather(data, start, end)
        elif not flags & END_STREAM:
            self.charge("empty_frames")
        if flags & END_STREAM:
            self.half_close(stream)

    def _give_stream_credit(self, stream: ServerStream) -> bool:
        """Gives the peer all of a stream's window back. If the peer has overrun the window, resets the stream and returns False."""
        if stream.credit < 0:
            self.reset(stream, Error.FLOW_CONTROL)
            return False
        given = STREAM_CREDIT - stream.credit
        stream.credit = STREAM_CREDIT
        stream.received += given
        if stream.remote_open:
            self.send_frame(WINDOW_UPDATE, 0, stream.number, WORD.pack(given))
        return True

    def _give_credit(self) -> None:
        """Gives the peer all of the connection's window back. Raises ConnectionFault if the peer has overrun it."""
        if self._credit < 0:
            raise ConnectionFault(Error.FLOW_CONTROL, "more DATA than the connection's window")
        self.send_frame(WINDOW_UPDATE, 0, 0, WORD.pack(CONNECTION_CREDIT - self._credit))
        self._credit = CONNECTION_CREDIT
