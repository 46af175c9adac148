"""Decides which connections give way when a worker has reached its limit of connections.

A connection is unused until it opens a stream. If the unused connections of one host take more than half of all places, they are a crowd.

    no unused connections    the connection that has been idle for longest is drained
    some, but no crowd       those that have been unused for UNUSED_SECONDS are closed
    a crowd                  its oldest connections are closed at any age, and new ones of its host as soon as they are accepted. A new
                             connection of another host displaces one of the crowd

A worker with several ports, as those of several pools, divides its places: a port may have at most one connection more than there are free
places. So if one port is flooded, half of all places stay free, and if two ports are flooded, a third. Each port has its own `Room`.

The kernel hands over connections in the order in which they came. So a client that opens connections without end must not make its own
connections wait for places, because those of other clients would wait behind them.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from workers.transport.limits import IDLE_SECONDS, UNUSED_SECONDS

LOOK_SECONDS: Final = 0.05
DISPLACED_AT_ONCE: Final = 16
ACCEPTED_AT_ONCE: Final = 32  # connections accepted in one call while there is a crowd


class Peer(Protocol):
    """One connection. `idle_since`: monotonic seconds. `used`: whether it has opened a stream. `busy`: whether it has open streams or is
    closing.
    """

    @property
    def host(self) -> str: ...
    @property
    def busy(self) -> bool: ...
    @property
    def used(self) -> bool: ...
    @property
    def idle_since(self) -> float: ...
    def make_room(self) -> None: ...
    def drain(self) -> None: ...


class Places:
    """All places for connections in one worker. `most`: their number. `taken` returns how many connections there are."""

    def __init__(self, most: int, taken: Callable[[], int]) -> None:
        self.most = most
        self.taken = taken
        self.ports = 0

    def share(self, count: int) -> int:
        """Returns the limit of connections for a port that has `count` connections."""
        if self.ports < 2:
            return self.most
        return max(0, self.most - (self.taken() - count) + 1) // 2


class Room:
    """The places for connections at one port of a worker. `on_refused` gets the host of each refused connection.

    `members`: the connections at the port, and connections in their handshake.
    """

    def __init__(self, places: Places, on_refused: Callable[[str], None]) -> None:
        self.members: set[object] = set()
        self._places = places
        places.ports += 1
        self._on_refused = on_refused
        self._look_at = 0.0
        # The unused connections of the host with too many connections, oldest first; empty without such a host.
        self._crowd: deque[Peer] = deque()

    def left(self, count: int, now: float, peers: Iterable[Peer]) -> int:
        """Returns how many connections may be accepted while `count` are open: one, none, or many (`admits` refuses most of these).

        At the limit, makes some connections give way.
        """
        most = self._places.share(count)
        if count < most:
            if count <= most // 2:
                self._crowd.clear()
            return 1
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._make_room(now, most, [peer for peer in peers if not peer.busy])
        return ACCEPTED_AT_ONCE if self._crowd else 0

    @property
    def full(self) -> bool:
        """Whether there is no place for one more connection."""
        return len(self.members) >= self._places.share(len(self.members))

    def admits(self, host: str, count: int) -> bool:
        """Whether a connection that was just accepted may stay, while `count` others are open."""
        if count < self._places.share(count) or not self._crowd:
            return True
        if host == self._crowd[0].host:
            self._on_refused(host)
            return False
        while self._crowd:
            oldest = self._crowd.popleft()
            if not (oldest.used or oldest.busy):
                oldest.make_room()
                break
        return True

    def _make_room(self, now: float, most: int, idle: list[Peer]) -> None:
        unused = sorted((peer for peer in idle if not peer.used), key=lambda peer: peer.idle_since)
        [(host, count)] = Counter(peer.host for peer in unused).most_common(1) or [("", 0)]
        self._crowd = deque(peer for peer in unused if peer.host == host) if count > most / 2 else deque()
        leaving = self._crowd or deque(peer for peer in unused if peer.idle_since <= now - UNUSED_SECONDS)
        for _ in range(min(DISPLACED_AT_ONCE, len(leaving))):
            leaving.popleft().make_room()
        if not unused:
            longest = min(idle, key=lambda peer: peer.idle_since, default=None)
            if longest is not None and now - longest.idle_since >= IDLE_SECONDS:
                longest.drain()
