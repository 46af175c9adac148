"""Provides memory for tests of shared structures. It runs the code of another process (an *intrusion*) before the n-th access.

`Words` behaves like a memoryview of 8-byte words, and `Memory` like a `shm.segment.Region`, so the
real code runs on them unchanged. A slice is accessed word by word, so an intrusion can happen inside
a slice. `every_point` runs a scenario once per access. This covers program order with one intrusion,
but not the reordering of a CPU.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

POINTS_MAX = 10_000


class Killed(Exception):
    """An intrusion raises this to end the code that it interrupts, like SIGKILL."""


def kill() -> None:
    raise Killed


class Words:
    """8-byte words. Runs `intrude` right before the n-th access after `arm`."""

    def __init__(self, cells: Iterable[int]) -> None:
        self.cells = array("Q", cells)
        self.left = -1
        self.fired = False

    def arm(self, n: int, intrude: Callable[[], None]) -> None:
        self.left, self.intrude, self.fired = n, intrude, False

    def disarm(self) -> None:
        self.left = -1

    def step(self) -> None:
        if self.left == 0:
            self.left, self.fired = -1, True
            self.intrude()
        elif self.left > 0:
            self.left -= 1

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return array("Q", [self[i] for i in range(*at.indices(len(self.cells)))])
        self.step()
        return self.cells[at]

    def __setitem__(self, at: int | slice, value: Any) -> None:
        if isinstance(at, slice):
            for i, one in zip(range(*at.indices(len(self.cells))), value, strict=True):
                self[i] = one
            return
        self.step()
        self.cells[at] = value

    def toreadonly(self) -> "Words":
        return self


class Bytes:
    """The same memory as bytes. An intrusion can happen before or in the middle of a slice."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.view = memoryview(words.cells).cast("B")

    def _halves(self, at: slice) -> Iterator[slice]:
        start, stop, _ = at.indices(len(self.view))
        middle = (start + stop) // 2
        for half in (slice(start, middle), slice(middle, stop)):
            self.words.step()
            yield half

    def __getitem__(self, at: slice) -> bytes:
        return b"".join(bytes(self.view[half]) for half in self._halves(at))

    def __setitem__(self, at: slice, value: bytes) -> None:
        done = 0
        for half in self._halves(at):
            size = half.stop - half.start
            self.view[half] = value[done : done + size]
            done += size

    def toreadonly(self) -> "Bytes":
        return self


class Grid:
    """Rows of words that are read like a 2-D NumPy array, but one word at a time."""

    def __init__(self, words: Words, first: int, rows: int, width: int) -> None:
        self.words, self.first, self.rows, self.width = words, first, rows, width
        self.flags = SimpleNamespace(writeable=True)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            start, stop, _ = at.indices(self.rows)
            return Grid(self.words, self.first + start * self.width, stop - start, self.width)
        if isinstance(at, int):
            return self.words[self.first + at * self.width : self.first + (at + 1) * self.width]
        _, column = at
        cells = [self.words[self.first + row * self.width + column] for row in range(self.rows)]
        return np.array(cells, dtype=np.uint64)

    def copy(self) -> np.ndarray:
        flat = self.words[self.first : self.first + self.rows * self.width]
        return np.array(flat, dtype=np.uint64).reshape(self.rows, self.width)


class Memory:
    """Replaces a `Region`."""

    def __init__(self, size: int) -> None:
        self.words = Words([0] * (size // 8))
        self.bytes = Bytes(self.words)

    def array(self, dtype: Any, offset_bytes: int, shape: tuple[int, int]) -> Grid:
        return Grid(self.words, offset_bytes // 8, *shape)


def every_point(scenario: Callable[[int], bool]) -> int:
    """Calls `scenario(n)` for n = 0, 1, ... until it returns False: its intrusion did not happen. Returns the number of accesses."""
    for n in range(POINTS_MAX):
        if not scenario(n):
            return n
    raise AssertionError(f"a scenario has more than {POINTS_MAX} accesses")
