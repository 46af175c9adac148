"""Requests whose body stops coming: they would keep a stream and what it holds for ever, since no gateway has a reason to wait.

Every `PATIENCE_S / 2` a worker looks at its streams. One whose gateway owes a part of the request, and has sent nothing since the
look before, is refused: 408 where an answer is possible, else a gRPC status. So a pause of half of PATIENCE_S is always
allowed, one of all of it never. A decision that takes its time, or an answer that does, is not the gateway's fault and is left
alone. Streams that owe nothing are not remembered, and nothing here is paid by a request.
"""

from collections.abc import Iterable
from typing import Final, Protocol

PATIENCE_S: Final = 30.0


class Waiting(Protocol):
    """A stream, as far as it waits for its peer."""

    def awaited(self) -> int: ...
    def give_up_waiting(self, seconds: float) -> None: ...


class Patience:
    """One worker's."""

    def __init__(self, seconds: float = PATIENCE_S) -> None:
        self.seconds = seconds
        self._seen: dict[Waiting, int] = {}

    def look(self, streams: Iterable[Waiting]) -> int:
        """Refuse those that have got no further since the last look; how many there were."""
        before, self._seen = self._seen, {}
        refused = 0
        for stream in streams:
            come = stream.awaited()
            if come < 0:
                continue
            if before.get(stream) == come:
                refused += 1
                stream.give_up_waiting(self.seconds)
            else:
                self._seen[stream] = come
        return refused
