"""The sending half of a connection: frames that wait to be written, the peer's windows, and streams that take turns to send.

Frames gather in `out` until the driver takes them with `output()`. Bytes that a stream cannot send at once stay in the stream. When a
window opens, or the socket takes more again, `pump` lets each stream that has a window send one frame in turn. `hold` counts all bytes that
are kept in memory for the peer.
"""

from collections.abc import Callable

from workers.transport.frames import FRAME, FRAME_MAX, WINDOW_FIRST, WINDOW_MAX, ConnectionFault, Error
from workers.transport.limits import Budget, Limits
from workers.transport.sending import Link
from workers.transport.server_stream import ServerStream


class Output(Link):
    """Sends the frames of one connection."""

    __slots__ = ("_budget", "_driver_wake", "blocked_since", "frame_max", "granted", "held", "held_max", "initial_window", "streams")

    def __init__(self, now: float, wake: Callable[[], None], limits: Limits, budget: Budget) -> None:
        super().__init__(now, limits)
        self.streams: dict[int, ServerStream] = {}  # the open streams by number
        self.granted = WINDOW_FIRST  # all bytes of window that the peer has ever given to the connection
        self.initial_window = WINDOW_FIRST  # the window that the peer gives to a new stream
        self.frame_max = FRAME_MAX  # largest DATA payload that we send to this peer, in bytes
        self.blocked_since: float | None = None
        self.held = 0  # bytes held in memory for the peer
        # No connection may use up the process's budget, so each gets half of it at most.
        self.held_max = min(limits.connection_held, budget.limit // 2)
        self._budget = budget
        self._driver_wake = wake

    # Calls of the driver.

    def output(self) -> bytes:
        """Returns all bytes to be written now, and removes them."""
        self.idle = True
        out = self.out
        data = b"".join(out)
        out.clear()
        return data

    def pause(self) -> None:
        """Notes that the socket takes no more. Answers wait in their streams until `resume()`."""
        self.blocked_since = self.now
        self.room = 0

    def resume(self) -> None:
        """Notes that the socket takes data again, and sends waiting answers."""
        self.blocked_since = None
        self.room = self.frame_max
        for stream in self.streams.values():
            stream.enter_ring()
        self.pump()

    # Calls of streams, see `Link`.

    def wake(self) -> None:
        self.idle = False
        self._driver_wake()

    def hold(self, count: int) -> bool:
        self.held += count
        budget = self._budget
        budget.used += count
        return self.held <= self.held_max and budget.used <= budget.limit

    def keep(self, count: int) -> bool:
        return self.hold(count) or self._relieved()

    def _relieved(self) -> bool:
        """Gives up unfinished requests until the limits are kept. Returns False if this was not enough."""
        budget = self._budget
        if self.held > self.held_max:
            handlers = [stream.handler for stream in self.streams.values() if stream.handler is not None]
            budget.relieve(handlers, self.held - self.held_max)
        if budget.used > budget.limit:
            budget.relieve(None, budget.used - budget.limit)
        return self.held <= self.held_max and budget.used <= budget.limit

    # Calls of the other parts of the connection.

    def sent(self) -> int:
        """Returns the number of all bytes of DATA sent so far."""
        return self.granted - self.window

    def send_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        self.out.append(FRAME.pack(len(payload) << 8 | kind, flags, number) + payload)
        if self.idle:
            self.wake()

    def change_initial_window(self, value: int) -> None:
        """Applies the peer's SETTINGS_INITIAL_WINDOW_SIZE to all streams. Raises ConnectionFault."""
        change = value - self.initial_window
        self.initial_window = value
        for stream in self.streams.values():
            stream.window += change
            if stream.window > WINDOW_MAX:
                raise ConnectionFault(Error.FLOW_CONTROL, "window above 2^31-1 by SETTINGS")
            stream.enter_ring()

    def pump(self) -> None:
        """Sends queued bytes, one frame of each stream in turn, until the connection's window or room is used up."""
        ring = self.ring
        while ring and self.window > 0 and self.room:
            stream = self.streams.get(ring.popleft())
            if stream is not None:
                stream.in_ring = False
                if stream.queued:
                    stream.pump(1)
                    stream.enter_ring()
        if self.out and self.idle:
            self.wake()
