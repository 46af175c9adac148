"""gRPC messages in a body: 1 byte that says whether it is compressed, 4 bytes of length (big endian), then the message.

`only` reads the message of a unary request; `Frames` those of an answer, however that is cut into chunks. Compressed messages are
gzip: what else a peer may have agreed on is not known here.
"""

from collections.abc import Iterator
from typing import Final

from epp.protocol.inflate import FREE_BYTES, RATIO_MAX, gunzip

HEAD_BYTES: Final = 5
MESSAGE_BYTES_MAX: Final = 32 << 20  # of a request, unpacked
ANSWER_BYTES_MAX: Final = 1 << 20  # of one message of an answer; longer ones are passed over


def only(body: bytes | memoryview) -> bytes | memoryview:
    """The first message of a body. Raises ValueError."""
    if len(body) < HEAD_BYTES:
        raise ValueError(f"{len(body)} bytes are no gRPC message")
    size = int.from_bytes(body[1:HEAD_BYTES], "big")
    if size > len(body) - HEAD_BYTES:
        raise ValueError(f"a gRPC message of {size} bytes has {len(body) - HEAD_BYTES}")
    return _plain(body[0], body[HEAD_BYTES : HEAD_BYTES + size], MESSAGE_BYTES_MAX)


def _plain(flag: int, message: bytes | memoryview, limit: int) -> bytes | memoryview:
    if flag == 0:
        return message
    if flag == 1:
        return gunzip(message, limit)
    raise ValueError(f"compression flag {flag}")


class Frames:
    """Feed it all chunks of a body in order; it gives the messages that are complete. After nonsense it gives none.

    Compressed messages grow to FREE_BYTES and RATIO_MAX times their size all together: one by one, 60 KB of them could stand for 60 MiB.
    """

    __slots__ = ("_broken", "_free", "_rest", "_skip")

    def __init__(self) -> None:
        self._free = FREE_BYTES
        self._rest = bytearray()  # what is not complete yet
        self._skip = 0  # bytes still to come of a message that is too long
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
        """Bytes that are worth looking at: a whole message, or the head of one that is too long."""
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
