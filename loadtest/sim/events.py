"""Publishes which blocks simulated servers hold in their KV caches, as inference engines do: `epp sim --kv-events-port 5557`.

    engine ── changes of its KV cache ──▶ BlockEvents ── one message per flush ──▶ KvPublisher ──▶ picker

A server that returns after the fault `vanish` is a new publisher: its numbers begin again, and it has no messages for replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from loadtest.sim.engine import Job
from loadtest.sim.faults import ServerFault
from loadtest.sim.kv_dialects import Dialect, events_of
from loadtest.sim.kv_pool import Change
from loadtest.sim.kv_publisher import KvPublisher
from loadtest.sim.kv_settings import EventSettings

JUMP = 1_000  # numbers that a message skips during the fault `kv-jump`
GARBAGE = b"\xc1 is not msgpack"
_context: zmq.Context[zmq.Socket[bytes]] | None = None


class BlockEvents:
    """Publishes the events of one server. `take` collects events, and `flush` sends them. Call `answer_replays` regularly."""

    def __init__(self, settings: EventSettings, index: int, host: str, model: str, block_size: int) -> None:
        """`index`: the place of the server in its fleet."""
        self._settings = settings
        self._index = index
        self._host = host
        self._model = model
        self._block_size = block_size
        self._events: list[Any] = []
        self._publisher: KvPublisher | None = None
        dialects = settings.dialects
        self._dialect = dialects[index % len(dialects)]
        self.dialect = Dialect(self._dialect)
        self.published = 0

    def open(self, port: int) -> None:
        """Opens the sockets of a server that listens on `port`. Raises OSError."""
        settings, index = self._settings, self._index
        topic = settings.topic.format(address=f"{self._host}:{port}", model=self._model)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self._publisher = KvPublisher(
                _shared_context(),
                settings.connect or f"tcp://{host}:{settings.port + index}",
                f"tcp://{host}:{settings.replay_port + index}" if settings.replay_port else "",
                dialect=self._dialect,
                topic=topic,
                first=settings.first,
                kept=settings.kept,
                replay_topics=settings.replay_topics,
                connect=bool(settings.connect),
            )
        except zmq.ZMQError as refused:
            where = settings.connect or f"port {settings.port + index} or {settings.replay_port + index}"
            raise OSError(refused.errno, f"the KV events of server {index} cannot use {where}: {refused}") from refused

    def close(self) -> None:
        """Closes the sockets. Events that were not sent are lost."""
        self._events = []
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def take(self, job: Job, changes: Sequence[Change]) -> None:
        """Collects the events of a request that has changed which blocks the KV cache holds."""
        self._events += events_of(self.dialect, job, changes, self._block_size)

    def flush(self, fault: ServerFault) -> None:
        """Sends the collected events as one message. `fault`: the server's current fault, which may lose or spoil the message."""
        events, self._events = self._events, []
        publisher = self._publisher
        if not events or publisher is None:
            return
        self.published += 1
        if fault is ServerFault.KV_JUMP:
            publisher.next += JUMP
        if fault is ServerFault.KV_GARBAGE:
            publisher.publish_bytes(GARBAGE)
        else:
            publisher.publish(events, lost=fault is ServerFault.KV_LOST)

    def answer_replays(self) -> None:
        """Answers the requests for replays that have arrived."""
        if self._publisher is not None:
            self._publisher.answer_replays()


def _shared_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Returns the ZeroMQ context of this process. All servers share it, because each context has threads of its own."""
    global _context
    if _context is None:
        _context = zmq.Context()
    return _context
