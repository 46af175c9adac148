"""Streams in normal use: which handlers the engine calls, what it answers, and how a stream ends."""

import pytest

from tests.workers.transport.helpers import (
    DATA,
    HEADERS,
    RST,
    Client,
    Echo,
    Engine,
    block,
    fields,
    frame,
    framed,
    messages,
    names,
    payload,
    word,
)


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


def test_the_preface_advertises_the_low_stream_limit_large_windows_and_the_limit_of_headers():
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
    ("changes", "status"), [({"method": "GET"}, "405"), ({"content_type": "text/html"}, "415"), ({"content_type": None}, "415")]
)
def test_requests_that_are_not_grpc_get_an_http_status(changes, status):
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


def test_a_handler_that_raises_ends_only_its_stream():
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


@pytest.mark.parametrize("state", ["open", "half_closed", "in_message", "answered", "ended_queued", "finished", "reset"])
def test_a_reset_in_any_state_closes_the_handler_at_most_once(state):
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


def test_a_lost_connection_closes_every_open_handler_once():
    engine = Engine()
    for number in (1, 3, 5):
        engine.open(number)
    engine.handlers[1].stream.end()
    engine.connection.lost()
    engine.connection.lost()
    assert [h.count("closed") for h in engine.handlers] == [1, 0, 1]
    assert engine.output() == []
