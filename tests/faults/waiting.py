"""Opens thousands of streams that wait in a picker's queue. Uses raw HTTP/2 in place of Envoy, so that a stream costs little here.

A stream sends a request and waits for its answer without a limit. `Waiting` counts the endings. When a request gets an endpoint, its
response ends at once, as from an infinitely fast model server, or stays open until the test releases it.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping

from loadtest.load.proto import ext_proc_pb2 as pb
from tests.faults.client import RESPONSE, Gateway, Lost, Stream, framed

SERVED, LOST, LEFT = "served", "lost", "left"
DROP_REASON = "x-llm-d-request-dropped-reason"


def request(prompt: str, headers: Mapping[str, str]) -> bytes:
    """Encodes headers and body of a completion request."""
    head, body = pb.ProcessingRequest(), pb.ProcessingRequest()
    for name, value in {":method": "POST", ":path": "/v1/completions", **headers}.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    body.request_body.body = json.dumps({"model": "sim-model", "prompt": prompt}).encode()
    body.request_body.end_of_stream = True
    return framed(head) + framed(body)


def identified(objective: str = "", tenant: str = "", **more: str) -> dict[str, str]:
    """Returns headers with the tenant and the objective of a request."""
    names = {"x-llm-d-inference-objective": objective, "x-llm-d-inference-fairness-id": tenant, **more}
    return {name: value for name, value in names.items() if value}


class Waiting:
    """Keeps many streams to one picker, and counts how they end."""

    def __init__(self, grpc_port: int) -> None:
        self.gateway = Gateway(grpc_port)
        self.endings: Counter[str] = Counter()
        self.released = asyncio.Event()  # when set, held responses end
        self.served = 0  # requests that got an endpoint so far
        self.held_on: set[int] = set()  # ports of connections with held responses
        self._tasks: set[asyncio.Task[str]] = set()

    @property
    def open(self) -> int:
        """The number of streams without an ending."""
        return len(self._tasks)

    def ask(self, data: bytes, *, hold: bool = False) -> asyncio.Task[str]:
        """Sends one request. With `hold`, its response stays open until `released`.

        Returns a task. Its result is "served", "lost", or a drop reason.
        """
        task = asyncio.create_task(self._one(data, hold))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.gateway.close()

    async def _one(self, data: bytes, hold: bool) -> str:
        stream = await self.gateway.stream()
        try:
            return await self._exchange(stream, data, hold)
        except Lost:
            return LOST
        except asyncio.CancelledError:
            stream.cancel()
            raise

    async def _exchange(self, stream: Stream, data: bytes, hold: bool) -> str:
        stream.send(data)
        for message in await stream.take(1):
            answer = pb.ProcessingResponse.FromString(message)
            if answer.WhichOneof("response") == "immediate_response":
                return reason(answer)
            await stream.take(1)
            self.served += 1
            if hold:
                self.held_on.add(stream.connection.port)
                await self.released.wait()
            stream.send(RESPONSE)
            await stream.take(2)
            stream.send(b"", last=True)
            await stream.end()
            return SERVED
        return f"status {await stream.end()}"

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._tasks.discard(task)
        self.endings[LEFT if task.cancelled() else task.result()] += 1


def reason(answer: pb.ProcessingResponse) -> str:
    """Returns the drop reason of a refused request."""
    for option in answer.immediate_response.headers.set_headers:
        if option.header.key == DROP_REASON:
            return option.header.raw_value.decode()
    return f"status {answer.immediate_response.status.code}"
