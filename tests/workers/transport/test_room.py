"""At the limit of connections, the right ones give way."""

from collections.abc import Iterator

import pytest

from workers.transport.limits import IDLE_SECONDS, UNUSED_SECONDS
from workers.transport.room import DISPLACED_AT_ONCE, LOOK_SECONDS, Room

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
    return Room(MOST, refused.append)


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
