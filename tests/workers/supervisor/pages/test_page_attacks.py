"""Clients that attack the metrics port: each connection and each host has a share, and nobody else is kept out."""

import asyncio
import contextlib
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.waiting import turns, until
from tests.workers.supervisor.pages.servers import served, status
from workers.supervisor.pages.admin import CONNECTIONS_MAX, AdminServer
from workers.supervisor.pages.page import PageAnswer, Request


def test_a_flood_of_connections_that_wait_for_their_turn_does_not_keep_out_another_host() -> None:
    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        admin.turns.share.spend(0.5)  # all wait for two seconds
        held = []
        for number in range(CONNECTIONS_MAX):
            held.append(await asyncio.open_connection(*address))
            await until(lambda before=number: admin.taken > before)
        assert await status(address, b"/healthz", "127.0.0.2") == 200
        for _, writer in held:
            writer.transport.abort()

    served(scenario)


@pytest.mark.parametrize("path", [b"/healthz", b"/readyz"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_probe_is_answered_though_others_have_used_up_the_time_of_the_port(path: bytes, kept: bool) -> None:
    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        probing = await asyncio.open_connection(*address) if kept else None
        reader, writer = await asyncio.open_connection(*address)
        await until(lambda: admin.taken >= 1 + kept)
        admin.turns.share.spend(1e6)  # no other client gets an answer in this test
        writer.write(b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(3):
            if probing is None:
                assert await status(address, path) in (200, 404)
            else:
                probing[1].write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await probing[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 ")
                await probing[0].readuntil(b"\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await reader.read(1)
        for _, each in filter(None, (probing, (reader, writer))):
            each.close()

    served(scenario)


async def attacked(address: tuple[str, int], piece: bytes, *, reads: bool) -> int:
    """Sends a piece again and again until the server ends the connection. Returns how many bytes it took."""
    reader, writer = await asyncio.open_connection(*address)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while not (reader.at_eof() or writer.transport.is_closing()):
            writer.write(piece)
            sent += len(piece)
            await writer.drain()
            if reads:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.001):
                        await reader.read(1 << 16)
            await turns()
    writer.close()
    return sent


@pytest.mark.parametrize(
    ("piece", "reads", "why"),
    [
        (b"\r\n" * 20_000, False, "sends "),
        (b"\r\n", True, "sends malformed requests"),
        (b"GET / HTTP/1.1\r\n" * 5_000, True, "sends "),
        (b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n" * 5_000, True, "sends more"),
        (b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n", True, "sends more"),
        (b"GET /x HTTP/1.1\r\nX: " + bytes(1000), True, "sends malformed requests"),
    ],
)
def test_an_attack_on_one_connection_is_ended_and_named(piece: bytes, reads: bool, why: str) -> None:
    reports: list[str] = []
    costly: list[int] = []

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        assert await attacked(address, piece, reads=reads) < 64 << 20
        assert await status(address, b"/healthz") == 200

    served(scenario, reports=reports, on_costly=lambda: costly.append(1))
    assert costly
    assert reports[0].startswith(f"clients of the metrics port that cost too much: 1; the last: 127.0.0.1 {why}")


def test_requests_of_a_burst_wait_for_their_turns() -> None:
    seen: list[int] = []
    answered = 0

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        nonlocal answered
        loop = asyncio.get_running_loop()
        begun = 0

        def heartbeat() -> None:
            seen.append(begun)
            loop.call_soon(heartbeat)

        def count(answer: Callable[[Request], PageAnswer]) -> Callable[[Request], PageAnswer]:
            def counted(request: Request) -> PageAnswer:
                nonlocal begun
                begun += 1
                return answer(request)

            return counted

        admin.answer = count(admin.answer)  # type: ignore[method-assign]
        heartbeat()
        pairs = [await asyncio.open_connection(*address) for _ in range(8)]
        for _, writer in pairs:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        for reader, writer in pairs:
            for _ in range(10):
                await reader.readuntil(b"ok\n")
                answered += 1
            writer.close()

    served(scenario)
    assert answered == 80
    assert max(later - earlier for earlier, later in pairwise(seen)) == 1


def test_a_flood_of_connections_of_one_host_does_not_keep_out_another() -> None:
    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        held: list[asyncio.StreamWriter] = []

        async def flood() -> None:
            while True:
                with contextlib.suppress(OSError):
                    held.append((await asyncio.open_connection(*address))[1])

        flooding = [asyncio.create_task(flood()) for _ in range(4)]
        await until(lambda: len(held) >= 2 * CONNECTIONS_MAX)
        for _ in range(20):
            assert await status(address, b"/healthz", "127.0.0.2") == 200
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
        for writer in held:
            writer.transport.abort()
        assert admin.taken <= CONNECTIONS_MAX

    served(scenario)
