"""A turn of the event loop ends although many connections bring much work at the same time, and every connection gets its turn."""

from collections.abc import Callable

import pytest

from tests.workers.transport.helpers import DATA, HEADERS, SETTINGS, block, frame, framed
from workers.transport.frames import PREFACE
from workers.transport.native import Server, ServerProtocol
from workers.transport.room import Room
from workers.transport.turn import GAP_SECONDS, TURN_SECONDS

GREETING = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
REQUEST = frame(HEADERS, 4, 1, block()) + frame(DATA, 1, 1, framed(b"request"))


class Loop:
    """An event loop that runs what was scheduled turn by turn."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.ready.append(call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """No timer is due in these tests."""

    def turn(self) -> None:
        calls, self.ready = self.ready, []
        for call in calls:
            call()


class Wire:
    """The transport of one connection."""

    def __init__(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        """Nothing is kept."""

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("10.0.0.1", 1)

    def write(self, data: bytes) -> None:
        """The peer takes everything."""

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class World:
    """A server whose requests take `seconds` each. `served`: how many were served."""

    def __init__(self, connections: int, seconds: float) -> None:
        self.now, self.seconds = 100.0, seconds
        self.served = 0
        self.loop = Loop()
        self.server = Server(self.loop, now=lambda: self.now)
        self.server.application = self.application
        self.wires = [Wire() for _ in range(connections)]
        self.peers = [ServerProtocol(self.server, Room(self.server._places, str)) for _ in self.wires]
        for peer, wire in zip(self.peers, self.wires, strict=True):
            peer.connection_made(wire)
            peer.data_received(GREETING)
        self.loop.turn()

    def application(self, path, metadata, stream):
        world = self

        class Handler:
            def message(self, message: bytes) -> None:
                world.now += world.seconds
                world.served += 1

            def half_closed(self) -> None:
                stream.end()

            def closed(self) -> None:
                """Nothing is kept."""

        return Handler()

    def all_send(self) -> None:
        """All connections are readable in the same turn."""
        for peer in self.peers:
            peer.data_received(REQUEST)

    def turn(self) -> None:
        self.loop.turn()


@pytest.fixture
def long_requests() -> World:
    return World(5, 2 * TURN_SECONDS)


def test_what_is_read_after_a_long_time_in_one_turn_is_put_off(long_requests: World) -> None:
    long_requests.now += 1.0
    long_requests.all_send()
    assert long_requests.served == 1
    assert [wire.reading for wire in long_requests.wires] == [True, False, False, False, False]


def test_every_connection_is_served_in_one_of_the_next_turns_and_read_again(long_requests: World) -> None:
    long_requests.now += 1.0
    long_requests.all_send()
    counts = []
    while long_requests.served < 5:
        before = long_requests.served
        long_requests.turn()
        counts.append(long_requests.served - before)
    assert counts == [1, 1, 1, 1]
    long_requests.turn()
    assert all(wire.reading for wire in long_requests.wires)
    assert long_requests.server.streams == 0


def test_a_turn_of_short_requests_puts_nothing_off() -> None:
    world = World(50, TURN_SECONDS / 100)
    world.now += 1.0
    world.all_send()
    assert world.served == 50
    assert all(wire.reading for wire in world.wires)


def test_many_requests_of_middle_length_do_not_make_a_long_turn() -> None:
    world = World(200, 2 * GAP_SECONDS)
    world.all_send()
    assert 0 < world.served * world.seconds <= TURN_SECONDS + 2 * world.seconds
    while world.served < 200:
        begun = world.now
        world.turn()
        assert world.now - begun <= TURN_SECONDS + 2 * world.seconds
