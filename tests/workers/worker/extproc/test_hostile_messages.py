"""Messages that no gateway sends: malformed in places that are read late or never. They end at most their own stream."""

from typing import Any

import pytest

from epp.candidates import Candidates
from epp.decision.decision import Decision, Response
from epp.plugin import DataProducer, NoParams, Parser, PreRequest, ResponseComplete
from epp.protocol.codec import field
from epp.request import Request
from tests.pair import bodies
from tests.workers.worker.extproc.streams import BODY, USAGE, Future, Waits, pair
from workers.worker.extproc.request_phase import BESIDES_MAX, LONG_BODY

INVALID_ARGUMENT = 3
PATH = field(1, field(1, b":path") + field(3, b"/v1/completions"))
MALFORMED = field(2, field(1, PATH + field(1, b"\x0b\x05other")))  # a group opens inside an entry


class ReadsHeaders(DataProducer):
    """Reads a header, at once or after a pause."""

    def __init__(self, future: Future | None = None) -> None:
        super().__init__("reads", NoParams())
        self.future = future

    def produce(self, request: Request, candidates: Candidates) -> Any:
        assert "x-any" not in request.headers
        return self.future


class Notes(PreRequest, ResponseComplete):
    """Counts the requests that have begun and not ended."""

    def __init__(self) -> None:
        super().__init__("notes", NoParams())
        self.open = 0

    def before_send(self, request: Request, decision: Decision) -> None:
        self.open += 1

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self.open -= 1


class Breaks(PreRequest):
    def before_send(self, request: Request, decision: Decision) -> None:
        raise ZeroDivisionError


class SetsHeader(PreRequest):
    """Sets a header that no HTTP message can have."""

    def before_send(self, request: Request, decision: Decision) -> None:
        decision.headers["x-name"] = "\u4f60"


def test_malformed_headers_end_the_stream_and_are_no_fault_of_a_plugin_that_reads_them() -> None:
    notes = Notes()
    p = pair(ReadsHeaders(), notes)
    envoy = p.open()
    envoy.handler.message(MALFORMED)
    envoy.body(BODY)
    assert envoy.stream.ended is not None
    assert envoy.stream.ended[0] == INVALID_ARGUMENT
    assert p.faults == [] and not any(p.inflight) and notes.open == 0
    assert p.counter("violations_total") == 1


def test_malformed_headers_end_a_stream_after_a_decision_that_waited() -> None:
    future = Future()
    p = pair(ReadsHeaders(future))
    envoy = p.open()
    envoy.handler.message(MALFORMED)
    envoy.body(BODY)
    assert envoy.stream.ended is None
    future.callback(None)
    assert envoy.stream.ended is not None
    assert envoy.stream.ended[0] == INVALID_ARGUMENT
    assert p.faults == [] and not any(p.inflight)


def test_a_failure_after_a_decision_that_waited_is_answered_with_500_and_releases_everything() -> None:
    waits, notes = Waits(), Notes()
    p = pair(waits, SetsHeader("sets", NoParams()), notes)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    waits.future.callback(None)
    (answer,) = envoy.answers()
    assert answer.immediate_response.status.code == 500
    assert envoy.stream.ended == (0, "")
    assert not any(p.inflight) and notes.open == 0
    assert [type(fault) for fault in p.faults] == [UnicodeEncodeError]


@pytest.mark.parametrize("first", [True, False])
def test_when_a_plugin_fails_before_sending_the_others_release_what_they_counted(first: bool) -> None:
    notes, breaks = Notes(), Breaks("breaks", NoParams())
    p = pair(*((notes, breaks) if first else (breaks, notes)))
    envoy = p.open()
    envoy.headers()
    (answer,) = envoy.body(BODY)
    assert answer.immediate_response.status.code == 500
    assert notes.open == 0 and not any(p.inflight)


def test_response_complete_is_skipped_for_a_plugin_if_its_before_send_did_not_run() -> None:
    notes = Notes()
    envoy = pair(notes).open()
    envoy.headers(prefer="if-available")
    (answer,) = envoy.body(BODY)
    assert answer.immediate_response.status.code == 412
    assert notes.open == 0


def test_a_body_with_an_impossible_field_is_not_passed_on() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    envoy.handler.message(b"\x2a\x05\x0a\x01x\x00\x00")  # field 0
    assert envoy.answers() == []
    assert envoy.stream.ended is not None
    assert envoy.stream.ended[0] == INVALID_ARGUMENT


def test_a_header_that_ends_before_its_value_is_ignored() -> None:
    envoy = pair().open()
    envoy.handler.message(b"\x12\x0b\x0a\x09\x0a\x07\x0a\x05:path")
    envoy.handler.message(b"\x12\x0c\x0a\x0a\x0a\x08\x0a\x05:path\x1a")
    assert envoy.stream.ended is not None
    assert envoy.stream.ended[0] == INVALID_ARGUMENT


