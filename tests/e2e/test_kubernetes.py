"""A picker's processes that follow Kubernetes. The API server is a thread of this process: it starts late, and stops for a while.

`tests/kube` tests against a real API server.
"""

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio")
from aiohttp import web

from loadtest.demo.children import command_name, descendants, python
from loadtest.demo.ports import free_ports
from tests.e2e.cluster import COMPLETIONS, LOOPBACK, Cluster, Picker, ask, completion, eventually, run
from tests.waiting import turns
from tests.workers.supervisor.kube.fake import PODS, POOLS, FakeApi, pod, pool
from workers.supervisor.kube.errors import ApiError, Unreachable

SERVERS = ("127.0.9.1", "127.0.9.2")


class HttpApi:
    """A fake API server on a loopback port, in a thread. `act` changes its objects from outside."""

    def __init__(self, port: int) -> None:
        self.api = FakeApi()
        self.api.install(POOLS)
        self.api.install(PODS)
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._listening: socket.socket
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self) -> None:
        self._await(self._start())

    def stop(self) -> None:
        self._await(self._stop())

    def act(self, change: Callable[[FakeApi], None]) -> None:
        async def run() -> None:
            change(self.api)

        self._await(run())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        app.router.add_post("/apis/authorization.k8s.io/{path:.*}", self._allow)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        self._listening = socket.create_server((LOOPBACK, self._port))
        await web.SockSite(self._runner, self._listening).start()

    async def _stop(self) -> None:
        if self._runner is not None:
            self._loop.remove_reader(self._listening)
            await turns(3)  # a server that is closed while it accepts a connection never closes that connection
            self.api.break_watches()
            await self._runner.cleanup()
            await turns(3)  # a connection that was open is closed in a later turn
            self._runner = None

    async def _allow(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": {"allowed": True}})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            if "watch" not in request.query:
                return web.Response(body=await self.api.request("GET", request.path, query=request.query))
            response = web.StreamResponse()
            async for line in self.api.lines(request.path, query=request.query, idle_s=3600):
                await (response.write(line + b"\n") if line else response.prepare(request))
            return response
        except Unreachable:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        except ApiError as refused:
            return web.json_response({"reason": refused.reason, "message": refused.message}, status=refused.status)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def kubernetes() -> Iterator[HttpApi]:
    (port,) = free_ports(1)
    server = HttpApi(port)
    yield server
    server.close()


def following(cluster: Cluster, kubernetes: HttpApi, directory: Path, under: Sequence[str] = (), **more: str) -> Picker:
    """Starts a picker for the pool `pool`. `more`: further flags. Does not wait until it is ready.

    `under`: a command that runs the picker's command line.
    """
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": f"http://{LOOPBACK}:{kubernetes._port}"}}],
        "users": [{"name": "u", "user": {"token": "tok"}}],
    }
    (directory / "kubeconfig").write_text(json.dumps(config))
    grpc, health, metrics = free_ports(3)
    flags = {
        "pool-name": "pool",
        "pool-namespace": PODS.namespace,
        "grpc-port": grpc,
        "grpc-health-port": health,
        "metrics-port": metrics,
        "workers": 1,
        "secure-serving": "false",
        "metrics-endpoint-auth": "false",
        "run-dir": directory / "run",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    argv = ["env", f"KUBECONFIG={directory / 'kubeconfig'}", *under, *python("workers", "serve")]
    child = cluster.children.start("picker", [*argv, *(f"--{name}={value}" for name, value in flags.items())])
    picker = Picker(child, grpc, health, metrics)
    cluster.wait(child, lambda: status(metrics, "/healthz") == 200)
    return picker


def status(port: int, path: str) -> int:
    """Returns the status of a page for a client on loopback without a token; 0 without an answer."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def known(picker: Picker) -> float:
    return picker.counter("ready_endpoints")


def test_a_picker_waits_for_the_api_follows_it_and_keeps_its_endpoints_while_the_api_is_away(
    cluster: Cluster, kubernetes: HttpApi, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    addresses = ",".join(f"{ip}:{port}" for ip in SERVERS)
    servers = cluster.children.start("servers", python("loadtest.sim.main", "--addresses", addresses))
    cluster.wait(servers, lambda: "ready" in servers.text())
    picker = following(cluster, kubernetes, tmp_path)
    gateway = cluster.envoy(picker)
    assert not picker.ready()

    kubernetes.start()

    def fill(api: FakeApi) -> None:
        for number, ip in enumerate(SERVERS):
            api.put(PODS, f"p{number}", pod(ip))
        api.put(PODS, "other", pod("127.0.9.3", app="other"))

    kubernetes.act(fill)
    assert eventually(lambda: "there is none" in picker.child.text())
    assert not picker.ready()
    refused = ask(gateway, COMPLETIONS, completion("hello"))
    assert (refused.status, refused.headers["x-llm-d-request-dropped-reason"]) == (503, "rejected-no-endpoints")
    kubernetes.act(lambda api: api.put(POOLS, "pool", pool(port)))
    assert eventually(lambda: picker.ready() and known(picker) == 2)
    assert ask(gateway, COMPLETIONS, completion("hello")).status == 200

    kubernetes.stop()
    assert eventually(lambda: "the Kubernetes API is away" in picker.child.text())
    (supervisor,) = [pid for pid in descendants(picker.child.pid) if "super" in command_name(pid)]
    os.kill(supervisor, signal.SIGKILL)
    assert eventually(lambda: "signal 9 (SIGKILL)" in picker.child.text())
    assert eventually(lambda: picker.ready() and known(picker) == 2)

    kubernetes.act(lambda api: api.delete(PODS, "p0"))
    kubernetes.start()
    assert eventually(lambda: known(picker) == 1)
    assert picker.ready()


@pytest.mark.parametrize(("flag", "expected"), [("false", 401), ("true", 200)])
def test_loopback_needs_a_token_for_private_pages_but_commands_beside_the_picker_do_not(
    cluster: Cluster, kubernetes: HttpApi, tmp_path: Path, flag: str, expected: int
) -> None:
    kubernetes.start()
    picker = following(cluster, kubernetes, tmp_path, metrics_endpoint_auth="true", debug_port_forward=flag)
    found = {path: status(picker.metrics, path) for path in ("/debug/state", "/debug/decisions", "/ui")}
    assert set(found.values()) == {expected}
    assert status(picker.metrics, "/metrics") == 401
    done = run(python("workers", "explain", f"--run-dir={tmp_path / 'run'}"))
    assert "no decision was made yet" in done.stderr
    done = run(python("workers", "doctor", f"--run-dir={tmp_path / 'run'}", "--json"))
    assert "picker" in json.loads(done.stdout)["checked"], done.stdout
