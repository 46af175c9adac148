"""The part of a connection that its streams use.

Streams import this module, not that of the connection. So imports point in one direction: link, stream, output, session, http2.
"""

from abc import ABC, abstractmethod
from collections import deque

from workers.transport.frames import FRAME_MAX, WINDOW_FIRST
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
        """Counts a stream that ends because of the peer's error. It counts like a reset stream, because the answer costs us as much."""

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
