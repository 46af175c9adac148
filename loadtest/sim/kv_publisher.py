"""Publishes KV events like an inference engine, with a replay socket. `loadtest.sim.kv_dialects` makes the events.

`KvPublisher` numbers its messages and keeps the last ones for replays: a subscriber asks on the replay socket for messages that it has
missed. `KvPublisher` can also misbehave: lose messages, send any bytes, and forget the messages that it keeps. Its owner must call
`answer_replays` regularly.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import zmq

from loadtest.sim.kv_dialects import Dialect, payload
from loadtest.sim.kv_settings import KEPT

REPLAY_END: Final = b"\xff" * 8


class KvPublisher:
    """Publishes the events of one engine. `events`, `replay`: addresses to bind, such as tcp://127.0.0.1:5557; with "" as `replay`, there
    are no replays.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        events: str,
        replay: str = "",
        *,
        dialect: str = "vllm",
        topic: str = "kv@sim@model",
        first: int = 0,
        kept: int = KEPT,
        replay_topics: bool = True,
        connect: bool = False,
    ) -> None:
        """Opens the sockets. Raises zmq.ZMQError if an address cannot be used.

        `first`: the number of the first message. `kept`: how many messages are kept for replays. `replay_topics`: whether replays
        repeat the topic, as newer engines do. `connect`: whether to connect to `events` instead of binding it.
        """
        self.dialect = Dialect(dialect)
        self.topic = topic.encode()
        self.next = first
        self._replay_topics = replay_topics
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._replay: zmq.Socket[bytes] | None = None
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUB)
        try:
            self._configure(self._socket)
            self._socket.connect(events) if connect else self._socket.bind(events)
            if replay:
                self._replay = context.socket(zmq.ROUTER)
                self._configure(self._replay)
                self._replay.bind(replay)
        except zmq.ZMQError:
            self.close()
            raise

    def _configure(self, socket: "zmq.Socket[bytes]") -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 100_000)

    @property
    def address(self) -> str:
        """Returns the address of the publishing socket. If the given port was `*`, it has the port that the system chose."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, events: Sequence[Any], *, timestamp: float = 1.0, lost: bool = False) -> int:
        """Sends one message and returns its number. `lost`: give the message a number and keep it for replays, but do not send it."""
        return self.publish_bytes(payload(events, timestamp), lost=lost)

    def publish_bytes(self, payload: bytes, *, lost: bool = False) -> int:
        """Sends any payload with the next number, and returns the number. `lost`: as for `publish`."""
        number = self.next
        self.next += 1
        self._kept.append((number, payload))
        if not lost:
            self._socket.send_multipart([self.topic, number.to_bytes(8, "big"), payload])
        return number

    def send_frames(self, frames: Sequence[bytes]) -> None:
        """Sends any frames as they are, without a number, and does not keep them for replays."""
        self._socket.send_multipart(frames)

    def forget(self) -> None:
        """Forgets the messages that are kept for replays, as a restart does."""
        self._kept.clear()

    def answer_replays(self) -> int:
        """Answers the requests for replays that have arrived. Returns how many there were."""
        answered = 0
        while self._replay is not None:
            try:
                peer, _, start = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            except ValueError:
                continue
            answered += 1
            for number, content in tuple(self._kept):
                if number >= int.from_bytes(start, "big"):
                    self._repeat(peer, number.to_bytes(8, "big"), content)
            self._repeat(peer, REPLAY_END, b"")
        return answered

    def close(self) -> None:
        """Closes the sockets."""
        self._socket.close(0)
        if self._replay is not None:
            self._replay.close(0)

    def _repeat(self, peer: bytes, number: bytes, payload: bytes) -> None:
        assert self._replay is not None
        topic = [self.topic if payload else b""] if self._replay_topics else []
        self._replay.send_multipart([peer, b"", *topic, number, payload])


def blocks_of(tokens: Sequence[int], block_size: int) -> Mapping[int, Sequence[int]]:
    """Returns hash -> tokens of each whole block. Hashes are chained as in an engine, but are other numbers than an engine's."""
    blocks: dict[int, Sequence[int]] = {}
    link = 0
    for at in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[at : at + block_size]
        link = hash((link, tuple(block))) & (1 << 63) - 1 or 1
        blocks[link] = block
    return blocks
