"""Pages in pieces: whose turn it is, on a loop that the test turns by hand."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.pieces import FAIR_S, PAGES_MAX, Coding, Delivery, Turns


class Timer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """Turns when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.soon: list[Callable[[], None]] = []
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now + delay, callback))
        return self.timers[-1]

    def turn(self) -> None:
        due, self.soon = self.soon, []
        for callback in due:
            callback()

    def settle(self) -> None:
        while self.soon:
            self.turn()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.timers if timer.at <= self.now and not timer.cancelled]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            timer.callback()


class Client:
    """Asks for one page. `room`: how many writes it takes before it is full."""

    def __init__(self, turns: Turns, pieces: Iterator[bytes], *, room: int = 1000, head: bytes = b"head ") -> None:
        self.room = room
        self.got: list[bytes] = []
        self.asked = 0
        self.events: list[Any] = []
        self.delivery = Delivery(self._counted(pieces), head, self, gzip=False, chunked=False)
        turns.begin(self.delivery)

    def _counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.asked += 1
            yield piece

    def write(self, data: bytes) -> None:
        self.got.append(data)
        self.room -= 1
        self.delivery.full = self.room <= 0

    def sent(self) -> None:
        self.events.append("sent")

    def broke_off(self, fault: Exception | None, *, begun: bool) -> None:
        self.events.append((fault, begun))


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def turns(loop: FakeLoop) -> Turns:
    return Turns(loop)


def letters(text: str = "abc") -> Iterator[bytes]:
    return (letter.encode() for letter in text)


def endless() -> Iterator[bytes]:
    while True:
        yield b"x"


def test_a_turn_of_the_loop_makes_one_piece_however_many_pages_are_under_way(loop: FakeLoop, turns: Turns) -> None:
    clients = [Client(turns, endless()) for _ in range(3)]
    for made in range(1, 10):
        loop.turn()
        assert sum(client.asked for client in clients) == made
    assert [client.asked for client in clients] == [3, 3, 3]


def test_a_page_is_sent_whole_behind_its_head(loop: FakeLoop, turns: Turns) -> None:
    client = Client(turns, letters())
    loop.settle()
    assert b"".join(client.got) == b"head abc"
    assert client.events == ["sent"]


def test_nothing_is_made_for_a_full_reader_until_it_has_room(loop: FakeLoop, turns: Turns) -> None:
    slow, quick = Client(turns, endless(), room=1), Client(turns, letters())
    loop.settle()
    assert (slow.asked, slow.got) == (1, [b"head x"])
    assert quick.events == ["sent"]
    slow.room = 2
    turns.resume(slow.delivery)
    loop.settle()
    assert slow.asked == 3


def test_a_reader_that_has_room_twice_gets_one_piece_a_turn(loop: FakeLoop, turns: Turns) -> None:
    client = Client(turns, endless())
    for _ in range(3):
        turns.resume(client.delivery)
    loop.turn()
    assert client.asked == 1


def test_an_empty_piece_is_a_turn_and_no_bytes(loop: FakeLoop, turns: Turns) -> None:
    client = Client(turns, iter([b"", b"a", b""]))
    loop.turn()
    assert (client.asked, client.got) == (1, [])
    loop.settle()
    assert b"".join(client.got) == b"head a"


def test_an_empty_page_has_its_head(loop: FakeLoop, turns: Turns) -> None:
    client = Client(turns, iter([]))
    loop.settle()
    assert (client.got, client.events) == ([b"head "], ["sent"])


def failing(before: str) -> Iterator[bytes]:
    yield from letters(before)
    raise ValueError("half-way")


@pytest.mark.parametrize(("before", "begun"), [("", False), ("ab", True)])
def test_a_page_that_fails_breaks_off_and_the_others_go_on(
    loop: FakeLoop, turns: Turns, before: str, begun: bool
) -> None:
    wrong, right = Client(turns, failing(before)), Client(turns, letters())
    loop.settle()
    ((fault, told),) = wrong.events
    assert isinstance(fault, ValueError)
    assert told is begun
    assert right.events == ["sent"]


