"""One connection to the store, in RESP 3, so that commands and the messages of channels share it.

`check` reads received bytes: it passes messages on to `hear`, gives commands their answers, and raises failures. `ask` also reads while it
waits for its answer. Only one task uses a connection.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from workers.replicas.byte_stream import ByteStream
from workers.replicas.replies import InvalidReply, Refusal, Replies

log = structlog.get_logger()

Hear = Callable[[bytes, bytes], None]  # channel, data


class CommandRefused(Exception):
    """Raised if the store answers a command with an error. The text comes from the store."""


class StoreConnection:
    """Sends commands, and gives each command its answer. `to` makes a connection."""

    def __init__(self, stream: ByteStream) -> None:
        self.hear: Hear = lambda channel, data: None
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._asked_at = 0.0
        self._replies = Replies()
        self._waiting: deque[list[Any] | None] = deque()  # per unanswered command: the list for the answer, or None
        self._fault: Exception | None = None

    @classmethod
    async def to(cls, where: tuple[str, int] | str, tls: ssl.SSLContext | None) -> "StoreConnection":
        """Connects to a host and port, or to the path of a socket. Raises OSError or ssl.SSLError."""
        return cls(await ByteStream.open(where, tls))

    @property
    def settled(self) -> bool:
        """Whether every command has its answer."""
        return not self._waiting

    def owed_s(self) -> float:
        """The least time that the oldest command can have waited: the time since no command waited."""
        return self._loop.time() - self._asked_at if self._waiting else 0.0

    def silent_s(self) -> float:
        """How long ago the last message arrived."""
        return self._loop.time() - self._heard_at

    def send(self, command: bytes) -> None:
        """Sends a packed command. If the answer is an error, `check` raises it; other answers do not matter. Raises earlier failures."""
        self._write(command, None)

    async def ask(self, *commands: tuple[str | int | bytes, ...]) -> list[Any]:
        """Sends commands together, and returns their answers. Raises CommandRefused for the first refused command or an earlier failure."""
        places: list[list[Any]] = [[] for _ in commands]
        for words, place in zip(commands, places, strict=True):
            self._write(packed(words), place)
        while not all(places):
            try:
                self._feed(await self._stream.wait())
            except OSError as fault:
                self._end(fault)
            self._raise()
        answers = [place[0] for place in places]
        for answer in answers:
            if isinstance(answer, Refusal):
                raise CommandRefused(answer.text)
        return answers

    def check(self) -> None:
        """Reads received bytes. Raises a failure: OSError, InvalidReply, Refused, or a fault of `hear`."""
        self._raise()
        try:
            data = self._stream.read()
        except OSError as fault:
            self._end(fault)
        else:
            self._feed(data)
        self._raise()

    def close(self) -> None:
        """Closes without waiting for anything."""
        self._end(ConnectionError("closed"))

    def _feed(self, data: bytes) -> None:
        if not data:
            return
        try:
            for value in self._replies.feed(data):
                if type(value) is tuple:
                    self._heard_at = self._loop.time()
                    self.hear(*value)
                else:
                    self._answered(value)
        except (InvalidReply, CommandRefused) as fault:
            self._end(fault)
        except Exception as fault:  # data from other replicas must not end the supervisor
            log.debug("a fault in the exchange with other replicas", exc_info=True)
            self._end(fault)

    def _write(self, command: bytes, answer: list[Any] | None) -> None:
        self._raise()
        if not self._waiting:
            self._asked_at = self._loop.time()
        self._waiting.append(answer)
        try:
            self._stream.write(command)
        except OSError as fault:
            self._end(fault)
            raise

    def _answered(self, value: Any) -> None:
        if not self._waiting:
            raise InvalidReply("the store sent an answer to no command")
        waiting = self._waiting.popleft()
        if waiting is not None:
            waiting.append(value)
        elif isinstance(value, Refusal):
            raise CommandRefused(value.text)

    def _raise(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _end(self, fault: Exception) -> None:
        """Keeps the first fault, and ends the connection."""
        if self._fault is None:
            self._fault = fault
        self._stream.close()


def packed(words: tuple[str | int | bytes, ...]) -> bytes:
    """Returns the bytes of a command."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def publishing(channel: str) -> bytes:
    """Returns the beginning of the command that publishes to a channel, without the message."""
    return packed(("PUBLISH", channel)).replace(b"*2", b"*3", 1)
