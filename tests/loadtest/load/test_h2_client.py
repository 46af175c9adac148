"""The driver's HTTP/2 client at the byte level: windows, the peer's limit of streams, endings, and frames in pieces of any size."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import h2.config
import h2.connection
import h2.events
import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.load.h2_client import (
    ACK,
    BLOCKS_KEPT,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    FRAME_HEADER,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    MAX_STREAMS,
    PING,
    PREFACE,
    RST,
    SETTINGS,
    WINDOW_LOW,
    WINDOW_UPDATE,
    ClientConnection,
    ClientStream,
    frame,
)

Frame = tuple[int, int, int, bytes]  # kind, flags, stream, payload


class RecordingCaller:
    """A caller that records its messages and endings."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.endings: list[tuple[str, str]] = []

    def message(self, message: bytes) -> None:
        self.messages.append(message)

    def ended(self, status: str, text: str) -> None:
        self.endings.append((status, text))


class Wire:
    """The transport: splits the written bytes into frames."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def take(self) -> list[Frame]:
        """The frames since the last call."""
        data, self.written = self.written.removeprefix(PREFACE), b""
        return list(frames(data))


class Peer:
    """A connection and the peer's end of its wire."""

    def __init__(self, *settings: tuple[int, int], greeted: bool = True) -> None:
        self.connection = ClientConnection("/svc/Method", "picker")
        self.wire = Wire()
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]
        if greeted:
            self.settings(*settings)

    def settings(self, *pairs: tuple[int, int]) -> None:
        self.give(SETTINGS, 0, 0, b"".join(n.to_bytes(2, "big") + v.to_bytes(4, "big") for n, v in pairs))

    def give(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self.connection.data_received(frame(kind, flags, stream, payload))

    def widen(self, stream: int, more: int) -> None:
        self.give(WINDOW_UPDATE, 0, stream, more.to_bytes(4, "big"))

    def end(self, stream: int, status: str = "0", text: str = "") -> None:
        self.give(HEADERS, END_HEADERS | END_STREAM, stream, trailers(status, text))

    def open(self) -> tuple[ClientStream, RecordingCaller]:
        caller = RecordingCaller()
        stream = self.connection.open(caller)
        assert isinstance(stream, ClientStream)
        return stream, caller

    async def sent(self) -> list[Frame]:
        """The frames that the client has written by the next turn of the loop."""
        await asyncio.sleep(0)
        return self.wire.take()

    async def data(self, stream: int) -> bytes:
        return b"".join(payload for kind, _, number, payload in await self.sent() if (kind, number) == (DATA, stream))


def frames(data: bytes) -> Iterator[Frame]:
    while data:
        size = int.from_bytes(data[:3], "big")
        yield data[3], data[4], int.from_bytes(data[5:9], "big"), data[FRAME_HEADER : FRAME_HEADER + size]
        data = data[FRAME_HEADER + size :]


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


def trailers(status: str, text: str = "") -> bytes:
    pairs = [("grpc-status", status), *([("grpc-message", text)] if text else [])]
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*pair) for pair in pairs])


def looped(test: Callable[[], Any]) -> Callable[[], None]:
    """Runs an `async def` test in a new event loop: the client needs a running one."""

    def run() -> None:
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@looped
async def test_it_begins_with_the_preface_settings_and_the_widest_window() -> None:
    peer = Peer(greeted=False)
    assert peer.wire.written.startswith(PREFACE)
    assert [kind for kind, *_ in peer.wire.take()] == [SETTINGS, WINDOW_UPDATE]
    assert not peer.connection.opened.done()
    peer.settings()
    assert peer.connection.opened.done()
    assert (SETTINGS, ACK, 0, b"") in await peer.sent()


