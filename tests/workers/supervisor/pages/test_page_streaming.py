"""Sending pages in pieces: the order of the pieces, on an event loop that the test turns."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.supervisor.pages.page import Pause, Piece
from workers.supervisor.pages.page_streaming import FAIR_S, PAGES_MAX, SLOW_S, WAITING_MAX, Coding, Delivery, RoundRobinSender


class Timer:
    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """An event loop that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0
        self.soon: list[Callable[[], None]] = []
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def patient(self, act: Callable[[], None]) -> None:
        self.call_soon(act)

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: Any) -> Timer:
        self.timers.append(Timer(self.now + delay, lambda: callback(*arguments)))
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
    """The reader of one page. `room`: how many writes it takes before it is full."""

    def __init__(self, sender: RoundRobinSender, pieces: Iterator[Piece], *, room: int = 1000, host: str = "host") -> None:
        self.host = host
        self.room = room
        self._sender = sender
        self.got: list[bytes] = []
        self.generated = 0
        self.events: list[Any] = []
        self.delivery = Delivery(self._counted(pieces), self, gzip=False)
        sender.begin(self.delivery)

    def _counted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.generated += 1
            yield piece

    def write(self, data: bytes) -> None:
        self.got.append(data)
        self.room -= 1
        if self.room <= 0:
            self._sender.full(self.delivery)

    def sent(self) -> None:
        self.events.append("sent")

    def broke_off(self, fault: Exception | None, *, begun: bool) -> None:
        self.events.append((fault, begun))


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def sender(loop: FakeLoop) -> RoundRobinSender:
    return RoundRobinSender(loop, loop)


def letters(text: str = "abc") -> Iterator[bytes]:
    return (letter.encode() for letter in text)


def endless() -> Iterator[bytes]:
    while True:
        yield b"x"


def test_a_turn_of_the_loop_generates_one_piece_for_any_number_of_pages(loop: FakeLoop, sender: RoundRobinSender) -> None:
    clients = [Client(sender, endless()) for _ in range(3)]
    for made in range(1, 10):
        loop.turn()
        assert sum(client.generated for client in clients) == made
    assert [client.generated for client in clients] == [3, 3, 3]


def test_a_page_is_sent_completely(loop: FakeLoop, sender: RoundRobinSender) -> None:
    client = Client(sender, letters())
    loop.settle()
    assert b"".join(client.got) == b"abc"
    assert client.events == ["sent"]


def test_no_piece_is_generated_for_a_full_reader_until_it_has_room(loop: FakeLoop, sender: RoundRobinSender) -> None:
    slow, quick = Client(sender, endless(), room=1), Client(sender, letters())
    loop.settle()
    assert (slow.generated, slow.got) == (1, [b"x"])
    assert quick.events == ["sent"]
    slow.room = 2
    sender.resume(slow.delivery)
    loop.settle()
    assert slow.generated == 3


def test_a_reader_that_reports_room_twice_still_gets_one_piece_per_turn(loop: FakeLoop, sender: RoundRobinSender) -> None:
    client = Client(sender, endless())
    for _ in range(3):
        sender.resume(client.delivery)
    loop.turn()
    assert client.generated == 1


def test_an_empty_piece_takes_a_turn_and_sends_nothing(loop: FakeLoop, sender: RoundRobinSender) -> None:
    client = Client(sender, iter([b"", b"a", b""]))
    loop.turn()
    assert (client.generated, client.got) == (1, [])
    loop.settle()
    assert b"".join(client.got) == b"a"


def test_an_empty_page_is_sent_without_a_piece(loop: FakeLoop, sender: RoundRobinSender) -> None:
    client = Client(sender, iter([]))
    loop.settle()
    assert (client.got, client.events) == ([], ["sent"])


def failing(before: str) -> Iterator[bytes]:
    yield from letters(before)
    raise ValueError("half-way")


@pytest.mark.parametrize(("before", "begun"), [("", False), ("ab", True)])
def test_a_page_that_fails_is_broken_off_and_the_others_continue(
    loop: FakeLoop, sender: RoundRobinSender, before: str, begun: bool
) -> None:
    wrong, right = Client(sender, failing(before)), Client(sender, letters())
    loop.settle()
    ((fault, reported),) = wrong.events
    assert isinstance(fault, ValueError)
    assert reported is begun
    assert right.events == ["sent"]


def test_pages_beyond_the_limit_wait_and_are_not_started(loop: FakeLoop, sender: RoundRobinSender) -> None:
    under_way = [Client(sender, endless(), room=1) for _ in range(PAGES_MAX)]
    waiting = Client(sender, letters())
    loop.settle()
    assert (waiting.generated, waiting.events) == (0, [])
    sender.leave(under_way[3].delivery)
    loop.settle()
    assert waiting.events == ["sent"]


def test_no_piece_is_generated_for_a_reader_that_has_left(loop: FakeLoop, sender: RoundRobinSender) -> None:
    clients = [Client(sender, endless()) for _ in range(PAGES_MAX + 1)]
    loop.turn()
    for client in clients:
        sender.leave(client.delivery)
    loop.settle()
    assert sum(client.generated for client in clients) == 1
    assert not any(client.events for client in clients)


def test_a_reader_that_leaves_during_a_write_gets_no_more_events(loop: FakeLoop, sender: RoundRobinSender) -> None:
    client = Client(sender, iter([b"a"]))
    client.write = lambda data: sender.leave(client.delivery)  # type: ignore[method-assign]
    loop.settle()
    assert client.events == []


def pausing(seconds: float = 1000.0) -> Iterator[Piece]:
    while True:
        yield Pause(seconds)


