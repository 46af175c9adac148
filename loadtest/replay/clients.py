"""Decides when requests arrive in a replay: a client that waited for an answer waits for the replayed answer.

open       a request comes at its recorded time
turns      a request comes as long after the end of the one before as it was recorded: the one before in its flow, if no two requests
           of that flow were ever under way at once, else the turn before in its conversation (the default)
clients    N clients: request k comes after the end of the (k - N)th answer, with the recorded pause, and after the turn before
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Final

from loadtest.replay.prompts import OPEN
from loadtest.replay.reading import Asked

CLOCK_S: Final = 0.002  # within this time, workers may see the end of an answer and the next request in either order


def turns(requests: Sequence[Asked], conversations: Sequence[int]) -> list[int]:
    """Returns, for each request, the index of the request whose answer its client waited for, or OPEN.

    `requests`: in the order of arrival. `conversations`: for each request, the index of the turn before in its conversation, or OPEN.
    """
    before = list(conversations)
    flows: dict[int, list[int]] = {}
    for index, asked in enumerate(requests):
        if asked.flow:
            flows.setdefault(asked.flow, []).append(index)
    for members in flows.values():
        pairs = list(itertools.pairwise(members))
        if pairs and all(_ends_before(requests[earlier], requests[later]) for earlier, later in pairs):
            for earlier, later in pairs:
                before[later] = earlier
    return before


def _ends_before(earlier: Asked, later: Asked) -> bool:
    return earlier.at + (0.0 if math.isnan(earlier.lasted_s) else earlier.lasted_s) <= later.at + CLOCK_S


class Arrivals:
    """The arrivals of a replay, in virtual seconds from the first arrival. The owner pops requests that are due, and reports the ends of
    requests.
    """

    def __init__(self, requests: Sequence[Asked], before: Sequence[int], rate: float, clients: int = 0) -> None:
        """`before`: see `turns`. `rate`: by which factor requests come faster. `clients`: how many there are; 0 means any number."""
        start = requests[0].at
        self._due: list[tuple[float, int]] = []  # heap
        self._pauses = [0.0] * len(requests)
        self._next: dict[int, list[int]] = {}  # request -> those that wait for it
        self._needs = [0] * len(requests)  # how many ends a request waits for
        self._earliest = [0.0] * len(requests)
        self._at: list[float] = []
        self._clients = clients
        self._ended = 0
        pairs = _by_ends(requests, clients)
        for index, asked in enumerate(requests):
            earlier = before[index]
            if earlier != OPEN:
                self._next.setdefault(earlier, []).append(index)
                self._needs[index] += 1
                if not clients:
                    lasted_s = requests[earlier].lasted_s
                    ended = requests[earlier].at + (0.0 if math.isnan(lasted_s) else lasted_s)
                    self._pauses[index] = max(asked.at - ended, 0.0) / rate
            if clients and index >= clients:
                self._needs[index] += 1
                self._pauses[index] = max(asked.at - pairs[index - clients], 0.0) / rate
            if not self._needs[index]:
                self._due.append(((asked.at - start) / rate, index))
        heapq.heapify(self._due)

    @property
    def due(self) -> float:
        """Returns when the next request arrives; inf if none will arrive, unless another request ends first."""
        return self._due[0][0] if self._due else math.inf

    def pop(self) -> int:
        """Returns the request that arrives at `due`."""
        return heapq.heappop(self._due)[1]

    def ended(self, index: int, now: float) -> None:
        """Lets the requests arrive that waited for the end of this one."""
        for later in self._next.get(index, ()):
            self._released(later, now, 0.0 if self._clients else self._pauses[later])
        if self._clients:
            freed = self._ended + self._clients
            self._ended += 1
            if freed < len(self._needs):
                self._released(freed, now, self._pauses[freed])

    def _released(self, index: int, now: float, pause: float) -> None:
        self._needs[index] -= 1
        self._earliest[index] = max(self._earliest[index], now + pause)
        if not self._needs[index]:
            heapq.heappush(self._due, (self._earliest[index], index))


def _by_ends(requests: Sequence[Asked], clients: int) -> list[float]:
    """Returns the times of the ends in order; for a request whose end was not recorded, the time of its arrival."""
    if not clients:
        return []
    return sorted(asked.at + (0.0 if math.isnan(asked.lasted_s) else asked.lasted_s) for asked in requests)
