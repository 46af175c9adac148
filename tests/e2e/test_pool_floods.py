"""A flood on one of several pools, behind real Envoys: the other pools keep their share, and their requests are answered."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from loadtest.demo.envoy_config import PICKER_FILTER
from loadtest.demo.stack import LOOPBACK
from tests.bench.floods import LITTLE_MEMORY, abuse
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, ask, eventually
from tests.e2e.echo import gateway, servers
from tests.e2e.filters import Json

MIB = 1 << 20
CALM_MIB = 6
FLOOD_MIB = 8
HELD_S = 0.5
CLIENTS = 16
GIVEN_UP = 2 * CLIENTS  # so that the flood has begun again after its first refusals
TEXT = """\
pools:
- {{name: calm, authorities: [calm], endpoints: [{0}]}}
- {{name: flooded, authorities: [flooded], endpoints: [{0}]}}
"""


def called(authority: str) -> Any:
    """Returns the change of an Envoy that calls the picker by this authority."""

    def change(manager: Json, _resources: Json) -> None:
        (picker,) = [each for each in manager["http_filters"] if each["name"] == PICKER_FILTER]
        picker["typed_config"]["grpc_service"]["envoy_grpc"]["authority"] = authority

    return change


def body(until: threading.Event) -> Iterator[bytes]:
    """Yields a request of some MiB, with last bytes that come after the event."""
    yield b'{"model": "m", "max_tokens": 1, "prompt": "'
    for _ in range(CALM_MIB):
        yield b"x" * MIB
    until.wait(60.0)
    yield b'"}'


def unfinished(port: int, over: threading.Event) -> Answer | None:
    """Sends most of a long body, and returns the answer that comes before its end; None if none comes."""
    with socket.create_connection((LOOPBACK, port), 10.0) as connection:
        connection.settimeout(HELD_S)
        with contextlib.suppress(OSError):  # the gateway has answered already
            connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: m\r\ncontent-length: {2 * FLOOD_MIB * MIB}\r\n\r\n".encode())
            for _ in range(FLOOD_MIB):
                connection.sendall(b"x" * MIB)
            over.wait(HELD_S)
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
            return Answer(response.status, {}, response.read())
        except (OSError, http.client.HTTPException):
            return None


def test_large_bodies_of_one_pool_are_given_up_before_older_ones_of_another(cluster: Cluster) -> None:
    with servers(1) as (server,):
        picker = cluster.picker(cluster.directory, LITTLE_MEMORY, workers=1, pools_text=TEXT.format(json.dumps(server.address)))
        calm, flooded = (gateway(cluster, picker.grpc, called(name)) for name in ("calm", "flooded"))
        begun, over = threading.Event(), threading.Event()
        answers: list[Answer] = []
        refusals: list[Answer | None] = []

        def old() -> None:
            answers.append(ask(calm, COMPLETIONS, body(begun)))

        def flood() -> None:
            while not over.is_set():
                refusals.append(unfinished(flooded, over))

        first = threading.Thread(target=old)
        first.start()
        assert eventually(lambda: picker.counter("streams_total") > 0)
        clients = [threading.Thread(target=flood) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            assert eventually(lambda: abuse(picker).get("body_given_up", 0) >= GIVEN_UP, 60.0)
            short = [ask(calm, COMPLETIONS, json.dumps({"model": "m", "prompt": "hello"}).encode()).status for _ in range(50)]
        finally:
            begun.set()
            first.join()
            over.set()
            for client in clients:
                client.join()
        assert short == [200] * 50
        assert [answer.status for answer in answers] == [200]
        refused = [answer for answer in refusals if answer is not None and answer.status == 429]
        assert refused
        text = refused[0].json()["error"]["message"]
        assert text.endswith("too many bytes of unfinished request bodies are held already by pool 'flooded'")
        assert ", pool flooded" in picker.child.text() and ", pool calm" not in picker.child.text()
