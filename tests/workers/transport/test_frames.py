"""Requests and frames that break a rule: which the engine accepts, and which it refuses by stream or by connection."""

import pytest

from tests.cases import cases
from tests.workers.transport.error_codes import (
    CALM,
    COMPRESSION_ERROR,
    FRAME_SIZE_ERROR,
    PROTOCOL_ERROR,
    STREAM_CLOSED,
    goaway_code,
    reset_code,
)
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
    Echo,
    Engine,
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
    "between", [frame(PING, 0, 0, bytes(8)), frame(DATA, 0, 1, b"x"), frame(CONTINUATION, 4, 3), frame(HEADERS, 4, 3, block())]
)
def test_no_other_frame_may_come_between_the_parts_of_a_header_block(between):
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


@cases(
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
def test_a_content_length_must_be_correct(length, fits):
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


@cases(
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


@cases(
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
