"""`--transport grpcio` through Envoy: the same requests over the grpcio library."""

import asyncio
import contextlib
import hashlib
import http.client
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.demo.children import descendants
from loadtest.demo.envoy_config import PickerTls
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import picker_config
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, Picker, ask, completion, events, eventually, run, serve
from tests.e2e.conftest import FAST
from tests.e2e.test_flow import HELD, Clients, one_at_a_time, site

END_S = 15.0


@pytest.fixture(scope="module")
def grpcio() -> Iterator[tuple[Cluster, Picker, Path]]:
    """Starts a picker with 2 workers. Yields the cluster, the picker, and the endpoints file of its servers."""
    with Cluster() as cluster:
        servers = cluster.fleet(2, *FAST).file
        yield cluster, cluster.picker(servers, "--transport=grpcio", workers=2), servers


def has_grpc(pid: int) -> bool:
    return "cygrpc" in Path(f"/proc/{pid}/maps").read_text()


def test_it_serves_requests_of_any_kind(grpcio: tuple[Cluster, Picker, Path]) -> None:
    cluster, picker, _ = grpcio
    port = cluster.envoy(picker)
    body = completion("hello " * 100_000, max_tokens=5)
    answer = ask(port, COMPLETIONS, body)
    assert answer.status == 200
    assert answer.headers["x-sim-body-sha256"] == hashlib.sha256(body).hexdigest()
    streamed = ask(port, COMPLETIONS, completion("hello", max_tokens=5, stream=True))
    assert sum(1 for event in events(streamed.body) if event["choices"]) >= 5
    assert ask(port, COMPLETIONS, b"{").status == 400
    assert ask(port, "/v1/models", None, method="GET").status == 200
    assert eventually(lambda: sum(picker.gauge("streams_open")) == 0)
    assert picker.in_flight() == []


def test_only_its_workers_hold_grpc(grpcio: tuple[Cluster, Picker, Path]) -> None:
    _, picker, _ = grpcio
    assert not has_grpc(picker.child.pid)
    assert sum(has_grpc(pid) for pid in descendants(picker.child.pid)) == 2


def test_another_picker_cannot_use_its_port(grpcio: tuple[Cluster, Picker, Path]) -> None:
    cluster, picker, servers = grpcio
    config = cluster.directory / "second.yaml"
    config.write_text(picker_config(servers))
    for transport in ("grpcio", "native"):
        argv = serve(config, picker.grpc, *free_ports(2), 1, cluster.directory / transport)
        second = run([*argv, f"--transport={transport}"])
        assert second.returncode == 1
        assert f"port {picker.grpc} (--grpc-port) is in use" in second.stderr


def test_requests_wait_are_refused_and_leave(cluster: Cluster) -> None:
    at = site(cluster, one_at_a_time(), "--transport=grpcio")

    async def test() -> None:
        async with Clients(at) as clients:
            clients.ask("busy", tokens=HELD)
            await clients.served(1)
            clients.ask("low", "low")
            await clients.waiting(1)
            clients.ask("high", "high")
            clients.ask("leaves")
            await clients.waiting(3)
            await clients.leave("leaves")
            await clients.waiting(2)
            clients.ask("impatient", headers={"x_llm_d_request_ttl_ms": 50})
            answers = await clients.answers("impatient", "busy", "low", "high")
            assert [answer.status for answer in answers] == [429, 200, 200, 200]
            assert clients.order == ["leaves", "impatient", "busy", "high", "low"]

    asyncio.run(test())


def test_it_stops_after_its_last_stream(cluster: Cluster) -> None:
    picker = cluster.picker(cluster.fleet(1, *FAST).file, "--transport=grpcio", "--secure-serving=true", workers=2)
    port = cluster.envoy(picker, tls=PickerTls())
    answers: list[Answer] = []
    asking = threading.Thread(target=lambda: answers.append(ask(port, COMPLETIONS, completion("hello", max_tokens=100, stream=True))))
    asking.start()
    assert eventually(lambda: sum(picker.gauge("streams_open")) == 1)
    picker.child.signal(signal.SIGTERM)
    asking.join(END_S)
    assert picker.child.process.wait(END_S) == 0, picker.child.tail()
    cluster.forget(picker.child)
    assert answers[0].body.endswith(b"data: [DONE]\n\n")


def test_it_stops_in_time_even_if_a_stream_does_not_end(cluster: Cluster) -> None:
    flags = ("--transport=grpcio", "--drain-timeout=1s")
    picker = cluster.picker(cluster.fleet(1, *FAST).file, *flags, workers=1)
    port = cluster.envoy(picker)

    def until_cut() -> None:
        with contextlib.suppress(http.client.IncompleteRead):
            ask(port, COMPLETIONS, completion("hello", max_tokens=500, stream=True))

    asking = threading.Thread(target=until_cut)
    asking.start()
    assert eventually(lambda: sum(picker.gauge("streams_open")) == 1)
    picker.child.signal(signal.SIGTERM)
    assert picker.child.process.wait(END_S) == 0, picker.child.tail()
    cluster.forget(picker.child)
    asking.join(END_S)
    assert "Traceback" not in picker.child.text()
