"""Keeps the deadlines of a connection's streams, which clients set with `grpc-timeout`.

One heap of (time, stream number) replaces a timer per stream, because each heartbeat looks only at the top of the heap. Most streams end
long before their deadline. When the entries of ended streams outnumber the open streams, `add` removes them. So the heap stays small.
"""

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

SLACK: Final = 64
Stream = TypeVar("Stream")


class Deadlines(Generic[Stream]):
    """Keeps the deadlines of one connection's streams. `streams`: the open streams by their numbers."""

    __slots__ = ("_heap", "_streams")

    def __init__(self, streams: Mapping[int, Stream]) -> None:
        self._streams = streams
        self._heap: list[tuple[float, int]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, number: int) -> None:
        heap = self._heap
        heappush(heap, (at, number))
        if len(heap) > 2 * len(self._streams) + SLACK:
            heap[:] = [entry for entry in heap if entry[1] in self._streams]
            heapify(heap)

    def due(self, now: float) -> Iterator[Stream]:
        """Yields the open streams that are past their deadline, each once."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            stream = self._streams.get(heappop(heap)[1])
            if stream is not None:
                yield stream
