"""gRPC health: the hand-written codec for its two messages with any bytes, and the meaning of each service name."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.protocol.codec import field
from workers.worker.extproc.health import (
    CHECK,
    EXT_PROC,
    INVALID_ARGUMENT,
    LIST,
    NOT_SERVING,
    SERVICE_UNKNOWN,
    SERVING,
    Health,
    beside,
    read_service,
)


class Stream:
    """Records what was sent and how the stream ended."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.endings: list[tuple[int, str]] = []

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def end(self, status: int = 0, text: str = "") -> None:
        self.endings.append((status, text))


def request(service: str) -> bytes:
    return field(1, service.encode()) if service else b""


def call(health: Health, path: str, message: bytes | None) -> Stream:
    stream = Stream()
    handler = health.open(path, (), stream)
    assert handler is not None
    if message is not None:
        handler.message(message)
    handler.half_closed()
    return stream


@pytest.mark.parametrize("service", ["", "readiness", EXT_PROC])
@pytest.mark.parametrize("ready", [True, False])
def test_readiness_follows_the_picker(service: str, ready: bool) -> None:
    stream = call(Health(lambda: ready), CHECK, request(service))
    assert stream.sent == [SERVING if ready else NOT_SERVING]
    assert stream.endings == [(0, "")]


def test_the_grpc_message_says_why_the_picker_is_not_ready() -> None:
    health = Health(lambda: False, missing=lambda: "no pool")
    assert call(health, CHECK, request("")).endings == [(0, "no pool")]
    assert call(health, CHECK, request("liveness")).endings == [(0, "")]
    assert call(health, LIST, b"").endings == [(0, "")]


@pytest.mark.parametrize("service", ["liveness", "any.other.Name", "Readiness", EXT_PROC + ".", "x" * 1000, "\u00fc"])
def test_liveness_does_not_depend_on_endpoints(service: str) -> None:
    assert call(Health(lambda: False), CHECK, request(service)).sent == [SERVING]


def test_list_and_check_have_the_same_status() -> None:
    (answer,) = call(Health(lambda: False), LIST, b"").sent
    assert answer.endswith(b"\x12\x02" + NOT_SERVING)


@pytest.mark.parametrize("ready", [True, False])
def test_with_leader_election_only_readiness_depends_on_the_picker_and_other_names_are_unknown(ready: bool) -> None:
    health = Health(lambda: ready, elects=True)
    for service in ("", "readiness", EXT_PROC):
        assert call(health, CHECK, request(service)).sent == [SERVING if ready else NOT_SERVING]
    assert call(health, CHECK, request("liveness")).sent == [SERVING]
    for service in ("any.other.Name", "Liveness", EXT_PROC + "."):
        stream = call(health, CHECK, request(service))
        assert (stream.sent, stream.endings) == ([SERVICE_UNKNOWN], [(0, "")])


@pytest.mark.parametrize("elects", [False, True])
def test_list_has_the_three_services_that_the_protocol_demands(elects: bool) -> None:
    def listed(name: str, status: bytes) -> bytes:
        return field(1, field(1, name.encode()) + field(2, status))

    for ready in (False, True):
        health = Health(lambda ready=ready: ready, elects=elects)
        (answer,) = call(health, LIST, b"").sent
        state = SERVING if ready else NOT_SERVING
        assert answer == listed(EXT_PROC, state) + listed("liveness", SERVING) + listed("readiness", state)
        for service, expected in ((EXT_PROC, state), ("readiness", state), ("liveness", SERVING)):
            assert call(health, CHECK, request(service)).sent == [expected]


def test_health_serves_the_paths_that_the_other_application_does_not_serve() -> None:
    mine = object()
    either = beside(lambda path, _metadata, _stream: mine if path == "/mine" else None, lambda: True)
    assert either("/mine", (), Stream()) is mine
    assert either("/x", (), Stream()) is None
    stream = Stream()
    handler = either(CHECK, (), stream)
    assert handler is not None
    handler.message(b"")
    assert stream.sent == [SERVING]


@pytest.mark.parametrize("path", ["/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/", "/x", ""])
def test_other_methods_have_no_handler(path: str) -> None:
    assert Health(lambda: True).open(path, (), Stream()) is None


def test_a_call_without_a_message_is_refused_once() -> None:
    stream = call(Health(lambda: True), CHECK, None)
    assert [status for status, _ in stream.endings] == [INVALID_ARGUMENT]


def test_a_second_message_is_not_answered() -> None:
    stream = Stream()
    handler = Health(lambda: True).open(CHECK, (), stream)
    assert handler is not None
    handler.message(b"")
    handler.message(b"")
    handler.half_closed()
    assert (len(stream.sent), len(stream.endings)) == (1, 1)


@pytest.mark.parametrize("message", [b"\x0a", b"\x0a\x05ab", b"\x80" * 11, b"\x0b", b"\x0a\x01\xff", b"\x0a" * 2000])
def test_malformed_requests_are_refused(message: bytes) -> None:
    stream = call(Health(lambda: True), CHECK, message)
    assert stream.sent == []
    assert stream.endings[0][0] == INVALID_ARGUMENT


def test_unknown_fields_are_skipped_and_the_last_service_counts() -> None:
    assert read_service(b"\x10\x96\x01" + request("a") + b"\x1d1234" + b"\x2112345678" + b"\x32\x01x" + request("b")) == "b"


@given(st.binary(max_size=100))
def test_any_bytes_are_a_request_or_a_refusal(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(read_service(message), str)
