"""At the limit of connections, the right ones give way."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.transport.limits import IDLE_SECONDS, UNUSED_SECONDS
from workers.transport.room import DISPLACED_AT_ONCE, LOOK_SECONDS, Places, Room

MOST = 100


class Peer:
    """A connection: what `Room` sees of it."""

    def __init__(self, host: str = "a", idle_since: float = 0.0, *, used: bool = False, busy: bool = False) -> None:
        self.host, self.idle_since, self.used, self.busy = host, idle_since, used, busy
        self.displaced = self.drained = False

    def make_room(self) -> None:
        self.displaced = self.busy = True

    def drain(self) -> None:
        self.drained = self.busy = True


@pytest.fixture
def refused() -> list[str]:
    return []


@pytest.fixture
def room(refused: list[str]) -> Room:
    return Room(Places(MOST, lambda: 0), refused.append)


def crowd(now: float, host: str = "a") -> list[Peer]:
    return [Peer(host, now - number / 1000) for number in range(MOST)]


def ages(peers: list[Peer], now: float) -> Iterator[float]:
    return (now - peer.idle_since for peer in peers)


def test_below_the_limit_every_connection_is_accepted(room: Room) -> None:
    peers = [Peer() for _ in range(MOST - 1)]
    assert room.left(len(peers), 10.0, peers)
    assert room.admits("a", len(peers))
    assert not any(peer.displaced for peer in peers)


def test_unused_connections_of_many_hosts_are_closed_once_they_are_old(room: Room) -> None:
    young = [Peer(f"host {n}", 10.0) for n in range(MOST - 1)]
    old = Peer("old", 10.0 - UNUSED_SECONDS)
    assert not room.left(MOST, 10.0, [*young, old])
    assert old.displaced
    assert not any(peer.displaced for peer in young)


def test_the_oldest_of_a_crowd_are_closed_at_any_age(room: Room) -> None:
    peers = crowd(10.0)
    assert room.left(MOST, 10.0, peers)
    closed = [peer for peer in peers if peer.displaced]
    assert len(closed) == DISPLACED_AT_ONCE
    assert min(ages(closed, 10.0)) > max(ages([peer for peer in peers if not peer.displaced], 10.0))


def test_between_two_looks_a_crowd_gets_no_place_and_others_do(room: Room, refused: list[str]) -> None:
    peers = crowd(10.0)
    assert room.left(MOST, 10.0, peers)
    before = sum(peer.displaced for peer in peers)
    assert room.left(MOST, 10.0 + LOOK_SECONDS / 2, peers)
    assert not room.admits("a", MOST)
    assert refused == ["a"]
    assert room.admits("b", MOST)
    assert sum(peer.displaced for peer in peers) == before + 1


def test_a_connection_that_was_used_meanwhile_is_not_displaced(room: Room) -> None:
    peers = crowd(10.0)
    assert room.left(MOST, 10.0, peers)
    for peer in peers:
        peer.used = True
    before = sum(peer.displaced for peer in peers)
    assert room.admits("b", MOST)
    assert sum(peer.displaced for peer in peers) == before
    assert not room.left(MOST, 10.0 + LOOK_SECONDS / 2, peers)


def test_half_of_all_places_is_no_crowd(room: Room) -> None:
    peers = [Peer("a" if number % 2 else f"host {number}", 10.0) for number in range(MOST)]
    assert not room.left(MOST, 10.0, peers)
    assert not any(peer.displaced for peer in peers)


def test_without_unused_connections_the_one_that_is_idle_for_longest_is_drained(room: Room) -> None:
    peers = [Peer(busy=True) for _ in range(MOST - 2)]
    idle, longest = Peer(idle_since=9.0, used=True), Peer(idle_since=10.0 - 2 * IDLE_SECONDS, used=True)
    assert not room.left(MOST, 10.0, [*peers, idle, longest])
    assert longest.drained
    assert not idle.drained


def test_a_crowd_is_forgotten_when_it_has_gone(room: Room) -> None:
    peers = crowd(10.0)
    assert room.left(MOST, 10.0, peers)
    assert room.left(MOST // 2, 10.01, [])
    assert room.admits("a", MOST)


class Worker:
    """A worker with several ports, and the number of connections at each."""

    def __init__(self, ports: int) -> None:
        self.places = Places(MOST, lambda: sum(self.counts))
        self.rooms = [Room(self.places, lambda _host: None) for _ in range(ports)]
        self.counts = [0] * ports

    def connect(self, port: int) -> bool:
        """Opens a connection that stays busy, if there is a place for it."""
        if not self.rooms[port].left(self.counts[port], 10.0, []):
            return False
        self.counts[port] += 1
        return True


@given(st.integers(1, 8), st.integers(2, 10), st.randoms())
def test_ports_that_are_flooded_leave_places_to_each_of_the_others(floods: int, ports: int, order: Random) -> None:
    floods = min(floods, ports - 1)
    worker = Worker(ports)
    for _ in range(8 * MOST):
        worker.connect(order.randrange(floods))
    assert worker.connect(ports - 1)
    share = MOST // (floods + 1)
    assert MOST - sum(worker.counts) + 1 >= share // 2
    for port in range(ports):
        while worker.connect(port):
            pass
    assert sum(worker.counts) <= MOST


def test_a_port_whose_connections_leave_gives_its_places_back_to_the_others() -> None:
    worker = Worker(2)
    while worker.connect(0):
        pass
    assert worker.counts == [MOST // 2, 0]
    while worker.connect(1):
        pass
    assert worker.counts == [MOST // 2, MOST // 4]
    worker.counts[0] = 0
    while worker.connect(1):
        pass
    assert worker.counts == [0, MOST // 2]


def test_a_single_port_gets_all_places() -> None:
    worker = Worker(1)
    while worker.connect(0):
        pass
    assert worker.counts == [MOST]