@looped
async def test_a_server_of_the_h2_library_understands_it() -> None:
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    peer = Peer(greeted=False)
    stream, caller = peer.open()
    stream.send(b"question")
    stream.half_close()
    await asyncio.sleep(0)
    events = server.receive_data(peer.wire.written)
    request = next(event for event in events if isinstance(event, h2.events.RequestReceived))
    assert dict(request.headers)[b":path"] == b"/svc/Method"
    assert [e.data for e in events if isinstance(e, h2.events.DataReceived) and e.data] == [message(b"question")]
    assert any(isinstance(event, h2.events.StreamEnded) for event in events)
    server.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
    server.send_data(1, message(b"answer"))
    server.send_headers(1, [("grpc-status", "0")], end_stream=True)
    peer.connection.data_received(server.data_to_send())
    assert (caller.messages, caller.endings) == ([b"answer"], [("0", "")])


# Windows.


@looped
async def test_data_beyond_the_streams_window_waits_in_order() -> None:
    peer = Peer((INITIAL_WINDOW, 8))
    stream, _ = peer.open()
    stream.send(b"0123456789")
    stream.send(b"next")
    whole = message(b"0123456789") + message(b"next")
    assert await peer.data(1) == whole[:8]
    peer.widen(1, 3)
    assert await peer.data(1) == whole[8:11]
    peer.widen(1, 100)
    assert await peer.data(1) == whole[11:]


@looped
async def test_the_connections_window_holds_back_all_its_streams() -> None:
    peer = Peer((INITIAL_WINDOW, 1 << 20))
    (first, _), (second, _) = peer.open(), peer.open()
    first.send(bytes(65_535 - 5))
    second.send(b"waits")
    assert [number for kind, _, number, _ in await peer.sent() if kind == DATA] == [1] * 4
    peer.widen(0, 100)
    assert await peer.data(3) == message(b"waits")


@looped
async def test_a_later_setting_of_the_window_changes_open_streams_and_may_make_it_negative() -> None:
    peer = Peer((INITIAL_WINDOW, 20))
    stream, _ = peer.open()
    stream.send(bytes(15))
    assert len(await peer.data(1)) == 20
    peer.settings((INITIAL_WINDOW, 10))
    stream.send(b"x")
    assert stream.window == -10
    peer.widen(1, 10)
    assert await peer.data(1) == b""
    peer.widen(1, 6)
    assert await peer.data(1) == message(b"x")


@looped
async def test_frames_have_at_most_the_size_that_every_peer_accepts() -> None:
    peer = Peer((INITIAL_WINDOW, 1 << 20))
    stream, _ = peer.open()
    stream.send(bytes(3 * FRAME_BYTES))
    sizes = [len(payload) for kind, *_, payload in await peer.sent() if kind == DATA]
    assert sizes == [FRAME_BYTES, FRAME_BYTES, FRAME_BYTES, 5]


@looped
async def test_the_end_of_the_request_follows_all_waiting_data() -> None:
    peer = Peer((INITIAL_WINDOW, 5))
    stream, _ = peer.open()
    stream.send(b"abc")
    stream.half_close()
    assert [flags for kind, flags, *_ in await peer.sent() if kind == DATA] == [0]
    peer.widen(1, 3)
    assert [(flags, payload) for kind, flags, _, payload in await peer.sent() if kind == DATA] == [(0, b"abc"), (END_STREAM, b"")]


@looped
async def test_the_peers_window_is_renewed_when_half_of_it_is_used() -> None:
    peer = Peer()
    peer.open()
    peer.connection._received = WINDOW_LOW
    peer.give(DATA, 0, 1, message(b"x"))
    assert [(kind, number, int.from_bytes(payload, "big")) for kind, _, number, payload in await peer.sent()][-1] == (
        WINDOW_UPDATE,
        0,
        WINDOW_LOW + 6,
    )


# The limit of streams.


@looped
async def test_beyond_the_peers_limit_a_stream_waits_for_the_end_of_another() -> None:
    peer = Peer((MAX_STREAMS, 1))
    peer.open()
    caller = RecordingCaller()
    waits = peer.connection.open(caller)
    assert isinstance(waits, asyncio.Future) and not waits.done()
    peer.end(1)
    opened = await waits
    opened.send(b"now")
    assert await peer.data(3) == message(b"now")


