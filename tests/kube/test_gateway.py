"""End to end: API server, picker, Envoy, and simulated servers on the addresses of their pods.

The test plays the kubelet: it starts a server before its pod is ready. After the pod was deleted, it gives the server the time that
clients need, and then kills it. A request that reaches a pod too late would fail, and no request may fail.
"""

import asyncio
import itertools
import json
import os
import signal
import time
from collections import Counter
from typing import Any

import aiohttp

from loadtest.demo.children import Child, python
from tests.e2e.cluster import COMPLETIONS, Picker, ask, ask_all, completion
from tests.kube.client import Object
from tests.kube.objects import pod, rewrite, status
from tests.kube.relay import Relay
from tests.kube.world import PORT, World, page, supervisor_of, until

NOTICED_S = 0.25  # so long after the event, a terminating pod gets no new request
CLIENTS = 16
SERVERS = 4
TOKENS = 20  # per request, 10 ms each
STREAM_TOKENS = 150
FAST = ("--prefill-us-per-token", "1", "--decode-ms", "10")
GRACE_S = 0.4  # the least time that a server gets before it is killed
ENDED_S = 10.0

_hosts = itertools.count(1)


class Server:
    """A pod, and the process that simulates its model server."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.host = f"127.60.0.{next(_hosts)}"
        argv = python("loadtest.sim.main", "--addresses", f"{self.host}:{PORT}", *FAST)
        self.child: Child = world.cluster.children.start(f"server {name}", argv)

    def up(self) -> "Server":
        """Waits until the process listens, and then makes the pod ready."""
        self.world.cluster.wait(self.child, lambda: "ready" in self.child.text())
        self.world.pod(self.name, self.host)
        return self

    @property
    def pod(self) -> Object:
        return pod(self.world.space, self.name)

    def stats(self) -> dict[str, Any]:
        code, text = page(PORT, "/sim/stats", host=self.host)
        assert code == 200, f"{self.name} does not answer"
        stats: dict[str, Any] = json.loads(text)
        return stats

    @property
    def requests(self) -> int:
        return int(self.stats()["requests"])

    @property
    def busy(self) -> int:
        return int(self.stats()["running"]) + int(self.stats()["waiting"])

    def terminate(self) -> None:
        """Deletes the pod with a grace period, as a user would."""
        self.world.kube.delete(self.pod, 30)

    def end(self) -> None:
        """Ends the server as the kubelet does after the grace period."""
        until(lambda: not self.busy, f"{self.name} has answered everything", ENDED_S)
        self.child.signal(signal.SIGKILL)
        self.child.process.wait(ENDED_S)
        self.world.cluster.forget(self.child)
        self.world.kube.delete(self.pod, 0)


class Load:
    """Clients that request streamed answers one by one, until the end of the context."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}{COMPLETIONS}"
        self.endings: Counter[int | str] = Counter()
        self.first_failure = ""
        self._stop = False

    async def __aenter__(self) -> "Load":
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._clients = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *_fault: object) -> None:
        self._stop = True
        await asyncio.gather(*self._clients)
        await self._session.close()

    async def _client(self, number: int) -> None:
        for count in itertools.count():
            if self._stop:
                return
            await self.one(f"{number} {count} some words of a prompt", TOKENS)

    async def one(self, prompt: str, tokens: int) -> None:
        body = completion(prompt, max_tokens=tokens, stream=True)
        try:
            async with self._session.post(self.url, data=body) as response:
                whole = await response.read()
                complete = whole.endswith(b"data: [DONE]\n\n")
                ending: int | str = response.status if complete or response.status != 200 else "cut"
                failure = whole[:300].decode(errors="replace")
        except aiohttp.ClientError as failed:
            ending, failure = type(failed).__name__, str(failed)
        self.endings[ending] += 1
        if ending != 200 and not self.first_failure:
            self.first_failure = f"{time.monotonic():.3f}: {ending} {failure}"


def stack(world: World, servers: int, api_port: int = 0) -> tuple[list[Server], Picker, int]:
    """Starts servers, a picker that knows them, and a gateway. Returns them with the gateway's port."""
    world.pool()
    running = [Server(world, f"server-{number}") for number in range(servers)]
    for server in running:
        server.up()
    picker = world.picker(workers=2, port=api_port)
    world.converged(world.table(picker))
    return running, picker, world.cluster.envoy(picker)


