"""Collects a message that comes in pieces."""

from typing import Final

SMALL: Final = 1024  # bytes; smaller pieces are joined at once, so that no object per piece is kept


class Pieces:
    """The pieces of a message's body. One bytearray for all of them would be copied several times while it grows."""

    __slots__ = ("_large", "_small", "received")

    def __init__(self) -> None:
        self._large: list[bytes] = []
        self._small = bytearray()  # the small pieces since the last one in `_large`
        self.received = 0  # bytes of all pieces

    def add(self, piece: bytes) -> None:
        self.received += len(piece)
        if len(piece) < SMALL:
            self._small += piece
            return
        if self._small:
            self._large.append(bytes(self._small))
            self._small.clear()
        self._large.append(piece)

    def joined(self) -> bytes:
        return b"".join((*self._large, self._small))
