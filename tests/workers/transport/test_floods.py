"""Peers that ask for much and give little: one read does a bounded amount of work, and a flood ends the connection."""

import pytest

from tests.workers.transport.error_codes import (
    CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    PROTOCOL_ERROR,
    STREAM_CLOSED,
    goaway_code,
    reset_code,
)
from tests.workers.transport.helpers import (
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    RST,
    SETTINGS,
    WINDOW,
    Echo,
    Engine,
    block,
    frame,
    framed,
    names,
    setting,
    word,
)
from workers.transport.limits import RESETS_OF_ALL_PER_SECOND, Budget, Limits


def test_one_read_begins_a_bounded_number_of_streams_and_puts_off_the_rest():
    engine = Engine(Echo, limits=Limits(streams_first=100, streams_at_once=4))
    read = b"".join(frame(HEADERS, 4, n, block()) + frame(DATA, 1, n, framed(b"x")) for n in range(1, 21, 2))
    connection = engine.connection
    connection.receive(read[:-3])
    begun = [len(engine.handlers)]
    while connection.behind:
        connection.go_on()
        begun.append(len(engine.handlers))
    connection.receive(read[-3:])
    assert begun == [4, 8, 10]
    assert [handler.messages for handler in engine.handlers] == [[b"x"]] * 10
    assert names(engine.output()) == ["Headers", "Data", "Headers"] * 10


def test_bytes_that_come_while_a_part_is_put_off_follow_it():
    engine = Engine(limits=Limits(streams_at_once=2))
    engine.connection.receive(b"".join(frame(HEADERS, 4, number, block()) for number in (1, 3, 5)))
    assert engine.connection.behind
    engine.connection.receive(frame(DATA, 0, 5, framed(b"x")))
    while engine.connection.behind:
        engine.connection.go_on()
    assert [handler.messages for handler in engine.handlers] == [[], [], [b"x"]]


@pytest.mark.parametrize(
    ("cause", "data"),
    [
        ("pings", frame(PING, 0, 0, bytes(8))),
        ("settings", frame(SETTINGS, 0, 0)),
        ("empty_frames", frame(DATA, 0, 1)),
        ("priorities", frame(PRIORITY, 0, 1, bytes(5))),
        ("window_updates", frame(WINDOW, 0, 1, word(1))),
        ("unknown_frames", frame(77, 0, 1, b"x")),
        ("goaways", frame(GOAWAY, 0, 0, bytes(8))),
    ],
)
def test_floods_end_the_connection_after_a_burst(cause, data):
    engine = Engine(limits=Limits(burst=100))
    engine.open()
    engine.receive(data * 90)
    assert not engine.connection.closing
    engine.connection.now = 1.0
    engine.receive(data * 30)  # the bucket gained 33
    assert not engine.connection.closing
    assert goaway_code(engine, engine.receive(data * 30)) == CALM
    assert engine.abuses == [cause]
    assert engine.handler.count("closed") == 1


def aborted(number: int) -> bytes:
    return frame(HEADERS, 4, number, block()) + frame(RST, 0, number, word(8))


def flooded(engine: Engine, first: int, until: float) -> int:
    """Sends aborted streams from this number on as fast as they are read, until a time. Returns the next number."""
    connection, number = engine.connection, first
    while connection.now < until:
        if connection.behind:
            connection.now = max(connection.now, connection.slow_until)
            connection.go_on()
        else:
            connection.receive(aborted(number))
            number += 2
    return number


def test_rapid_resets_slow_the_connection_down_and_end_no_stream():
    engine = Engine(limits=Limits(burst=100, resets_per_second=50.0))
    engine.open()
    taken = (flooded(engine, 3, until=10.0) - 3) / 2
    assert 100 + 10 * 50 <= taken <= 100 + 10 * (50 + 33) + 5
    assert not engine.connection.closing
    assert set(engine.abuses) == {"resets"}
    assert engine.handlers[0].events == []


def test_the_rest_of_a_read_waits_while_a_connection_is_slow():
    engine = Engine(limits=Limits(burst=10, resets_per_second=10.0))
    connection = engine.connection
    connection.receive(b"".join(aborted(number) for number in range(1, 101, 2)))
    assert connection.behind
    before = len(engine.handlers)
    connection.now = connection.slow_until
    connection.go_on()
    assert connection.behind
    assert len(engine.handlers) <= before + 5


def test_a_gateway_that_relays_400_aborts_a_second_among_good_streams_never_waits():
    engine = Engine(Echo)
    connection, number = engine.connection, 1
    for turn in range(4_000):
        connection.now = turn / 400
        connection.receive(aborted(number))
        assert not connection.behind
        if not turn % 4:
            engine.open(number + 2)
            engine.receive(frame(DATA, 1, number + 2, framed(b"good")))
            assert engine.handler.events == [("message", b"good"), ("half_closed", b"")]
        number += 4
    assert not connection.closing


