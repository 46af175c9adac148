"""Model servers that fail or lie, and floods of requests, as a gateway's client plays them.

`tests.bench.floods` and `tests.faults.attacks` use them.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from loadtest.load.proto import ext_proc_pb2 as pb
from tests.faults.client import Gateway, completion, event_stream, framed, request_messages

SERVED_S = 0.1  # how long a server that works takes for an answer
LATE_S = 3.0  # from then on, a black hole should get little
AT_ONCE = 64
MADE_UP_NAMES = 3000  # the fewest
REFUSED_BODIES = 60  # the fewest
REFUSED_WORDS = 140_000  # 1.4 MiB
CONVERSATIONS = 50
CONVERSATION_WORDS = 800


def answered(status: int, body: bytes) -> list[bytes]:
    """Encodes the answer of a model server."""
    head = pb.ProcessingRequest()
    for name, value in ((":status", str(status)), ("date", "now"), ("content-type", "application/json")):
        head.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    return [framed(head), framed(pb.ProcessingRequest(response_body=pb.HttpBody(body=body, end_of_stream=True)))]


def refused(status: int) -> list[bytes]:
    """Encodes an error answer of a model server."""
    return answered(status, b'{"error":{"message":"no"}}')


BLACK_HOLES: Mapping[str, Sequence[bytes]] = {
    **{f"black hole: {status}": refused(status) for status in (404, 429, 400)},
    "black hole: empty 200": answered(200, b""),
}


class BlackHole:
    """Answers for all servers. The first one that gets a request fails it at once, and the others take SERVED_S."""

    def __init__(self, name: str) -> None:
        """`name`: in BLACK_HOLES."""
        self._failure = BLACK_HOLES[name]
        self._bad = ""
        self._begun = time.monotonic()
        self._late: list[bool] = []

    async def answer(self, usual: Sequence[bytes], target: str) -> Sequence[bytes]:
        """Returns the answer of the server at `target`. `usual`: that of a server that works."""
        self._bad = self._bad or target
        if time.monotonic() - self._begun >= LATE_S:
            self._late.append(target == self._bad)
        if target == self._bad:
            return self._failure
        await asyncio.sleep(SERVED_S)
        return usual

    @property
    def percent(self) -> int:
        """Which part of the later requests went to the server that fails them."""
        return round(100 * sum(self._late) / max(1, len(self._late)))


class Conversations:
    """Clients with prompts that servers hold. `percent`: how many of them went to the same server again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._targets: dict[int, str] = {}
        self.percent = 0

    async def speak(self) -> None:
        """Sends the prompt of each conversation, one after the other."""
        gateway, targets = Gateway(self._port), dict[int, str]()
        for number in range(CONVERSATIONS):

            async def answer(target: str, number: int = number) -> Sequence[bytes]:
                targets[number] = target
                return event_stream(1)

            await gateway.whole(completion(f"{number} speaks. " * CONVERSATION_WORDS), answer)
        await gateway.close()
        kept = sum(self._targets.get(number) == target for number, target in targets.items())
        self._targets, self.percent = targets, round(100 * kept / CONVERSATIONS)


Asked = Callable[[int], list[bytes]]


async def _flood(port: int, seconds: float, asked: Asked, answer: Sequence[bytes], at_once: int, least: int) -> int:
    gateway, until, numbers = Gateway(port), time.monotonic() + seconds, itertools.count()

    async def client() -> None:
        for number in numbers:
            if number >= least and time.monotonic() >= until:
                return
            await gateway.whole(asked(number), answer)

    await asyncio.gather(*(client() for _ in range(at_once)))
    count = len(gateway.connections)
    await gateway.close()
    return count


def flood(asked: Asked, answer: Sequence[bytes], *, at_once: int = AT_ONCE, least: int = 0) -> Callable[[int, float], int]:
    """Returns an attack on a port for some seconds: sends requests as fast as they are answered, at least so many.

    `asked`: returns the messages of a request. The attack returns how many connections it has opened.
    """
    return lambda port, seconds: asyncio.run(_flood(port, seconds, asked, answer, at_once, least))


REQUEST_FLOODS: Mapping[str, Callable[[int, float], int]] = {
    "bad requests": flood(request_messages, refused(400)),
    "label flood": flood(lambda n: completion("hi", model=f"made-up-{n}", tenant=f"made-up-{n}"), event_stream(1), least=MADE_UP_NAMES),
    "prefix flush": flood(lambda n: completion(f"{n} flushes " * (REFUSED_WORDS // 10)), refused(400), at_once=32, least=REFUSED_BODIES),
}
