"""The sending half of a connection: what waits to be written, the peer's windows, and streams that take turns.

Bytes gather in `out` until the driver takes them with `output()`. What a stream can't send at once stays in the stream; when a
window opens, or the socket takes more again, `pump` lets those that have a window of their own send one frame each in turn.
Everything that is kept in memory for the peer counts by `hold`. The receiving half, `http2.Connection`, is built on this.
"""

from collections import deque
from collections.abc import Callable

from workers.transport.frames import FRAME_MAX, WINDOW_MAX, ConnectionFault, Error
from workers.transport.limits import Budget, Limits
from workers.transport.stream import FRAME, ServerStream


class Output:
    """One connection's."""

    def __init__(self, now: float, wake: Callable[[], None], limits: Limits, budget: Budget) -> None:
        self.limits = limits
        self.now = now
        self.wake = self._wake
        self.out: list[bytes | memoryview] = []
        self.idle = False  # True: nobody will look at `out` unless woken
        self.window = 65535  # what the peer lets us send
        self.room = FRAME_MAX  # the largest DATA frame that may be sent now; 0 while the socket is blocked
        self.streams: dict[int, ServerStream] = {}
        self.held = 0
        self.unread = 0  # of it, what waits in streams because the peer doesn't take it
        self.held_max = min(limits.connection_held, budget.limit // 2)  # nobody takes all that there is for all
        self.frame_max = FRAME_MAX  # the peer's, as far as we use it
        self.initial_window = 65535  # the peer's, for new streams
        self.blocked_since: float | None = None
        self.ring: deque[ServerStream] = deque()  # streams with queued bytes and a window of their own
        self._driver_wake = wake
        self._budget = budget

    # What the driver calls.

    def output(self) -> bytes:
        """Everything to be written now."""
        self.idle = True
        out = self.out
        data = b"".join(out)
        out.clear()
        return data

    def pause(self) -> None:
        """The socket takes no more: answers wait in their streams until `resume()`."""
        self.blocked_since = self.now
        self.room = 0

    def resume(self) -> None:
        self.blocked_since = None
        self.room = self.frame_max
        for stream in self.streams.values():
            self.enter_ring(stream)
        self.pump()

    # What streams call.

    def hold(self, count: int) -> bool:
        """Count bytes as held for this peer; False: too many now."""
        self.held += count
        self._budget.used += count
        return self.held <= self.held_max and self._budget.used <= self._budget.limit

    def enter_ring(self, stream: ServerStream) -> None:
        """The stream has something queued, and may have a window to send it."""
        if stream.queued and stream.window > 0 and not stream.in_ring:
            stream.in_ring = True
            self.ring.append(stream)

    # What the receiving half calls.

    def change_initial_window(self, value: int) -> None:
        change = value - self.initial_window
        self.initial_window = value
        for stream in self.streams.values():
            stream.window += change
            if stream.window > WINDOW_MAX:
                raise ConnectionFault(Error.FLOW_CONTROL, "window above 2^31-1 by SETTINGS")
            self.enter_ring(stream)

    def send_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        self.out.append(FRAME.pack(len(payload) << 8 | kind, flags, number) + payload)
        if self.idle:
            self.wake()

    def _wake(self) -> None:
        self.idle = False
        self._driver_wake()

    def pump(self) -> None:
        """Send what is queued, one frame of each stream in turn, until a window of the connection is used up."""
        ring = self.ring
        while ring and self.window > 0 and self.room:
            stream = ring.popleft()
            stream.in_ring = False
            if stream.queued:
                stream.pump(1)
                self.enter_ring(stream)
        if self.out and self.idle:
            self.wake()
