"""The real supervisor in the event loop of the test, and model servers that it scrapes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import uvloop

from tests.waiting import until
from workers.host.exit_codes import ExitCode
from workers.process.instance import Instance
from workers.supervisor.main import Supervisor
from workers.worker.extproc.health import CHECK

PAGE = b"""\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} %d
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m"} 0.25
"""


@contextlib.asynccontextmanager
async def page_server(page: bytes) -> AsyncIterator[int]:
    """Runs a server that answers every request with this page. Yields its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def model_server(waiting: int, more: bytes = b"") -> contextlib.AbstractAsyncContextManager[int]:
    """Runs a server with `waiting` waiting requests, and `more` lines, on its metrics page. Yields its port."""
    return page_server(PAGE % waiting + more)


async def page(instance: Instance, path: str) -> tuple[int, str]:
    port = instance.sockets.metrics.getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def check(instance: Instance, service: str) -> bytes:
    name = service.encode()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{instance.sockets.health.getsockname()[1]}") as channel:
        answer: bytes = await channel.unary_unary(CHECK)(bytes((0x0A, len(name))) + name, timeout=10)
    return answer


def serve_worker(instance: Instance) -> None:
    """Marks worker 0 as serving, with a fresh heartbeat."""
    instance.memory.areas.area(1).heartbeat(time.monotonic())
    instance.memory.areas.set_serving(1, True)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    uvloop.run(scenario())


@contextlib.asynccontextmanager
async def supervised(instance: Instance) -> AsyncIterator[Supervisor]:
    """Yields a supervisor that is ready. At the end it stops as if the parent had released its children."""
    supervisor = Supervisor(instance)
    serving = asyncio.ensure_future(supervisor.serve())
    try:
        await until(lambda: serving.done() or instance.reports.received(), "ready")
        if serving.done():
            await serving
        yield supervisor
        instance.pipes.release_children()
        assert await serving == ExitCode.OK
    finally:
        await killed(serving)


async def killed(serving: asyncio.Future[int]) -> None:
    """Cancels the supervisor, as if it were killed."""
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def file_config(path: Path) -> str:
    return f"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: file-discovery
  name: file
  parameters: {{path: {path}, watchFile: true}}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
dataLayer:
  discovery: {{pluginRef: file}}
"""
