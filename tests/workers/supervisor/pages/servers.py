"""A server of the metrics port with pages for tests, and clients for it."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator

import uvloop

from tests.waiting import turns, until
from tests.workers.recorder import texts
from workers.supervisor.pages.admin import AdminServer
from workers.supervisor.pages.page import PageAnswer, Request

Scenario = Callable[[AdminServer, tuple[str, int]], Awaitable[None]]
PIECES = [b"", b"first ", b"second " * 1000, b"", b"third"]
PIECE = bytes(256 << 10)
CLOSE = b"Connection: close\r\n"
SCENARIO_S = 90.0
TURNS_TO_CLOSE = 20  # of the loop, until transports that were aborted are closed


def long_page(_: Request) -> PageAnswer:
    return PageAnswer(iter(PIECES), "text/x-pieces")


def broken_page(request: Request) -> PageAnswer:
    """Fails at once, before its first piece or after it, depending on the query."""
    if request.query == "at-once":
        raise ValueError(request.query)

    def pieces() -> Iterator[bytes]:
        if request.query == "half-way":
            yield b"one piece"
        raise ValueError(request.query)

    return PageAnswer(pieces())


class Endless:
    """A page without end that counts the pieces."""

    def __init__(self) -> None:
        self.made = 0

    def page(self, _: Request) -> PageAnswer:
        return PageAnswer(self._pieces())

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
    on_costly: Callable[[], None] = lambda: None,
) -> None:
    """Runs a scenario against a server and its address."""

    async def run() -> None:
        admin = AdminServer(
            {
                "/healthz": lambda _: PageAnswer(b"ok\n"),
                "/accept": lambda request: PageAnswer(request.accept.encode()),
                "/long": long_page,
                "/large": lambda _: PageAnswer(bytes(8 << 20)),
                "/broken": broken_page,
                "/endless": (endless or Endless()).page,
                "/echo": lambda request: PageAnswer(f"{request.query} {request.peer}".encode()),
            },
            texts([] if reports is None else reports),
            on_costly=on_costly,
        )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=256, dualstack_ipv6=":" in host) as listening:
            admin.serve(listening, context)
            try:
                async with asyncio.timeout(SCENARIO_S):
                    await scenario(admin, ("127.0.0.1", listening.getsockname()[1]))
            finally:
                admin.close()
                await turns(TURNS_TO_CLOSE)

    uvloop.run(run())


def talk(sent: bytes, *, pieces: int = 1, host: str = "127.0.0.1", reports: list[str] | None = None, half: bool = False) -> bytes:
    """Sends bytes and returns everything that the server answers until it closes. `half`: the client closes its sending side at once."""
    answer = b""

    async def scenario(_admin: AdminServer, address: tuple[str, int]) -> None:
        nonlocal answer
        reader, writer = await asyncio.open_connection(*address)
        size = -(-len(sent) // pieces)
        for at in range(0, len(sent), size):
            writer.write(sent[at : at + size])
            # The server reads one piece before the next one comes.
            await asyncio.sleep(0.001 if pieces > 1 else 0)
        if half:
            writer.write_eof()
        answer = await reader.read()
        writer.close()

    served(scenario, host=host, reports=reports)
    return answer


def split(answer: bytes) -> tuple[list[bytes], bytes]:
    """Splits an answer into the lines of the head and the body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n"), body


async def request(address: tuple[str, int], path: bytes = b"/endless") -> socket.socket:
    """Requests a page. Returns the client's socket, which only the test reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, address)
    await asyncio.get_running_loop().sock_sendall(client, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    return client


async def finished(endless: Endless) -> int:
    """Waits until no more pieces are generated. Returns their number."""
    made = -1
    while made != endless.made or not made:
        made = endless.made
        # The buffers of the kernel are full when the number stays.
        await asyncio.sleep(0.05)
    return made


async def settled(admin: AdminServer, connections: int) -> None:
    await until(lambda: len(admin.connections) == connections)


async def disconnected(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return await reader.read() == b""
    return True


async def status(address: tuple[str, int], path: bytes, source: str = "127.0.0.1") -> int:
    """Requests a page on a new connection from this address of the loopback interface. Returns the status."""
    reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
    writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ")[1])
