"""gRPC messages in pieces, compression, limits, and flow control in both directions."""

import gzip

import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.transport.helpers import (
    DATA,
    RST,
    SETTINGS,
    WINDOW,
    Client,
    Echo,
    Engine,
    fields,
    frame,
    framed,
    messages,
    names,
    payload,
    setting,
    word,
)
from workers.transport.http2 import CONNECTION_CREDIT, STREAM_CREDIT
from workers.transport.limits import MIB, Budget, Limits

BIG = bytes(range(256)) * 1600  # 409,600 bytes


def data_frames(data: bytes, number: int = 1, size: int = 16384, end: bool = False) -> bytes:
    cuts = range(0, len(data), size)
    return b"".join(
        frame(DATA, 1 if end and at + size >= len(data) else 0, number, data[at : at + size]) for at in cuts
    )


# Messages.


@pytest.mark.parametrize("read", [1000, 16393, 65536, 1 << 20])
def test_a_long_message_over_many_frames_and_reads_arrives_whole(read):
    engine = Engine()
    engine.open()
    wire = data_frames(framed(BIG))
    for at in range(0, len(wire), read):
        engine.receive(wire[at : at + read])
    assert engine.handler.messages == [BIG]
    assert engine.connection.held == 0


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_messages_are_found_however_frames_cut_them(sent, sizes):
    engine = Engine()
    engine.open()
    wire = b"".join(framed(m) for m in sent)
    turn = 0
    while wire:
        size = sizes[turn % len(sizes)]
        engine.receive(frame(DATA, 0, 1, wire[:size]))
        wire = wire[size:]
        turn += 1
    engine.receive(frame(DATA, 1, 1))
    assert engine.handler.messages == sent
    assert engine.handler.count("half_closed") == 1
    assert engine.connection.held == 0


def test_unfinished_messages_count_as_held_until_the_stream_ends():
    engine = Engine()
    engine.open()
    engine.receive(data_frames(framed(BIG)[:100_005]))
    assert engine.connection.held == 100_000
    engine.receive(frame(RST, 0, 1, word(8)))
    assert engine.connection.held == 0


def test_an_announced_length_alone_costs_no_memory():
    engine = Engine()
    engine.open()
    engine.receive(frame(DATA, 0, 1, framed(bytes(4 * MIB))[:5]))
    assert engine.connection.held == 0


def test_a_message_above_the_limit_ends_the_stream_before_it_is_gathered():
    engine = Engine(limits=Limits(message=20_000))
    engine.open()
    answer = engine.receive(frame(DATA, 0, 1, framed(bytes(20_001))[:10]))
    assert fields(answer[0])["grpc-status"] == "8"
    assert fields(answer[0])["grpc-message"] == "message of 20001 bytes is larger than the limit of 20000"
    assert engine.handler.events == [("closed", b"")]
    assert engine.receive(data_frames(framed(bytes(20_001))[10:])) == []


def test_a_message_at_the_limit_is_taken():
    engine = Engine(limits=Limits(message=20_000))
    engine.open()
    engine.receive(data_frames(framed(bytes(20_000))))
    assert engine.handler.messages == [bytes(20_000)]


def test_a_stream_that_ends_within_a_message_fails():
    engine = Engine()
    engine.open()
    answer = engine.receive(frame(DATA, 1, 1, framed(b"abc")[:6]))
    assert fields(answer[0])["grpc-status"] == "13"
    assert engine.handler.events == [("closed", b"")]


def test_unfinished_messages_of_one_connection_are_bounded():
    engine = Engine(limits=Limits(connection_held=100_000))
    for number in (1, 3, 5):
        engine.open(number)
        engine.receive(data_frames(framed(BIG)[:40_005], number))
    assert [h.count("closed") for h in engine.handlers] == [0, 0, 1]
    assert engine.connection.held == 80_000


def test_a_budget_bounds_all_connections_together():
    budget = Budget(100_000)
    engines = [Engine(budget=budget) for _ in range(3)]
    for engine in engines:
        engine.open()
        engine.receive(data_frames(framed(BIG)[:40_005]))
    assert [e.handler.count("closed") for e in engines] == [0, 0, 1]
    for engine in engines:
        engine.connection.lost()
    assert budget.used == 0


def test_gzip_messages_are_decompressed():
    engine = Engine()
    engine.open(grpc_encoding="gzip")
    engine.receive(data_frames(framed(gzip.compress(BIG), 1)) + frame(DATA, 0, 1, framed(b"plain")))
    assert engine.handler.messages == [BIG, b"plain"]