def test_usage_that_is_no_utf8_is_ignored_and_the_answer_passes() -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    answer = USAGE.replace(b'"prompt_tokens":9', b'"prompt_tokens":"\xff"')
    assert bodies(envoy.response_body(answer), "response_body")[0] == answer
    assert p.faults == [] and not any(p.inflight)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (b"\x48\x01" * 2000 + b"\x12\x00", "more than 1024 fields"),
        (field(2, field(1, b"\x0a\x02\x0a\x00" * 4000) + b"\x18\x01"), "more than 1000"),
    ],
    ids=["fields", "headers"],
)
def test_very_many_fields_or_headers_end_the_stream(message: bytes, problem: str) -> None:
    envoy = pair().open()
    envoy.handler.message(message)
    assert envoy.stream.ended is not None
    assert envoy.stream.ended[0] == INVALID_ARGUMENT
    assert problem in envoy.stream.ended[1]


@pytest.mark.parametrize("kind", [2, 3, 4])
def test_a_message_with_too_many_bytes_besides_a_body_ends_the_stream(kind: int) -> None:
    envoy = pair().open()
    if kind != 2:
        envoy.headers()
    if kind == 3:
        envoy.body(BODY)
    envoy.handler.message(field(kind, b"") + field(99, bytes(BESIDES_MAX)))
    assert envoy.stream.ended == (INVALID_ARGUMENT, f"malformed message: more than {BESIDES_MAX} bytes besides a body's")


def test_bytes_besides_a_piece_of_a_body_count_as_held_too() -> None:
    envoy = pair().open()
    envoy.headers()
    message = field(4, field(1, b"{")) + field(99, bytes(1000))
    envoy.handler.message(message)
    assert envoy.stream.held == len(message)


def test_as_many_headers_as_a_gateway_allows_are_read() -> None:
    envoy = pair().open()
    envoy.headers("/v1/completions", **{f"x-{n:08}": "y" * 10 for n in range(990)})
    assert [a.WhichOneof("response") for a in envoy.body(BODY)] == ["request_headers", "request_body"]


@pytest.mark.parametrize("tokens", [b"-5", b"4294967296", b"9223372036854775808", b'"-1"', b"1" + b"0" * 400])
def test_impossible_usage_is_ignored_and_the_answer_passes(tokens: bytes) -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    answer = USAGE.replace(b'"prompt_tokens":9', b'"prompt_tokens":' + tokens)
    assert bodies(envoy.response_body(answer), "response_body")[0] == answer
    assert p.faults == [] and not any(p.inflight)
    assert p.counter("prompt_tokens_total") == 0


class ParserBreaks(Parser):
    paths = ("breaks",)

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("by_trailers", [False, True])
def test_a_long_body_is_decided_in_a_separate_turn_and_a_fault_there_ends_its_stream(by_trailers: bool) -> None:
    p = pair(parsers=(ParserBreaks("breaks", NoParams()),), body_bytes_max=2 * LONG_BODY)
    envoy = p.open()
    envoy.headers("/breaks")
    assert envoy.body(bytes(LONG_BODY + 1), last=not by_trailers) == []
    if by_trailers:
        envoy.trailers()
    assert len(p.turns) == 1 and p.faults == []
    p.turns.popleft()()
    (answer,) = envoy.answers()
    assert answer.immediate_response.status.code == 500
    assert envoy.stream.ended == (0, "") and len(p.faults) == 1


def test_a_stream_that_ends_before_its_long_body_is_decided_is_dropped() -> None:
    p = pair(body_bytes_max=2 * LONG_BODY)
    envoy = p.open()
    envoy.headers()
    envoy.body(b'{"model":"m","prompt":"%b"}' % (b"x" * LONG_BODY))
    envoy.handler.closed()
    p.turns.popleft()()
    assert envoy.answers() == [] and not any(p.inflight) and p.faults == []


@pytest.mark.parametrize("by_trailers", [False, True])
def test_a_half_close_behind_a_long_body_does_not_cost_its_answer(by_trailers: bool) -> None:
    p = pair(body_bytes_max=2 * LONG_BODY)
    envoy = p.open()
    envoy.headers()
    envoy.body(b'{"model":"m","prompt":"%b"}' % (b"x" * LONG_BODY), last=not by_trailers)
    if by_trailers:
        envoy.trailers()
    envoy.handler.half_closed()
    p.turns.popleft()()
    assert envoy.answers()[0].WhichOneof("response") == "request_headers"
    assert envoy.stream.ended == (0, "") and not any(p.inflight) and p.faults == []


def test_a_half_close_before_the_whole_body_ends_the_stream_without_an_answer() -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY[:9], last=False)
    envoy.handler.half_closed()
    assert envoy.answers() == [] and envoy.stream.ended == (0, "") and p.faults == []


def test_empty_pieces_are_answered_in_their_direction() -> None:
    p = pair()
    for _ in range(2):  # the second stream uses what was cached for the first one
        envoy = p.open()
        envoy.headers()
        envoy.handler.message(b"\x22\x00")
        answers = envoy.body(BODY)
        assert [a.WhichOneof("response") for a in answers] == ["request_headers", "request_body", "request_body"]
        envoy.response_headers()
        envoy.handler.message(b"\x2a\x00")
        assert [a.WhichOneof("response") for a in envoy.answers()] == ["response_body"]
