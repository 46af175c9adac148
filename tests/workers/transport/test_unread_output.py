"""Peers that do not read: what a stream and a connection hold for them is bounded, and both end after a time."""

import pytest

from tests.workers.transport.helpers import (
    HEADERS,
    RST,
    SETTINGS,
    WINDOW,
    Echo,
    Engine,
    block,
    frame,
    messages,
    names,
    payload,
    setting,
    word,
)
from workers.transport.limits import Budget, Limits


def test_a_peer_that_never_opens_its_window_is_reset_after_the_stall_time():
    engine = Engine()
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    engine.open()
    engine.handler.stream.send(b"hello")
    engine.output()
    assert engine.connection.held == 10
    engine.connection.tick(29.0)
    assert engine.handler.events == []
    engine.wakes = 0
    engine.connection.tick(31.0)
    assert engine.wakes == 1
    assert [f.error_code for f in engine.output()] == [8]
    assert engine.handler.events == [("closed", b"")]
    assert engine.abuses == ["output_stalled"]
    assert engine.connection.held == 0


def test_slow_progress_is_no_stall():
    engine = Engine()
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    engine.open()
    engine.handler.stream.send(b"hello")
    for second in range(20, 100, 20):
        engine.connection.tick(float(second))
        engine.receive(frame(WINDOW, 0, 1, word(1)))
    assert engine.handler.events == []


def test_output_that_is_never_read_costs_bounded_memory():
    engine = Engine(Echo, limits=Limits(stream_output=100_000))
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    engine.open()
    for _ in range(200):
        engine.send(bytes(1000))
        assert engine.connection.held <= 101_005
    assert engine.handler.count("closed") == 1
    assert engine.handler.count("message") == 100
    assert engine.abuses == ["output_limit"]
    assert engine.connection.held == 0


def test_a_refusal_without_window_and_budget_resets_its_stream_and_sends_nothing_more():
    engine = Engine(budget=Budget(100))
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    answers = engine.receive(frame(HEADERS, 5, 1, block(method="GET", content_type=None)))
    kinds = [answer.type for answer in answers if answer.stream_id == 1]
    assert kinds == [HEADERS, RST]


def test_output_of_one_connection_is_bounded_over_its_streams():
    engine = Engine(Echo, limits=Limits(connection_held=100_000))
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    for number in (1, 3, 5):
        engine.open(number)
        for _ in range(4):
            engine.send(bytes(9_995), number)
    assert [h.count("closed") for h in engine.handlers] == [0, 0, 1]
    assert engine.connection.held == engine.connection.unread == 80_000


def test_one_connection_never_holds_more_than_half_of_the_budget():
    budget = Budget(100_000)
    engine = Engine(Echo, budget=budget)
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    engine.open()
    for _ in range(6):
        engine.send(bytes(9_995))
        assert budget.used <= 60_000
    assert engine.abuses == ["output_limit"]
    assert budget.used == 0


def hoarder() -> Engine:
    """An engine with 300 kB that wait for a window."""
    engine = Engine(Echo, limits=Limits(hoard=100_000, hoard_read=1000, hoard_seconds=0.5))
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)) + frame(WINDOW, 0, 0, word(1 << 30)))
    for number in (1, 3, 5):
        engine.open(number)
        engine.handler.stream.send(bytes(99_995))
    engine.output()
    assert engine.connection.unread == 300_000
    return engine


@pytest.mark.parametrize("seen", ["at a heartbeat", "with more of it"])
def test_a_connection_that_hoards_answers_is_closed(seen):
    engine = hoarder()
    assert engine.connection.expire(0.4), "the connection must be watched"
    assert not engine.connection.closing
    engine.receive(frame(WINDOW, 0, 1, word(999)))
    if seen == "at a heartbeat":
        assert not engine.connection.expire(0.6)
    else:
        engine.connection.now = 0.6
        engine.handler.stream.send(b"more")
    assert engine.output()[-1].error_code == 11
    assert [h.count("closed") for h in engine.handlers] == [1, 1, 1]
    assert engine.abuses == ["output_limit"]
    assert engine.connection.held == engine.connection.unread == 0


def test_a_peer_that_reads_much_at_a_fair_pace_is_no_hoarder():
    engine = hoarder()
    for tick in range(1, 90):
        engine.receive(frame(WINDOW, 0, 1 + tick % 3 * 2, word(2000)))
        engine.connection.expire(tick / 2)
    assert not engine.connection.closing


@pytest.mark.parametrize(("taken", "closed"), [(2 << 20, False), (1000, True)])
def test_a_gateway_that_has_read_much_may_pause_for_seconds_and_one_that_has_read_nothing_may_not(taken, closed):
    engine = Engine(Echo)
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)) + frame(WINDOW, 0, 0, word(1 << 30)))
    for number in (1, 3):
        engine.open(number)
        engine.receive(frame(WINDOW, 0, number, word(taken)))
        engine.handler.stream.send(bytes(30_000_000))
    for tick in range(1, 5):
        engine.connection.expire(float(tick))
    assert engine.connection.closing is closed


def test_a_hoarder_that_reads_on_is_no_longer_watched():
    engine = hoarder()
    assert engine.connection.expire(0.1)
    engine.receive(b"".join(frame(WINDOW, 0, number, word(1 << 20)) for number in (1, 3, 5)))
    assert not engine.connection.expire(0.2)


def test_a_connection_with_a_stalled_window_is_closed():
    engine = Engine(limits=Limits(stall_seconds=30.0))
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 1 << 20)))
    for number in (1, 3):
        engine.open(number)
        engine.handlers[-1].stream.send(bytes(60_000))
    engine.connection.tick(31.0)
    goaway = engine.output()[-1]
    assert goaway.error_code == 11
    assert engine.abuses == ["output_stalled"]
    assert [h.events for h in engine.handlers] == [[("closed", b"")]] * 2


def test_a_connection_with_many_stalled_streams_is_closed():
    engine = Engine(limits=Limits(stalls=3))
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    for number in range(1, 16, 2):
        engine.open(number)
        engine.handlers[-1].stream.send(b"x")
    engine.output()
    engine.connection.tick(31.0)
    assert [type(f).__name__ for f in engine.output()] == ["RstStreamFrame"] * 3 + ["GoAwayFrame"]
    assert [h.events for h in engine.handlers] == [[("closed", b"")]] * 8


def test_a_blocked_socket_keeps_answers_in_their_streams():
    engine = Engine(Echo)
    engine.open()
    engine.output()
    engine.connection.pause()
    assert names(engine.send(b"one")) == ["Headers"]
    assert engine.send(b"two", flags=1) == []
    assert names(engine.receive(frame(SETTINGS, 0, 0, setting(5, 20_000)))) == ["Settings"]
    engine.wakes = 0
    engine.connection.resume()
    assert engine.wakes == 1
    answer = engine.output()
    assert messages(payload(answer)) == [b"one", b"two"]
    assert names(answer)[-1] == "Headers"


def test_a_socket_that_stays_blocked_ends_the_connection():
    engine = Engine(Echo)
    engine.open()
    engine.connection.pause()
    engine.connection.tick(29.0)
    assert not engine.connection.closing
    engine.connection.tick(31.0)
    assert engine.connection.closing
    assert engine.handler.count("closed") == 1