def test_pages_beyond_the_limit_wait_and_nothing_is_asked_of_them(loop: FakeLoop, turns: Turns) -> None:
    under_way = [Client(turns, endless(), room=1) for _ in range(PAGES_MAX)]
    waiting = Client(turns, letters())
    loop.settle()
    assert (waiting.asked, waiting.events) == (0, [])
    turns.leave(under_way[3].delivery)
    loop.settle()
    assert waiting.events == ["sent"]


def test_who_leaves_is_asked_for_nothing_more(loop: FakeLoop, turns: Turns) -> None:
    clients = [Client(turns, endless()) for _ in range(PAGES_MAX + 1)]
    loop.turn()
    for client in clients:
        turns.leave(client.delivery)
    loop.settle()
    assert sum(client.asked for client in clients) == 1
    assert not any(client.events for client in clients)


def test_who_leaves_while_it_is_written_to_is_not_told_that_all_was_sent(loop: FakeLoop, turns: Turns) -> None:
    client = Client(turns, iter([]))
    client.write = lambda data: turns.leave(client.delivery)  # type: ignore[method-assign]
    loop.settle()
    assert client.events == []


def test_the_oldest_page_is_broken_off_once_it_took_long_and_others_wait(loop: FakeLoop, turns: Turns) -> None:
    oldest = Client(turns, endless(), room=1)
    loop.advance(1)
    others = [Client(turns, endless(), room=1) for _ in range(PAGES_MAX - 1)]
    loop.settle()
    loop.advance(5 * FAIR_S)
    assert oldest.events == []  # nobody waits
    waiting = Client(turns, letters())
    loop.advance(0)
    loop.settle()
    assert oldest.events == [(None, True)]
    assert not any(other.events for other in others)
    assert waiting.events == ["sent"]


def test_those_that_wait_do_so_until_the_oldest_had_its_time(loop: FakeLoop, turns: Turns) -> None:
    under_way = [Client(turns, endless(), room=1) for _ in range(PAGES_MAX)]
    waiting = Client(turns, letters())
    loop.advance(FAIR_S - 1)
    loop.settle()
    assert waiting.events == []
    assert not any(client.events for client in under_way)
    loop.advance(1)
    loop.settle()
    assert waiting.events == ["sent"]


def test_after_the_end_nothing_runs(loop: FakeLoop, turns: Turns) -> None:
    clients = [Client(turns, endless()) for _ in range(PAGES_MAX + 1)]
    turns.close()
    loop.settle()
    loop.advance(2 * FAIR_S)
    assert not any(client.asked for client in clients)


@given(st.lists(st.binary(max_size=300), max_size=8), st.booleans())
def test_what_is_compressed_is_the_same_behind_gzip(pieces: list[bytes], chunked: bool) -> None:
    coding = Coding(gzip=True, chunked=chunked)
    wire = [coding.piece(piece) for piece in pieces]
    body = b"".join((*wire, coding.end()))
    assert gzip.decompress(unchunked(body) if chunked else body) == b"".join(pieces)


def unchunked(body: bytes) -> bytes:
    whole = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        count = int(size, 16)
        whole += rest[:count]
        assert rest[count:][:2] == b"\r\n"
        if not count:
            assert rest == b"\r\n"
            return whole
        body = rest[count + 2 :]


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_no_piece_is_taken_for_the_end(pieces: list[bytes]) -> None:
    coding = Coding(gzip=False, chunked=True)
    assert unchunked(b"".join((*map(coding.piece, pieces), coding.end()))) == b"".join(pieces)


def test_a_page_that_waits_has_no_compressor_yet(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(zlib, "compressobj", lambda *_: made.append(1))
    Delivery(letters(), b"", Client(turns, letters()), gzip=True, chunked=True)
    assert made == []
