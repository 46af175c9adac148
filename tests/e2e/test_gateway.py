"""Requests through Envoy, the picker and a simulated server, and back."""

import contextlib
import hashlib
import http.client
import json
import random
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hpack
import pytest

from loadtest.demo.children import descendants
from loadtest.demo.envoy_config import PickerTls
from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import (
    ANSWER_S,
    CHAT,
    COMPLETIONS,
    MODEL,
    Answer,
    Cluster,
    ask,
    chat,
    completion,
    events,
    eventually,
    write_endpoints,
)
from tests.e2e.conftest import Gateway
from tests.faults.client import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame

MIB = 1 << 20
PIECE = 40_000
LARGE = 30_000_000
BYTES_ALONE = 200_000  # Envoy allows 10,000 queued frames by default


def pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]


def refused_early(port: int, size: int, chunked: bool) -> Answer:
    """Sends zeros until an answer arrives, like a client that looks for an early answer."""
    piece = bytes(MIB)
    head = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
    unsent = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode()
    sent = 0
    with socket.create_connection((LOOPBACK, port), ANSWER_S) as connection:
        while sent < size:
            readable, writable, _ = select.select([connection], [connection], [], ANSWER_S)
            if readable:
                break
            assert writable, "the gateway neither reads nor answers"
            if not unsent:
                unsent = b"%x\r\n%s\r\n" % (MIB, piece) if chunked else piece
                sent += MIB
            unsent = unsent[connection.send(unsent, socket.MSG_DONTWAIT) :]
        response = http.client.HTTPResponse(connection)
        response.begin()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def resident_peak(pids: list[int]) -> int:
    """Returns the sum of the peak resident sizes of these processes, in bytes."""
    total = 0
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
    return total


