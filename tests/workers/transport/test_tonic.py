"""The frames of a tonic client, replayed: tonic needs a newer Rust than Debian 12 has, so it does not run here.

They follow the code of tonic (tonic/src/codec/encode.rs: messages that are ready go into one buffer, up to 32 KiB) and the documented
defaults of hyper's HTTP/2 client below it: no push, windows of 2 MiB a stream and 5 MiB a connection, frames of 16 KiB, indexed and
Huffman-coded headers. agentgateway speaks to its picker like this.
"""

import hpack

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
    fields,
    frame,
    framed,
    messages,
    names,
    payload,
    setting,
    word,
)
from workers.transport.frames import PREFACE

END_STREAM, ACK, END_HEADERS = 1, 1, 4
ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 2, 4, 5, 6
STREAM_WINDOW, CONNECTION_WINDOW, FRAME_MAX = 2 << 20, 5 << 20, 16 << 10
YIELD_THRESHOLD = 32 << 10
CANCEL = 8
HEAD = (
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "picker:9002"),
    (":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Process"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("user-agent", "tonic/0.14.2"),
)


class Tonic:
    """One connection. `h2` keeps one HPACK table for all of its streams."""

    def __init__(self) -> None:
        self.engine = Engine(Echo, hello=False)
        self._encoder = hpack.Encoder()
        settings = (
            setting(ENABLE_PUSH, 0)
            + setting(INITIAL_WINDOW_SIZE, STREAM_WINDOW)
            + setting(MAX_FRAME_SIZE, FRAME_MAX)
            + setting(MAX_HEADER_LIST_SIZE, 16 << 10)
        )
        greeting = PREFACE + frame(SETTINGS, 0, 0, settings)
        greeting += frame(WINDOW, 0, 0, word(CONNECTION_WINDOW - 65_535))
        # the first request goes out before the server's settings are there
        self.answers = self.engine.receive(greeting + self._headers(1))
        self.engine.receive(frame(SETTINGS, ACK, 0))

    def open(self, number: int) -> None:
        self.engine.receive(self._headers(number))

    def _headers(self, number: int) -> bytes:
        return frame(HEADERS, END_HEADERS, number, self._encoder.encode(HEAD))

    def send(self, number: int, *ready: bytes) -> bytes:
        """Messages that are ready at once share a buffer; frames cut it without regard for messages. Returns what comes back."""
        data, back = b"".join(framed(message) for message in ready), b""
        assert len(data) - len(framed(ready[-1])) < YIELD_THRESHOLD
        for start in range(0, len(data), FRAME_MAX):
            back += payload(self.engine.receive(frame(DATA, 0, number, data[start : start + FRAME_MAX])), number)
        return back


def test_a_request_that_goes_out_with_the_greeting_is_answered() -> None:
    tonic = Tonic()
    assert names(tonic.answers)[0] == "Settings" and not tonic.engine.connection.closing
    assert messages(tonic.send(1, b"headers", b"body")) == [b"headers", b"body"]
    assert tonic.engine.handler.path == HEAD[3][1]


def test_messages_that_share_and_cross_frames_arrive_whole() -> None:
    tonic = Tonic()
    ready = [b"h" * 300, b"b" * 20_000, b"c" * 60_000]
    assert messages(tonic.send(1, *ready)) == ready


def test_streams_share_one_table_of_header_fields() -> None:
    tonic = Tonic()
    for number in range(1, 41, 2):
        if number > 1:
            tonic.open(number)
        assert messages(tonic.send(number, b"%d" % number)) == [b"%d" % number]
        frames = tonic.engine.receive(frame(DATA, END_STREAM, number))
        assert fields(frames[-1])["grpc-status"] == "0" and frames[-1].stream_id == number
    assert [handler.count("half_closed") for handler in tonic.engine.handlers] == [1] * 20


def test_a_dropped_stream_is_reset_and_the_connection_serves_on() -> None:
    tonic = Tonic()
    tonic.send(1, b"headers")
    tonic.engine.receive(frame(RST, 0, 1, word(CANCEL)))
    assert tonic.engine.handler.count("closed") == 1
    tonic.open(3)
    assert messages(tonic.send(3, b"again")) == [b"again"]
    assert tonic.engine.abuses == [] and tonic.engine.errors == []


def test_keep_alive_pings_are_answered_and_a_goodbye_ends_the_connection() -> None:
    tonic = Tonic()
    (answer,) = tonic.engine.receive(frame(PING, 0, 0, b"\0" * 8))
    assert names([answer]) == ["Ping"] and "ACK" in answer.flags
    tonic.send(1, b"x")
    tonic.engine.receive(frame(DATA, END_STREAM, 1) + frame(GOAWAY, 0, 0, word(0) + word(0)))
    assert tonic.engine.connection.closing and tonic.engine.abuses == []