def test_the_oldest_page_is_broken_off_after_its_time_if_others_wait(loop: FakeLoop, sender: RoundRobinSender) -> None:
    oldest = Client(sender, pausing())
    loop.advance(1)
    others = [Client(sender, pausing()) for _ in range(PAGES_MAX - 1)]
    loop.settle()
    loop.advance(5 * FAIR_S)
    assert oldest.events == []  # no page waits
    waiting = Client(sender, letters())
    loop.advance(0)
    loop.settle()
    assert oldest.events == [(None, False)]
    assert not any(other.events for other in others)
    assert waiting.events == ["sent"]


def test_waiting_pages_wait_until_the_time_of_the_oldest_is_over(loop: FakeLoop, sender: RoundRobinSender) -> None:
    under_way = [Client(sender, pausing()) for _ in range(PAGES_MAX)]
    waiting = Client(sender, letters())
    for _ in range(int(FAIR_S) - 1):
        loop.advance(1)
        loop.settle()
    assert waiting.events == []
    assert not any(client.events for client in under_way)
    loop.advance(1)
    loop.settle()
    assert waiting.events == ["sent"]


def test_slow_readers_are_broken_off_first_and_soon(loop: FakeLoop, sender: RoundRobinSender) -> None:
    slow = [Client(sender, endless(), room=1) for _ in range(PAGES_MAX - 1)]
    quick = Client(sender, pausing())
    loop.settle()
    waiting = Client(sender, letters())
    loop.advance(SLOW_S / 2)
    loop.settle()
    assert waiting.events == []
    loop.advance(SLOW_S)
    loop.settle()
    assert waiting.events == ["sent"]
    assert [client.events for client in slow].count([(None, True)]) == 1
    assert quick.events == []


def test_a_waiting_page_of_a_host_without_pages_comes_first(loop: FakeLoop, sender: RoundRobinSender) -> None:
    many = [Client(sender, endless(), room=1, host="many") for _ in range(PAGES_MAX + WAITING_MAX)]
    one = Client(sender, letters(), host="one")
    loop.settle()
    assert many[-1].events == [(None, False)]  # one too many waits: the last of the host with most gives way
    sender.leave(many[0].delivery)
    loop.settle()
    assert one.events == ["sent"]
    assert not any(client.events for client in many[:-1])


def test_a_page_that_pauses_goes_on_after_its_pause(loop: FakeLoop, sender: RoundRobinSender) -> None:
    client = Client(sender, iter([b"a", Pause(2.0), b"b"]))
    other = Client(sender, letters())
    loop.settle()
    assert (client.got, other.events) == ([b"a"], ["sent"])
    sender.resume(client.delivery)
    loop.advance(1)
    loop.settle()
    assert client.got == [b"a"]
    loop.advance(1)
    loop.settle()
    assert client.events == ["sent"]


def test_the_pause_of_a_page_ends_with_its_reader(loop: FakeLoop, sender: RoundRobinSender) -> None:
    client = Client(sender, iter([Pause(2.0), b"b"]))
    loop.settle()
    sender.leave(client.delivery)
    assert all(timer.cancelled for timer in loop.timers)


def test_no_piece_is_generated_after_close(loop: FakeLoop, sender: RoundRobinSender) -> None:
    clients = [Client(sender, endless()) for _ in range(PAGES_MAX + 1)]
    sender.close()
    loop.settle()
    loop.advance(2 * FAIR_S)
    assert not any(client.generated for client in clients)


@given(st.lists(st.binary(max_size=300), max_size=8), st.booleans())
def test_the_coded_pieces_are_the_page(pieces: list[bytes], compressed: bool) -> None:
    coding = Coding(gzip=compressed)
    body = b"".join((*map(coding.piece, pieces), coding.end()))
    assert (gzip.decompress(body) if compressed else body) == b"".join(pieces)


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


def test_a_waiting_page_has_no_compressor_yet(sender: RoundRobinSender, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[int] = []
    monkeypatch.setattr(zlib, "compressobj", lambda *_: created.append(1))
    Delivery(letters(), Client(sender, letters()), gzip=True)
    assert created == []


def test_endless_pages_take_no_place_and_are_never_broken_off_for_others(loop: FakeLoop, sender: RoundRobinSender) -> None:
    viewers = [Endless(sender) for _ in range(PAGES_MAX)]
    pages = [Client(sender, iter([Pause(1000.0)])) for _ in range(PAGES_MAX)]
    waiting = Client(sender, letters())
    loop.settle()
    assert all(viewer.got for viewer in viewers)
    assert not waiting.got
    loop.advance(FAIR_S + SLOW_S)
    loop.settle()
    assert pages[0].events
    assert not any(viewer.events for viewer in viewers)


def test_a_piece_of_an_endless_page_can_be_unpacked_at_once() -> None:
    coding, unpacker = Coding(gzip=True, at_once=True), zlib.decompressobj(16 + zlib.MAX_WBITS)
    for piece in (b"first", b"second"):
        assert unpacker.decompress(coding.piece(piece)) == piece
    assert coding.piece(b"") == b""


class Endless(Client):
    """The reader of a page without end that sends a letter and then pauses."""

    def __init__(self, sender: RoundRobinSender) -> None:
        self.host, self.room, self._sender = "viewer", 1000, sender
        self.got: list[bytes] = []
        self.generated, self.events = 0, []
        self.delivery = Delivery(iter([b"a", *[Pause(3.0)] * 100]), self, gzip=False, endless=True)
        sender.begin(self.delivery)
