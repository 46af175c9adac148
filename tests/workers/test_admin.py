"""The metrics port's HTTP, byte by byte and over a real connection."""

import asyncio
import contextlib
import gzip
import http.client
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.authority import CLIENT, Authority, write, write_pair
from tests.workers.test_pieces import unchunked
from workers import admin as module
from workers.admin import (
    CONNECTIONS_MAX,
    HEAD_BYTES_MAX,
    QUERY_BYTES_MAX,
    AdminServer,
    Answer,
    BadRequest,
    Request,
    parse_head,
)
from workers.pieces import PAGES_MAX
from workers.transport.tls import Settings, server_context

Scenario = Callable[[AdminServer, tuple[str, int]], Awaitable[None]]
PIECES = [b"", b"first ", b"second " * 1000, b"", b"third"]
PIECE = bytes(256 << 10)
CLOSE = b"Connection: close\r\n"


def long_page(_: Request) -> Answer:
    return Answer(iter(PIECES), "text/x-pieces")


def broken_page(request: Request) -> Answer:
    """Fails at once, before or behind its first piece, as the query says."""
    if request.query == "at-once":
        raise ValueError(request.query)

    def pieces() -> Iterator[bytes]:
        if request.query == "half-way":
            yield b"one piece"
        raise ValueError(request.query)

    return Answer(pieces())


class Endless:
    """A page without end, that knows how many pieces were made."""

    def __init__(self) -> None:
        self.made = 0

    def page(self, _: Request) -> Answer:
        return Answer(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        while True:
            self.made += 1
            yield PIECE


def served(
    scenario: Scenario,
    *,
    context: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    reports: list[str] | None = None,
    endless: Endless | None = None,
) -> None:
    """Runs a scenario against a server and its address."""

    async def run() -> None:
        admin = AdminServer(
            {
                "/healthz": lambda _: Answer(b"ok\n"),
                "/accept": lambda request: Answer(request.accept.encode()),
                "/long": long_page,
                "/broken": broken_page,
                "/endless": (endless or Endless()).page,
                "/asked": lambda request: Answer(f"{request.query} {request.peer}".encode()),
            },
            [].append if reports is None else reports.append,
        )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=256, dualstack_ipv6=":" in host) as listening:
            admin.serve(listening, context)
            try:
                async with asyncio.timeout(20):
                    await scenario(admin, ("127.0.0.1", listening.getsockname()[1]))
            finally:
                admin.close()

    uvloop.run(run())


