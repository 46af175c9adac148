"""Flow control in both directions: windows, blocked streams that take turns, and ends behind queued messages."""

import h2.settings
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.workers.transport.data_frames import BIG, data_frames
from tests.workers.transport.helpers import (
    DATA,
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
from workers.transport.limits import MIB
from workers.transport.server_stream import STREAM_CREDIT
from workers.transport.session import CONNECTION_CREDIT


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


def test_answers_keep_to_the_peers_windows_and_continue_when_they_open():
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


operations = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 2), st.integers(0, 40_000)),
    st.tuples(st.just("window"), st.integers(0, 3), st.integers(1, 50_000)),
    st.tuples(st.just("initial"), st.just(0), st.integers(0, 70_000)),
    st.tuples(st.just("frame"), st.just(0), st.integers(16384, 40_000)),
    st.tuples(st.just("socket"), st.just(0), st.integers(0, 1)),
)


@given(st.lists(operations, max_size=40))
@examples(150)
def test_the_peers_windows_are_never_overrun_and_everything_arrives_when_they_open(steps):
    """The h2 client raises for DATA beyond one of its windows or above its frame size."""
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
