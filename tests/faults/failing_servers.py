"""Model servers that fail requests, as a gateway's client plays them: a black hole, and requests that no server can serve.

`tests.bench.floods` and `tests.faults.attacks` use them.
"""

import asyncio
import time
from collections.abc import Sequence

from epp.protocol.proto import ext_proc_pb2 as pb
from tests.faults.client import Gateway, framed, request

SERVED_S = 0.1  # how long a server that works takes for an answer
LATE_S = 3.0  # from then on, the black hole should get little
AT_ONCE = 64


def refused(status: int) -> list[bytes]:
    """Encodes an error answer of a model server."""
    head = pb.ProcessingRequest()
    for name, value in ((":status", str(status)), ("date", "now"), ("content-type", "application/json")):
        head.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    body = pb.HttpBody(body=b'{"error":{"message":"no"}}', end_of_stream=True)
    return [framed(head), framed(pb.ProcessingRequest(response_body=body))]


class BlackHole:
    """Answers for all servers. The first one that gets a request answers 404 at once, and the others take SERVED_S."""

    def __init__(self) -> None:
        self._bad = ""
        self._begun = time.monotonic()
        self._late: list[bool] = []

    async def answer(self, usual: Sequence[bytes], target: str) -> Sequence[bytes]:
        """Returns the answer of the server at `target`. `usual`: that of a server that works."""
        self._bad = self._bad or target
        if time.monotonic() - self._begun >= LATE_S:
            self._late.append(target == self._bad)
        if target == self._bad:
            return refused(404)
        await asyncio.sleep(SERVED_S)
        return usual

    @property
    def percent(self) -> int:
        """Which part of the later requests went to the server that answers 404."""
        return round(100 * sum(self._late) / max(1, len(self._late)))


async def _bad_requests(port: int, seconds: float) -> int:
    gateway, until = Gateway(port), time.monotonic() + seconds

    async def client(number: int) -> None:
        while time.monotonic() < until:
            head, body = request(number), refused(400)
            cut = 5 + int.from_bytes(head[1:5], "big")
            await gateway.whole([head[:cut], head[cut:]], body)

    await asyncio.gather(*(client(number) for number in range(AT_ONCE)))
    count = len(gateway.connections)
    await gateway.close()
    return count


def bad_requests(port: int, seconds: float) -> int:
    """Sends requests that every server answers with 400, as fast as they are answered. Returns how many connections it has opened."""
    return asyncio.run(_bad_requests(port, seconds))
