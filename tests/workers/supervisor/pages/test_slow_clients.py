"""Clients of the metrics port that read slowly, wait or leave: they hold little and keep nobody else waiting."""

import asyncio
import contextlib
import socket
from itertools import pairwise

import pytest

from tests.waiting import turns, until
from tests.workers.supervisor.pages.servers import (
    CLOSE,
    PIECE,
    PIECES,
    Endless,
    disconnected,
    finished,
    request,
    served,
    settled,
    split,
    status,
)
from tests.workers.supervisor.pages.test_page_streaming import unchunked
from workers.supervisor.pages import connection as module
from workers.supervisor.pages.admin import CONNECTIONS_MAX, AdminServer
from workers.supervisor.pages.page_streaming import PAGES_MAX, WAITING_MAX


def test_a_client_that_reads_nothing_holds_one_piece_in_memory() -> None:
    endless = Endless()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        client = await request(address)
        made = await finished(endless)
        (connection,) = admin.connections
        assert 0 < connection.unsent <= len(PIECE) + module.UNSENT_BYTES_MAX + 32
        loop = asyncio.get_running_loop()
        while endless.made < made + 20:  # each read makes room for new pieces
            await loop.sock_recv(client, 1 << 20)
        assert connection.unsent <= len(PIECE) + module.UNSENT_BYTES_MAX + 32
        client.close()
        await settled(admin, 0)

    served(scenario, endless=endless)


def test_other_callbacks_run_between_any_two_pieces() -> None:
    endless = Endless()
    seen: list[int] = []

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        readers, writers = [], []
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            readers.append(loop.create_task(drain(reader)))
            writers.append(writer)

        def heartbeat() -> None:
            seen.append(endless.made)
            loop.call_soon(heartbeat)

        heartbeat()
        await until(lambda: endless.made >= 100)
        admin.close()
        for reader, writer in zip(readers, writers, strict=True):
            await reader
            writer.close()

    async def drain(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass

    served(scenario, endless=endless)
    assert max(later - earlier for earlier, later in pairwise(seen)) == 1


def test_a_page_that_was_given_up_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if the look was due in the same turn of the event loop, before the connection is lost."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    faults: list[object] = []

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        client = await request(address)
        await settled(admin, 1)
        await turns(3)
        (connection,) = admin.connections
        connection.close()
        await settled(admin, 0)
        client.close()

    served(scenario)
    assert not faults


def test_a_client_that_reads_nothing_for_long_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALLED_S", 0.05)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        client = await request(address)
        await settled(admin, 1)
        await settled(admin, 0)
        client.close()

    served(scenario)


def test_a_client_that_waits_for_its_page_is_not_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    endless = Endless()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        clients = [await request(address) for _ in range(PAGES_MAX)]
        await settled(admin, PAGES_MAX)
        await finished(endless)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /long HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
        await until(lambda: len(admin.connections) > PAGES_MAX)
        monkeypatch.setattr(module, "STALLED_S", 0.02)
        assert unchunked(split(await reader.read())[1]) == b"".join(PIECES)
        for client in clients:
            client.close()
        writer.close()

    served(scenario, endless=endless)


def test_short_pages_do_not_wait_for_long_ones() -> None:
    endless = Endless()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        clients = [await request(address) for _ in range(PAGES_MAX + 3)]
        await settled(admin, len(clients))
        await finished(endless)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
        assert (await reader.read()).endswith(b"ok\n")
        writer.close()
        admin.close()
        for client in clients:
            client.close()

    served(scenario, endless=endless)


def test_no_piece_is_generated_after_the_client_has_left() -> None:
    endless = Endless()
    reports: list[str] = []

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        for _ in range(2 * PAGES_MAX):
            client = await request(address)
            made = endless.made
            await until(lambda before=made: endless.made > before)
            client.close()
        await settled(admin, 0)
        made = endless.made
        await turns(10)
        assert endless.made == made

    served(scenario, endless=endless, reports=reports)
    assert reports == []


def test_at_the_limit_a_new_connection_replaces_the_one_that_was_silent_longest() -> None:
    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        held = []
        for number in range(CONNECTIONS_MAX):
            held.append(await asyncio.open_connection(*address))
            await settled(admin, number + 1)
        reader, writer = held[0]
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
        held[1][1].write(b"GET /hea")  # a part of a request does not count
        late = [await asyncio.open_connection(*address) for _ in range(2)]
        for new, sending in late:
            sending.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await new.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
        assert await disconnected(held[1][0])
        assert await disconnected(held[2][0])
        assert len(admin.connections) == CONNECTIONS_MAX
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
        for _, kept in (*held, *late):
            kept.close()
        await settled(admin, 0)

    served(scenario)


def test_slow_readers_of_long_pages_leave_places_for_others() -> None:
    costly: list[int] = []

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        held = [await request(address) for _ in range(2 * CONNECTIONS_MAX)]
        await until(lambda: len(costly) >= len(held) - PAGES_MAX - WAITING_MAX, "all others are disconnected")
        assert await status(address, b"/healthz") == 200
        for one in held:
            one.close()
        await settled(admin, 0)

    served(scenario, on_costly=lambda: costly.append(1))


def test_clients_that_leave_the_ends_of_their_answers_unread_give_way_to_others() -> None:
    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        with contextlib.ExitStack() as held:
            for number in range(CONNECTIONS_MAX):
                client = held.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, address)
                client.send(b"GET /large HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
                await settled(admin, number + 1)
            assert await status(address, b"/healthz", "127.0.0.2") == 200
        await settled(admin, 0)

    served(scenario)