@pytest.mark.parametrize(
    ("encoding", "message", "status"),
    [
        ("gzip", framed(gzip.compress(bytes(5 * MIB)), 1), "8"),
        ("gzip", framed(b"not gzip at all", 1), "13"),
        ("gzip", framed(gzip.compress(b"hello")[:-4], 1), "13"),
        ("deflate", framed(b"x", 1), "12"),
        ("identity", framed(b"x", 1), "13"),
        (None, framed(b"x", 1), "13"),
        ("gzip", framed(b"x", 2), "13"),
    ],
)
def test_messages_that_cannot_be_decompressed_end_the_stream(encoding, message, status):
    engine = Engine()
    engine.open(grpc_encoding=encoding)
    answer = engine.receive(data_frames(message))
    assert fields(answer[0])["grpc-status"] == status
    assert engine.handler.events == [("closed", b"")]


# Windows towards us.


def test_stream_window_is_given_back_when_half_of_it_is_used():
    engine = Engine()
    engine.open()
    wire = data_frames(framed(bytes(MIB)))
    out = []
    for _ in range(20):
        out += engine.receive(wire)
    assert names(out) == ["WindowUpdate"] * 2
    assert all(f.stream_id == 1 and f.window_increment > STREAM_CREDIT // 2 for f in out)


def test_connection_window_is_given_back_when_half_of_it_is_used():
    engine = Engine()
    engine.open()
    engine.connection._credit = CONNECTION_CREDIT // 2 + 3
    (update,) = engine.send(b"x")
    assert (update.stream_id, update.window_increment) == (0, CONNECTION_CREDIT // 2 + 3)


@pytest.mark.parametrize("whole_messages", [True, False])
def test_a_stream_that_overruns_its_window_is_reset(whole_messages):
    engine = Engine()
    engine.open()
    engine.connection.streams[1].credit = 10
    engine.open(3)
    answer = engine.receive(frame(DATA, 0, 1, framed(bytes(20)) if whole_messages else bytes(20)))
    assert answer[0].error_code == 3
    assert engine.handlers[0].events == [("closed", b"")]
    assert not engine.connection.closing


# Windows towards the peer.


def test_answers_keep_to_the_peers_windows_and_go_on_when_they_open():
    engine = Engine()
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 10)))
    engine.open()
    engine.handler.stream.send(b"hello world")
    assert payload(engine.output()) == framed(b"hello world")[:10]
    assert payload(engine.receive(frame(WINDOW, 0, 1, word(4)))) == framed(b"hello world")[10:14]
    engine.handler.stream.end()
    answer = engine.receive(frame(WINDOW, 0, 1, word(100)))
    assert payload(answer) == framed(b"hello world")[14:]
    assert fields(answer[1]) == {"grpc-status": "0"}
    assert not engine.connection.streams


def test_a_smaller_initial_window_makes_windows_negative():
    engine = Engine()
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 20)))
    engine.open()
    engine.handler.stream.send(bytes(30))
    assert len(payload(engine.output())) == 20
    assert payload(engine.receive(frame(SETTINGS, 0, 0, setting(4, 5)))) == b""
    assert payload(engine.receive(frame(WINDOW, 0, 1, word(15)))) == b""
    assert len(payload(engine.receive(frame(WINDOW, 0, 1, word(3))))) == 3
    assert len(payload(engine.receive(frame(SETTINGS, 0, 0, setting(4, 100))))) == 12


def test_a_window_above_the_maximum_is_an_error_of_the_stream_or_the_connection():
    engine = Engine()
    engine.open()
    assert engine.receive(frame(WINDOW, 0, 1, word(2**31 - 1)))[0].error_code == 3
    assert engine.handler.events == [("closed", b"")]
    engine.receive(frame(WINDOW, 0, 0, word(2**31 - 1)))
    assert engine.connection.closing
    engine = Engine()
    engine.open()
    engine.receive(frame(WINDOW, 0, 1, word(2**31 - 1 - 65535)))
    assert engine.receive(frame(SETTINGS, 0, 0, setting(4, 65536)))[-1].error_code == 3


def test_frames_are_no_larger_than_the_peer_allows():
    engine = Engine()
    engine.receive(frame(WINDOW, 0, 0, word(MIB)) + frame(SETTINGS, 0, 0, setting(4, MIB)))
    engine.open()
    engine.handler.stream.send(bytes(40_000))
    assert [len(f.data) for f in engine.output()[1:]] == [16384, 16384, 7237]
    engine.receive(frame(SETTINGS, 0, 0, setting(5, 30_000)))
    engine.handler.stream.send(bytes(40_000))
    assert [len(f.data) for f in engine.output()] == [30_000, 10_005]


