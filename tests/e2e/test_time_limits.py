"""Envoy's limits of time for headers and bodies, as in deploy/envoy.yaml but shorter, and answers that last longer than they."""

import itertools
import socket
import time
from collections.abc import Iterable

import pytest

from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import ANSWER_S, COMPLETIONS, Cluster, Picker, ask, completion, events, eventually
from tests.e2e.conftest import FAST, Gateway

HEADERS_S, REQUEST_S = 1, 2
EARLY_S = 0.5  # Envoy counts from the start of a turn of its loop, so a limit may end early on a busy machine
PAUSE_S = 0.1
TOKENS = 400  # at 10 ms each: twice REQUEST_S
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n"


def shorter(config: str) -> str:
    """Returns the configuration with smaller values for both time limits."""
    for name, before, after in (("request_headers_timeout", 10, HEADERS_S), ("request_timeout", 660, REQUEST_S)):
        assert f"{name}: {before}s" in config
        config = config.replace(f"{name}: {before}s", f"{name}: {after}s")
    return config


@pytest.fixture
def limited(cluster: Cluster) -> Gateway:
    fleet = cluster.fleet(1, *FAST)
    picker = cluster.picker(fleet.file, workers=1)
    return Gateway(cluster.envoy(picker, change=shorter), picker, fleet, cluster)


def trickle(port: int, first: str, pieces: Iterable[bytes]) -> tuple[bytes, float]:
    """Sends a request piece by piece until there is an answer. Returns the first line of the answer, and the seconds."""
    begun = time.monotonic()
    with socket.create_connection((LOOPBACK, port), ANSWER_S) as client:
        client.sendall(first.encode())
        client.settimeout(PAUSE_S)
        for piece in pieces:
            try:
                client.sendall(piece)
                answer = client.recv(4096)
            except TimeoutError:
                continue
            return answer.split(b"\r\n")[0], time.monotonic() - begun
    raise AssertionError("no piece was refused")


def idle(picker: Picker) -> bool:
    return sum(picker.gauge("streams_open")) == 0 and not picker.in_flight()


def test_headers_and_bodies_without_end_get_408_and_leave_nothing_in_the_picker(limited: Gateway) -> None:
    line, seconds = trickle(limited.port, HEAD, itertools.repeat(b"x-y: z\r\n", 200))
    assert (line, seconds >= HEADERS_S - EARLY_S) == (b"HTTP/1.1 408 Request Timeout", True)
    line, seconds = trickle(limited.port, f"{HEAD}\r\n", itertools.repeat(b"x" * 1000, 200))
    assert (line, seconds >= REQUEST_S - EARLY_S) == (b"HTTP/1.1 408 Request Timeout", True)
    assert eventually(lambda: idle(limited.picker))


def test_a_streamed_answer_may_take_longer_than_the_limits_of_its_request(limited: Gateway) -> None:
    begun = time.monotonic()
    answer = ask(limited.port, COMPLETIONS, completion("long answer", max_tokens=TOKENS, stream=True))
    assert time.monotonic() - begun > REQUEST_S
    assert answer.status == 200
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert len(events(answer.body)) >= TOKENS
    assert eventually(lambda: idle(limited.picker))
