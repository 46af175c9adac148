"""The engine's frames: what it takes, what it refuses and how, and who is told."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.transport.helpers import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    PUSH,
    RST,
    SETTINGS,
    WINDOW,
    Client,
    Echo,
    Engine,
    Recorder,
    block,
    fields,
    frame,
    framed,
    messages,
    names,
    payload,
    setting,
    word,
)
from workers.transport.headers import ClientKind
from workers.transport.http2 import PREFACE
from workers.transport.limits import Limits

PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CALM = 7, 8, 9, 11


def goaway_code(engine: Engine, frames) -> int:
    """The error code of the GOAWAY that must have ended the connection."""
    assert engine.connection.closing
    assert names(frames)[-1] == "GoAway"
    return frames[-1].error_code


def reset_code(frames) -> int:
    resets = [f for f in frames if type(f).__name__ == "RstStreamFrame"]
    assert len(resets) == 1
    return resets[0].error_code


# A normal life.


def test_a_client_of_the_h2_library_gets_its_messages_back():
    engine = Engine(Echo, hello=False)
    client = Client(engine)
    number = client.request()
    client.send(number, framed(b"one") + framed(b"two"), end=True)
    assert messages(client.received(number)) == [b"one", b"two"]
    assert client.trailers(number) == {"grpc-status": "0"}
    assert engine.handler.events == [("message", b"one"), ("message", b"two"), ("half_closed", b"")]
    assert engine.handler.path == "/test/Record"
    assert (b"te", b"trailers") in engine.handler.metadata


def test_the_greeting_advertises_the_low_stream_limit_large_windows_and_the_limit_of_headers():
    engine = Engine()
    first, update, ack = engine.greeting
    assert first.settings == {3: 8, 4: 1 << 24, 6: 64 << 10}
    assert update.window_increment == (1 << 30) - 65535
    assert names([ack]) == ["Settings"] and "ACK" in ack.flags


def test_many_frames_of_one_read_are_answered_by_one_output():
    engine = Engine(Echo)
    read = b"".join(frame(HEADERS, 4, n, block()) + frame(DATA, 1, n, framed(b"x")) for n in (1, 3, 5))
    assert names(engine.receive(read)) == ["Headers", "Data", "Headers"] * 3


def test_an_end_without_any_message_is_one_header_block():
    engine = Engine()
    engine.open()
    engine.handler.stream.end(7, "no: 100%\n é")
    headers, reset = engine.output()
    assert "END_STREAM" in headers.flags
    assert fields(headers) == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "7",
        "grpc-message": "no: 100%25%0A %C3%A9",
    }
    assert reset.error_code == 0  # the peer needn't send the rest


def test_an_end_after_the_peers_end_sends_no_reset():
    engine = Engine()
    engine.open(flags=5)
    engine.handler.stream.end()
    assert names(engine.output()) == ["Headers"]
    assert not engine.connection.streams


def test_a_handler_may_answer_and_end_before_the_peer_is_done_and_late_data_is_ignored():
    engine = Engine()
    engine.open()
    engine.handler.stream.send(b"early")
    engine.handler.stream.end()
    assert names(engine.output()) == ["Headers", "Data", "Headers", "RstStream"]
    assert engine.send(b"late") == []
    assert engine.receive(frame(DATA, 1, 1)) == []
    assert engine.receive(frame(RST, 0, 1, word(8))) == []
    assert engine.handler.events == []


def test_an_unknown_method_is_unimplemented():
    engine = Engine(lambda path, metadata, stream: None)
    headers, _ = engine.open()
    assert fields(headers)["grpc-status"] == "12"
    assert "/test/Record" in fields(headers)["grpc-message"]


def test_an_application_may_end_a_stream_at_once():
    def refuse(path, metadata, stream):
        stream.end(16, "who are you")

    headers, _ = Engine(refuse).open()
    assert fields(headers)["grpc-status"] == "16"


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"method": "GET"}, "405"), ({"content_type": "text/html"}, "415"), ({"content_type": None}, "415")],
)
def test_what_is_not_grpc_is_answered_in_the_words_of_http(changes, status):
    engine = Engine()
    assert engine.open(**changes) == []
    answer = engine.receive(frame(DATA, 1, 1, b"not framed"))
    assert names(answer) == ["Headers", "Data", "Data"]
    assert fields(answer[0])[":status"] == status
    assert engine.handlers == []
    assert not engine.connection.streams


@pytest.mark.parametrize("value", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_grpc_content_types_with_a_suffix_are_grpc(value):
    engine = Engine()
    engine.open(content_type=value)
    assert engine.handler.events == []


def test_a_handler_that_raises_ends_its_stream_alone():
    engine = Engine()
    engine.open(1)
    engine.open(3)

    def fail(message):
        raise ValueError("bug")

    engine.handlers[0].on_message = fail
    answer = engine.send(b"x", 1)
    assert fields(answer[0])["grpc-status"] == "13"
    assert "bug" not in str(fields(answer[0]))
    assert [type(e) for e in engine.errors] == [ValueError]
    assert engine.handlers[0].count("closed") == 1
    engine.send(b"y", 3)
    assert engine.handlers[1].messages == [b"y"]


def test_an_application_that_raises_ends_the_stream_and_not_the_connection():
    def fail(path, metadata, stream):
        raise KeyError("bug")

    engine = Engine(fail)
    answer = engine.open()
    assert fields(answer[0])["grpc-status"] == "13"
    assert not engine.connection.closing


def test_answers_outside_a_read_wake_the_driver_once():
    engine = Engine()
    engine.open()
    engine.wakes = 0
    engine.handler.stream.send(b"a")
    engine.handler.stream.send(b"b")
    assert engine.wakes == 1
    assert messages(payload(engine.output())) == [b"a", b"b"]
    engine.handler.stream.end()
    assert engine.wakes == 2


def test_nothing_wakes_the_driver_during_a_read():
    engine = Engine(Echo)
    engine.wakes = 0
    engine.receive(frame(HEADERS, 4, 1, block()) + frame(DATA, 1, 1, framed(b"x")))
    assert engine.wakes == 0


def test_writing_to_a_stream_that_is_gone_does_nothing():
    engine = Engine()
    engine.open()
    engine.receive(frame(RST, 0, 1, word(8)))
    stream = engine.handler.stream
    stream.send(b"x")
    stream.send(b"xy")
    stream.send_raw(framed(b"x"))
    stream.send(bytes(100_000))
    stream.end()
    assert engine.output() == []
    assert engine.handler.count("closed") == 1


# Requests.


@pytest.mark.parametrize("pad", [0, 1, 255])
def test_padding_and_priority_are_stripped(pad):
    engine = Engine(Echo)
    padding = bytes(pad)
    engine.receive(frame(HEADERS, 4 | 8 | 32, 1, bytes((pad,)) + word(0) + b"\x10" + block() + padding))
    answer = engine.receive(frame(DATA, 8 | 1, 1, bytes((pad,)) + framed(b"hello") + padding))
    assert messages(payload(answer)) == [b"hello"]


@pytest.mark.parametrize("kind", [HEADERS, DATA])
def test_more_padding_than_frame_is_a_connection_error(kind):
    engine = Engine()
    engine.open()
    answer = engine.receive(frame(kind, 8 | 4, 3 if kind == HEADERS else 1, b"\x09" + bytes(8)))
    assert goaway_code(engine, answer) == PROTOCOL_ERROR
    assert engine.handler.count("closed") == 1


def test_a_header_block_may_come_in_continuations_cut_anywhere():
    whole = block()
    for cut in range(len(whole)):
        engine = Engine()
        engine.receive(frame(HEADERS, 1, 1, whole[:cut]) + frame(CONTINUATION, 4, 1, whole[cut:]))
        assert engine.handler.events == [("half_closed", b"")]


@pytest.mark.parametrize(
    "between",
    [frame(PING, 0, 0, bytes(8)), frame(DATA, 0, 1, b"x"), frame(CONTINUATION, 4, 3), frame(HEADERS, 4, 3, block())],
)
def test_nothing_may_come_between_the_parts_of_a_header_block(between):
    engine = Engine()
    answer = engine.receive(frame(HEADERS, 0, 1, block()) + between)
    assert goaway_code(engine, answer) == PROTOCOL_ERROR


def test_a_ninth_continuation_ends_the_connection():
    engine = Engine()
    engine.receive(frame(HEADERS, 0, 1, block()))
    for _ in range(8):
        assert engine.receive(frame(CONTINUATION, 0, 1)) == []
    assert goaway_code(engine, engine.receive(frame(CONTINUATION, 0, 1))) == CALM
    assert engine.abuses == ["header_block"]


def test_a_header_block_above_16_kib_ends_the_connection():
    engine = Engine()
    engine.receive(frame(HEADERS, 0, 1, bytes(16000)))
    assert goaway_code(engine, engine.receive(frame(CONTINUATION, 4, 1, bytes(1000)))) == CALM


def test_a_header_block_that_is_not_finished_in_time_ends_the_connection():
    engine = Engine()
    engine.receive(frame(HEADERS, 0, 1, block()))
    engine.connection.tick(4.9)
    assert not engine.connection.closing
    engine.connection.tick(5.1)
    assert goaway_code(engine, engine.output()) == CALM
    assert engine.abuses == ["header_timeout"]


def test_trailers_of_the_peer_half_close_the_stream():
    engine = Engine(Echo)
    engine.open()
    engine.send(b"x")
    answer = engine.receive(frame(HEADERS, 5, 1, block([("x-checksum", "1")])))
    assert engine.handler.events == [("message", b"x"), ("half_closed", b"")]
    assert fields(answer[-1]) == {"grpc-status": "0"}


@pytest.mark.parametrize(("flags", "headers"), [(4, [("a", "b")]), (5, [(":path", "/")]), (5, [("A", "b")])])
def test_bad_trailers_reset_the_stream(flags, headers):
    engine = Engine()
    engine.open()
    assert reset_code(engine.receive(frame(HEADERS, flags, 1, block(headers)))) == PROTOCOL_ERROR
    assert engine.handler.events == [("closed", b"")]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": None},
        {"path": None},
        {"scheme": None},
        {"path": ""},
        {"te": "gzip"},
        {"connection": "close"},
        {"X-Upper": "1"},
        {"content_length": "x"},
        {"x": "a\nb"},
        {":late": "1"},
    ],
)
def test_malformed_requests_are_reset(changes):
    engine = Engine()
    assert reset_code(engine.open(**changes)) == PROTOCOL_ERROR
    assert engine.handlers == []
    assert not engine.connection.closing


@pytest.mark.parametrize(("length", "fits"), [("8", True), ("7", False)])
def test_content_length_must_be_true_if_given(length, fits):
    engine = Engine()
    engine.open(content_length=length)
    answer = engine.receive(frame(DATA, 9, 1, b"\x02" + framed(b"abc") + bytes(2)))
    if fits:
        assert engine.handler.count("half_closed") == 1
    else:
        assert reset_code(answer) == PROTOCOL_ERROR
        assert engine.handler.count("closed") == 1


def test_undecodable_headers_end_the_connection():
    engine = Engine()
    assert goaway_code(engine, engine.receive(frame(HEADERS, 5, 1, b"\xff\xff\xff\xff\xff"))) == COMPRESSION_ERROR


@pytest.mark.parametrize(
    "bomb",
    [
        block() + b"\x40\x01a" + b"\x7f\x81\x17" + bytes(3072) + b"\xbe" * 100,  # one byte stands for 3 KiB
        block() + b"\x82" * 130,  # fields
        block() + b"\x00\x01a" + b"\x7f\x81\x47" + b"v" * 9216,  # one field
    ],
)
def test_a_header_bomb_ends_the_connection(bomb):
    engine = Engine()
    assert goaway_code(engine, engine.receive(frame(HEADERS, 5, 1, bomb))) == CALM
    assert engine.abuses == ["header_list"]


# Stream states.


def test_data_after_the_peers_end_is_a_stream_error():
    engine = Engine()
    engine.open(flags=5)
    assert reset_code(engine.send(b"x")) == STREAM_CLOSED
    assert engine.handler.events == [("half_closed", b""), ("closed", b"")]


def test_headers_after_the_peers_end_is_a_stream_error():
    engine = Engine()
    engine.open(flags=5)
    assert reset_code(engine.open(flags=5)) == STREAM_CLOSED


def test_data_on_a_finished_stream_is_reset_and_headers_end_the_connection():
    engine = Engine(Echo)
    engine.open(flags=5)
    assert reset_code(engine.send(b"x")) == STREAM_CLOSED
    engine = Engine(Echo)
    engine.open(flags=5)
    assert goaway_code(engine, engine.open(flags=5)) == STREAM_CLOSED


@pytest.mark.parametrize(
    "data",
    [
        frame(DATA, 0, 3, b"x"),
        frame(DATA, 0, 0, b"x"),
        frame(DATA, 0, 2, b"x"),
        frame(HEADERS, 5, 0, block()),
        frame(HEADERS, 5, 4, block()),
        frame(RST, 0, 3, word(8)),
        frame(RST, 0, 0, word(8)),
        frame(WINDOW, 0, 3, word(1)),
        frame(WINDOW, 0, 0, word(0)),
        frame(CONTINUATION, 4, 1, b""),
        frame(PUSH, 4, 1, word(2)),
        frame(PING, 0, 1, bytes(8)),
        frame(SETTINGS, 0, 1, b""),
        frame(GOAWAY, 0, 1, bytes(8)),
        frame(PRIORITY, 0, 0, bytes(5)),
        frame(SETTINGS, 0, 0, setting(2, 2)),
        frame(SETTINGS, 0, 0, setting(5, 16383)),
        frame(SETTINGS, 0, 0, setting(5, 1 << 24)),
    ],
)
def test_connection_errors(data):
    engine = Engine()
    engine.open()
    assert goaway_code(engine, engine.receive(data)) == PROTOCOL_ERROR
    assert engine.handler.events == [("closed", b"")]
    assert engine.receive(frame(PING, 0, 0, bytes(8))) == []


@pytest.mark.parametrize(
    "data",
    [
        frame(RST, 0, 1, bytes(3)),
        frame(WINDOW, 0, 1, bytes(3)),
        frame(SETTINGS, 0, 0, bytes(5)),
        frame(SETTINGS, 1, 0, bytes(6)),
        frame(PING, 0, 0, bytes(7)),
        frame(GOAWAY, 0, 0, bytes(7)),
        frame(DATA, 8, 1, b""),
        frame(DATA, 0, 1, bytes(16385)),
        frame(HEADERS, 4 | 32, 3, bytes(4)),
        frame(11, 0, 0, bytes(16385)),
    ],
)
def test_frames_of_a_wrong_size(data):
    engine = Engine()
    engine.open()
    assert goaway_code(engine, engine.receive(data)) == FRAME_SIZE_ERROR


def test_an_oversized_frame_is_refused_before_its_payload_arrives():
    engine = Engine()
    assert goaway_code(engine, engine.receive(frame(DATA, 0, 1, bytes(16385))[:9])) == FRAME_SIZE_ERROR
    engine = Engine()
    engine.receive(frame(DATA, 0, 1, bytes(16385))[:5])
    assert goaway_code(engine, engine.receive(frame(DATA, 0, 1, bytes(16385))[5:9])) == FRAME_SIZE_ERROR


def test_a_lower_stream_number_that_was_never_opened_is_a_connection_error():
    engine = Engine()
    engine.open(5)
    assert goaway_code(engine, engine.open(3)) == PROTOCOL_ERROR


@pytest.mark.parametrize("kind", [HEADERS, PRIORITY])
def test_a_stream_that_depends_on_itself_is_reset(kind):
    engine = Engine()
    engine.open()
    if kind == HEADERS:
        answer = engine.receive(frame(HEADERS, 5 | 32, 3, word(3) + b"\x00" + block()))
    else:
        answer = engine.receive(frame(PRIORITY, 0, 1, word(1) + b"\x00"))
    assert reset_code(answer) == PROTOCOL_ERROR


def test_unknown_frames_and_settings_and_priorities_are_ignored():
    engine = Engine()
    engine.open()
    assert engine.receive(frame(0x16, 255, 1, b"hello") + frame(PRIORITY, 0, 1, bytes(5))) == []
    assert names(engine.receive(frame(SETTINGS, 0, 0, setting(99, 1)))) == ["Settings"]


def test_the_reserved_bit_of_a_stream_number_is_ignored():
    engine = Engine(Echo)
    engine.receive(frame(HEADERS, 4, 1 | 1 << 31, block()))
    assert payload(engine.receive(frame(DATA, 1, 1 | 1 << 31, framed(b"x")))) == framed(b"x")


@pytest.mark.parametrize(
    "state", ["open", "half_closed", "in_message", "answered", "ended_queued", "finished", "reset"]
)
def test_a_reset_in_every_state_is_told_at_most_once(state):
    engine = Engine()
    engine.open(flags=5 if state == "half_closed" else 4)
    stream = engine.handler.stream
    if state == "in_message":
        engine.receive(frame(DATA, 0, 1, framed(b"abc")[:6]))
    elif state == "answered":
        stream.send(b"x")
    elif state == "ended_queued":
        stream.send(bytes(100_000))
        stream.end()
    elif state == "finished":
        stream.end()
    elif state == "reset":
        engine.receive(frame(RST, 0, 1, word(8)))
    engine.output()
    assert names(engine.receive(frame(RST, 0, 1, word(8)))) == []
    assert engine.handler.count("closed") == (0 if state in ("ended_queued", "finished") else 1)
    assert not engine.connection.streams
    assert engine.connection.held == 0


def test_a_lost_connection_tells_every_open_handler_once():
    engine = Engine()
    for number in (1, 3, 5):
        engine.open(number)
    engine.handlers[1].stream.end()
    engine.connection.lost()
    engine.connection.lost()
    assert [h.count("closed") for h in engine.handlers] == [1, 0, 1]
    assert engine.output() == []


# The preface.


@pytest.mark.parametrize("data", [b"EHLO picker\r\n", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSN\r\n\r\n"])
def test_a_wrong_preface_ends_the_connection(data):
    engine = Engine(hello=False)
    frames = engine.receive(data)
    assert goaway_code(engine, frames) == PROTOCOL_ERROR
    assert names(frames)[0] == "Settings"


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_http1_is_told_in_its_own_words_what_the_port_is(method):
    engine = Engine(hello=False)
    assert engine.connection.output() == b""  # nothing before the client has spoken
    engine.connection.receive(f"{method} / HTTP/1.1\r\nhost: picker\r\n\r\n".encode())
    head, _, text = engine.connection.output().decode().partition("\r\n\r\n")
    assert engine.connection.closing
    assert head.startswith("HTTP/1.1 400 ") and "connection: close" in head
    assert ("a gRPC port of an endpoint picker" in text) == (method != "HEAD")
    assert engine.abuses == []


def test_the_first_frame_must_be_settings():
    engine = Engine(hello=False)
    engine.output()
    assert goaway_code(engine, engine.receive(PREFACE + frame(PING, 0, 0, bytes(8)))) == PROTOCOL_ERROR


def test_a_peer_that_says_nothing_is_let_go():
    engine = Engine(hello=False)
    engine.connection.tick(9.0)
    assert not engine.connection.closing
    engine.connection.tick(11.0)
    assert engine.connection.closing
    assert engine.abuses == ["preface_timeout"]


# The stream limit.


def test_streams_above_the_acknowledged_limit_are_refused():
    engine = Engine(limits=Limits(streams_first=2))
    engine.open(1)
    engine.open(3)
    assert reset_code(engine.open(5)) == REFUSED_STREAM
    assert len(engine.handlers) == 2
    engine.handlers[0].stream.end()
    assert engine.open(7) != []
    assert len(engine.handlers) == 3


def test_the_limit_holds_only_after_the_peer_knows_it():
    engine = Engine(limits=Limits(streams_first=2), acknowledged=False)
    for number in (1, 3, 5):
        engine.open(number)
    assert len(engine.handlers) == 3
    engine.receive(frame(SETTINGS, 1, 0))
    assert reset_code(engine.open(7)) == REFUSED_STREAM


def test_headers_of_refused_streams_still_feed_the_table():
    engine = Engine(limits=Limits(streams_first=1))
    engine.open(1)
    engine.receive(frame(HEADERS, 4, 3, block() + b"\x40\x01a\x01b"))
    engine.handlers[0].stream.end()
    engine.receive(frame(HEADERS, 4, 5, block() + b"\xbe"))
    assert (b"a", b"b") in engine.handler.metadata


def test_the_limit_doubles_on_demand_up_to_its_maximum():
    engine = Engine(limits=Limits(streams_first=3, streams_max=10))
    announced = []
    for _ in range(4):
        engine.connection.raise_limit()
        announced += [f.settings[3] for f in engine.output()]
    assert announced == [6, 10]


def test_a_connection_knows_since_when_it_is_full():
    engine = Engine(limits=Limits(streams_first=2))
    connection = engine.connection
    engine.open(1)
    assert connection.full() is None
    connection.now = 1.0
    engine.open(3)
    assert connection.full() == 1.0
    connection.now = 2.0
    engine.handlers[0].stream.end()
    assert connection.full() is None
    connection.now = 2.004
    engine.open(5)
    assert connection.full() == 1.0  # taken again at once: somebody was waiting for it
    engine.handlers[1].stream.end()
    connection.now = 3.0
    engine.open(7)
    assert connection.full() == 3.0
    connection.raise_limit()
    assert connection.full() is None


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ({"user_agent": "grpc-go/1.76"}, ClientKind.QUEUES),
        ({"user_agent": "tonic/0.14"}, ClientKind.QUEUES),
        ({"x_envoy_internal": "true"}, ClientKind.POOLS),
        ({"user_agent": "curl/8"}, ClientKind.UNKNOWN),
        ({}, ClientKind.UNKNOWN),
    ],
)
def test_clients_that_wait_are_told_from_those_with_a_pool(header, kind):
    engine = Engine()
    engine.open(**header)
    assert engine.connection.client is kind


# Going away.


def test_drain_serves_what_is_on_its_way_and_closes_with_the_last_stream():
    engine = Engine(Echo)
    engine.open(1)
    connection = engine.connection
    connection.drain()
    first, ping = engine.output()
    assert (first.last_stream_id, first.error_code) == ((1 << 31) - 1, 0)
    engine.open(3)  # sent before the peer saw it
    (second,) = engine.receive(frame(PING, 1, 0, ping.opaque_data))
    assert second.last_stream_id == 3
    assert engine.receive(frame(HEADERS, 5, 5, block()) + frame(DATA, 1, 5, b"late")) == []
    assert engine.receive(frame(WINDOW, 0, 5, word(1)) + frame(RST, 0, 5, word(8))) == []
    assert len(engine.handlers) == 2
    engine.send(b"x", 1, flags=1)
    assert not connection.closing
    answer = engine.send(b"y", 3, flags=1)
    assert messages(payload(answer, 3)) == [b"y"]
    assert connection.closing


def test_drain_of_an_idle_connection_closes_it_at_once():
    engine = Engine()
    engine.connection.drain()
    engine.connection.drain()
    _, ping = engine.output()
    engine.receive(frame(PING, 1, 0, ping.opaque_data))
    assert engine.connection.closing


def test_drain_does_not_wait_for_a_peer_that_answers_no_ping():
    engine = Engine()
    engine.connection.drain()
    engine.connection.tick(0.5)
    assert not engine.connection.closing
    engine.connection.tick(1.0)
    assert engine.connection.closing


def test_a_peer_that_goes_away_keeps_its_open_streams():
    engine = Engine(Echo)
    engine.open()
    engine.receive(frame(GOAWAY, 0, 0, bytes(8)))
    assert not engine.connection.closing
    assert messages(payload(engine.send(b"x", flags=1))) == [b"x"]
    assert engine.connection.closing


def test_a_ping_is_answered_with_its_own_bytes():
    (answer,) = Engine().receive(frame(PING, 0, 0, b"12345678"))
    assert "ACK" in answer.flags and answer.opaque_data == b"12345678"


# Fairness between connections.


def test_one_read_begins_so_many_streams_and_puts_the_rest_off():
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


def test_what_comes_while_a_part_is_put_off_follows_it():
    engine = Engine(limits=Limits(streams_at_once=2))
    engine.connection.receive(b"".join(frame(HEADERS, 4, number, block()) for number in (1, 3, 5)))
    assert engine.connection.behind
    engine.connection.receive(frame(DATA, 0, 5, framed(b"x")))
    while engine.connection.behind:
        engine.connection.go_on()
    assert [handler.messages for handler in engine.handlers] == [[], [], [b"x"]]


# Floods.


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


def test_rapid_resets_end_the_connection():
    engine = Engine(limits=Limits(burst=100))
    for number in range(1, 400, 2):
        engine.receive(frame(HEADERS, 4, number, block()) + frame(RST, 0, number, word(8)))
        if engine.connection.closing:
            break
    assert engine.abuses == ["resets"]
    assert number // 2 == 100
    assert all(h.count("closed") == 1 for h in engine.handlers)


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


def test_a_window_opened_byte_by_byte_is_a_flood_although_it_lets_bytes_out():
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
def test_resets_that_the_peer_provokes_end_the_connection_like_its_own(code, provoke):
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
    assert engine.abuses in (["provoked_resets"], ["window_updates"])  # whichever bucket is asked first


def test_the_text_of_the_goaway_says_what_was_too_much():
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
def test_streams_that_bring_nothing_are_bounded(cause, request_):
    def make(path, metadata, stream):
        return None if path == "/test/Nothing" else Echo(path, metadata, stream)

    engine = Engine(make, limits=Limits(burst=20))
    for number in range(1, 100, 2):
        engine.receive(request_(number))
    assert engine.abuses == [cause]


def test_streams_that_are_answered_earn_what_others_cost():
    engine = Engine(Echo, limits=Limits(burst=5))
    for number in range(1, 400, 4):
        engine.receive(frame(HEADERS, 4, number, block()) + frame(DATA, 1, number, framed(b"x")))
        engine.receive(frame(HEADERS, 4, number + 2, block()) + frame(RST, 0, number + 2, word(8)))
    assert not engine.connection.closing


def test_settings_that_would_move_windows_over_and_over_are_taken_once_or_refused():
    engine = Engine()
    engine.open()
    moves = b"".join(setting(4, value) for value in range(64))
    (ack,) = engine.receive(frame(SETTINGS, 0, 0, moves))
    assert "ACK" in ack.flags
    assert engine.connection.streams[1].window == 63
    assert goaway_code(engine, engine.receive(frame(SETTINGS, 0, 0, moves + setting(4, 1)))) == CALM
    assert engine.abuses == ["settings"]


# Peers that are gone.


def test_a_silent_peer_is_asked_whether_it_lives_and_an_answer_is_enough():
    engine = Engine()
    engine.open()
    connection = engine.connection
    for now in range(200):
        connection.tick(float(now))
        for asked in engine.output():
            assert names([asked]) == ["Ping"]
            engine.receive(frame(PING, 1, 0, asked.opaque_data))
    assert not connection.closing
    assert engine.handler.events == []


@pytest.mark.parametrize("streams", [True, False])
def test_a_peer_that_does_not_answer_is_gone_with_its_streams(streams):
    engine = Engine()
    if streams:
        engine.open()
    for now in range(82):
        engine.connection.tick(float(now))
    ping, goaway = engine.output()
    assert names([ping, goaway]) == ["Ping", "GoAway"]
    assert engine.connection.closing
    assert [handler.events for handler in engine.handlers] == [[("closed", b"")]] * streams
    assert engine.abuses == ["dead_peer"]


def test_a_peer_that_sends_is_never_asked():
    engine = Engine()
    engine.open()
    for now in range(300):
        engine.connection.tick(float(now))
        if now % 50 == 0:
            assert engine.send(b"x") == []
    assert engine.output() == []


# Deadlines.


def test_a_stream_ends_at_its_callers_deadline():
    engine = Engine()
    engine.open(1, grpc_timeout="1500m")
    engine.open(3, grpc_timeout="1H")
    connection = engine.connection
    assert connection.expire(1.4)
    assert engine.output() == []
    assert connection.expire(1.6)
    trailers, reset = engine.output()
    assert fields(trailers)["grpc-status"] == "4"
    assert "deadline" in fields(trailers)["grpc-message"]
    assert reset.error_code == 0
    assert [h.events for h in engine.handlers] == [[("closed", b"")], []]
    assert list(connection.streams) == [3]


def test_a_stream_that_is_not_read_is_reset_at_its_deadline_and_keeps_nothing():
    engine = Engine()
    engine.receive(frame(SETTINGS, 0, 0, setting(4, 0)))
    engine.open(grpc_timeout="1S")
    engine.handler.stream.send(b"never read")
    engine.output()
    assert not engine.connection.expire(1.1)
    assert reset_code(engine.output()) == CANCEL
    assert engine.handler.events == [("closed", b"")]
    assert engine.connection.held == 0


def test_deadlines_of_ended_streams_are_forgotten():
    engine = Engine(Echo)
    for number in range(1, 2000, 2):
        engine.open(number, flags=5, grpc_timeout="99999999H")
    assert len(engine.connection._deadlines) <= 64


@pytest.mark.parametrize("timeout", ["1", "S", "1s", "123456789S", "-1S", "1.5S"])
def test_a_malformed_timeout_is_a_malformed_request(timeout):
    engine = Engine()
    assert reset_code(engine.open(grpc_timeout=timeout)) == PROTOCOL_ERROR


def test_stray_frames_on_finished_streams_are_bounded():
    engine = Engine(Echo, limits=Limits(burst=10))
    engine.open(flags=5)
    for _ in range(30):
        engine.receive(frame(RST, 0, 1, word(8)))
    assert engine.abuses == ["stray_frames"]


# Any bytes.


SCRIPT = (
    PREFACE
    + frame(SETTINGS, 0, 0, setting(4, 100_000))
    + frame(SETTINGS, 1, 0)
    + frame(WINDOW, 0, 0, word(1 << 20))
    + frame(HEADERS, 4, 1, block())
    + frame(DATA, 0, 1, framed(b"first"))
    + frame(HEADERS, 0, 3, block()[:10])
    + frame(CONTINUATION, 4, 3, block()[10:])
    + frame(DATA, 8, 3, b"\x03" + framed(b"padded") + bytes(3))
    + frame(DATA, 0, 1, framed(b"x" * 20_000)[:15_000])
    + frame(PING, 0, 0, b"abcdefgh")
    + frame(DATA, 0, 3, framed(b"") + framed(b"two in one")[:7])
    + frame(DATA, 0, 1, framed(b"x" * 20_000)[15_000:])
    + frame(DATA, 1, 3, framed(b"two in one")[7:])
    + frame(HEADERS, 5, 1, block([("trailer", "1")]))
    + frame(HEADERS, 4, 5, block())
    + frame(RST, 0, 5, word(8))
)


def run(chunks):
    engine = Engine(Echo, hello=False)
    out = engine.connection.output()
    for chunk in chunks:
        engine.connection.receive(chunk)
        out += engine.connection.output()
    return [h.events for h in engine.handlers], out


WHOLE = run([SCRIPT])


@given(st.lists(st.integers(1, len(SCRIPT) - 1), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_chunking_of_the_same_bytes_gives_the_same_events_and_answers(cuts):
    edges = [0, *sorted(set(cuts)), len(SCRIPT)]
    assert run([SCRIPT[a:b] for a, b in itertools.pairwise(edges)]) == WHOLE


def test_byte_by_byte_gives_the_same_too():
    assert run([SCRIPT[i : i + 1] for i in range(len(SCRIPT))]) == WHOLE
    first, second, third = WHOLE[0]
    assert [len(m) for _, m in first] == [5, 20_000, 0]
    assert second == [("message", b"padded"), ("message", b""), ("message", b"two in one"), ("half_closed", b"")]
    assert third == [("closed", b"")]


def check_endings(engine: Engine) -> None:
    engine.connection.lost()
    for handler in engine.handlers:
        ends = handler.count("closed")
        assert ends <= 1
        assert handler.count("half_closed") <= 1
    assert engine.connection.held == 0
    assert engine.errors == []


@given(st.lists(st.binary(max_size=60), max_size=10))
@settings(max_examples=300, deadline=None)
def test_garbage_never_raises(chunks):
    engine = Engine()
    engine.open()
    for chunk in chunks:
        engine.receive(chunk)
    check_endings(engine)


numbers = st.sampled_from([0, 1, 2, 3, 5, 7, 9, 2**31 - 1])
some_frame = st.builds(
    frame,
    st.integers(0, 11),
    st.sampled_from([0, 1, 4, 5, 8, 9, 12, 13, 32, 36, 37, 255]),
    numbers,
    st.one_of(
        st.binary(max_size=40),
        st.just(block()),
        st.integers(0, 2**31).map(word),
        st.binary(max_size=20).map(framed),
        st.builds(setting, st.integers(0, 7), st.integers(0, 2**31)),
        st.just(framed(b"compressed", 1)),
    ),
)


@given(st.lists(some_frame, max_size=30), st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_frames_in_any_order_never_raise_and_a_fault_is_a_goaway(frames, echo):
    engine = Engine(Echo if echo else Recorder)
    out = []
    for data in frames:
        out += engine.receive(data)
    if engine.connection.closing and not any(type(f).__name__ == "GoAwayFrame" for f in out):
        raise AssertionError("closed without a GOAWAY")
    assert engine.errors == []
    check_endings(engine)


def test_a_single_random_byte_error_in_a_script_is_survived():
    for position in range(24, len(SCRIPT)):
        if position % 7:
            continue
        engine = Engine(Echo, hello=False)
        broken = bytearray(SCRIPT)
        broken[position] ^= 0x55
        engine.receive(bytes(broken))
        check_endings(engine)
