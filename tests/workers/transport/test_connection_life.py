"""A connection from its preface to its end: the stream limit, drains, silent peers, and deadlines."""

import pytest

from tests.workers.transport.error_codes import CANCEL, PROTOCOL_ERROR, REFUSED_STREAM, goaway_code, reset_code
from tests.workers.transport.helpers import (
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    RST,
    SETTINGS,
    WINDOW,
    Echo,
    Engine,
    block,
    fields,
    frame,
    messages,
    names,
    payload,
    setting,
    word,
)
from workers.transport.frames import PREFACE
from workers.transport.headers import ClientKind
from workers.transport.limits import Limits
from workers.transport.wrong_protocol import TLS_PEER, TLS_RECORD


@pytest.mark.parametrize("data", [b"EHLO picker\r\n", b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSN\r\n\r\n"])
def test_a_wrong_preface_ends_the_connection(data):
    engine = Engine(hello=False)
    frames = engine.receive(data)
    assert goaway_code(engine, frames) == PROTOCOL_ERROR
    assert names(frames)[0] == "Settings"
    assert engine.abuses == ([TLS_PEER] if data.startswith(TLS_RECORD) else [])


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_http1_gets_an_http1_answer_that_says_what_the_port_is(method):
    engine = Engine(hello=False)
    assert engine.connection.output() == b""  # nothing before the client has sent something
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


def test_a_peer_that_sends_nothing_is_disconnected():
    engine = Engine(hello=False)
    engine.connection.tick(9.0)
    assert not engine.connection.closing
    engine.connection.tick(11.0)
    assert engine.connection.closing
    assert engine.abuses == ["preface_timeout"]


def test_streams_above_the_acknowledged_limit_are_refused():
    engine = Engine(limits=Limits(streams_first=2))
    engine.open(1)
    engine.open(3)
    assert reset_code(engine.open(5)) == REFUSED_STREAM
    assert len(engine.handlers) == 2
    engine.handlers[0].stream.end()
    assert engine.open(7) != []
    assert len(engine.handlers) == 3


def test_the_limit_applies_only_after_the_peer_has_acknowledged_it():
    engine = Engine(limits=Limits(streams_first=2), acknowledged=False)
    for number in (1, 3, 5):
        engine.open(number)
    assert len(engine.handlers) == 3
    engine.receive(frame(SETTINGS, 1, 0))
    assert reset_code(engine.open(7)) == REFUSED_STREAM


def test_headers_of_refused_streams_still_change_the_table():
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


def test_full_returns_since_when_a_connection_is_full():
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
    assert connection.full() == 1.0  # taken again at once: a request was waiting for the place
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
def test_clients_that_wait_are_distinguished_from_clients_with_a_pool(header, kind):
    engine = Engine()
    engine.open(**header)
    assert engine.connection.client is kind


def test_a_drain_serves_streams_that_are_on_their_way_and_closes_with_the_last_stream():
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


def test_a_drain_closes_an_idle_connection_at_once():
    engine = Engine()
    engine.connection.drain()
    engine.connection.drain()
    _, ping = engine.output()
    engine.receive(frame(PING, 1, 0, ping.opaque_data))
    assert engine.connection.closing


def test_a_drain_does_not_wait_for_a_peer_that_answers_no_ping():
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


def test_a_ping_is_answered_with_its_bytes():
    (answer,) = Engine().receive(frame(PING, 0, 0, b"12345678"))
    assert "ACK" in answer.flags and answer.opaque_data == b"12345678"


def test_a_silent_peer_gets_a_ping_and_an_answer_keeps_the_connection():
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
def test_a_peer_that_answers_no_ping_is_disconnected(streams):
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


def test_a_peer_that_sends_gets_no_ping():
    engine = Engine()
    engine.open()
    for now in range(300):
        engine.connection.tick(float(now))
        if now % 50 == 0:
            assert engine.send(b"x") == []
    assert engine.output() == []


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


def test_a_stream_that_is_not_read_is_reset_at_its_deadline_and_holds_nothing():
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
    assert len(engine.connection._timeouts._deadlines) <= 64


@pytest.mark.parametrize("timeout", ["1", "S", "1s", "123456789S", "-1S", "1.5S"])
def test_a_malformed_timeout_is_a_malformed_request(timeout):
    engine = Engine()
    assert reset_code(engine.open(grpc_timeout=timeout)) == PROTOCOL_ERROR
