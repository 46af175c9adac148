"""One connection to the store, in RESP 3, so that commands and the messages of channels share it.

Messages are passed on as they come, without a task: `hear` is called from the event loop. What fails is kept, and `check` raises it.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from workers.endpoints.replicas.replies import InvalidReply, Message, Refusal, Replies

log = structlog.get_logger()

Hear = Callable[[bytes, bytes], None]  # channel, data


class Refused(Exception):
    """Says that the store answered a command with an error. Its text is that of the store."""


class Connection(asyncio.Protocol):
    """Sends commands, and gives each its answer. `heard_at`: when the last message came, in seconds of the event loop."""

    def __init__(self) -> None:
        self.hear: Hear = lambda channel, data: None
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self._asked_at = 0.0
        self._replies = Replies()
        self._waiting: deque[asyncio.Future[Any] | None] = deque()  # commands without answer; None: nobody waits for it
        self._transport: asyncio.Transport | None = None
        self._fault: Exception | None = None

    @classmethod
    async def to(cls, where: tuple[str, int] | str, tls: ssl.SSLContext | None) -> "Connection":
        """Connects to a host and port, or to the path of a socket. Raises OSError or ssl.SSLError."""
        loop = asyncio.get_running_loop()
        if isinstance(where, str):
            _, connection = await loop.create_unix_connection(cls, where)
        else:
            _, connection = await loop.create_connection(cls, *where, ssl=tls)
        return connection

    @property
    def settled(self) -> bool:
        """Whether every command has its answer."""
        return not self._waiting

    def owed_s(self) -> float:
        """How long the oldest command has waited for its answer, at least: since the last time that none waited."""
        return self._loop.time() - self._asked_at if self._waiting else 0.0

    def silent_s(self) -> float:
        """How long no message has come."""
        return self._loop.time() - self.heard_at

    def send(self, *words: str | int | bytes) -> None:
        """Sends a command whose answer matters only if it is an error; `check` raises that. Raises what has failed before."""
        self._write(words, None)

    async def ask(self, *words: str | int | bytes) -> Any:
        """Sends a command, and returns its answer. Raises Refused, or what has failed."""
        answer = self._loop.create_future()
        self._write(words, answer)
        return await answer

    def check(self) -> None:
        """Raises what has failed: ConnectionError, InvalidReply, Refused, or a fault of `hear`."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Closes without waiting for anything."""
        self._end(ConnectionError("closed"))

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for value in self._replies.feed(data):
                if type(value) is Message:
                    self.heard_at = self._loop.time()
                    self.hear(value.channel, value.data)
                else:
                    self._answered(value)
        except InvalidReply as fault:
            self._end(fault)
        except Exception as fault:  # the supervisor must not end by what others send
            log.debug("a fault in the exchange with other replicas", exc_info=True)
            self._end(fault)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionError("the store has closed the connection"))

    def _write(self, words: tuple[str | int | bytes, ...], answer: asyncio.Future[Any] | None) -> None:
        self.check()
        assert self._transport is not None
        if not self._waiting:
            self._asked_at = self._loop.time()
        self._waiting.append(answer)
        self._transport.write(packed(words))

    def _answered(self, value: Any) -> None:
        if not self._waiting:
            raise InvalidReply("the store sent an answer to no command")
        waiting = self._waiting.popleft()
        if isinstance(value, Refusal):
            refused = Refused(value.text)
            if waiting is None:
                self._end(refused)
            elif not waiting.done():
                waiting.set_exception(refused)
        elif waiting is not None and not waiting.done():
            waiting.set_result(value)

    def _end(self, fault: Exception) -> None:
        """Keeps the first fault, and ends the connection."""
        if self._fault is None:
            self._fault = fault
        while self._waiting:
            waiting = self._waiting.popleft()
            if waiting is not None and not waiting.done():
                waiting.set_exception(self._fault)
        if self._transport is not None:
            self._transport.abort()


def packed(words: tuple[str | int | bytes, ...]) -> bytes:
    """Returns the bytes of a command."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
