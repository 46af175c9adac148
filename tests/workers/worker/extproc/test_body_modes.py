"""Streams of gateways that name their body modes in the first message."""

from typing import Any

import pytest

from epp.protocol.codec import ALL_DUPLEX, BodyMode, body_modes
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.workers.worker.extproc.streams import USAGE, refusal
from tests.workers.worker.extproc.test_rewritten_streams import BODY, EVENT, HEADER, RENAMED, RESTORED, pair

Mode = BodyMode
OVERRIDE = bytes.fromhex("4a0a 10011802 20012801 3001")  # field 9: SEND, BUFFERED, STREAMED, SEND, SEND


def config(request: Mode, response: Mode) -> bytes:
    """ProcessingRequest.protocol_config{request_body_mode, response_body_mode}, without defaults, as protobuf writes it."""
    inner = b"".join(bytes((tag, mode)) for tag, mode in ((0x08, request), (0x10, response)) if mode)
    return bytes((0x5A, len(inner))) + inner


def begun(p: Any, request: Mode, response: Mode = Mode.FULL_DUPLEX_STREAMED, *, last: bool = False, **headers: str) -> Any:
    """A stream that has sent its headers, and the bytes that it got."""
    envoy = p.open()
    message = pb.ProcessingRequest()
    for name, value in {":method": "POST", ":path": "/v1/completions", **headers}.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = last
    envoy.handler.message(message.SerializeToString() + config(request, response))
    return envoy


def target(response: pb.HeadersResponse | pb.BodyResponse) -> dict[str, str]:
    options = response.response.header_mutation.set_headers
    return {o.header.key: o.header.raw_value.decode() for o in options}


def test_modes_are_read_wherever_they_stand_and_absent_ones_are_none() -> None:
    assert body_modes(config(Mode.BUFFERED, Mode.NONE) + b"\x12\x00") == (2, 0)
    assert body_modes(b"\x12\x00") is None
    assert config(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED) == ALL_DUPLEX


def test_in_full_duplex_mode_headers_wait_for_the_body() -> None:
    envoy = begun(pair(), Mode.FULL_DUPLEX_STREAMED)
    assert envoy.answers() == []
    assert [a.WhichOneof("response") for a in envoy.body(BODY)] == ["request_headers", "request_body"]


@pytest.mark.parametrize("mode", [Mode.BUFFERED, Mode.BUFFERED_PARTIAL])
def test_a_buffering_gateway_gets_the_target_with_the_answer_to_its_body(mode: Mode) -> None:
    p = pair()
    envoy = begun(p, mode)
    (first,) = envoy.answers()
    assert first.WhichOneof("response") == "request_headers" and not target(first.request_headers)
    (answer,) = envoy.body(BODY)
    assert answer.WhichOneof("response") == "request_body"
    address = target(answer.request_body)["x-gateway-destination-endpoint"]
    assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == address
    assert "content-length" not in target(answer.request_body)
    assert answer.request_body.response.clear_route_cache
    assert not answer.request_body.response.HasField("body_mutation")
    assert sum(p.inflight) == 1


def test_a_buffering_gateway_with_request_trailers_is_answered_before_they_come() -> None:
    envoy = begun(pair(), Mode.BUFFERED)
    envoy.answers()
    assert [a.WhichOneof("response") for a in envoy.body(BODY, last=False)] == ["request_body"]
    assert [a.WhichOneof("response") for a in envoy.trailers()] == ["request_trailers"]


def test_a_body_that_the_gateway_cut_off_is_413() -> None:
    envoy = begun(pair(), Mode.BUFFERED_PARTIAL)
    envoy.answers()
    code, error, _ = refusal(envoy.body(BODY[:9], last=False))
    assert code == 413 and "cut the request body off after 9 bytes" in error["message"]


@pytest.mark.parametrize(("response", "asks"), [(Mode.BUFFERED, True), (Mode.FULL_DUPLEX_STREAMED, False), (Mode.NONE, False)])
def test_streamed_answers_are_asked_for_if_the_gateway_would_buffer_them(response: Mode, asks: bool) -> None:
    envoy = begun(pair(), Mode.BUFFERED, response)
    assert envoy.stream.sent.endswith(OVERRIDE) == asks


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.STREAMED, 5])
def test_a_mode_that_cannot_work_is_refused_by_name_unless_there_is_no_body(mode: Any) -> None:
    p = pair()
    code, error, _ = refusal(begun(p, mode).answers())
    name = mode.name if isinstance(mode, Mode) else "5"
    assert code == 500 and f"request_body_mode {name}: " in error["message"]
    assert p.faults == []
    (answer,) = begun(p, mode, last=True).answers()
    assert answer.WhichOneof("response") == "request_headers" and target(answer.request_headers)


@pytest.mark.parametrize("response", [Mode.BUFFERED, Mode.STREAMED, Mode.BUFFERED_PARTIAL])
def test_outside_of_full_duplex_mode_the_answer_to_a_response_body_leaves_it_unchanged(response: Mode) -> None:
    p = pair()
    envoy = begun(p, Mode.FULL_DUPLEX_STREAMED, response)
    envoy.body(BODY)
    envoy.response_headers()
    for piece, last in ((USAGE[:9], False), (USAGE[9:12], False), (USAGE[12:], True)):
        (answer,) = envoy.response_body(piece, last=last)
        assert answer.response_body.response == pb.CommonResponse()
    assert sum(p.inflight) == 0 and p.faults == []


def test_a_renamed_model_is_replaced_in_buffered_bodies_in_both_directions() -> None:
    envoy = begun(pair(), Mode.BUFFERED, Mode.BUFFERED, **{HEADER: "base-v2"})
    envoy.answers()
    (answer,) = envoy.body(BODY)
    assert answer.request_body.response.body_mutation.body == RENAMED
    envoy.response_headers()
    (answer,) = envoy.response_body(EVENT)
    assert answer.response_body.response.body_mutation.body == RESTORED


def test_a_stream_that_has_only_a_response_obeys_its_mode_too() -> None:
    envoy = pair().open()
    message = pb.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"504")
    envoy.handler.message(message.SerializeToString() + config(Mode.BUFFERED, Mode.BUFFERED))
    envoy.answers()
    (answer,) = envoy.response_body(b"x")
    assert answer.response_body.response == pb.CommonResponse()
