"""Reads gRPC messages in a body: 1 byte of compression flag, 4 bytes of length (big endian), then the message.

`only` reads the message of a unary request. `Frames` reads the messages of an answer from chunks of any size. Compressed messages
must be gzip, because this code does not see which encoding the peers have agreed on.
"""

from collections.abc import Iterator
from typing import Final

from epp.protocol.inflate import FREE_BYTES, RATIO_MAX, gunzip

HEAD_BYTES: Final = 5
MESSAGE_BYTES_MAX: Final = 32 << 20  # bytes of the message of a request, unpacked
ANSWER_BYTES_MAX: Final = 1 << 20  # bytes of one message of an answer; longer messages are skipped


def only(body: bytes | memoryview) -> bytes | memoryview:
    """Returns the first message of a body. Raises ValueError."""
    if len(body) < HEAD_BYTES:
        raise ValueError(f"{len(body)} bytes are too few for a gRPC message")
    size = int.from_bytes(body[1:HEAD_BYTES], "big")
    if size > len(body) - HEAD_BYTES:
        raise ValueError(f"a gRPC message announces {size} bytes and has {len(body) - HEAD_BYTES}")
    return _plain(body[0], body[HEAD_BYTES : HEAD_BYTES + size], MESSAGE_BYTES_MAX)


def _plain(flag: int, message: bytes | memoryview, limit: int) -> bytes | memoryview:
    if flag == 0:
        return message
    if flag == 1:
        return gunzip(message, limit)
    raise ValueError(f"compression flag {flag}")


class Frames:
    """Yields the complete messages of a body. Feed it all chunks in order. After an invalid message it yields nothing more.

    All compressed messages of a body together may unpack to FREE_BYTES plus RATIO_MAX times their size. If only each message had a
    limit, 60 KB of messages could unpack to 60 MiB.
    """

    __slots__ = ("_broken", "_free", "_rest", "_skip")

    def __init__(self) -> None:
        self._free = FREE_BYTES
        self._rest = bytearray()  # the bytes of an incomplete message
        self._skip = 0  # how many bytes of a message that is too long are still to be skipped
        self._broken = False

    def feed(self, chunk: bytes) -> Iterator[bytes | memoryview]:
        if self._broken:
            return
        if self._skip:
            skipped = min(self._skip, len(chunk))
            self._skip -= skipped
            chunk = chunk[skipped:]
        rest = self._rest
        if rest:
            rest += chunk
            if len(rest) < self._wanted():
                return
            chunk = bytes(rest)
        yield from self._messages(chunk)

    def _wanted(self) -> int:
        """Returns how many bytes are needed to continue: a whole message, or the head of a message that is too long."""
        head = self._rest
        size = int.from_bytes(head[1:HEAD_BYTES], "big") if len(head) >= HEAD_BYTES else 0
        return HEAD_BYTES + (size if size <= ANSWER_BYTES_MAX else 0)

    def _messages(self, data: bytes) -> Iterator[bytes | memoryview]:
        at, end = 0, len(data)
        while end - at >= HEAD_BYTES:
            size = int.from_bytes(data[at + 1 : at + HEAD_BYTES], "big")
            after = at + HEAD_BYTES + size
            if size > ANSWER_BYTES_MAX:
                self._skip = max(0, after - end)
                at = min(after, end)
                continue
            if after > end:
                break
            try:
                yield self._plain(data[at], memoryview(data)[at + HEAD_BYTES : after])
            except ValueError:
                self._broken, self._rest = True, bytearray()
                return
            at = after
        self._rest = bytearray(data[at:])

    def _plain(self, flag: int, message: memoryview) -> bytes | memoryview:
        earned = RATIO_MAX * len(message)
        plain = _plain(flag, message, min(ANSWER_BYTES_MAX, self._free + earned))
        if flag:
            self._free -= max(0, len(plain) - earned)
        return plain
