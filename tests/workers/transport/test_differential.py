"""The native engine and grpc.aio with the same clients: the same answers, byte for byte, and the same gRPC status.

    script of streams ─▶ sync grpcio client ─▶ native | grpcio ─▶ App on a fake pool
                                                                   └ the calls of handlers, what they sent, and the App's counters

Each script runs once through each transport, with a new App. The test compares: the answers, status code and text that the client
got; the calls of each handler; the counters and loads of the area at the end. Two things differ by nature. The transports refuse
a message over their limit with different texts. And bytes on their way may be lost when a client cancels, so the client cancels only
after the server has seen all messages, and its answers are not compared.

A state machine does the same step by step: concurrent streams open, send, half-close and are cancelled in any order.
"""

import queue
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grpc
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from epp.protocol.codec import SUBSET_KEY, SUBSET_NAMESPACE
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.examples import examples
from tests.pair import Pair
from tests.workers.transport.sites import WAIT, Site
from tests.workers.worker.extproc.streams import BODY, USAGE, pair
from workers.transport.interface import Handler, Metadata, Stream
from workers.transport.limits import Limits
from workers.worker.extproc.app import App
from workers.worker.extproc.stream import PATH, open_stream

BODY_MAX = 200_000
MESSAGE_MAX = 300_000
TRANSPORTS = ("native", "grpcio")
HALF_CLOSE, CANCEL = "half close", "cancel"


class Script(NamedTuple):
    """What the client of one stream sends, and how it ends the stream."""

    messages: Sequence[bytes]
    ending: str = HALF_CLOSE
    compressed: bool = False


class Outcome(NamedTuple):
    """What the client of one stream got, and the calls of its handler."""

    answers: Sequence[bytes]
    code: grpc.StatusCode
    text: str
    events: Sequence[str]


class Recorded:
    """Stands between a transport and a handler: records the calls of the handler, and the end of the stream."""

    def __init__(self, app: App, path: str, metadata: Metadata, stream: Stream) -> None:
        self._stream = stream
        self.events: list[str] = []
        self.over = False
        self.send, self.send_raw, self.send_parts = stream.send, stream.send_raw, stream.send_parts
        self.hold, self.release = stream.hold, stream.release
        handler = open_stream(app, path, metadata, self)
        assert handler is not None
        self._handler: Handler = handler

    def message(self, message: bytes) -> None:
        self.events.append("message")
        self._handler.message(message)

    def half_closed(self) -> None:
        self.events.append("half_closed")
        self._handler.half_closed()

    def closed(self) -> None:
        self.events.append("closed")
        self.over = True
        self._handler.closed()

    def end(self, status: int = 0, text: str = "") -> None:
        self.events.append(f"ends with {status}")
        self.over = True
        self._stream.end(status, text)


class Player:
    """One transport with its client."""

    def __init__(self, transport: str) -> None:
        self.site = Site(transport, limits=Limits(message=MESSAGE_MAX))
        self.site.serves = self._open
        self._channel = self.site.channel()
        self._pair: Pair
        self._handlers: list[Recorded] = []
        self.faults: list[BaseException] = []

    def close(self) -> None:
        self._channel.close()
        self.site.__exit__(None, None, None)

    def begin(self) -> None:
        """Creates a new App without streams."""
        self._handlers, self._pair = [], pair(body_bytes_max=BODY_MAX)

    def open(self, *, compressed: bool) -> "Live":
        """Opens one more stream."""
        number = len(self._handlers)
        played = Played(self._channel, Script((), compressed=compressed))
        self.site.until(lambda: len(self._handlers) > number)
        return Live(self.site, played, self._handlers[number])

    def left(self) -> Any:
        """Counters, load and faults after all streams have ended."""
        self.site.until(lambda: self.site.server.streams == 0)
        area = self._pair.area
        return list(area.counters), area.inflight.tolist(), [type(fault) for fault in self._pair.faults]

    def play(self, scripts: Sequence[Script]) -> tuple[list[Outcome], Any]:
        """Opens all streams before any ends. Their messages take turns."""
        self.begin()
        streams = []
        for number, script in enumerate(scripts):
            streams.append(Played(self._channel, script))
            self.site.until(lambda number=number: len(self._handlers) > number)  # so that handlers have the numbers of their streams
        for turn in range(max(len(script.messages) for script in scripts)):
            for played, handler in zip(streams, self._handlers, strict=True):
                self._take_turn(played, handler, turn)
        outcomes = [played.end() for played in streams]
        self.site.until(lambda: self.site.server.streams == 0)
        outcomes = [Outcome(*o[:3], tuple(h.events)) for o, h in zip(outcomes, self._handlers, strict=True)]
        return outcomes, self.left()

    def _take_turn(self, played: "Played", handler: Recorded, turn: int) -> None:
        """Sends one message, and waits until the handler got it, so that turns are the same on both transports."""
        if turn < len(played.script.messages) and not handler.over:
            played.say(played.script.messages[turn])
            self.site.until(lambda: len(handler.events) > turn or handler.over)

    def _open(self, path: str, metadata: Metadata, stream: Stream) -> Handler | None:
        self._handlers.append(Recorded(self._pair.app, path, metadata, stream))
        return self._handlers[-1]