def test_all_connections_together_have_a_rate_of_early_resets():
    budget = Budget()
    engines = [Engine(limits=Limits(burst=10), budget=budget) for _ in range(10)]
    numbers = [1] * len(engines)
    for tenth in range(1, 21):
        for at, engine in enumerate(engines):
            numbers[at] = flooded(engine, numbers[at], until=tenth / 10)
    taken = sum(number // 2 for number in numbers)
    assert 0.2 * RESETS_OF_ALL_PER_SECOND * 2 < taken < 1.3 * RESETS_OF_ALL_PER_SECOND * 2
    calm = Engine(budget=budget)
    calm.open()
    assert not calm.connection.behind


def test_resets_of_answered_or_old_streams_are_no_attack():
    engine = Engine(limits=Limits(burst=10))
    for number in range(1, 200, 2):
        engine.open(number)
        if number % 4 == 1:
            engine.handler.stream.send(b"x")
        else:
            engine.connection.now += 1.5
        engine.receive(frame(RST, 0, number, word(8)))
    assert not engine.connection.closing


def test_pings_that_go_with_data_are_no_flood():
    engine = Engine(Echo, limits=Limits(burst=10))
    engine.open()
    engine.receive(frame(WINDOW, 0, 0, word(1 << 20)) + frame(WINDOW, 0, 1, word(1 << 20)))
    for _ in range(100):
        engine.send(b"short")
        engine.receive(frame(PING, 0, 0, bytes(8)) + frame(WINDOW, 0, 0, word(10)) + frame(WINDOW, 0, 1, word(10)))
    assert not engine.connection.closing


def test_opening_a_window_byte_by_byte_is_a_flood_even_if_it_lets_bytes_out():
    engine = Engine(Echo, limits=Limits(burst=10))
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    engine.open()
    engine.send(bytes(1000))
    for _ in range(100):
        engine.receive(frame(WINDOW, 0, 1, word(1)))
    assert engine.abuses == ["window_updates"]


@pytest.mark.parametrize(
    ("code", "provoke"),
    [
        (PROTOCOL_ERROR, lambda number: frame(WINDOW, 0, number, word(0))),
        (FLOW_CONTROL_ERROR, lambda number: frame(WINDOW, 0, number, word((1 << 31) - 1))),
        (FRAME_SIZE_ERROR, lambda number: frame(PRIORITY, 0, number, bytes(4))),
        (PROTOCOL_ERROR, lambda number: frame(PRIORITY, 0, number, word(number) + b"\0")),
        (STREAM_CLOSED, lambda number: frame(DATA, 1, number, framed(b"x")) + frame(DATA, 0, number, b"x")),
        (STREAM_CLOSED, lambda number: frame(DATA, 1, number, framed(b"x")) + frame(HEADERS, 5, number, block())),
        (PROTOCOL_ERROR, lambda number: frame(HEADERS, 4, number, block([("a", "b")]))),
        (PROTOCOL_ERROR, lambda number: frame(HEADERS, 5, number, block([(":path", "/")]))),
    ],
)
def test_resets_that_the_peer_provokes_end_the_connection_like_resets_by_the_peer(code, provoke):
    engine = Engine(limits=Limits(burst=20))
    for number in range(1, 100, 2):
        frames = engine.receive(frame(HEADERS, 4, number, block()) + provoke(number))
        if engine.connection.closing:
            break
        assert reset_code(frames) == code
        assert engine.handler.count("closed") == 1
        assert not engine.connection.streams
    assert number // 2 == 20
    assert goaway_code(engine, frames) == CALM
    assert engine.abuses in (["provoked_resets"], ["window_updates"])  # the first bucket that is empty


def test_the_text_of_the_goaway_names_the_cause():
    engine = Engine(limits=Limits(burst=1))
    *_, goaway = engine.receive(frame(PING, 0, 0, bytes(8)) * 2)
    assert goaway.additional_data == b"too many PING frames"


@pytest.mark.parametrize(
    ("cause", "request_"),
    [
        ("refused_requests", lambda n: frame(HEADERS, 4, n, block(path="/test/Nothing"))),
        ("refused_requests", lambda n: frame(HEADERS, 5, n, block(method="GET"))),
        ("empty_streams", lambda n: frame(HEADERS, 5, n, block())),
        ("provoked_resets", lambda n: frame(HEADERS, 5, n, block([(":method", "POST")]))),
        ("provoked_resets", lambda n: frame(HEADERS, 4, n, block()) + frame(DATA, 0, n, framed(b"x", 2))),
        ("provoked_resets", lambda n: frame(HEADERS, 4, n, block()) + frame(DATA, 1, n, framed(b"xyz")[:6])),
    ],
)
def test_useless_streams_are_bounded(cause, request_):
    def make(path, metadata, stream):
        return None if path == "/test/Nothing" else Echo(path, metadata, stream)

    engine = Engine(make, limits=Limits(burst=20))
    for number in range(1, 100, 2):
        engine.receive(request_(number))
    assert engine.abuses == [cause]


def test_answered_streams_earn_tokens_for_resets():
    engine = Engine(Echo, limits=Limits(burst=5))
    for number in range(1, 400, 4):
        engine.receive(frame(HEADERS, 4, number, block()) + frame(DATA, 1, number, framed(b"x")))
        engine.receive(frame(HEADERS, 4, number + 2, block()) + frame(RST, 0, number + 2, word(8)))
    assert not engine.connection.closing


def test_settings_that_change_windows_again_and_again_are_applied_once_or_refused():
    engine = Engine()
    engine.open()
    moves = b"".join(setting(4, value) for value in range(64))
    (ack,) = engine.receive(frame(SETTINGS, 0, 0, moves))
    assert "ACK" in ack.flags
    assert engine.connection.streams[1].window == 63
    assert goaway_code(engine, engine.receive(frame(SETTINGS, 0, 0, moves + setting(4, 1)))) == CALM
    assert engine.abuses == ["settings"]


def test_stray_frames_on_finished_streams_are_bounded():
    engine = Engine(Echo, limits=Limits(burst=10))
    engine.open(flags=5)
    for _ in range(30):
        engine.receive(frame(RST, 0, 1, word(8)))
    assert engine.abuses == ["stray_frames"]
