"""Adds blocks that endpoints will hold soon: workers report where they have just sent a prompt. The entries expire after a short time.

Without these entries, requests with the same prefix could go elsewhere until the first event of the earlier request arrives. A later
request for the same blocks makes their entries live longer.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from epp.prefix.updates import FRAME_BYTES_MAX, CorruptFrame, decode
from workers.supervisor.kv_events.holdings import Holder, Holdings

FRAMES_PER_TURN: Final = 256
EXPECTED_MAX: Final = 100_000  # frames whose entries have not expired; above this, the oldest expire early
AGE_TICKS: Final = 16

Hashes = NDArray[np.uint64]


class Speculation:
    """Reads the workers' pipes and adds the reported blocks to the index. `seconds`: how long an entry lives; 0 if workers report none."""

    def __init__(self, holdings: Holdings, seconds: float, descriptors: Sequence[int]) -> None:
        self._holdings = holdings
        self._seconds = seconds
        self._descriptors = tuple(descriptors)
        self._holders: Mapping[int, Holder] = {}
        self._expected: deque[tuple[float, int, int, Hashes]] = deque()  # expiry time, owner, age, keys
        self.frames = 0
        self.corrupt = 0

    def know(self, holders: Mapping[int, Holder]) -> None:
        """Sets the endpoints that workers may name. `holders`: owner id of an endpoint -> its blocks."""
        self._holders = holders

    def receive(self, now: float) -> None:
        """Reads the frames in the pipes, up to a limit per pipe, and adds their blocks."""
        for descriptor in self._descriptors:
            for _ in range(FRAMES_PER_TURN):
                try:
                    data = os.read(descriptor, FRAME_BYTES_MAX)
                except BlockingIOError:
                    break
                if not data:
                    break
                self._take(data, now)

    def expire(self, now: float) -> None:
        """Removes the entries whose time is over."""
        while self._expected and self._expected[0][0] <= now:
            self._end()

    def _take(self, data: bytes, now: float) -> None:
        self.frames += 1
        try:
            frame = decode(data)
        except CorruptFrame:
            self.corrupt += 1
            return
        hashes, at = np.frombuffer(frame.hashes, dtype=np.uint64), 0
        age = int(now * AGE_TICKS)
        for endpoint, count in zip(frame.owners, frame.counts, strict=True):
            keys = hashes[at : at + count]
            at += count
            if (holder := self._holders.get(endpoint)) is None:
                continue
            self._holdings.writer.insert(keys, holder.speculative, age)
            self._expected.append((now + self._seconds, holder.speculative, age, keys))
            if len(self._expected) > EXPECTED_MAX:
                self._end()

    def _end(self) -> None:
        _, owner, age, keys = self._expected.popleft()
        self._holdings.writer.forget(keys, owner, before=age)
