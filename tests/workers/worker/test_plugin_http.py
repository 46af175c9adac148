"""HTTP for plugins, with a server on loopback."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from tests.waiting import turns, until
from workers.worker import plugin_http
from workers.worker.plugin_http import HttpClient
from workers.worker.plugin_work import Background

ROOT = Path(__file__).parents[3]


class Site:
    """A server, a client, and the connections that the server has seen."""

    def __init__(self) -> None:
        self.peers: set[object] = set()
        self.seen: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.inside = self.most = 0
        self.release = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.method, request.path, await request.read(), headers))
        if request.path == "/moved":
            raise web.HTTPFound("/there")
        if request.path == "/huge":
            return web.Response(body=bytes(plugin_http.BODY_BYTES_MAX + 1))
        if request.path == "/broken":
            request.transport.close()
        if request.path == "/held":
            self.inside += 1
            self.most = max(self.most, self.inside)
            await self.release.wait()
            self.inside -= 1
        return web.Response(text="fine", headers={"X-Said": "Yes"})

    async def run(self, scenario: Callable[["Site"], Awaitable[None]]) -> None:
        server = web.Server(self.answer)
        runner = web.ServerRunner(server)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.client = HttpClient()
        try:
            await scenario(self)
        finally:
            self.release.set()
            await self.client.close()
            await runner.cleanup()


def run(scenario: Callable[[Site], Awaitable[None]]) -> Site:
    async def main() -> Site:
        site = Site()
        async with asyncio.timeout(20):
            await site.run(scenario)
        return site

    return asyncio.run(main())


def test_requests_share_a_kept_connection_and_return_the_whole_answer() -> None:
    async def scenario(site: Site) -> None:
        for _ in range(5):
            answer = await site.client.fetch("POST", site.url + "/x", {"content-type": "application/json"}, b"{}")
            assert (answer.status, answer.body, answer.headers["x-said"]) == (200, b"fine", "Yes")
            assert answer.seconds > 0.0

    site = run(scenario)
    assert len(site.peers) == 1
    method, path, body, headers = site.seen[0]
    assert (method, path, body, headers["content-type"]) == ("POST", "/x", b"{}", "application/json")
    assert headers["accept-encoding"] == "identity"


def test_redirects_are_not_followed() -> None:
    async def scenario(site: Site) -> None:
        assert (await site.client.fetch("GET", site.url + "/moved", None, b"")).status == 302

    assert [path for _, path, _, _ in run(scenario).seen] == ["/moved"]


def test_proxies_from_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")

    async def scenario(site: Site) -> None:
        assert (await site.client.fetch("GET", site.url + "/x", None, b"")).status == 200

    run(scenario)


def test_an_answer_over_the_limit_is_an_error() -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(OSError, match=r"GET .*/huge: .*more than 16 MiB"):
            await site.client.fetch("GET", site.url + "/huge", None, b"")

    run(scenario)


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("http://127.0.0.1:1/x", "Cannot connect"),
        ("{site}/broken", "Disconnected"),
        ("no-url", "InvalidUrl"),
        ("http://127.0.0.1:99999/x", "99999"),
    ],
)
def test_failures_are_os_errors_that_name_the_request(url: str, cause: str) -> None:
    async def scenario(site: Site) -> None:
        target = url.replace("{site}", site.url)
        with pytest.raises(OSError, match=cause) as raised:
            await site.client.fetch("POST", target, None, b"x")
        assert f"POST {target}" in str(raised.value)

    run(scenario)


def test_connections_per_host_and_waiting_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_http, "CONNECTIONS_PER_HOST", 2)
    monkeypatch.setattr(plugin_http, "WAITING_MAX", 3)

    async def scenario(site: Site) -> None:
        calls = [asyncio.create_task(site.client.fetch("GET", site.url + "/held", None, b"")) for _ in range(5)]
        await until(lambda: site.inside == 2)
        with pytest.raises(OSError, match="5 requests of plugins are running already"):
            await site.client.fetch("GET", site.url + "/x", None, b"")
        site.release.set()
        assert [answer.status for answer in await asyncio.gather(*calls)] == [200] * 5
        assert (await site.client.fetch("GET", site.url + "/x", None, b"")).status == 200

    assert run(scenario).most == 2


def test_a_waiter_that_leaves_frees_the_connection() -> None:
    async def scenario(site: Site) -> None:
        background = Background(lambda problem: None)
        call = background.spawn(site.client.fetch("GET", site.url + "/held", None, b""), 60.0)

        async def decide() -> None:
            await call

        client = decide()
        client.send(None)
        await until(lambda: site.inside)
        client.close()
        await until(lambda: not background._tasks)
        assert site.client._running == 0
        session = await site.client._opened()
        assert not session.connector._acquired  # type: ignore[union-attr]
        await background.close()

    run(scenario)


def test_a_worker_without_such_plugins_does_not_import_the_client() -> None:
    script = "import sys, workers.worker.main; assert 'aiohttp' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=50)


def test_the_loop_turns_while_the_client_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a starved CPU, the import takes longer than a loop may stand still."""
    turned = threading.Event()

    def imported(_name: str) -> None:
        assert turned.wait(20), "the loop stands still"

    monkeypatch.setattr(plugin_http.importlib, "import_module", imported)

    async def scenario(site: Site) -> None:
        calls = [asyncio.create_task(site.client.fetch("GET", site.url + "/x", None, b"")) for _ in range(2)]
        await turns()
        turned.set()
        assert [answer.status for answer in await asyncio.gather(*calls)] == [200, 200]

    run(scenario)


def test_a_client_whose_first_request_is_cancelled_serves_the_next_one() -> None:
    async def scenario(site: Site) -> None:
        first = asyncio.create_task(site.client.fetch("GET", site.url + "/x", None, b""))
        await turns()
        first.cancel()
        assert (await site.client.fetch("GET", site.url + "/x", None, b"")).status == 200

    run(scenario)