def talk(
    sent: bytes, *, pieces: int = 1, host: str = "127.0.0.1", reports: list[str] | None = None, half: bool = False
) -> bytes:
    """All that the server answers until it closes. `half`: the client closes its side at once."""
    answer = b""

    async def scenario(_admin: AdminServer, address: tuple[str, int]) -> None:
        nonlocal answer
        reader, writer = await asyncio.open_connection(*address)
        size = -(-len(sent) // pieces)
        for at in range(0, len(sent), size):
            writer.write(sent[at : at + size])
            await asyncio.sleep(0.001 if pieces > 1 else 0)
        if half:
            writer.write_eof()
        answer = await reader.read()
        writer.close()

    served(scenario, host=host, reports=reports)
    return answer


def split(answer: bytes) -> tuple[list[bytes], bytes]:
    """Lines of the head, and the body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n"), body


def test_a_page_is_answered_with_its_length() -> None:
    answer = talk(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 3" in head
    assert body == b"ok\n"


def test_a_query_does_not_change_the_page() -> None:
    assert talk(b"GET /healthz?x=1 HTTP/1.1\r\nConnection: close\r\n\r\n").endswith(b"ok\n")


def test_head_has_no_body_but_the_length_of_one() -> None:
    answer = talk(b"HEAD /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert b"Content-Length: 3\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_another_path_is_404_and_names_those_that_exist() -> None:
    answer = talk(b"GET /nothing HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"/healthz" in answer


def test_another_method_is_405_and_the_connection_ends_before_its_body() -> None:
    answer = talk(b"POST /healthz HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello")
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"Allow: GET, HEAD\r\n" in answer


def test_requests_on_one_connection_are_answered_in_order_however_they_are_cut() -> None:
    sent = b"GET /healthz HTTP/1.1\r\n\r\nGET /accept HTTP/1.1\r\nAccept: a/b\r\n\r\nGET /healthz HTTP/1.0\r\n\r\n"
    for pieces in (1, 7, len(sent)):
        answer = talk(sent, pieces=pieces)
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        assert answer.index(b"ok\n") < answer.index(b"a/b") < answer.rindex(b"ok\n")


def test_http_10_ends_the_connection_unless_asked_not_to() -> None:
    assert not parse_head(b"GET / HTTP/1.0").keep_alive
    assert parse_head(b"GET / HTTP/1.0\r\nConnection: keep-alive").keep_alive
    assert parse_head(b"GET / HTTP/1.1").keep_alive
    assert not parse_head(b"GET / HTTP/1.1\r\nConnection: Close").keep_alive


def test_a_head_without_end_is_refused_at_the_limit() -> None:
    assert talk(b"GET /healthz HTTP/1.1\r\nX: " + b"a" * (HEAD_BYTES_MAX + 1)).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("line", [b"", b"GET /", b"GET / HTTP/2.0", b"GET  / HTTP/1.1"])
def test_what_is_no_request_line_is_refused(line: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_head(line)


@pytest.mark.parametrize("field", [b"no colon", b": x", b"a : x", b"a: x\ny: z"])
def test_what_is_no_header_field_is_refused(field: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_head(b"GET / HTTP/1.1\r\n" + field)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_a_refusal(head: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(parse_head(head), Request)


def test_a_long_page_comes_in_chunks() -> None:
    head, body = split(talk(b"GET /long HTTP/1.1\r\n" + CLOSE + b"\r\n"))
    assert head[0] == b"HTTP/1.1 200 OK"
    assert {b"Transfer-Encoding: chunked", b"Content-Type: text/x-pieces", b"Vary: Accept-Encoding"} <= set(head)
    assert not any(line.startswith((b"Content-Length", b"Content-Encoding")) for line in head)
    assert unchunked(body) == b"".join(PIECES)


def test_for_http_10_a_long_page_ends_with_the_connection() -> None:
    head, body = split(talk(b"GET /long HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"))
    assert b"Connection: close" in head
    assert not any(line.startswith((b"Content-Length", b"Transfer-Encoding")) for line in head)
    assert body == b"".join(PIECES)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_long_page_is_compressed_for_who_can_read_it(version: bytes) -> None:
    sent = b"GET /long HTTP/" + version + b"\r\nAccept-Encoding: br, GZIP;q=0.5\r\n" + CLOSE + b"\r\n"
    head, body = split(talk(sent))
    assert b"Content-Encoding: gzip" in head
    assert gzip.decompress(body if version == b"1.0" else unchunked(body)) == b"".join(PIECES)


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("gzip", True),
        ("deflate, gzip;q=1.0", True),
        ("gzip;q=0.001", True),
        ("gzip; q=0", False),
        ("gzip;q=0.000", False),
        ("identity", False),
        ("x-gzip-like", False),
        ("", False),
    ],
)
def test_who_wants_gzip(accepted: str, compressed: bool) -> None:
    assert parse_head(f"GET / HTTP/1.1\r\nAccept-Encoding: {accepted}".encode()).gzip is compressed


def test_a_short_page_is_never_compressed() -> None:
    assert talk(b"GET /healthz HTTP/1.1\r\nAccept-Encoding: gzip\r\n" + CLOSE + b"\r\n").endswith(b"ok\n")


def test_head_of_a_long_page_makes_none_of_it() -> None:
    endless = Endless()

    async def scenario(_admin: AdminServer, address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"HEAD /endless HTTP/1.1\r\n" + CLOSE + b"\r\n")
        head, body = split(await reader.read())
        assert b"Transfer-Encoding: chunked" in head
        assert body == b""
        assert endless.made == 0
        writer.close()

    served(scenario, endless=endless)


def test_requests_wait_for_the_long_page_before_them() -> None:
    sent = b"GET /long HTTP/1.1\r\n\r\nGET /healthz HTTP/1.1\r\n\r\nGET /long HTTP/1.1\r\n" + CLOSE + b"\r\n"
    for pieces in (1, 5):
        first, second, third = talk(sent, pieces=pieces).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert unchunked(split(first)[1]) == unchunked(split(third)[1]) == b"".join(PIECES)
        assert second.endswith(b"\r\n\r\nok\n")


def test_who_asks_and_closes_his_side_still_gets_all_he_asked_for() -> None:
    answer = talk(b"GET /long HTTP/1.1\r\n\r\nGET /long HTTP/1.1\r\n\r\n", half=True)
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b"third\r\n0\r\n\r\n") == 2


def test_pythons_client_reads_a_long_page_and_the_next_one() -> None:
    def read(port: int) -> list[bytes]:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        bodies = []
        for path in ("/long", "/healthz", "/long"):
            client.request("GET", path)
            bodies.append(client.getresponse().read())
        client.close()
        return bodies

    async def scenario(_admin: AdminServer, address: tuple[str, int]) -> None:
        bodies = await asyncio.get_running_loop().run_in_executor(None, read, address[1])
        assert bodies == [b"".join(PIECES), b"ok\n", b"".join(PIECES)]

    served(scenario)


@pytest.mark.parametrize("query", [b"at-once", b"before"])
def test_a_page_that_fails_before_its_first_piece_is_a_500_and_the_connection_stays(query: bytes) -> None:
    reports: list[str] = []
    sent = b"GET /broken?" + query + b" HTTP/1.1\r\n\r\nGET /healthz HTTP/1.1\r\n" + CLOSE + b"\r\n"
    answer = talk(sent, reports=reports)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.endswith(b"ok\n")
    (report,) = reports
    assert "/broken" in report
    assert "ValueError" in report


def test_a_page_that_fails_half_way_ends_the_connection_and_is_reported_rarely() -> None:
    reports: list[str] = []

    async def scenario(_admin: AdminServer, address: tuple[str, int]) -> None:
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /broken?half-way HTTP/1.1\r\n\r\n")
            answer = await reader.read()
            assert not answer.endswith(b"0\r\n\r\n")
            writer.close()

    served(scenario, reports=reports)
    (report,) = reports
    assert report == "pages on the metrics port that failed: 1; the last: /broken for 127.0.0.1: ValueError('half-way')"


async def ask(address: tuple[str, int], path: bytes = b"/endless") -> socket.socket:
    """A client that reads only when it is told to."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, address)
    await asyncio.get_running_loop().sock_sendall(client, b"GET " + path + b" HTTP/1.1\r\n\r\n")
    return client


async def standing_still(endless: Endless) -> int:
    """How many pieces were made when no more are."""
    made = -1
    while made != endless.made or not made:
        made = endless.made
        await asyncio.sleep(0.05)
    return made


def test_a_reader_that_takes_nothing_holds_one_piece_and_the_other_callbacks_go_on() -> None:
    endless = Endless()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        client = await ask(address)
        made = await standing_still(endless)
        (connection,) = admin.connections
        assert 0 < connection.unsent <= len(PIECE) + module.UNSENT_BYTES_MAX + 32
        loop = asyncio.get_running_loop()
        while endless.made < made + 20:  # what it takes is made anew
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
            writer.write(b"GET /endless HTTP/1.1\r\n\r\n")
            readers.append(loop.create_task(drain(reader)))
            writers.append(writer)

        def beat() -> None:
            seen.append(endless.made)
            loop.call_soon(beat)

        beat()
        while endless.made < 100:
            await asyncio.sleep(0)
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


def test_a_reader_that_takes_nothing_for_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALLED_S", 0.05)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        client = await ask(address)
        await settled(admin, 1)
        await settled(admin, 0)
        client.close()

    served(scenario)


def test_who_waits_for_his_page_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    endless = Endless()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        clients = [await ask(address) for _ in range(PAGES_MAX)]
        await settled(admin, PAGES_MAX)
        await standing_still(endless)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /long HTTP/1.1\r\n" + CLOSE + b"\r\n")
        while len(admin.connections) <= PAGES_MAX:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(module, "STALLED_S", 0.02)
        assert unchunked(split(await reader.read())[1]) == b"".join(PIECES)
        for client in clients:
            client.close()
        writer.close()

    served(scenario, endless=endless)


def test_short_pages_do_not_wait_for_long_ones() -> None:
    endless = Endless()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        clients = [await ask(address) for _ in range(PAGES_MAX + 3)]
        await settled(admin, len(clients))
        await standing_still(endless)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /healthz HTTP/1.1\r\n" + CLOSE + b"\r\n")
        assert (await reader.read()).endswith(b"ok\n")
        writer.close()
        admin.close()
        for client in clients:
            client.close()

    served(scenario, endless=endless)


def test_a_reader_that_goes_in_the_middle_leaves_nothing_behind() -> None:
    endless = Endless()
    reports: list[str] = []

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        for _ in range(2 * PAGES_MAX):
            client = await ask(address)
            made = endless.made
            while endless.made == made:
                await asyncio.sleep(0.001)
            client.close()
        await settled(admin, 0)
        made = endless.made
        for _ in range(10):
            await asyncio.sleep(0)
        assert endless.made == made

    served(scenario, endless=endless, reports=reports)
    assert reports == []


async def settled(admin: AdminServer, connections: int) -> None:
    while len(admin.connections) != connections:
        await asyncio.sleep(0.001)


async def cut(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return await reader.read() == b""
    return True


def test_at_the_limit_of_connections_who_has_been_silent_longest_makes_room() -> None:
    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        held = []
        for number in range(CONNECTIONS_MAX):
            held.append(await asyncio.open_connection(*address))
            await settled(admin, number + 1)
        reader, writer = held[0]
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
        held[1][1].write(b"GET /hea")  # a part of a request is none
        late = [await asyncio.open_connection(*address) for _ in range(2)]
        for new, asks in late:
            asks.write(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert (await new.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
        assert await cut(held[1][0])
        assert await cut(held[2][0])
        assert len(admin.connections) == CONNECTIONS_MAX
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
        for _, kept in (*held, *late):
            kept.close()
        await settled(admin, 0)

    served(scenario)


def test_who_is_owed_a_page_is_not_cut_for_a_newcomer() -> None:
    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        held = [await ask(address) for _ in range(CONNECTIONS_MAX)]
        while sum(connection.busy for connection in admin.connections) < CONNECTIONS_MAX:
            await asyncio.sleep(0.001)
        reader, writer = await asyncio.open_connection(*address)
        assert await cut(reader)
        writer.close()
        assert len(admin.connections) == CONNECTIONS_MAX
        for one in held:
            one.close()
        await settled(admin, 0)

    served(scenario)


def test_a_page_sees_the_query_and_who_asks() -> None:
    request = b"GET /asked?a=1&b=2 HTTP/1.1\r\nConnection: close\r\n\r\n"
    assert talk(request).endswith(b"\r\n\r\na=1&b=2 127.0.0.1")
    assert talk(request, host="::").endswith(b"a=1&b=2 127.0.0.1")


def test_a_query_that_is_too_long_is_refused() -> None:
    assert parse_head(b"GET /x?" + b"q" * QUERY_BYTES_MAX + b" HTTP/1.1").query == "q" * QUERY_BYTES_MAX
    sent = b"GET /asked?" + b"q" * (QUERY_BYTES_MAX + 1) + b" HTTP/1.1\r\n\r\n"
    assert talk(sent).startswith(b"HTTP/1.1 414 ")


def tls(directory: Path, authority: Authority, clients: Authority | None = None) -> ssl.SSLContext:
    """As the metrics port has it."""
    if clients is not None:
        write(directory / "ca.pem", clients.pem)
    client_ca = directory / "ca.pem" if clients is not None else None
    return server_context(Settings(write_pair(directory / "server", authority.pair()), client_ca, "http/1.1"))


async def get(address: tuple[str, int], context: ssl.SSLContext) -> tuple[bytes, str | None]:
    """A page, and the protocol that was agreed on."""
    reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname="localhost")
    writer.write(b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
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


def test_only_clients_with_a_certificate_of_the_ca_read_pages(tmp_path: Path) -> None:
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


def test_handshakes_that_stand_still_count_as_connections_and_make_room(tmp_path: Path) -> None:
    authority = Authority()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        held = [await asyncio.open_connection(*address) for _ in range(CONNECTIONS_MAX)]
        while admin.taken < CONNECTIONS_MAX:
            await asyncio.sleep(0.001)
        assert not admin.connections
        assert (await get(address, authority.client()))[0].endswith(b"ok\n")
        assert await cut(held[0][0])
        assert admin.taken <= CONNECTIONS_MAX
        for _, kept in held:
            kept.close()
        while admin.taken:
            await asyncio.sleep(0.001)

    served(scenario, context=tls(tmp_path, authority))


def test_long_pages_are_read_over_tls_piece_by_piece(tmp_path: Path) -> None:
    authority, endless = Authority(), Endless()

    async def scenario(admin: AdminServer, address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address, ssl=authority.client(), server_hostname="localhost")
        writer.write(b"GET /long HTTP/1.1\r\nAccept-Encoding: gzip\r\n" + CLOSE + b"\r\n")
        assert gzip.decompress(unchunked(split(await reader.read())[1])) == b"".join(PIECES)
        writer.close()
        await settled(admin, 0)
        reader, writer = await asyncio.open_connection(*address, ssl=authority.client(), server_hostname="localhost")
        writer.write(b"GET /endless HTTP/1.1\r\n\r\n")
        await standing_still(endless)
        (connection,) = admin.connections
        assert connection.unsent <= 2 * len(PIECE)
        writer.transport.abort()
        await settled(admin, 0)

    served(scenario, context=tls(tmp_path, authority), endless=endless)