def test_requests_follow_the_pods(world: World) -> None:
    (first,), picker, port = stack(world, 1)
    table, prompts = world.table(picker), itertools.count()

    def served(server: Server, requests: int = 20) -> int:
        before = server.requests
        bodies = [completion(f"{next(prompts)} hello", max_tokens=5) for _ in range(requests)]
        answers = asyncio.run(ask_all(port, COMPLETIONS, bodies))
        assert {answer.status for answer in answers} == {200}
        return server.requests - before

    assert served(first) == 20
    second = Server(world, "second").up()
    world.converged(table)
    assert 0 < served(second) < 20
    world.kube.patch(first.pod, status(first.host, ready=False), status=True)
    world.converged(table)
    assert served(first) == 0
    world.kube.delete(second.pod, 0)
    world.converged(table)
    assert ask(port, COMPLETIONS, completion("hello", max_tokens=1)).status == 503
    world.kube.patch(first.pod, status(first.host), status=True)
    world.converged(table)
    assert served(first) == 20


def test_a_terminating_pod_gets_no_new_requests_and_finishes_its_old_ones(world: World) -> None:
    servers, picker, port = stack(world, SERVERS)
    table = world.table(picker)

    async def story() -> None:
        async with Load(port) as load:
            streams = [asyncio.create_task(load.one(f"{n} a long one", STREAM_TOKENS)) for n in range(2 * SERVERS)]
            await asyncio.sleep(0.4)
            leaving = servers[0]
            assert await asyncio.to_thread(lambda: leaving.busy) > 0
            deleted = time.monotonic()
            await asyncio.to_thread(leaving.terminate)
            took = await asyncio.to_thread(world.converged, table, deleted)
            await asyncio.sleep(max(0.0, deleted + NOTICED_S - time.monotonic()))
            before = await asyncio.to_thread(lambda: leaving.requests)
            await asyncio.gather(*streams)
            assert await asyncio.to_thread(lambda: leaving.requests) == before
            print(f"left the table {1000 * took:.0f} ms after the delete request")
        assert set(load.endings) == {200}, f"{load.endings}, first {load.first_failure}"

    asyncio.run(story())


def test_no_request_fails_while_all_pods_are_replaced_one_by_one(world: World) -> None:
    servers, _, port = stack(world, SERVERS)

    def replaced(old: Server, number: int) -> None:
        new = Server(world, f"again-{number}").up()
        until(lambda: new.requests > 0, "the new pod gets requests")
        old.terminate()
        time.sleep(GRACE_S)
        old.end()

    async def story() -> None:
        async with Load(port) as load:
            for number, old in enumerate(servers):
                await asyncio.to_thread(replaced, old, number)
        print(f"{SERVERS} pods replaced under load: {dict(load.endings)}")
        assert set(load.endings) == {200}, f"{load.endings}, first {load.first_failure}"

    asyncio.run(story())


def test_requests_are_served_while_the_api_server_is_away_and_the_supervisor_dies(world: World) -> None:
    relay = Relay("127.0.0.1", world.plane.port)
    _, picker, port = stack(world, SERVERS, relay.port)

    async def story() -> None:
        async with Load(port) as load:
            await asyncio.sleep(0.3)
            relay.leave()
            await asyncio.sleep(0.3)
            os.kill(supervisor_of(picker.child.pid), signal.SIGKILL)
            await asyncio.sleep(2.0)
            relay.come_back()
            await asyncio.sleep(0.5)
        assert set(load.endings) == {200}, f"{load.endings}, first {load.first_failure}"

    asyncio.run(story())


def test_a_model_rewrite_from_the_api_changes_the_model_of_requests(world: World) -> None:
    _, _, port = stack(world, 1)

    def status_of(model: str) -> int:
        return ask(port, COMPLETIONS, json.dumps({"model": model, "prompt": "hello", "max_tokens": 1}).encode()).status

    assert (status_of("sim-model"), status_of("alias")) == (200, 404)
    aliases = world.kube.create(rewrite(world.space, "aliases", "alias", {"sim-model": 1}))
    took = until(lambda: status_of("alias") == 200, "the alias works")
    world.kube.delete(aliases)
    gone = until(lambda: status_of("alias") == 404, "the alias is gone")
    print(f"a rewrite takes effect after {1000 * took:.0f} ms, and ends {1000 * gone:.0f} ms after it was deleted")