def error_of(answer: Answer) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)])
def test_an_unstreamed_request_is_answered_with_usage(gateway: Gateway, path: str, make: Any) -> None:
    answer = ask(gateway.port, path, make("hello there", max_tokens=5))
    assert answer.status == 200
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert answer.server in {stats["server"] for stats in gateway.fleet.stats()}


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)])
def test_a_streamed_request_is_answered_event_by_event_with_usage_last(gateway: Gateway, path: str, make: Any) -> None:
    answer = ask(gateway.port, path, make("hello there", max_tokens=5, stream=True, stream_options={"include_usage": True}))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body.endswith(b"data: [DONE]\n\n")
    chunks = events(answer.body)
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert sum(1 for event in chunks if event["choices"]) >= 5


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1_000, 200_000, 3_000_000])
def test_the_body_arrives_byte_for_byte(gateway: Gateway, size: int, chunked: bool) -> None:
    body = completion(f"{chunked} " + random.Random(size).randbytes(size // 2).hex(), max_tokens=1)
    answer = ask(gateway.port, COMPLETIONS, pieces(body) if chunked else body)
    assert answer.status == 200, answer.body[:300]
    assert answer.headers["x-sim-body-bytes"] == str(len(body))
    assert answer.headers["x-sim-body-sha256"] == hashlib.sha256(body).hexdigest()


def test_a_long_answer_arrives_whole(gateway: Gateway) -> None:
    answer = ask(gateway.port, COMPLETIONS, completion("x", max_tokens=40, stream=True))
    again = ask(gateway.port, COMPLETIONS, completion("x", max_tokens=40))
    words = "".join(event["choices"][0]["text"] for event in events(answer.body) if event["choices"])
    assert words == again.json()["choices"][0]["text"]


def test_a_request_without_a_body_reaches_a_server(gateway: Gateway) -> None:
    answer = ask(gateway.port, "/v1/models", None, method="GET")
    assert answer.status == 200
    assert answer.json()["data"][0]["id"] == MODEL


def test_a_body_that_is_not_json_is_refused(gateway: Gateway) -> None:
    answer = ask(gateway.port, COMPLETIONS, b'{"model": "x", ')
    error = error_of(answer)
    assert answer.status == 400
    assert error["message"].startswith("inference error: BadRequest - ")
    assert (error["type"], error["code"]) == ("BadRequest", 400)


def test_a_body_without_a_model_is_refused_with_the_exact_text(gateway: Gateway) -> None:
    answer = ask(gateway.port, COMPLETIONS, b'{"prompt": "hello"}')
    assert answer.status == 400
    expected = {"message": "inference error: BadRequest - model not found in request body", "type": "BadRequest", "code": 400}
    assert error_of(answer) == expected
    assert answer.body == json.dumps({"error": expected}, separators=(",", ":")).encode()


REFUSED_BY_ENVOY = {
    b"GET / HTTP/1.0\r\nhost: x\r\n\r\n": 426,
    b"GET nowhere HTTP/1.1\r\nhost: x\r\n\r\n": 400,
    b"\0garbage\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nhost: x\r\nx-long: %s\r\n\r\n" % (b"x" * 70_000): 431,
    b"GET / HTTP/1.1\r\nhost: x\r\n%s\r\n" % (b"x-many: x\r\n" * 200): 431,
    b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n\r\n": 404,
}


@pytest.mark.parametrize(("sent", "status"), REFUSED_BY_ENVOY.items(), ids=lambda value: str(value)[:20])
def test_a_request_that_envoy_refuses_by_itself_opens_no_stream(gateway: Gateway, sent: bytes, status: int) -> None:
    assert eventually(lambda: sum(gateway.picker.gauge("streams_open")) == 0)
    streams = gateway.picker.counter("streams_total")
    with socket.create_connection((LOOPBACK, gateway.port), ANSWER_S) as client:
        client.sendall(sent)
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == status
    assert gateway.picker.counter("streams_total") == streams


def test_an_error_of_the_server_passes_through(gateway: Gateway) -> None:
    answer = ask(gateway.port, COMPLETIONS, completion("hello"), {"x-sim-fault": "error"})
    assert answer.status == 500
    assert b"asked for this failure" in answer.body


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_mb_is_refused_without_being_buffered(gateway: Gateway, chunked: bool) -> None:
    processes = descendants(gateway.picker.child.pid)
    before = resident_peak(processes)
    answer = refused_early(gateway.port, 100 * MIB, chunked)
    grown = resident_peak(processes) - before
    print(f"100 MiB refused; the peak of {len(processes)} processes grew by {grown / MIB:.0f} MiB")
    assert answer.status == 413
    error = error_of(answer)
    assert error["message"] == "inference error: PayloadTooLarge - request body exceeds 33554432 bytes"
    assert (error["type"], error["code"]) == ("PayloadTooLarge", 413)
    assert grown < 120 * MIB


def test_without_endpoints_the_answer_is_503_with_a_reason(cluster: Cluster) -> None:
    picker = cluster.picker(write_endpoints(cluster.directory / "none.yaml", []), workers=1, ready=False)
    cluster.wait(picker.child, lambda: "worker_serving" in picker.page())
    port = cluster.envoy(picker)
    answer = ask(port, COMPLETIONS, completion("hello"))
    assert answer.status == 503
    assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    assert error_of(answer)["type"] == "ServiceUnavailable"
    models = ask(port, "/v1/models", None, method="GET")
    assert models.status == 503
    assert models.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


def test_a_clients_destination_header_has_no_effect(gateway: Gateway) -> None:
    address = gateway.fleet.addresses[0]
    dead = {"x-gateway-destination-endpoint": "127.0.0.1:1"}
    nowhere = [ask(gateway.port, COMPLETIONS, completion(f"nowhere {n}", max_tokens=1), dead) for n in range(5)]
    assert [answer.status for answer in nowhere] == [200] * 5
    pinned = {"x-gateway-destination-endpoint": f"{address[0]}:{address[1]}"}
    servers = {ask(gateway.port, COMPLETIONS, completion(f"{n} pinned" * 40, max_tokens=1), pinned).server for n in range(24)}
    assert len(servers) > 1
    models = {ask(gateway.port, "/v1/models", None, pinned, method="GET").server for _ in range(24)}
    assert len(models) > 1


def test_a_gateway_can_use_tls_to_a_picker_with_a_self_signed_certificate(gateway: Gateway, cluster: Cluster) -> None:
    picker = cluster.picker(gateway.fleet.file, "--secure-serving=true", workers=2)
    port = cluster.envoy(picker, tls=PickerTls())
    body = completion("hello over TLS" * 5_000, max_tokens=2)
    answer = ask(port, COMPLETIONS, body)
    assert answer.status == 200
    assert answer.headers["x-sim-body-sha256"] == hashlib.sha256(body).hexdigest()
    assert ask(cluster.envoy(picker), COMPLETIONS, body).status == 503, "a plaintext gateway gets no answer from a TLS port"


@contextlib.contextmanager
def served_throughout(gateway: Gateway) -> Iterator[int]:
    """Yields the port of an Envoy. During the block, other clients get long answers through it, on the same connections to the picker."""
    port = gateway.cluster.envoy(gateway.picker, threads=1)
    with ThreadPoolExecutor() as pool:
        body = completion("a long answer", max_tokens=300, stream=True)
        answers = [pool.submit(ask, port, COMPLETIONS, body) for _ in range(4)]
        assert eventually(lambda: sum(gateway.picker.gauge("streams_open")) >= 4)
        yield port
        results = [answer.result() for answer in answers]
    assert [answer.status for answer in results] == [200] * 4
    assert all(answer.body.endswith(b"data: [DONE]\n\n") for answer in results)


def test_a_client_that_sends_its_body_byte_by_byte_ends_no_other_request(gateway: Gateway) -> None:
    body = completion("x" * BYTES_ALONE, max_tokens=1)
    fields = (":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", COMPLETIONS)
    alone = b"".join([frame(DATA, 0, 1, body[at : at + 1]) for at in range(len(body))])
    with served_throughout(gateway) as port, socket.create_connection((LOOPBACK, port)) as client:
        client.sendall(PREFACE + frame(SETTINGS, 0, 0))
        assert client.recv(1)  # Envoy's settings, and a window for the whole body
        client.sendall(frame(HEADERS, END_HEADERS, 1, hpack.Encoder().encode(fields)) + alone)


def test_clients_that_leave_again_and_again_end_no_other_request(gateway: Gateway) -> None:
    begun = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode() + b'{"model":'
    with served_throughout(gateway) as port:
        for _ in range(100):  # more than the thousand a second from which on the picker reads more slowly
            with contextlib.ExitStack() as clients:
                for _ in range(64):
                    clients.enter_context(socket.create_connection((LOOPBACK, port))).sendall(begun)


def test_concurrent_large_bodies_are_answered_and_end_no_other_request(gateway: Gateway) -> None:
    body = completion("with a picture", max_tokens=1, picture="x" * LARGE)
    with served_throughout(gateway) as port, ThreadPoolExecutor() as clients:
        results = [answer.result() for answer in [clients.submit(ask, port, COMPLETIONS, body) for _ in range(8)]]
    assert [answer.status for answer in results] == [200] * 8
