"""The guard of the metrics port over real connections: verdicts at once and later, clients that leave, requests behind each other."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import pytest
import uvloop

from workers.admin import ALLOWED, HEAD_BYTES_MAX, AdminServer, Answer, Request, Verdict, parse_head

REFUSED = Verdict(HTTPStatus.FORBIDDEN, "not you", "X-Why: because\r\n")
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Guarded:
    """Pages behind a guard that says nothing before it is told to."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.verdicts: dict[str, asyncio.Future[Verdict]] = {}
        self.made: list[str] = []
        self.reports: list[str] = []

    def guard(self, request: Request) -> Verdict | asyncio.Future[Verdict]:
        self.asked.append(request)
        if request.path == "/open":
            return ALLOWED
        if request.token == "":
            return REFUSED
        return self.verdicts.setdefault(str(request.token), asyncio.get_running_loop().create_future())

    def page(self, request: Request) -> Answer:
        self.made.append(request.query)
        return Answer(request.query.encode())

    def serve(self, scenario: Callable[["Guarded", AdminServer, Connect], Awaitable[None]]) -> None:
        async def run() -> None:
            admin = AdminServer({"/page": self.page, "/open": self.page}, self.reports.append, self.guard)
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
    return f"GET {path}?{query} HTTP/1.1\r\n{field}{more}\r\n".encode()


async def until(happened: Callable[[], object]) -> None:
    while not happened():
        await asyncio.sleep(0.001)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
    return int(head.split()[1]), await reader.readexactly(length)


def test_a_refusal_says_why_and_makes_no_page() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("x", more="Connection: close\r\n"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert b"X-Why: because" in head
        assert body == b"not you\n"
        assert world.made == []
        writer.close()

    Guarded().serve(scenario)


def test_a_verdict_that_comes_later_holds_back_the_requests_behind_it() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("first", "t") + get("second", path="/open"))
        await until(lambda: world.verdicts)
        assert len(world.asked) == 1
        world.verdicts["t"].set_result(ALLOWED)
        assert await answer(reader) == (200, b"first")
        assert await answer(reader) == (200, b"second")
        writer.close()

    Guarded().serve(scenario)


def test_one_verdict_answers_all_connections_that_wait_for_it() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        pairs = [await connect() for _ in range(5)]
        for _, writer in pairs:
            writer.write(get("x", "t"))
        await until(lambda: len(world.asked) == 5)
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
        writer.transport.abort()  # a reset: closing one side only asks on
        await until(lambda: not admin.connections)
        world.verdicts["t"].set_result(ALLOWED)
        await asyncio.sleep(0)
        assert world.made == []

    Guarded().serve(scenario)


def test_a_client_that_closed_its_side_still_gets_its_answer() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("x", "t"))
        writer.write_eof()
        await until(lambda: world.verdicts)
        await asyncio.sleep(0.01)
        world.verdicts["t"].set_result(ALLOWED)
        assert (await reader.read()).endswith(b"x")
        writer.close()

    Guarded().serve(scenario)


def test_a_client_that_goes_on_asking_while_it_waits_is_cut() -> None:
    async def scenario(world: Guarded, admin: AdminServer, connect: Connect) -> None:
        _, writer = await connect()
        writer.write(get("x", "t"))
        await until(lambda: world.verdicts)
        writer.write(b"x" * (HEAD_BYTES_MAX + 1))
        await until(lambda: not admin.connections)
        writer.close()

    Guarded().serve(scenario)


def test_a_guard_that_fails_lets_nobody_in_and_the_log_says_so() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("x", "t"))
        await until(lambda: world.verdicts)
        world.verdicts["t"].set_exception(ValueError("broken"))
        status, _ = await answer(reader)
        assert status == 500
        assert "broken" in world.reports[0]
        assert world.made == []
        writer.close()

    Guarded().serve(scenario)


def test_when_nobody_will_say_any_more_the_connection_ends() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("x", "t"))
        await until(lambda: world.verdicts)
        world.verdicts["t"].cancel()
        assert await reader.read() == b""
        writer.close()

    Guarded().serve(scenario)


def test_what_is_no_page_needs_no_token() -> None:
    async def scenario(world: Guarded, _: AdminServer, connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(get("x", path="/nothing"))
        assert (await answer(reader))[0] == 404
        assert world.asked == []
        writer.close()

    Guarded().serve(scenario)


@pytest.mark.parametrize(
    ("field", "token"),
    [
        ("Authorization: Bearer abc", "abc"),
        ("authorization:  bearer   abc ", "abc"),
        ("Authorization: Basic abc", ""),
        ("Authorization: Bearer", ""),
        ("X-Authorization: Bearer abc", ""),
        ("Authorization: Bearer a b", "a b"),
    ],
)
def test_a_token_comes_with_the_scheme_bearer(field: str, token: str) -> None:
    assert parse_head(f"GET / HTTP/1.1\r\n{field}".encode()).token == token