class Played:
    """The client's side of a stream."""

    def __init__(self, channel: grpc.Channel, script: Script) -> None:
        self.script = script
        self._says: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        opened = channel.stream_stream(PATH, _registered_method=False)
        compression = grpc.Compression.Gzip if script.compressed else None
        self.call = opened(iter(self._words()), timeout=WAIT, compression=compression)

    def say(self, message: bytes) -> None:
        self._says.put(message)

    def end(self) -> Outcome:
        """Half-closes or cancels the stream, and reads to its end."""
        answers: list[bytes] = []
        if self.script.ending == CANCEL:
            self.call.cancel()
            self._says.put(None)
            return Outcome((), grpc.StatusCode.CANCELLED, "", ())
        self._says.put(None)
        try:
            answers.extend(self.call)
        except grpc.RpcError as error:
            assert error is self.call
        code, text = self.call.code(), self.call.details()
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than" in text:
            text = "larger than the limit"
        return Outcome(answers, code, text, ())

    def _words(self) -> Iterator[bytes]:
        while (message := self._says.get(timeout=WAIT)) is not None:
            yield message


class Live:
    """Both sides of a stream that the test drives step by step."""

    def __init__(self, site: Site, played: Played, handler: Recorded) -> None:
        self._site, self._played, self._handler = site, played, handler

    @property
    def over(self) -> bool:
        return self._handler.over

    def say(self, message: bytes) -> None:
        heard = len(self._handler.events)
        self._played.say(message)
        self._site.until(lambda: len(self._handler.events) > heard or self._handler.over)

    def end(self, ending: str) -> Outcome:
        self._played.script = self._played.script._replace(ending=ending)
        outcome = self._played.end()
        self._site.until(lambda: self._handler.over)
        return outcome._replace(events=tuple(self._handler.events))


@pytest.fixture(scope="module")
def players() -> Iterator[list[Player]]:
    made = [Player(transport) for transport in TRANSPORTS]
    yield made
    for player in made:
        player.close()
        assert player.site.errors == []


def headers(path: str = "/v1/completions", *, last: bool = False, host: str = "") -> bytes:
    request = pb.ProcessingRequest()
    for name, value in {":method": "POST", ":path": path, "x-request-id": "given"}.items():
        request.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    request.request_headers.end_of_stream = last
    if host:
        request.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET_KEY: [host]})
    return request.SerializeToString()


def body(data: bytes, *, last: bool = True) -> bytes:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=last)).SerializeToString()


def response_headers(kind: str = "application/json", *, last: bool = False) -> bytes:
    response = pb.ProcessingRequest()
    for name, value in {":status": "200", "content-type": kind}.items():
        response.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    response.response_headers.end_of_stream = last
    return response.SerializeToString()


def response_body(data: bytes, *, last: bool = True) -> bytes:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=last)).SerializeToString()


def prompt(size: int) -> bytes:
    return b'{"model":"m","prompt":"' + b"p" * size + b'"}'


TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers()).SerializeToString()
RESPONSE_TRAILERS = pb.ProcessingRequest(response_trailers=pb.HttpTrailers()).SerializeToString()
CHUNK = b'data: {"choices":[{"text":" word"}]}\n\n'
UNSTREAMED = (headers(), body(BODY), response_headers(), response_body(USAGE))
STREAMED = (
    *(headers("/v1/chat/completions"), body(b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}')),
    *(response_headers("text/event-stream"), *[response_body(CHUNK, last=False)] * 20),
    *(response_body(b"data: [DONE]\n\n", last=False), response_body(b"")),
)
PIECES = [prompt(150_000)[at : at + 40_000] for at in range(0, 150_024, 40_000)]


def same(players: list[Player], *scripts: Script) -> list[Outcome]:
    """Plays the scripts through each transport, and compares the outcomes. Returns them."""
    (native, area), (grpcio, other_area) = (player.play(scripts) for player in players)
    assert native == grpcio
    assert area == other_area
    assert not any(area[1]), "something is still counted as in flight"
    assert area[2] == []
    return native


RECORDED = {  # name -> messages, gRPC status, number of answers
    "an unstreamed request": (UNSTREAMED, 0, 4),
    "a streamed request": (STREAMED, 0, 25),
    "a body in pieces": ((headers(), *(body(piece, last=piece is PIECES[-1]) for piece in PIECES), *UNSTREAMED[2:]), 0, 7),
    "long bodies": ((headers(), body(prompt(180_000)), response_headers(), response_body(b"r" * 250_000)), 0, 10),
    "trailers end the request": ((headers(), body(BODY, last=False), TRAILERS, response_headers(last=True)), 0, 4),
    "no body": ((headers("/v1/models", last=True, host="10.0.0.2"), response_headers(), response_body(b"x")), 0, 3),
    "trailers end the answer": ((*UNSTREAMED[:3], response_body(USAGE, last=False), RESPONSE_TRAILERS), 0, 5),
    "no JSON": ((headers(), body(b"{")), 0, 1),
    "a body over the limit": ((headers(), body(b"p" * (BODY_MAX + 1))), 0, 1),
    "no endpoint in the subset": ((headers(last=True, host="10.9.9.9"),), 0, 1),
    "a local reply": ((headers(), response_headers("text/plain"), response_body(b"local reply")), 0, 2),
    "headers twice": ((headers(), headers()), 3, 0),
    "garbage": ((b"\xff\xff\xff",), 3, 0),
    "an empty message": ((b"",), 3, 0),
    "everything twice": ((*UNSTREAMED, *UNSTREAMED), 3, 4),
    "a message over the limit": ((headers(), body(b"p" * MESSAGE_MAX)), 8, 0),
    "nothing": ((), 0, 0),
}


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("compressed", [False, True])
def test_both_transports_answer_a_recorded_stream_alike(players: list[Player], name: str, compressed: bool) -> None:
    messages, code, answers = RECORDED[name]
    (outcome,) = same(players, Script(messages, compressed=compressed))
    assert (outcome.code.value[0], len(outcome.answers)) == (code, answers)


@pytest.mark.parametrize("count", range(len(UNSTREAMED) + 1))
def test_a_stream_that_is_cancelled_at_any_point_is_closed_alike_and_releases_everything(players: list[Player], count: int) -> None:
    (outcome,) = same(players, Script(UNSTREAMED[:count], CANCEL))
    assert outcome.events == (*["message"] * count, "closed")


sizes = st.one_of(st.integers(0, 200), st.sampled_from([16_379, 16_380, 62_000, 62_001, 65_535, 150_000]))
pieces = st.builds(lambda size, last: body(prompt(size)[: size + last], last=last), sizes, st.booleans())
legal_parts = st.tuples(
    st.sampled_from([headers(), headers("/v1/chat/completions"), headers(host="10.0.0.3"), headers("/v2/other")]),
    st.lists(sizes.map(lambda size: body(b"p" * size, last=False)), max_size=3).map(tuple),
    sizes.map(lambda size: body(prompt(size))),
    st.lists(sizes.map(lambda size: response_body(b"r" * size, last=False)), max_size=4).map(tuple),
    st.sampled_from([(response_body(USAGE),), (response_body(b""),), (RESPONSE_TRAILERS,), ()]),
)
legal = legal_parts.map(lambda parts: (parts[0], *parts[1], parts[2], response_headers(), *parts[3], *parts[4]))
any_message = st.one_of(
    pieces,
    sizes.map(lambda size: response_body(b"r" * size, last=size % 2 == 0)),
    st.binary(max_size=40),
    st.sampled_from([headers(), headers(last=True, host="10.0.0.1"), TRAILERS, RESPONSE_TRAILERS, response_headers(), b"", body(BODY)]),
)
cut = st.tuples(legal, st.integers(0, 12)).map(lambda pair: pair[0][: pair[1]])
spoiled = st.tuples(legal, st.integers(0, 8), any_message).map(
    lambda spoiled: (*spoiled[0][: spoiled[1]], spoiled[2], *spoiled[0][spoiled[1] :])
)
messages = st.one_of(legal, cut, spoiled, st.lists(any_message, max_size=8).map(tuple))
scripts = st.builds(Script, messages, st.sampled_from([HALF_CLOSE, HALF_CLOSE, CANCEL]), st.booleans())


@given(st.lists(scripts, min_size=1, max_size=4))
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large])
def test_both_transports_answer_any_streams_alike(players: list[Player], played: list[Script]) -> None:
    same(players, *played)


