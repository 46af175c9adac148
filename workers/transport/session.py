"""The streams of a connection, and the ways in which streams and the connection end. All parts of a connection share this state.

There are three kinds of errors. If the peer breaks the protocol, the connection ends with GOAWAY and the code of the error, or one stream
ends with RST_STREAM. If the peer keeps the protocol but costs too much (see `abuse`), the same happens with ENHANCE_YOUR_CALM or CANCEL,
and `on_abuse(cause)` is called. If a handler raises, its stream ends with INTERNAL, and `on_error` gets the exception.

A stream leaves the table only when its handler has ended it, or after `Handler.closed`. After that, the handler does no more work. So a
stream outside the table costs nothing, and a peer that resets streams cannot cause more work than the table's limit allows.
"""

from collections.abc import Callable
from typing import Final

from workers.transport.abuse import BYTES_PER_TOKEN, CAUSES, VIOLATION, Buckets
from workers.transport.frames import (
    GOAWAY,
    HEADER_LIST,
    INITIAL_WINDOW,
    MAX_STREAMS,
    PING,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_FIRST,
    WINDOW_MAX,
    WINDOW_UPDATE,
    WORD,
    ConnectionFault,
    Error,
)
from workers.transport.interface import Status
from workers.transport.limits import RESETS_OF_ALL_PER_SECOND, Budget, Limits
from workers.transport.output import Output
from workers.transport.sending import NO_WINDOW
from workers.transport.server_stream import STREAM_CREDIT, ServerStream

CONNECTION_CREDIT: Final = 1 << 30  # bytes: the window that we give the peer for all streams together
RECENT_STREAMS: Final = 256  # the least number of remembered ended streams
FULL_GAP: Final = 0.005  # seconds; if a free place is taken within this time, a request was waiting for it
DRAIN_PING: Final = b"draining"


