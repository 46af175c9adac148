"""Clients that leave and servers that die, while others go on."""

import asyncio
import signal
import socket
import time
from dataclasses import dataclass, field

import aiohttp

from tests.e2e.cluster import COMPLETIONS, Cluster, Picker, ask, completion, eventually, write_endpoints
from tests.e2e.conftest import FAST, WORKERS, Gateway
from workers.demo.stack import LOOPBACK

SERVERS = 8
CLIENTS = 16
KILL_AFTER_S = 1.0
GO_ON_S = 2.5
SETTLED_S = 2.0  # generous: two scrapes of 50 ms are needed


def idle(picker: Picker) -> bool:
    return sum(picker.gauge("streams_open")) == 0 and picker.in_flight() == []


def send_and_leave(port: int, head: str, part: bytes, seen: float, picker: Picker) -> None:
    """A client that sends this much, waits until the picker has its stream, and is gone."""
    opened = picker.counter("streams_total")
    with socket.create_connection((LOOPBACK, port), 5) as client:
        client.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode() + part)
        assert eventually(lambda: picker.counter("streams_total") > opened)
        time.sleep(seen)


def test_a_client_that_leaves_in_its_body_leaves_nothing_in_flight(gateway: Gateway) -> None:
    assert eventually(lambda: idle(gateway.picker))
    send_and_leave(gateway.port, "content-length: 1000000", b'{"prompt":"' + b"x" * 100_000, 0.1, gateway.picker)
    assert eventually(lambda: idle(gateway.picker)), gateway.picker.in_flight()
    assert ask(gateway.port, COMPLETIONS, completion("after that", max_tokens=1)).status == 200


def test_a_client_that_leaves_in_the_answer_leaves_nothing_in_flight(gateway: Gateway) -> None:
    assert eventually(lambda: idle(gateway.picker))
    body = completion("a long answer", max_tokens=2_000, stream=True)
    send_and_leave(gateway.port, f"content-length: {len(body)}", body, 0.3, gateway.picker)
    assert eventually(lambda: idle(gateway.picker)), gateway.picker.in_flight()
    assert eventually(lambda: sum(stats["running"] for stats in gateway.fleet.stats()) == 0)


@dataclass
class Load:
    """What closed-loop clients saw: (sent at, status, server)."""

    port: int
    stop: bool = False
    seen: list[tuple[float, int, str]] = field(default_factory=list)

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        count = 0
        while not self.stop:
            count += 1
            body = completion(f"{number} {count} " + "load " * 50, max_tokens=8)
            sent = time.monotonic()
            async with session.post(f"http://{LOOPBACK}:{self.port}{COMPLETIONS}", data=body) as response:
                await response.read()
                self.seen.append((sent, response.status, response.headers.get("x-sim-server", "")))


def test_a_killed_server_is_avoided_within_moments(cluster: Cluster) -> None:
    fleets = cluster.fleets(SERVERS, *FAST)
    addresses = [fleet.addresses[0] for fleet in fleets]
    picker = cluster.picker(write_endpoints(cluster.directory / "all.yaml", addresses), workers=WORKERS)
    load = Load(cluster.envoy(picker))
    victim = fleets[3]
    name = victim.stats()[0]["address"]

    async def scenario() -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            clients = [asyncio.create_task(load.client(session, n)) for n in range(CLIENTS)]
            await asyncio.sleep(KILL_AFTER_S)
            killed = time.monotonic()
            victim.child.signal(signal.SIGKILL)
            await asyncio.sleep(GO_ON_S)
            load.stop = True
            await asyncio.gather(*clients)
            return killed

    killed = asyncio.run(scenario())
    cluster.forget(victim.child)
    victim.child.process.wait()
    before = [status for sent, status, _ in load.seen if sent < killed - 0.5]
    failed = [sent - killed for sent, status, _ in load.seen if status != 200]
    after = [status for sent, status, _ in load.seen if sent > killed + SETTLED_S]
    print(
        f"{name} killed under load: {len(failed)} of {len(load.seen)} requests failed; "
        f"the last of them was sent {max(failed, default=0.0) * 1e3:.0f} ms after the kill"
    )
    assert set(before) == {200}
    assert len(after) > 20
    assert set(after) == {200}
    assert len(failed) < 200
