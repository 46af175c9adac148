"""Scrapes of real servers: bad ones do not affect the others, and nothing is left open."""

import asyncio
import socket
from typing import Any

from tests.cases import cases
from tests.waiting import turns, until
from tests.workers.supervisor.endpoints.model_servers import Servers, run, serving
from tests.workers.supervisor.endpoints.scraping import answer, reader
from workers.supervisor.endpoints.http_client import Connection, Dialer

BAD = {
    "slow": (serving(*(answer()[i : i + 9] for i in range(0, 69, 9)), pause_s=0.3), "timeout"),
    "hanging": (serving(then="hang"), "timeout"),
    "half a page": (serving(answer()[:-10], then="hang"), "timeout"),
    "cut": (serving(answer()[:-10], then="close"), "closed"),
    "longer than announced": (serving(answer() + b"more"), "length"),
    "flooding": (serving(b"HTTP/1.1 200 OK\r\n\r\n", then="flood"), "too-large"),
    "vanishing": (serving(then="close"), "closed"),
    "NaN": (serving(answer(b"vllm:num_requests_waiting NaN\n")), "extract"),
    "negative": (serving(answer(b"vllm:num_requests_waiting -1\n")), "extract"),
    "empty": (serving(answer(b"")), "extract"),
    "redirecting": (serving(b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n"), "status"),
}


def test_bad_servers_do_not_affect_the_scrapes_of_others() -> None:
    async def scenario() -> None:
        servers = Servers()
        for n in range(5):
            await servers.add(f"good {n}", serving(answer()))
        await servers.add("closing", serving(answer(more=b"Connection: close\r\n"), then="close"))
        for tag, (serve, _) in BAD.items():
            await servers.add(tag, serve)
        await until(lambda: all(cause in servers.causes(tag) for tag, (_, cause) in BAD.items()), "a failure of each bad server")
        before = {f"good {n}": servers.good(f"good {n}") for n in range(5)}
        await until(lambda: all(servers.good(tag) > count + 5 for tag, count in before.items()), "scrapes of good ones")
        assert not any(servers.causes(tag) for tag in before)
        assert servers.good("closing")
        assert not servers.causes("closing")
        assert not any(servers.good(tag) for tag in BAD)
        assert not any(refused for _, _, refused in servers.seen.bad)
        await servers.close()

    run(scenario())


def test_a_killed_server_is_refused_twice_at_once_and_is_good_again_after_its_first_answer() -> None:
    async def scenario() -> None:
        servers = Servers()
        server = await servers.add("a", serving(answer()))
        port = server.sockets[0].getsockname()[1]
        await until(lambda: servers.good("a") > 3, "scrapes")
        server.close()
        for task in servers.tasks:
            task.cancel()
        await until(lambda: sum(refused for _, _, refused in servers.seen.bad) >= 2, "refusals")
        assert not servers.causes("a") - {"refused", "closed"}
        count = servers.good("a")
        again = await asyncio.start_server(serving(answer()), "127.0.0.1", port)
        await until(lambda: servers.good("a") > count, "it is back")
        again.close()
        await servers.close()

    run(scenario())


def test_a_server_whose_metrics_port_refuses_refuses_only_when_its_own_port_does() -> None:
    async def scenario() -> None:
        servers = Servers()
        server = await servers.add("served", serving(answer()))
        own = server.sockets[0].getsockname()[:2]
        closed = socket.create_server(("127.0.0.1", 0))
        page = closed.getsockname()
        closed.close()
        servers.scraper.add("a", 0, page, reader(), "", own)
        failures = servers.seen.failures
        await until(lambda: sum(failure.serves for failure in failures) > 2, "its own port accepts")
        assert not any(failure.refused for failure in failures)
        server.close()
        await until(lambda: failures[-1].refused and failures[-1].text.startswith(f"127.0.0.1:{page[1]}: "), "it refuses")
        await servers.close()

    run(scenario())


@cases("count", range(12))
def test_a_cancelled_attempt_calls_nothing_at_any_turn_of_the_loop(count: int) -> None:
    calls: list[str] = []

    class Recording:
        """A caller that records its calls."""

        server = ""

        def connected(self, _connection: Connection) -> None:
            calls.append("connected")

        def unreachable(self, failure: OSError) -> None:
            calls.append(str(failure))

        def lost(self, _connection: Connection, failure: Exception | None) -> None:
            calls.append(f"lost {failure}")

        answered = garbled = lost

    async def scenario() -> None:
        server = await asyncio.start_server(serving(then="hang"), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        caller: Any = Recording()
        attempt = Dialer(asyncio.get_running_loop()).dial(host, port, caller)
        await turns(count)
        before = list(calls)
        attempt.cancel()
        server.close()
        # A cancelled attempt is silent for good.
        await asyncio.sleep(0.02)
        assert calls == before

    run(scenario())


def test_hundreds_of_added_and_removed_real_endpoints_leave_no_socket_and_no_task() -> None:
    async def scenario() -> None:
        servers = Servers()
        server = await servers.add("a", serving(answer()))
        refusing = socket.socket()
        refusing.bind(("127.0.0.1", 0))
        places = [server.sockets[0].getsockname()[:2], refusing.getsockname()]
        for _ in range(3):
            targets = [servers.scraper.add(n, 0, places[n % 4 == 0], reader()) for n in range(200)]
            # Some have connected by then, and some have not.
            await asyncio.sleep(0.08)
            for target in targets:
                servers.scraper.remove(target)
        assert len(servers.scraper) == 1
        refusing.close()
        await servers.close()

    run(scenario())