class Session(Output):
    """Keeps one connection's streams, and ends them and the connection."""

    __slots__ = (
        "_buckets",
        "_earlier",
        "_finished",
        "_freed_at",
        "_goaway",
        "_greeted",
        "_on_abuse",
        "_on_error",
        "_recent",
        "closing",
        "drain_until",
        "full_since",
        "heard",
        "idle_since",
        "last_opened",
        "limit_known",
        "slow_until",
        "stream_limit",
    )

    def __init__(
        self,
        now: float,
        wake: Callable[[], None],
        limits: Limits,
        budget: Budget,
        on_abuse: Callable[[str], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        super().__init__(now, wake, limits, budget)
        # The driver reads no more, and closes the connection once the output is written.
        self.closing = False
        self.stream_limit = limits.streams_first  # the last limit of streams that we have sent
        self.limit_known = False  # whether the peer has acknowledged our SETTINGS
        self.full_since: float | None = None  # see `full`
        self.idle_since = now
        self.heard = True  # whether bytes were read since the last tick
        self.slow_until = 0.0  # the time before which the driver should not read
        self.last_opened = 0  # the highest number of a stream that the peer has opened
        # Until when we wait for the answer to our PING after a first GOAWAY; None if we do not wait.
        self.drain_until: float | None = None
        self._buckets = Buckets(limits)
        self._finished = 0  # number of streams that have ended properly
        self._freed_at = -FULL_GAP  # when the number of streams last fell below the limit
        self._goaway: int | None = None  # the highest stream that we have promised to serve; None if we serve all
        self._greeted = False
        self._on_abuse = on_abuse
        self._on_error = on_error
        # Recently ended streams -> whether we have reset them; if so, more frames may come. When the first dict has RECENT_STREAMS, it
        # replaces the second one.
        self._recent: dict[int, bool] = {}
        self._earlier: dict[int, bool] = {}

    # Calls of the driver.

    def lost(self) -> None:
        """Ends all streams, because the transport is gone."""
        self.closing = True
        self._close_streams()
        self.out.clear()

    def full(self) -> float | None:
        """Returns the time since which all places have been taken, apart from short gaps. Returns None if a place is free."""
        return self.full_since if len(self.streams) >= self.stream_limit else None

    def raise_limit(self) -> None:
        """Doubles the number of streams that the peer may open, up to `streams_max`."""
        limit = min(2 * self.stream_limit, self.limits.streams_max)
        if limit > self.stream_limit and not self.closing:
            self.stream_limit = limit
            self.full_since = None
            self.send_frame(SETTINGS, 0, 0, SETTING.pack(MAX_STREAMS, limit))

    @property
    def leaving(self) -> bool:
        """Whether the connection serves no new streams."""
        return self.closing or self._goaway is not None

    def displace(self) -> None:
        """Closes the connection to make room for other connections."""
        self.abuse("connections", Error.CALM)

    def drain(self) -> None:
        """Shuts down gracefully: serves the streams that are open or on their way, then closes."""
        if self._goaway is None and not self.closing:
            self.greet()
            self._goaway = WINDOW_MAX
            self.drain_until = self.now + self.limits.drain_ping_seconds
            self.send_frame(GOAWAY, 0, 0, WORD.pack(WINDOW_MAX) + WORD.pack(Error.NONE))
            self.send_frame(PING, 0, 0, DRAIN_PING)

    # Calls of streams, see `Link`.

    def give_up(self, number: int, cause: str) -> None:
        self._on_abuse(cause)
        self.cancel(self.streams[number])

    def provoked(self) -> None:
        self._finished -= 1  # the end of this stream must not earn a token
        self.charge_stream("provoked_resets")

    def blame(self, text: str) -> None:
        self._on_abuse(f"{VIOLATION}: {text}")

    def leave(self, number: int) -> None:
        stream = self.streams.pop(number, None)
        if stream is None:
            return
        by_us = stream.remote_open
        if by_us:  # the peer need not send more, but may have sent more already
            self.send_frame(RST_STREAM, 0, number, WORD.pack(Error.NONE))
        if stream.credit != STREAM_CREDIT or stream.received:  # a stream without a byte of DATA earns nothing
            self._finished += 1
        self._forget(stream, by_us)

    def report(self, error: Exception) -> None:
        self._on_error(error)

    # Opening a stream, and the end of its request.

    def greet(self) -> None:
        """Sends our own preface, once."""
        if not self._greeted:
            self._greeted = True
            settings = ((MAX_STREAMS, self.stream_limit), (INITIAL_WINDOW, STREAM_CREDIT), (HEADER_LIST, self.limits.header_list))
            self.send_frame(SETTINGS, 0, 0, b"".join([SETTING.pack(name, value) for name, value in settings]))
            self.send_frame(WINDOW_UPDATE, 0, 0, WORD.pack(CONNECTION_CREDIT - WINDOW_FIRST))

    def open(self, number: int) -> ServerStream:
        """Adds a stream to the table."""
        streams = self.streams
        stream = streams[number] = ServerStream(self, number, self.initial_window, self.now)
        if len(streams) == self.stream_limit and (self.full_since is None or self.now - self._freed_at > FULL_GAP):
            self.full_since = self.now
        return stream

    def half_close(self, stream: ServerStream) -> None:
        """Handles END_STREAM: the peer sends no more on this stream."""
        stream.remote_open = False
        stream.deliver = None
        if stream.window <= NO_WINDOW:
            return  # the handler has ended the stream meanwhile
        if stream.head_length >= 0 and stream.content_bytes() != stream.head_length:
            self.reset(stream, Error.PROTOCOL)
        elif stream.refusal:
            stream.refuse()
        elif stream.handler is not None:
            if stream.unfinished():
                stream.reject(Status.INTERNAL, "the stream ended within a message")
                return
            try:
                stream.handler.half_closed()
            except Exception as error:
                stream.handler_failed(error)

    # What a peer may cost.

    def charge(self, cause: str, earned: int = 0) -> bool:
        """Takes a token for a frame that could be part of a flood. If no token is left, ends the connection and returns False."""
        if self._buckets.take(cause, self.now, earned):
            return True
        self.abuse(cause, Error.CALM)
        return False

    def charge_stream(self, cause: str) -> bool:
        """Takes a token like `charge`. Every stream that has ended properly has earned one."""
        return self.charge(cause, self._finished)

    def reset_early(self) -> None:
        """Counts that the peer has reset a young stream before an answer. If there are too many, slows the connection down.

        The connection is not closed, because a gateway may relay what one client does over the connection that all clients share.
        """
        if self._buckets.take("resets", self.now, self._finished):
            return
        self._on_abuse("resets")
        now, budget = self.now, self._budget
        budget.slow_until = max(budget.slow_until, now) + 1.0 / RESETS_OF_ALL_PER_SECOND
        own = max(self.slow_until, now) + 1.0 / self.limits.resets_per_second
        self.slow_until = max(own, budget.slow_until)

    def charge_reading(self, cause: str) -> bool:
        """Takes a token like `charge`. Every BYTES_PER_TOKEN bytes that the peer let us send have earned one."""
        return self.charge(cause, self.sent() // BYTES_PER_TOKEN)

    def charge_stray(self) -> bool:
        """Takes a token like `charge`, for a frame on a stream that has ended. Every stream that the peer has opened has earned tokens."""
        return self.charge("stray_frames", self.last_opened)

    def abuse(self, cause: str, code: int) -> None:
        """Ends the connection of a peer that costs too much. `cause`: a key of CAUSES. `code`: an error code of HTTP/2."""
        if not self.closing:
            self._on_abuse(cause)
            self.fail(code, CAUSES[cause])

    # Ends of streams.

    def is_late(self, number: int) -> bool:
        """Returns whether the peer has opened the stream after our GOAWAY."""
        return self._goaway is not None and number > self._goaway

    def no_such_stream(self, number: int, what: str) -> None:
        """Handles a frame on a stream that is not open. Raises ConnectionFault."""
        if self.is_late(number):
            return
        if not number or number > self.last_opened or not number & 1:
            raise ConnectionFault(Error.PROTOCOL, f"{what} on stream {number}, which was never opened")
        ours = self._recent.get(number, self._earlier.get(number))
        if ours is None and what == "HEADERS":
            raise ConnectionFault(Error.PROTOCOL, f"HEADERS on stream {number} after {self.last_opened}")
        if ours is False and what == "HEADERS":
            raise ConnectionFault(Error.STREAM_CLOSED, f"HEADERS on closed stream {number}")
        if ours:
            return  # the peer sent it before it saw our RST_STREAM
        if self.charge_stray():
            self.reset_unknown(number, Error.STREAM_CLOSED)

    def reset(self, stream: ServerStream, code: int) -> None:
        """Resets a stream because of the peer's error. Too many such resets end the connection."""
        self.send_frame(RST_STREAM, 0, stream.number, WORD.pack(code))
        self.discard(stream, True)
        self.charge_stream("provoked_resets")

    def cancel(self, stream: ServerStream) -> None:
        """Ends a stream that cannot continue, though the peer has made no error."""
        self.send_frame(RST_STREAM, 0, stream.number, WORD.pack(Error.CANCEL))
        self.discard(stream, True)

    def reset_unknown(self, number: int, code: int) -> None:
        """Resets a stream that is not in the table."""
        self._remember(number, True)
        self.send_frame(RST_STREAM, 0, number, WORD.pack(code))

    def discard(self, stream: ServerStream, by_us: bool) -> None:
        """Removes a stream with its unsent bytes, and tells its handler. `by_us`: whether we have reset it."""
        handler = stream.handler
        if self.streams.pop(stream.number, None) is not None:
            self._forget(stream, by_us)
        if handler is not None:
            self.tell_closed(handler)

    def _forget(self, stream: ServerStream, by_us: bool) -> None:
        """Updates the state after a stream has left the table."""
        held = stream.drop()
        if held:
            self.hold(-held)
        self._remember(stream.number, by_us)
        open_streams = len(self.streams)
        if open_streams == self.stream_limit - 1:
            self._freed_at = self.now
        if not open_streams:
            self.idle_since = self.now
            if self._goaway is not None and self.drain_until is None:
                self.closing = True

    def _remember(self, number: int, by_us: bool) -> None:
        self._recent[number] = by_us
        if len(self._recent) == RECENT_STREAMS:
            self._recent, self._earlier = {}, self._recent

    # Ends of the connection.

    def peer_leaves(self) -> None:
        """Handles GOAWAY of the peer."""
        if self._goaway is None:
            self._goaway = WINDOW_MAX
        self.last_goaway()

    def last_goaway(self) -> None:
        """Promises to serve only the streams that the peer has opened. Called when the peer knows that we leave."""
        self.drain_until = None
        if self._goaway == WINDOW_MAX:
            self._goaway = self.last_opened
            self.send_frame(GOAWAY, 0, 0, WORD.pack(self.last_opened) + WORD.pack(Error.NONE))
        if not self.streams:
            self.closing = True

    def fail(self, code: int, text: str) -> None:
        """Ends the connection at once, with GOAWAY."""
        if not self.closing:
            self.greet()
            self.closing = True
            payload = WORD.pack(self.last_opened) + WORD.pack(code) + text.encode()
            self.send_frame(GOAWAY, 0, 0, payload)
            self._close_streams()

    def _close_streams(self) -> None:
        for stream in list(self.streams.values()):
            self.discard(stream, True)
        self.ring.clear()