def test_ready_made_messages_are_cut_like_any_other():
    engine = Engine()
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 7)))
    engine.open()
    stream = engine.handler.stream
    stream.send(b"abcdefg")
    stream.send_raw(framed(b"x") + framed(b"yz"))
    out = payload(engine.output())
    for _ in range(30):
        out += payload(engine.receive(frame(WINDOW, 0, 1, word(1))))
    assert messages(out) == [b"abcdefg", b"x", b"yz"]


def test_blocked_streams_take_turns():
    engine = Engine()
    engine.receive(frame(SETTINGS, 0, 0, setting(4, MIB)) + frame(WINDOW, 0, 0, word(1)))
    engine.open(1)
    engine.handlers[0].stream.send(bytes(65531))  # uses up the connection's window
    for number in (3, 5, 7):
        engine.open(number)
        engine.handler.stream.send(bytes(100_000))
    engine.output()
    sent = [f.stream_id for f in engine.receive(frame(WINDOW, 0, 0, word(9 * 16384)))]
    assert sent == [3, 5, 7] * 3


def test_a_stream_with_a_closed_window_does_not_hold_up_others():
    engine = Engine(Echo)
    engine.open(1)
    engine.open(3)
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)) + frame(WINDOW, 0, 3, word(100)))
    assert payload(engine.send(b"blocked", 1), 1) == b""
    assert messages(payload(engine.send(b"free", 3), 3)) == [b"free"]


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


def test_output_that_is_never_taken_costs_bounded_memory():
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


def test_output_of_one_connection_is_bounded_over_its_streams():
    engine = Engine(Echo, limits=Limits(connection_held=100_000))
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    for number in (1, 3, 5):
        engine.open(number)
        for _ in range(4):
            engine.send(bytes(9_995), number)
    assert [h.count("closed") for h in engine.handlers] == [0, 0, 1]
    assert engine.connection.held == engine.connection.unread == 80_000


def test_one_connection_never_holds_more_than_half_of_what_there_is_for_all():
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
    """With 300 kB that wait for a window."""
    engine = Engine(Echo, limits=Limits(hoard=100_000, hoard_read=1000, hoard_seconds=0.5))
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)) + frame(WINDOW, 0, 0, word(1 << 30)))
    for number in (1, 3, 5):
        engine.open(number)
        engine.handler.stream.send(bytes(99_995))
    engine.output()
    assert engine.connection.unread == 300_000
    return engine


@pytest.mark.parametrize("seen", ["at a beat", "with more of it"])
def test_a_connection_that_hoards_answers_is_closed(seen):
    engine = hoarder()
    assert engine.connection.expire(0.4), "there is something to look after"
    assert not engine.connection.closing
    engine.receive(frame(WINDOW, 0, 1, word(999)))
    if seen == "at a beat":
        assert not engine.connection.expire(0.6)
    else:
        engine.connection.now = 0.6
        engine.handler.stream.send(b"more")
    assert engine.output()[-1].error_code == 11
    assert [h.count("closed") for h in engine.handlers] == [1, 1, 1]
    assert engine.abuses == ["output_limit"]
    assert engine.connection.held == engine.connection.unread == 0


def test_who_reads_much_at_a_fair_pace_is_no_hoarder():
    engine = hoarder()
    for tick in range(1, 90):
        engine.receive(frame(WINDOW, 0, 1 + tick % 3 * 2, word(2000)))
        engine.connection.expire(tick / 2)
    assert not engine.connection.closing


@pytest.mark.parametrize(("taken", "closed"), [(2 << 20, False), (1000, True)])
def test_a_gateway_that_has_read_much_may_be_busy_for_seconds_and_one_that_has_read_nothing_hoards(taken, closed):
    engine = Engine(Echo)
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)) + frame(WINDOW, 0, 0, word(1 << 30)))
    for number in (1, 3):
        engine.open(number)
        engine.receive(frame(WINDOW, 0, number, word(taken)))
        engine.handler.stream.send(bytes(30_000_000))
    for tick in range(1, 5):
        engine.connection.expire(float(tick))
    assert engine.connection.closing is closed


def test_a_hoarder_that_reads_on_is_no_longer_looked_after():
    engine = hoarder()
    assert engine.connection.expire(0.1)
    engine.receive(b"".join(frame(WINDOW, 0, number, word(1 << 20)) for number in (1, 3, 5)))
    assert not engine.connection.expire(0.2)


