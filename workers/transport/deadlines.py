"""When streams of a connection have to end, because their callers said so by `grpc-timeout`.

A heap of (time, stream): no timer per stream, one look at the top per beat. Most streams end long before; their entries are
swept out when they outnumber the living, so the heap stays within a few times the streams that are open.
"""

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from workers.transport.stream import ServerStream

SLACK: Final = 64


class Deadlines:
    """Those of one connection's streams."""

    __slots__ = ("_heap", "_streams")

    def __init__(self, streams: Mapping[int, ServerStream]) -> None:
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

    def due(self, now: float) -> Iterator[ServerStream]:
        """Open streams whose time has come, each once."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            stream = self._streams.get(heappop(heap)[1])
            if stream is not None:
                yield stream