@looped
async def test_a_raised_limit_admits_waiting_streams_in_order() -> None:
    peer = Peer((MAX_STREAMS, 0))
    waiting = [peer.connection.open(RecordingCaller()) for _ in range(3)]
    peer.settings((MAX_STREAMS, 2))
    assert [stream.done() for stream in waiting if isinstance(stream, asyncio.Future)] == [True, True, False]


@looped
async def test_a_caller_that_gave_up_waiting_uses_no_stream() -> None:
    peer = Peer((MAX_STREAMS, 0))
    first, second = peer.connection.open(RecordingCaller()), peer.connection.open(RecordingCaller())
    assert isinstance(first, asyncio.Future) and isinstance(second, asyncio.Future)
    first.cancel()
    peer.settings((MAX_STREAMS, 1))
    assert (await second).number == 1


# Endings.


@looped
async def test_trailers_end_a_stream_with_their_status_and_text() -> None:
    peer = Peer()
    _, caller = peer.open()
    peer.end(1, "8", "too much")
    assert caller.endings == [("8", "too much")]


@looped
async def test_a_reset_ends_only_its_stream_and_names_the_error() -> None:
    peer = Peer()
    (_, reset), (_, other) = peer.open(), peer.open()
    peer.give(RST, 0, 1, (7).to_bytes(4, "big"))
    assert reset.endings == [("2", "reset by the peer, error 7")]
    peer.end(3)
    assert other.endings == [("0", "")]


@looped
async def test_an_end_without_trailers_is_a_failure() -> None:
    peer = Peer()
    _, caller = peer.open()
    peer.give(DATA, END_STREAM, 1, message(b"last"))
    assert caller.messages == [b"last"]
    assert caller.endings == [("2", "the stream ended without a status")]


@looped
async def test_nothing_is_sent_or_delivered_after_the_end() -> None:
    peer = Peer()
    stream, caller = peer.open()
    peer.end(1)
    await peer.sent()
    stream.send(b"late")
    stream.half_close()
    stream.reset()
    for kind, payload in ((DATA, message(b"late")), (RST, bytes(4)), (HEADERS, trailers("13"))):
        peer.give(kind, END_STREAM, 1, payload)
    peer.widen(1, 10)
    assert await peer.sent() == []
    assert (caller.messages, caller.endings) == ([], [("0", "")])


@looped
async def test_a_cancelled_stream_is_reset_and_makes_room_for_another() -> None:
    peer = Peer((MAX_STREAMS, 1))
    stream, caller = peer.open()
    waits = peer.connection.open(RecordingCaller())
    stream.reset()
    assert caller.endings[0][0] == "1"
    assert isinstance(waits, asyncio.Future) and waits.done()
    assert (RST, 0, 1, (8).to_bytes(4, "big")) in await peer.sent()


@looped
async def test_goaway_ends_all_open_and_waiting_streams_and_refuses_new_ones() -> None:
    peer = Peer((MAX_STREAMS, 1))
    _, caller = peer.open()
    waits = peer.connection.open(RecordingCaller())
    peer.give(GOAWAY, 0, 0, bytes(4) + (11).to_bytes(4, "big") + b"calm down")
    assert caller.endings == [("14", "the peer sent GOAWAY: error 11 calm down")]
    for refused in (waits, peer.connection.open(RecordingCaller())):
        assert isinstance(refused, asyncio.Future)
        with pytest.raises(ConnectionError, match="calm down"):
            await refused


@looped
async def test_a_lost_connection_ends_all_streams_once() -> None:
    peer = Peer()
    _, caller = peer.open()
    peer.connection.connection_lost(ConnectionResetError("reset"))
    peer.connection.connection_lost(None)
    assert caller.endings == [("14", "the connection was lost: reset")]


@looped
async def test_a_connection_that_is_lost_before_its_settings_never_opens() -> None:
    peer = Peer(greeted=False)
    peer.connection.connection_lost(None)
    with pytest.raises(ConnectionError, match="closed by the peer"):
        await peer.connection.opened


