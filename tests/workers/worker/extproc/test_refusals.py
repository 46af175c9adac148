"""Requests that cannot be routed: each gets one answer with the status, the shape and the reason that its client needs."""

import pytest

from loadtest.load.proto import ext_proc_pb2 as pb
from tests.cases import cases
from tests.pair import set_headers
from tests.workers.worker.extproc.streams import BODY, Waits, pair, refusal


@cases(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", b"{", 400, "inference error: BadRequest - invalid request body: "),
        ("/v1/completions", b'{"prompt":"x"}', 400, "inference error: BadRequest - model not found in request body"),
        ("/v1/completions", b'{"model":7,"prompt":"x"}', 400, "inference error: BadRequest - model not found in request body"),
        ("/v1/completions", b'{"model":"m"}', 400, "inference error: BadRequest - invalid completions request: must have prompt field"),
        ("/v1/completions", b'{"model":"m","prompt":["a",1]}', 400, "inference error: BadRequest - invalid completions request: prompt: "),
        (
            "/v1/chat/completions",
            b'{"model":"m","messages":[]}',
            400,
            "inference error: BadRequest - invalid chat completions request: must have valid messages field",
        ),
        (
            "/v1/embeddings",
            b'{"model":"m","input":""}',
            400,
            "inference error: BadRequest - invalid embeddings request: must have input field",
        ),
        ("/v1/responses", b'{"model":"m"}', 400, "inference error: BadRequest - invalid responses request: must have input field"),
        (
            "/v1/conversations",
            b'{"model":"m","items":[]}',
            400,
            "inference error: BadRequest - invalid conversations request: must have items field",
        ),
        (
            "/v1/images/generations",
            b'{"model":"m"}',
            400,
            "inference error: BadRequest - invalid images generations request: must have prompt field",
        ),
        ("/v1/completions", b"[" * 100_000, 400, "inference error: BadRequest - invalid request body: "),
    ],
)
def test_bad_bodies_are_refused_in_openais_shape(path: str, body: bytes, status: int, message: str) -> None:
    p = pair()
    envoy = p.open()
    envoy.headers(path)
    code, error, headers = refusal(envoy.body(body))
    assert (code, error["type"], error["code"]) == (status, "BadRequest", status)
    assert error["message"].startswith(message)
    assert headers["content-type"] == "application/json"
    assert envoy.stream.ended == (0, "")
    assert p.counter("refusals_total") == 1 and sum(p.inflight) == 0
    assert p.counter("load_refusals_total") == 0


def test_a_body_over_the_limit_is_413_before_it_is_complete() -> None:
    envoy = pair(body_bytes_max=1000).open()
    envoy.headers()
    assert envoy.body(b"x" * 900, last=False) == []
    code, error, _ = refusal(envoy.body(b"x" * 101, last=False))
    assert (code, error["type"], error["message"]) == (
        413,
        "PayloadTooLarge",
        "inference error: PayloadTooLarge - request body exceeds 1000 bytes",
    )
    envoy.handler.message(b"\x22\x02\x10\x01")  # a piece that was already on its way is ignored
    assert envoy.answers() == []


def test_a_body_that_stops_coming_is_408() -> None:
    envoy = pair().open()
    assert envoy.handler.awaited() == 0
    envoy.headers()
    envoy.body(BODY[:5], last=False)
    assert envoy.handler.awaited() == 5
    envoy.handler.give_up_waiting(30.0)
    code, error, _ = refusal(envoy.answers())
    assert (code, error["type"]) == (408, "RequestTimeout")
    assert "too little of the request body came for 30 seconds" in error["message"]
    assert envoy.handler.awaited() == -1


