"""One ext_proc stream of the driver, against right answers and against each kind of wrong answer that it counts."""

from collections.abc import Callable

import pytest

from loadtest.load.exchange import DESTINATION, Ending, Exchange, Messages, Shape
from loadtest.load.proto import ext_proc_pb2 as pb


class Sent:
    """A stream that keeps the sent messages."""

    def __init__(self) -> None:
        self.messages: list[pb.ProcessingRequest] = []
        self.ended = False

    def send(self, message: bytes) -> None:
        self.messages.append(pb.ProcessingRequest.FromString(message))

    def half_close(self) -> None:
        self.ended = True


class Session:
    """An exchange, its stream, its endings, and a clock that fires by hand."""

    def __init__(self, shape: Shape, number: int = 7, before: bytes = b"") -> None:
        self.before = before  # bytes before each answer
        self.messages = Messages(shape, "tag")
        self.picked = 0
        self.endings: list[tuple[Ending, str]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.stream = Sent()
        self.exchange = Exchange(self.messages, self._picked, lambda *ending: self.endings.append(ending), self._later)
        self.exchange.begin(self.stream, number)  # type: ignore[arg-type]

    def _picked(self) -> None:
        self.picked += 1

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append((seconds, call))

    @property
    def body(self) -> bytes:
        return b"".join(message.request_body.body for message in self.stream.messages)

    def answer_request(self, *, target: bool = True, body: bytes | None = None) -> None:
        headers = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        mutation = headers.request_headers.response.header_mutation
        if target:
            mutation.set_headers.add().header.key = DESTINATION.decode()
        self._answer(headers)
        answer = pb.ProcessingResponse()
        streamed = answer.request_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = self.body if body is None else body, True
        self._answer(answer)

    def answer_response(self) -> None:
        self._answer(pb.ProcessingResponse(response_headers=pb.HeadersResponse()))
        for message in self.stream.messages:
            if message.HasField("response_body"):
                self._echo(message.response_body)

    def _answer(self, message: pb.ProcessingResponse) -> None:
        self.exchange.message(self.before + message.SerializeToString())

    def _echo(self, body: pb.HttpBody) -> None:
        answer = pb.ProcessingResponse()
        streamed = answer.response_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = body.body, body.end_of_stream
        self._answer(answer)


def test_requests_have_the_size_of_their_shape_and_no_two_are_equal() -> None:
    messages = Messages(Shape(prompt_bytes=5_000, shared_bytes=2_000), "tag")
    first, second = (b"".join(messages.bodies(number)) for number in (1, 2))
    assert first != second
    assert first[:2_000] == second[:2_000]
    assert pb.ProcessingRequest.FromString(messages.headers(1)) != pb.ProcessingRequest.FromString(messages.headers(2))


@pytest.mark.parametrize("piece", [1_000, 65_536])
def test_a_body_is_sent_in_pieces_and_the_last_one_ends_the_stream(piece: int) -> None:
    session = Session(Shape(prompt_bytes=3_000, piece_bytes=piece))
    pieces = [message.request_body for message in session.stream.messages if message.HasField("request_body")]
    assert len(pieces) == -(-session.messages.body_bytes // piece)
    assert [part.end_of_stream for part in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(session.body) == session.messages.body_bytes


def test_a_request_succeeds_when_its_bytes_and_its_answer_return() -> None:
    session = Session(Shape(chunks=5, streamed=True))
    session.answer_request()
    assert session.picked == 1
    session.answer_response()
    assert session.stream.ended
    session.exchange.ended("0", "")
    assert session.endings == [(Ending.OK, "")]


@pytest.mark.parametrize(("target", "lost", "ending"), [(False, 0, Ending.NO_TARGET), (True, 3, Ending.ALTERED)])
def test_an_answer_without_a_target_or_with_altered_bytes_is_an_error(target: bool, lost: int, ending: Ending) -> None:
    session = Session(Shape())
    session.answer_request(target=target, body=session.body[lost:])
    session.answer_response()
    session.exchange.ended("0", "")
    assert [kind for kind, _ in session.endings] == [ending]


def test_an_answer_may_begin_with_metadata() -> None:
    metadata = pb.ProcessingResponse()
    metadata.dynamic_metadata["envoy.lb"] = "10.0.0.1:80"
    session = Session(Shape(), before=metadata.SerializeToString())
    session.answer_request()
    session.answer_response()
    session.exchange.ended("0", "")
    assert session.endings == [(Ending.OK, "")]


def test_a_refusal_and_a_broken_stream_have_different_endings() -> None:
    refused, broken = Session(Shape()), Session(Shape())
    immediate = pb.ProcessingResponse(immediate_response=pb.ImmediateResponse(body=b"too many"))
    refused.exchange.message(immediate.SerializeToString())
    refused.exchange.ended("0", "")
    broken.exchange.ended("14", "the connection was lost")
    assert refused.endings[0][0] is Ending.REFUSED and "too many" in refused.endings[0][1]
    assert broken.endings == [(Ending.FAILED, "gRPC status 14: the connection was lost")]


def test_a_stream_that_ends_before_the_last_answer_has_failed() -> None:
    session = Session(Shape(chunks=3, streamed=True))
    session.answer_request()
    session.exchange.ended("0", "")
    assert session.endings == [(Ending.FAILED, "the stream ended early")]


def test_a_paced_answer_sends_one_chunk_per_tick() -> None:
    session = Session(Shape(chunks=3, streamed=True, pace_s=0.04))
    session.answer_request()
    chunks = [1]
    while session.timers:
        seconds, call = session.timers.pop()
        assert seconds == 0.04
        call()
        chunks.append(sum(message.HasField("response_body") for message in session.stream.messages))
    assert chunks == [1, 2, 3]