STREAMS_MAX = 5
plain_headers = st.sampled_from([headers(), headers("/v1/chat/completions"), headers(host="10.0.0.3"), headers("/v2/other")])
any_headers = st.builds(
    lambda path, names, values, last: named_headers(path, dict(zip(names, values, strict=False)), last=last),
    st.sampled_from(["/v1/completions", "/v1/chat/completions?x=1", "/v1/embeddings", "/generate", ""]),
    st.lists(
        st.sampled_from(["x-request-id", "content-encoding", "prefer", "x-llm-d-inference-fairness-id", "x-gateway-destination-endpoint"]),
        max_size=3,
        unique=True,
    ),
    st.lists(st.sampled_from(["gzip", "identity", "if-available", "1", "", "a" * 200, "\xe9"]), min_size=3, max_size=3),
    st.booleans(),
)


def named_headers(path: str, named: dict[str, str], *, last: bool) -> bytes:
    request = pb.ProcessingRequest()
    for name, value in {":method": "POST", ":path": path, "x-request-id": "given", **named}.items():
        request.request_headers.headers.headers.add(key=name, raw_value=value.encode("latin-1"))
    request.request_headers.end_of_stream = last
    return request.SerializeToString()


class Streams(RuleBasedStateMachine):
    """Streams of one connection through both transports at once. The handlers see each step before the next one."""

    players: list[Player]

    @initialize()
    def begin(self) -> None:
        self.live: list[list[Live]] = []
        for player in self.players:
            player.begin()

    @rule(compressed=st.booleans())
    @precondition(lambda self: len(self.live) < STREAMS_MAX)
    def a_stream_opens(self, compressed: bool) -> None:
        self.live.append([player.open(compressed=compressed) for player in self.players])

    @rule(data=st.data(), message=st.one_of(plain_headers, any_headers, any_message))
    @precondition(lambda self: self.live)
    def a_stream_sends_any_message(self, data: st.DataObject, message: bytes) -> None:
        self._say(data.draw(st.sampled_from(self.live)), message)

    @rule(data=st.data(), legal_messages=st.one_of(legal, cut))
    @precondition(lambda self: self.live)
    def a_stream_sends_legal_messages(self, data: st.DataObject, legal_messages: tuple[bytes, ...]) -> None:
        pair_ = data.draw(st.sampled_from(self.live))
        for message in legal_messages[:5]:
            self._say(pair_, message)

    @rule(data=st.data(), ending=st.sampled_from([HALF_CLOSE, CANCEL]))
    @precondition(lambda self: self.live)
    def a_stream_ends(self, data: st.DataObject, ending: str) -> None:
        pair_ = data.draw(st.sampled_from(self.live))
        self.live.remove(pair_)
        self._end(pair_, ending)

    def _say(self, pair_: list[Live], message: bytes) -> None:
        if not pair_[0].over:
            for stream in pair_:
                stream.say(message)
        assert len({stream.over for stream in pair_}) == 1

    def _end(self, pair_: list[Live], ending: str) -> None:
        if pair_[0].over:
            ending = HALF_CLOSE  # after a cancel, it is random which side learns first that the stream has ended
        native, grpcio = (stream.end(ending) for stream in pair_)
        assert native == grpcio

    def teardown(self) -> None:
        for pair_ in getattr(self, "live", ()):
            self._end(pair_, HALF_CLOSE)
        native, grpcio = (player.left() for player in self.players)
        assert native == grpcio
        assert not any(native[1]), "something is still counted as in flight"
        assert native[2] == []


def test_both_transports_answer_concurrent_streams_alike(players: list[Player]) -> None:
    class Machine(Streams):
        pass

    Machine.players = players
    run_state_machine_as_test(
        Machine,
        settings=examples(
            20,
            stateful_step_count=12,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