def test_a_body_that_is_given_up_is_429_with_a_time_to_retry() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY[:5], last=False)
    envoy.handler.give_up_body()
    code, error, headers = refusal(envoy.answers())
    assert (code, error["type"], headers["retry-after"]) == (429, "ResourceExhausted", "1")
    assert envoy.handler.awaited() == -1
    assert envoy.stream.ended == (0, "")


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_complete_body_is_held_while_its_decision_waits(pieces: int) -> None:
    waits = Waits()
    envoy = pair(waits).open()
    envoy.headers()
    size = -(-len(BODY) // pieces)
    for number in range(pieces):
        envoy.body(BODY[number * size : (number + 1) * size], last=number == pieces - 1)
    assert envoy.stream.held >= len(BODY)
    assert envoy.handler.unfinished() <= 0, "short bodies in a queue are not given up for others"
    waits.future.callback(None)
    assert envoy.answers() and envoy.stream.held == 0


@cases("ends_by", ["piece", "trailers"])
@cases("pieces", [1, 2, 5])
@cases("prompt", [100, 2 << 20])
def test_a_complete_body_holds_each_piece_once_however_it_ends(ends_by: str, pieces: int, prompt: int) -> None:
    waits = Waits()
    p = pair(waits, body_bytes_max=4 << 20)
    envoy = p.open()
    envoy.headers()
    body = BODY.replace(b"hello", b"x" * prompt)
    size, messages = -(-len(body) // pieces), 0
    for number in range(pieces):
        piece = body[number * size : (number + 1) * size]
        last = ends_by == "piece" and number == pieces - 1
        messages += pb.ProcessingRequest(request_body=pb.HttpBody(body=piece, end_of_stream=last)).ByteSize()
        envoy.body(piece, last=last)
    if ends_by == "trailers":
        envoy.trailers()
    assert envoy.stream.held == messages
    while p.turns:
        p.turns.popleft()()
    assert envoy.stream.held == messages, "also while the decision waits"
    waits.future.callback(None)
    assert envoy.answers() and envoy.stream.held == 0


def test_a_request_that_would_wait_is_refused_if_too_many_bytes_are_held() -> None:
    waits = Waits()
    p = pair(waits)
    envoy = p.open()
    envoy.headers()
    envoy.stream.held_max = 0
    code, error, headers = refusal(envoy.body(BODY))
    assert (code, error["type"], headers["retry-after"]) == (429, "ResourceExhausted", "1")
    assert envoy.stream.ended == (0, "") and not any(p.inflight)


def test_long_bodies_that_wait_for_their_turns_are_held() -> None:
    p = pair(body_bytes_max=4 << 20)
    long = BODY.replace(b"hello", b"x" * (2 << 20))
    streams = [p.open() for _ in range(3)]
    for envoy in streams:
        envoy.headers()
        assert envoy.body(long) == []
    assert all(envoy.stream.held >= len(long) <= envoy.handler.unfinished() for envoy in streams)
    while p.turns:
        p.turns.popleft()()
    assert all(envoy.answers() and envoy.stream.held == 0 for envoy in streams)


def test_the_log_says_whose_request_is_given_up() -> None:
    envoy = pair().open()
    assert envoy.handler.origin() == "request unknown of client unknown, from 10.9.8.7"
    envoy.headers(**{"x-request-id": "abc\x1b" + "d" * 500, "x-forwarded-for": "10.1.2.3"})
    assert envoy.handler.origin() == f"request abc\x1b{'d' * 60} of client 10.1.2.3, from 10.9.8.7"


def test_a_stream_that_is_given_up_before_its_headers_ends_with_a_grpc_status() -> None:
    envoy = pair().open()
    envoy.handler.give_up_body()
    assert envoy.answers() == []
    assert envoy.stream.ended is not None
    assert envoy.stream.ended[0] == 8


def test_a_body_that_is_given_up_while_its_piece_is_counted_gets_one_answer() -> None:
    envoy = pair().open()
    envoy.headers()

    def hold(count: int) -> bool:
        envoy.handler.give_up_body()
        return False

    envoy.stream.hold = hold  # type: ignore[method-assign]
    assert refusal(envoy.body(BODY[:5], last=False))[0] == 429


def test_a_stream_without_a_request_ends_with_a_grpc_status() -> None:
    envoy = pair().open()
    envoy.handler.give_up_waiting(30.0)
    assert envoy.answers() == []
    assert envoy.stream.ended == (4, "no request came for 30 seconds")


def test_bodies_that_together_hold_too_much_are_429() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.stream.held_max = 100
    assert envoy.body(b"x" * 90, last=False) == []
    code, error, headers = refusal(envoy.body(b"x" * 20, last=False))
    assert (code, error["type"]) == (429, "ResourceExhausted")
    assert headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"]])
def test_a_subset_without_endpoints_is_503_with_a_reason(subset: list[str]) -> None:
    envoy = pair().open()
    envoy.headers()
    code, error, headers = refusal(envoy.body(BODY, subset=subset))
    assert (code, error["type"]) == (503, "ServiceUnavailable")
    assert headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


def test_both_messages_may_have_the_subset_and_the_one_of_the_body_wins() -> None:
    for first, second, expected in ((["10.0.0.1"], None, "10.0.0.1:8000"), (["10.0.0.1"], ["10.0.0.3:8000"], "10.0.0.3:8000")):
        envoy = pair().open()
        envoy.headers(subset=first)
        assert set_headers(envoy.body(BODY, subset=second)[0])["x-gateway-destination-endpoint"] == expected


@pytest.mark.parametrize(("waiting_for", "text"), [("decision", "evicted from queue"), ("body", "rejected pre-queue")])
def test_undecided_requests_are_refused_with_the_reason_when_the_worker_leaves(waiting_for: str, text: str) -> None:
    waits = Waits()
    p = pair(waits)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY, last=waiting_for == "decision")
    assert envoy.handler.refuse_waiting()
    (answer,) = envoy.answers()
    assert answer.immediate_response.status.code == 503
    body = answer.immediate_response.body.decode()
    assert f"flow controller shutting down: request {text}: flow controller is not running" in body
    headers = {o.header.key: o.header.raw_value for o in answer.immediate_response.headers.set_headers}
    assert headers["x-llm-d-request-dropped-reason"] == b"rejected-shutting-down"
    assert not envoy.handler.refuse_waiting()
    assert sum(p.inflight) == 0 and p.faults == []


def test_requests_that_are_routed_or_have_not_begun_are_not_refused_when_the_worker_leaves() -> None:
    envoy = pair().open()
    assert not envoy.handler.refuse_waiting()
    envoy.headers()
    envoy.body(BODY)
    assert not envoy.handler.refuse_waiting()
