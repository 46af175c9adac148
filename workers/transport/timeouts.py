"""Enforces the time limits of one connection: for silent peers, unread answers, and deadlines of streams.

`tick` is called about twice a second. `on_deadline` asks the driver to call `expire` at a shorter heartbeat for as long as it returns True.
"""

from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

from workers.transport.frames import PING, Error
from workers.transport.interface import Status
from workers.transport.server_stream import ServerStream
from workers.transport.session import Session

SLACK: Final = 64
Stream = TypeVar("Stream")


class Deadlines(Generic[Stream]):
    """Keeps the deadlines of one connection's streams, which clients set with `grpc-timeout`. `streams`: the open streams by their numbers.

    One heap of (time, stream number) replaces a timer per stream, because each heartbeat looks only at the top of the heap. Most streams
    end long before their deadline. When the entries of ended streams outnumber the open streams, `add` removes them.
    """

    __slots__ = ("_heap", "_streams")

    def __init__(self, streams: Mapping[int, Stream]) -> None:
        self._streams = streams
        self._heap: list[tuple[float, int]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, number: int) -> None:
        heap = self._heap
        heappush(heap, (at, number))
        if len(heap) > 2 * len(self._streams) + SLACK:
            heap[:] = [entry for entry in heap if entry[1] in self._streams]
            heapify(heap)

    def due(self, now: float) -> Iterator[Stream]:
        """Yields the open streams that are past their deadline, each once."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            stream = self._streams.get(heappop(heap)[1])
            if stream is not None:
                yield stream


KEEPALIVE_PING: Final = b"are you?"


class Timeouts:
    """Enforces the time limits of one connection."""

    __slots__ = ("_asked_at", "_deadlines", "_heard_at", "_hoards", "_on_deadline", "_session")

    def __init__(self, session: Session, deadlines: Deadlines[ServerStream], on_deadline: Callable[[], None]) -> None:
        self._session = session
        self._deadlines = deadlines
        self._on_deadline = on_deadline
        self._heard_at = session.now
        # When we sent a keep-alive PING, if the peer has been silent since; else None.
        self._asked_at: float | None = None
        # (since when the peer is watched for hoarding, bytes of DATA sent until then); None if it is not watched.
        self._hoards: tuple[float, int] | None = None

    def tick(self, now: float, *, greeted: bool) -> None:
        """Ends a connection with a peer that is silent or does not read. Sends keep-alive PINGs. `greeted`: whether the peer's preface has
        arrived.
        """
        session = self._session
        limits = session.limits
        if session.blocked_since is not None:
            if now - session.blocked_since > limits.stall_seconds:
                session.abuse("output_stalled", Error.CALM)
        elif session.drain_until is not None and now >= session.drain_until:
            session.last_goaway()
        elif session.heard:
            session.heard = False
            self._heard_at, self._asked_at = now, None
        elif self._asked_at is None:
            if now - self._heard_at >= limits.keepalive_seconds and greeted:
                self._asked_at = now
                session.send_frame(PING, 0, 0, KEEPALIVE_PING)
        elif now - self._asked_at > limits.keepalive_ack_seconds:
            session.abuse("dead_peer", Error.NONE)

    def give_up_stalled(self, now: float) -> None:
        """Resets streams that sent nothing for `stall_seconds`. Ends the connection if its window is used up, or after many resets."""
        session = self._session
        before = now - session.limits.stall_seconds
        for stream in list(session.streams.values()):
            if stream.queued and stream.progress < before:
                if session.window <= 0:
                    session.abuse("output_stalled", Error.CALM)
                elif session.charge_stream("output_stalled"):
                    session.give_up(stream.number, "output_stalled")

    def expire(self, now: float) -> bool:
        """Ends streams past their deadline, and checks a hoarding peer (`watch_hoarding`). Returns True if it must be called again soon."""
        if self._hoards is not None:
            self.watch_hoarding()
        session = self._session
        for stream in self._deadlines.due(now):
            # Queued bytes wait for the peer, so trailers would not arrive in time either.
            if stream.ended() or stream.queued:
                session.cancel(stream)
            else:
                stream.fail(Status.DEADLINE_EXCEEDED, "the deadline of this call (grpc-timeout) has passed")
        return bool(self._deadlines) or self._hoards is not None

    def watch_hoarding(self) -> None:
        """Ends a connection whose peer leaves much unread and does not read on fast enough. A burst of large answers alone is no fault."""
        session = self._session
        limits, sent = session.limits, session.sent()
        if session.unread <= limits.hoard:
            self._hoards = None
            return
        if self._hoards is None:
            self._hoards = (session.now, sent)
            self._on_deadline()
            return
        since, before = self._hoards
        seconds = limits.hoard_seconds if before < limits.hoard_read else limits.hoard_busy_seconds
        if session.now - since >= seconds:
            if sent - before >= limits.hoard_read:
                self._hoards = (session.now, sent)
            else:
                self._hoards = None
                session.abuse("output_limit", Error.CALM)
