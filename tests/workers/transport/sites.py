"""A server of either transport on real loopback sockets, in the thread of its loop, and grpcio clients for it."""

import asyncio
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import uvloop

from tests.waiting import wait_until
from tests.workers.transport.echo import application
from workers.process.sockets import hold
from workers.transport import grpcio, native
from workers.transport.interface import Application, Handler, Metadata, Stream

WAIT = 20.0
PATH = "/test/Hold"


class Held:
    """A handler that records its calls, and answers only when its test does so."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.events: list[str] = []
        self.messages: list[bytes] = []

    def message(self, message: bytes) -> None:
        self.events.append("message")
        self.messages.append(message)

    def half_closed(self) -> None:
        self.events.append("half_closed")

    def closed(self) -> None:
        self.events.append("closed")


class Site:
    """`transport`: native or grpcio. `held` has the handlers of `/test/Hold`; the echo serves the other methods."""

    def __init__(self, transport: str = "grpcio", certificates: Any = None, beside: Self | None = None, **options: Any) -> None:
        self.held: list[Held] = []
        self.errors: list[BaseException] = []
        self.abuses: list[str] = []
        self.serves: Application = application
        self.streams = 0  # opened so far
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        more = {"on_error": self.errors.append, "on_abuse": self.abuses.append, **options}
        self.server: Any
        if transport == "native":
            self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
            self.server = native.Server(self.loop, **more)
        else:
            self.socket = beside.socket.dup() if beside is not None else hold(0, "--grpc-port")
            self.server = grpcio.Server(self.loop, **more)
        self.port = self.socket.getsockname()[1]
        self.call(self.server.serve, self.socket, self._application, certificates)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.call(self.server.abort)
        asyncio.run_coroutine_threadsafe(self.server.closed(), self.loop).result(WAIT)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT)
        self.loop.close()
        self.socket.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function in the loop's thread and returns its result."""

        async def run() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT)

    def until(self, condition: Callable[[], Any]) -> None:
        wait_until(lambda: self.call(condition))

    def channel(self, *, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
        """A channel with a separate connection."""
        address = f"127.0.0.1:{self.port}"
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.ssl_target_name_override", "localhost"),
        ]
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, credentials, options=options)

    def expect(self, *events: str) -> None:
        """Waits until the only held handler has had exactly these calls."""
        self.until(lambda: [held.events for held in self.held] == [list(events)])

    def _application(self, path: str, metadata: Metadata, stream: Stream) -> Handler | None:
        self.streams += 1
        if path == PATH:
            held = Held(stream)
            self.held.append(held)
            return held
        return self.serves(path, metadata, stream)
