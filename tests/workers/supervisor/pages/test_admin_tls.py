"""Pages of the metrics port over TLS: who may read them, and handshakes that stall."""

import asyncio
import contextlib
import gzip
import ssl
from pathlib import Path

from tests.waiting import until
from tests.workers.authority import CLIENT, Authority, write, write_pair
from tests.workers.supervisor.pages.servers import CLOSE, PIECE, PIECES, Endless, disconnected, finished, served, settled, split
from tests.workers.supervisor.pages.test_page_streaming import unchunked
from workers.supervisor.pages.admin import CONNECTIONS_MAX, AdminServer
from workers.transport.tls import Settings, server_context


def tls(directory: Path, authority: Authority, clients: Authority | None = None) -> ssl.SSLContext:
    """The TLS context of the metrics port."""
    if clients is not None:
        write(directory / "ca.pem", clients.pem)
    client_ca = directory / "ca.pem" if clients is not None else None
    return server_context(Settings(write_pair(directory / "server", authority.pair()), client_ca, "http/1.1"))


async def get(address: tuple[str, int], context: ssl.SSLContext) -> tuple[bytes, str | None]:
    """Reads a page over TLS. Returns it with the negotiated protocol."""
    reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname="localhost")
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    try:
        return await reader.read(), writer.get_extra_info("ssl_object").selected_alpn_protocol()
    finally:
        writer.transport.abort()


def test_pages_are_read_over_tls(tmp_path: Path) -> None:
    authority = Authority()

    async def scenario(_admin: AdminServer, address: tuple[str, int]) -> None:
        answer, protocol = await get(address, authority.client())
        assert answer.endswith(b"\r\n\r\nok\n")
        assert protocol == "http/1.1"

    served(scenario, context=tls(tmp_path, authority))


def test_only_clients_with_a_certificate_of_the_ca_can_read_pages(tmp_path: Path) -> None:
    authority, clients = Authority(), Authority("clients")
    right = authority.client(clients.pair(use=CLIENT), tmp_path / "right")
    wrong = [authority.client(), authority.client(Authority().pair(use=CLIENT), tmp_path / "wrong")]
    reports: list[str] = []

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        for context in wrong:
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert (await get(address, context))[0] == b""
            assert not admin.connections
        assert (await get(address, right))[0].endswith(b"ok\n")

    served(scenario, context=tls(tmp_path, authority, clients), reports=reports)
    (report,) = reports
    assert "handshakes on the metrics port that failed: 1; the last: " in report
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in report


def test_stalled_handshakes_count_as_connections_and_can_be_replaced(tmp_path: Path) -> None:
    authority = Authority()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        held = [await asyncio.open_connection(*address) for _ in range(CONNECTIONS_MAX)]
        await until(lambda: admin.taken >= CONNECTIONS_MAX)
        assert not admin.connections
        assert (await get(address, authority.client()))[0].endswith(b"ok\n")
        assert await disconnected(held[0][0])
        assert admin.taken <= CONNECTIONS_MAX
        for _, kept in held:
            kept.close()
        await until(lambda: not admin.taken)

    served(scenario, context=tls(tmp_path, authority))


def test_long_pages_are_sent_over_tls_piece_by_piece(tmp_path: Path) -> None:
    authority, endless = Authority(), Endless()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address, ssl=authority.client(), server_hostname="localhost")
        writer.write(b"GET /long HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n" + CLOSE + b"\r\n")
        assert gzip.decompress(unchunked(split(await reader.read())[1])) == b"".join(PIECES)
        writer.close()
        await settled(admin, 0)
        reader, writer = await asyncio.open_connection(*address, ssl=authority.client(), server_hostname="localhost")
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        await finished(endless)
        (connection,) = admin.connections
        assert connection.unsent <= 2 * len(PIECE)
        writer.transport.abort()
        await settled(admin, 0)

    served(scenario, context=tls(tmp_path, authority), endless=endless)


def test_a_flood_of_handshakes_of_one_host_does_not_keep_out_another(tmp_path: Path) -> None:
    authority = Authority()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        context = authority.client()
        done = 0

        async def flood() -> None:
            nonlocal done
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(*address, ssl=context, server_hostname="localhost")
                    writer.transport.abort()
                done += 1

        flooding = [asyncio.create_task(flood()) for _ in range(100)]
        await until(lambda: done >= 100)
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname="localhost", local_addr=("127.0.0.2", 0))
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
            assert (await reader.read()).endswith(b"ok\n")
            writer.close()
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)

    served(scenario, context=tls(tmp_path, authority))
