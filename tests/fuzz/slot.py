"""The data that a fuzzing process shares with its supervisor: its counts and its current input, in a file mapped by both.

The process writes the input before it runs it. So the slot of a process that dies or hangs still has the input.
"""

import mmap
from pathlib import Path
from struct import Struct
from typing import NamedTuple, Self

_COUNTS = Struct("=QQQdd")  # inputs, length of the current input, findings, slowest run, largest allocation ratio
INPUT_MAX = 1 << 20


class Counts(NamedTuple):
    inputs: int = 0
    length: int = 0
    findings: int = 0
    slowest_s: float = 0.0
    ratio: float = 0.0


class Slot:
    """One mapped file. The supervisor creates it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), _COUNTS.size + INPUT_MAX)

    @classmethod
    def create(cls, path: Path) -> Self:
        path.write_bytes(bytes(_COUNTS.size + INPUT_MAX))
        return cls(path)

    def close(self) -> None:
        self._map.close()
        self._file.close()

    def note(self, counts: Counts, data: bytes) -> None:
        self._map[_COUNTS.size : _COUNTS.size + len(data)] = data
        _COUNTS.pack_into(self._map, 0, *counts._replace(length=len(data)))

    def counts(self) -> Counts:
        return Counts(*_COUNTS.unpack_from(self._map, 0))

    def input(self) -> bytes:
        return self._map[_COUNTS.size : _COUNTS.size + self.counts().length]
