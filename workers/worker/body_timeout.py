"""Ends requests with bodies that arrive too slowly (`BodyTimeout`), or that need most memory while the budget is used up (`BodyRelief`).

`BodyTimeout`: every `BODY_TIMEOUT_S / 2`, a worker looks at its streams. Each incomplete body must have received BODY_RATE bytes per second
since the last look. Otherwise the request is refused: with 408 if an answer is possible, else with a gRPC status. The first look at a body
only notes its size, so every body may take BODY_TIMEOUT_S / 2 at any speed. The time of slow decisions and slow answers is not included,
because the gateway does not cause it.

`BodyRelief`: a body costs its bytes times the seconds for which they are held. When the budget for unfinished bodies is used up, the
transport asks for relief, and the requests with the highest cost are refused with 429. So a few large or slow bodies do not use up the
budget of all others. The bytes of a complete body of more than 1 MiB are included while it waits for its turn or for a decision, together
with its unpacked part.

If the picker has several pools, the worker gives up bodies of the pool that holds most bytes at this moment. So a pool that holds at most
an equal share of the budget loses no body to other pools, and may use the rest of the budget.

The worker remembers nothing about complete requests, and the request path does no work for this.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from workers.transport.interface import Handler
from workers.worker.extproc.stream import ExtProcStream

BODY_TIMEOUT_S: Final = 30.0
# Bytes per second. On a link with 10 KB/s a prompt of 400 KB takes 40 s, so a time limit for whole bodies would refuse it.
BODY_RATE: Final = 1024
# A relief frees 1 / SPARE of the budget in addition to the missing bytes, so that not every message needs a relief.
SPARE: Final = 32
NEW_S: Final = 0.1  # added to the age of a body, so that among new bodies the largest costs most
GIVEN_UP: Final = "body_given_up"


class BodyTimeout:
    """Refuses requests with slow bodies in one worker. `seconds`: a body may take half of this at any speed."""

    def __init__(self, seconds: float = BODY_TIMEOUT_S) -> None:
        self.seconds = seconds
        self._least = int(BODY_RATE * seconds / 2)
        self._seen: dict[ExtProcStream, int] = {}

    def look(self, streams: Iterable[ExtProcStream]) -> list[str]:
        """Refuses the streams that have received too little since the last look. Returns the origins of their requests, for the log."""
        before, self._seen = self._seen, {}
        refused = []
        for stream in streams:
            received = stream.awaited()
            if received < 0:
                continue
            if received - before.get(stream, -self._least) < self._least:
                refused.append(stream.origin())
                stream.give_up_waiting(self.seconds)
            else:
                self._seen[stream] = received
        return refused


class BodyRelief:
    """Frees a worker's budget by giving up the bodies that cost most."""

    def __init__(
        self,
        limit: int,
        streams: Callable[[Sequence[Handler] | None], Iterable[ExtProcStream]],
        now: Callable[[], float],
        on_given_up: Callable[[str], None],
    ) -> None:
        """`limit`: the budget in bytes. `streams(handlers)` returns the unfinished streams of these handlers, or all unfinished streams for
        None.

        `on_given_up` gets the cause of each refusal.
        """
        self._spare = limit // SPARE
        self._streams = streams
        self._now = now
        self._on_given_up = on_given_up
        self._busy = False

    def __call__(self, among: Sequence[Handler] | None, excess: int) -> None:
        """Gives up the bodies that cost most, until `excess` bytes and 1 / SPARE of the budget are freed.

        `among`: the handlers to choose from; None for all handlers.
        """
        if self._busy:  # the answers to refused requests also need memory, and so may call this again
            return
        self._busy = True
        try:
            self._relieve(among, excess + self._spare)
        finally:
            self._busy = False

    def _relieve(self, among: Sequence[Handler] | None, missing: int) -> None:
        now = self._now()
        found = [(size, now - stream.received_at, stream) for stream in self._streams(among) if (size := stream.unfinished()) > 0]
        found.sort(key=lambda one: one[0] * (one[1] + NEW_S))
        pools: dict[int, list[tuple[int, float, ExtProcStream]]] = {}  # the bodies of each pool, the most costly last
        for one in found:
            pools.setdefault(one[2].pool, []).append(one)
        most = [(-sum(size for size, _, _ in bodies), pool) for pool, bodies in pools.items()]
        heapq.heapify(most)
        while missing > 0 and most:
            held, pool = most[0]
            size, age, stream = pools[pool].pop()
            if pools[pool]:
                heapq.heapreplace(most, (held + size, pool))
            else:
                heapq.heappop(most)
            missing -= size
            origin = stream.origin()
            stream.give_up_body()
            self._on_given_up(f"{GIVEN_UP}: {size} bytes after {age:.1f} s, {origin}")
