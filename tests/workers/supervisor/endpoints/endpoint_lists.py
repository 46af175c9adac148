"""Lists of endpoints for tests of discovery: a good file, and names that resolve as the test says."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import uvloop

from workers.supervisor.endpoints.discovery import Entry

GOOD = b"""# the pool
endpoints:
- name: vllm-0
  address: "10.0.0.1"
  port: "8000"
  labels: {role: decode, gpu: 4}
  comment: [ignored, {too: 1}]
- name: vllm-1
  namespace: prod
  address: 2001:DB8::1
  port: 8001
- {name: vllm-2, address: vllm.example.com, port: 8000}
"""


ENTRIES = [
    Entry("default", "vllm-0", "10.0.0.1", 8000, (("gpu", "4"), ("role", "decode"))),
    Entry("prod", "vllm-1", "2001:db8::1", 8001),
    Entry("default", "vllm-2", "vllm.example.com", 8000),
]
CLUSTERS = b"""endpoints:
- {name: east, address: east.example.com, port: "443", labels: {metricsAddress: metrics.east.example.com, metricsPort: "9090"}}
- {name: west, address: 10.0.0.2, port: "443", labels: {metricsAddress: 10.0.0.9}}
- {name: north, address: 10.0.0.3, port: "443"}
"""


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, 15))


class FakeNames:
    """A fake for the resolver of the event loop."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.held: asyncio.Event | None = None  # answers wait until it is set
        self.waiting = 0
        outer = self

        class Loop(asyncio.SelectorEventLoop):
            async def getaddrinfo(self, host: str, port: Any, **options: Any) -> Any:
                if outer.held is not None:
                    outer.waiting += 1
                    await outer.held.wait()
                found = outer.addresses.get(host)
                if not found:
                    raise socket.gaierror(-2, "Name or service not known")
                kinds = [socket.AF_INET6 if ":" in a else socket.AF_INET for a in found]
                return [(kind, 1, 6, "", (a, 0)) for kind, a in zip(kinds, found, strict=True)]

        self.loop = Loop

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=self.loop) as runner:
            runner.run(test)
