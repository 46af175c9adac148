"""`python -m tests.e2e.raw_streams PORT STREAMS CONNECTIONS`: a gRPC client that opens all streams before it ends one.

It uses grpcio in place of Envoy: grpcio keeps its connections, and waits when they are full. It prints one line of JSON. It is a separate
process because a process with grpc must not fork.
"""

import asyncio
import json
import sys
import time
from typing import Any

import grpc  # type: ignore[import-untyped]

from loadtest.load.proto import ext_proc_pb2 as pb

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ANSWERS = 2  # to request headers and body
DESTINATION = "x-gateway-destination-endpoint"


def request_headers(number: int) -> Any:
    message = pb.ProcessingRequest()
    for name, value in ((":method", "POST"), (":path", "/v1/completions"), ("x-request-id", f"raw-{number}")):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


def request_body(number: int) -> Any:
    message = pb.ProcessingRequest()
    message.request_body.body = json.dumps({"model": "sim-model", "prompt": f"{number} raw"}).encode()
    message.request_body.end_of_stream = True
    return message


def destination(answer: Any) -> str:
    options = answer.request_headers.response.header_mutation.set_headers
    return next((option.header.raw_value.decode() for option in options if option.header.key == DESTINATION), "")


async def hold(channel: grpc.aio.Channel, number: int, opened: asyncio.Semaphore, release: asyncio.Event) -> str:
    """Runs one stream: sends the request, reads the answer, waits for the release. Returns the endpoint, or the error."""
    call = channel.stream_stream(METHOD, pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString)()
    await call.write(request_headers(number))
    await call.write(request_body(number))
    answers = [await call.read() for _ in range(ANSWERS)]
    opened.release()
    await release.wait()
    await call.done_writing()
    await call.read()
    code = await call.code()
    return destination(answers[0]) if code is grpc.StatusCode.OK else str(code)


async def main(port: int, streams: int, connections: int) -> dict[str, Any]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(connections)]
    opened, release = asyncio.Semaphore(0), asyncio.Event()
    begun = time.monotonic()
    tasks = [asyncio.create_task(hold(channels[n % connections], n, opened, release)) for n in range(streams)]
    answered = 0
    try:
        async with asyncio.timeout(20):
            for _ in range(streams):
                await opened.acquire()
                answered += 1
    except TimeoutError:
        pass
    seconds = time.monotonic() - begun
    release.set()
    _, late = await asyncio.wait(tasks, timeout=10)
    for task in late:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for channel in channels:
        await channel.close()
    return {"answered_while_held": answered, "seconds": seconds, "results": [str(result) for result in results]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*map(int, sys.argv[1:4])))) + "\n")