@looped
async def test_a_caller_may_open_the_next_stream_from_the_end_of_the_last() -> None:
    peer = Peer((MAX_STREAMS, 1))
    followers: list[ClientStream | asyncio.Future[ClientStream]] = []

    class Chained(RecordingCaller):
        def ended(self, status: str, text: str) -> None:
            followers.append(peer.connection.open(RecordingCaller()))

    peer.connection.open(Chained())
    peer.end(1)
    assert [stream.number for stream in followers if isinstance(stream, ClientStream)] == [3]


# The rest of the protocol.


@looped
async def test_a_ping_is_answered_and_an_acknowledgement_is_not() -> None:
    peer = Peer()
    await peer.sent()
    peer.give(PING, 0, 0, b"12345678")
    peer.give(PING, ACK, 0, b"87654321")
    assert await peer.sent() == [(PING, ACK, 0, b"12345678")]


@looped
async def test_closing_first_sends_the_remaining_data() -> None:
    peer = Peer()
    stream, _ = peer.open()
    stream.send(b"last words")
    peer.connection.close()
    assert peer.wire.closed
    assert message(b"last words") in [payload for kind, *_, payload in peer.wire.take() if kind == DATA]


@looped
async def test_different_header_blocks_are_all_decoded_and_the_cache_is_bounded() -> None:
    peer = Peer()
    for number in range(BLOCKS_KEPT + 10):
        _, caller = peer.open()
        peer.end(1 + 2 * number, "0", f"number {number}")
        assert caller.endings == [("0", f"number {number}")]
    assert len(peer.connection._blocks) <= BLOCKS_KEPT


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, list[list[bytes]]]:
    """The bytes that a peer sends on two streams, cut into interleaved frames; and the messages in them."""
    sent = [draw(st.lists(st.binary(max_size=40), max_size=6)) for _ in range(2)]
    queues: list[list[bytes]] = []
    for number, messages in zip((1, 3), sent, strict=True):
        data = b"".join(map(message, messages))
        cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
        parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        end = frame(HEADERS, END_HEADERS | END_STREAM, number, trailers("0"))
        queues.append([frame(HEADERS, END_HEADERS, number, b""), *(frame(DATA, 0, number, part) for part in parts), end])
    out = []
    while any(queues):
        queue = draw(st.sampled_from([queue for queue in queues if queue]))
        out.append(queue.pop(0))
    return b"".join(out), sent


@given(conversations(), st.data())
def test_messages_are_whole_and_in_order_however_frames_and_reads_are_cut(
    conversation: tuple[bytes, list[list[bytes]]], data: st.DataObject
) -> None:
    wire, sent = conversation
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=20)))

    async def run() -> None:
        peer = Peer()
        caller = [peer.open()[1] for _ in sent]
        for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True):
            if a < b:
                peer.connection.data_received(wire[a:b])
        assert [each.messages for each in caller] == sent
        assert [each.endings for each in caller] == [[("0", "")]] * len(sent)

    asyncio.run(run())


@given(
    st.lists(st.binary(max_size=100), min_size=1, max_size=5),
    st.integers(0, 50),
    st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(1, 60)), max_size=40),
)
def test_bytes_leave_in_order_and_never_exceed_the_windows(sent: list[bytes], initial: int, grants: list[tuple[int, int]]) -> None:
    whole = b"".join(map(message, sent))

    async def run() -> None:
        peer = Peer((INITIAL_WINDOW, initial))
        peer.connection.window = 30  # as if other streams had used the rest
        stream, _ = peer.open()
        for each in sent:
            stream.send(each)
        got, allowed = await peer.data(1), [30, initial]
        for number, more in grants:
            peer.widen(number, more)
            allowed[number] += more
            got += await peer.data(1)
            assert whole.startswith(got)
            assert len(got) == min(len(whole), *allowed)

    asyncio.run(run())
