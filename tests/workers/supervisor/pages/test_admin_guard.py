"""The guard of the metrics port over real connections: immediate and late verdicts, clients that leave, pipelined requests."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import uvloop

from tests.waiting import turns, until
from tests.workers.recorder import texts
from workers.supervisor.pages.admin import AdminServer
from workers.supervisor.pages.http_messages import HEAD_BYTES_MAX
from workers.supervisor.pages.page import ALLOWED, PageAnswer, Request, Verdict

REFUSED = Verdict(HTTPStatus.FORBIDDEN, "not you", (("X-Why", "because"),))
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Guarded:
    """Pages behind a guard. The test sets the verdicts of requests with a token."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.verdicts: dict[str, asyncio.Future[Verdict]] = {}
        self.served: list[str] = []
        self.reports: list[str] = []

    def guard(self, request: Request) -> Verdict | asyncio.Future[Verdict]:
        self.requests.append(request)
        if request.path == "/open":
            return ALLOWED
        if request.token == "":
            return REFUSED
        return self.verdicts.setdefault(str(request.token), asyncio.get_running_loop().create_future())

    def page(self, request: Request) -> PageAnswer:
        self.served.append(request.query)
        return PageAnswer(request.query.encode())

    def serve(self, scenario: Callable[["Guarded", AdminServer, Connect], Awaitable[None]]) -> None:
        async def run() -> None:
            admin = AdminServer({"/page": self.page, "/open": self.page}, texts(self.reports), self.guard)
            with socket.create_server(("127.0.0.1", 0)) as listening:
                admin.serve(listening)

                async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                    return await asyncio.open_connection(*listening.getsockname())

                try:
                    async with asyncio.timeout(20):
                        await scenario(self, admin, connect)
                finally:
                    admin.close()

        uvloop.run(run())


def get(query: str, token: str = "", path: str = "/page", more: str = "") -> bytes:
    field = f"Authorization: Bearer {token}\r\n" if token else ""
    return f"GET {path}?{query} HTTP/1.1\r\nHost: x\r\n{field}{more}\r\n".encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
    return int(head.split()[1]), await reader.readexactly(length)


def test_a_refusal_has_a_reason_and_generates_no_page() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("x", more="Connection: close\r\n"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert b"X-Why: because" in head
        assert body == b"not you\n"
        assert world.served == []
        writer.close()

    Guarded().serve(scenario)


def test_a_late_verdict_delays_the_following_requests_of_the_connection() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("first", "t") + get("second", path="/open"))
        await until(lambda: world.verdicts)
        assert len(world.requests) == 1
        world.verdicts["t"].set_result(ALLOWED)
        assert await answer(reader) == (200, b"first")
        assert await answer(reader) == (200, b"second")
        writer.close()

    Guarded().serve(scenario)


def test_one_verdict_serves_all_connections_that_wait_for_it() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        pairs = [await connect() for _ in range(5)]
        for _, writer in pairs:
            writer.write(get("x", "t"))
        await until(lambda: len(world.requests) == 5)
        world.verdicts["t"].set_result(REFUSED)
        for reader, writer in pairs:
            assert await answer(reader) == (403, b"not you\n")
            writer.close()

    Guarded().serve(scenario)


def test_a_client_that_left_before_its_verdict_gets_no_page() -> None:
    async def scenario(world: Guarded, admin: AdminServer, connect: Connect) -> None:
        _, writer = await connect()
        writer.write(get("x", "t"))
        await until(lambda: world.verdicts)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()  # sends a reset, because a half close would keep the connection waiting
        await until(lambda: not admin.connections)
        world.verdicts["t"].set_result(ALLOWED)
        await turns()
        assert world.served == []

    Guarded().serve(scenario)


def test_a_client_that_closed_its_sending_side_still_gets_its_answer() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("x", "t"))
        writer.write_eof()
        await until(lambda: world.verdicts)
        # The server reads the end of the stream, and changes nothing.
        await asyncio.sleep(0.01)
        world.verdicts["t"].set_result(ALLOWED)
        assert (await reader.read()).endswith(b"x")
        writer.close()

    Guarded().serve(scenario)


def test_a_client_that_keeps_sending_while_it_waits_is_disconnected() -> None:
    async def scenario(world: Guarded, admin: AdminServer, connect: Connect) -> None:
        _, writer = await connect()
        writer.write(get("x", "t"))
        await until(lambda: world.verdicts)
        writer.write(b"x" * (HEAD_BYTES_MAX + 1))
        await until(lambda: not admin.connections)
        writer.close()

    Guarded().serve(scenario)


def test_a_guard_that_fails_admits_no_request_and_is_logged() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("x", "t"))
        await until(lambda: world.verdicts)
        world.verdicts["t"].set_exception(ValueError("broken"))
        status, _ = await answer(reader)
        assert status == 500
        assert "broken" in world.reports[0]
        assert world.served == []
        writer.close()

    Guarded().serve(scenario)


def test_the_connection_ends_when_its_verdict_is_cancelled() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("x", "t"))
        await until(lambda: world.verdicts)
        world.verdicts["t"].cancel()
        assert await reader.read() == b""
        writer.close()

    Guarded().serve(scenario)


def test_a_path_without_a_page_needs_no_token() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("x", path="/nothing"))
        assert (await answer(reader))[0] == 404
        assert world.requests == []
        writer.close()

    Guarded().serve(scenario)