def test_a_connection_whose_own_window_stalls_is_closed():
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


def test_an_end_waits_behind_queued_messages_and_no_more_can_be_sent():
    engine = Engine()
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    engine.open(flags=5)
    stream = engine.handler.stream
    stream.send(b"a")
    stream.end(5, "gone")
    stream.send(b"b")
    stream.end(0)
    engine.output()
    answer = engine.receive(frame(WINDOW, 0, 1, word(100)))
    assert messages(payload(answer)) == [b"a"]
    assert fields(answer[-1]) == {"grpc-status": "5", "grpc-message": "gone"}
    assert engine.handler.count("closed") == 0


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


operations = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 2), st.integers(0, 40_000)),
    st.tuples(st.just("window"), st.integers(0, 3), st.integers(1, 50_000)),
    st.tuples(st.just("initial"), st.just(0), st.integers(0, 70_000)),
    st.tuples(st.just("frame"), st.just(0), st.integers(16384, 40_000)),
    st.tuples(st.just("socket"), st.just(0), st.integers(0, 1)),
)


@given(st.lists(operations, max_size=40))
@settings(max_examples=150, deadline=None)
def test_the_peers_windows_are_never_overrun_and_everything_arrives_when_they_open(steps):
    """The h2 client raises on DATA beyond any window it gave or above its frame size."""
    engine = Engine(hello=False)
    client = Client(engine)
    numbers = [client.request(end=True) for _ in range(3)]
    sent: dict[int, list[bytes]] = {number: [] for number in numbers}
    for what, which, value in steps:
        if what == "send":
            message = bytes((which,)) * value
            engine.handlers[which].stream.send(message)
            sent[numbers[which]].append(message)
        elif what == "window":
            client.h2.increment_flow_control_window(value, numbers[which] if which < 3 else None)
        elif what == "initial":
            client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: value})
        elif what == "frame":
            client.h2.update_settings({h2.settings.SettingCodes.MAX_FRAME_SIZE: value})
        elif value:
            engine.connection.pause()
        else:
            engine.connection.resume()
        client.exchange()
    for handler in engine.handlers:
        handler.stream.end()
    engine.connection.resume()
    client.h2.increment_flow_control_window(1 << 22)
    for number in numbers:
        if number in engine.connection.streams:
            client.h2.increment_flow_control_window(1 << 22, number)
    client.exchange()
    for number in numbers:
        assert messages(client.received(number)) == sent[number]
        assert client.trailers(number)["grpc-status"] == "0"
    assert engine.connection.held == 0
    assert not engine.connection.streams
    assert all(h.count("closed") == 0 for h in engine.handlers)


def test_a_body_echo_does_not_lock_up_when_both_windows_are_small():
    engine = Engine(Echo, hello=False)
    client = Client(engine)
    number = client.request()
    wire = framed(BIG[:100_000]) * 3
    while wire:
        size = min(len(wire), 16384, client.h2.local_flow_control_window(number))
        client.h2.send_data(number, wire[:size])
        wire = wire[size:]
        for event in client.exchange():
            if type(event).__name__ == "DataReceived":
                client.h2.acknowledge_received_data(event.flow_controlled_length, number)
    client.h2.end_stream(number)
    for _ in range(20):
        for event in client.exchange():
            if type(event).__name__ == "DataReceived":
                client.h2.acknowledge_received_data(event.flow_controlled_length, number)
    assert messages(client.received(number)) == [BIG[:100_000]] * 3
    assert client.trailers(number) == {"grpc-status": "0"}


def test_a_closed_handler_may_write_to_other_streams():
    engine = Engine()
    engine.open(1)
    engine.open(3)

    first, second = engine.handlers
    first.closed = lambda: second.stream.send(b"your turn")
    assert messages(payload(engine.receive(frame(RST, 0, 1, word(8))), 3)) == [b"your turn"]


# What handlers keep.


def test_what_handlers_keep_counts_for_the_connection_until_they_release_it_or_end():
    engine = Engine(limits=Limits(connection_held=100))
    for number in (1, 3, 5):
        engine.open(number)
    first, second, third = (handler.stream for handler in engine.handlers)
    assert first.hold(60) and second.hold(40)
    assert not third.hold(1)
    assert engine.connection.held == 101
    first.release()
    first.release()
    assert engine.connection.held == 41
    second.end()
    engine.receive(frame(RST, 0, 5, word(8)))
    assert engine.connection.held == 0
    assert not third.hold(1)
    assert engine.connection.held == 0
