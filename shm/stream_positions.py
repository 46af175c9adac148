"""Stream positions: how far the kv-events process has read each model server's stream of KV events. There is one row per slot, and a
heartbeat.

    control  | heartbeat (float64, monotonic seconds) | applying | 0 ... |             one cache line
    row      | position | check | heard (float64, monotonic seconds) | messages | held | dropped | 0 | 0 |   one cache line per slot

- `position` is one more than the number of the last message that was applied; 0 before the first. `check` is the CRC of the payload of
  this message. A successor compares the CRC to find out whether the publisher has started again.
- `applying` is 1 while a batch of messages changes index and links. A successor that finds 1 empties index and links first.
- Only one process writes. Every value is one word, so readers need no version. The values of a row may be of different moments.
"""

from typing import NamedTuple

import numpy as np

from shm.layout import CACHE_LINE, WORD, Layout, aligned
from shm.segment import Floats, Region

HEARTBEAT, APPLYING = range(2)
POSITION, CHECK, HEARD, MESSAGES, HELD, DROPPED = range(6)
ROW_WORDS = CACHE_LINE // WORD


class StreamPositionsSchema(Layout):
    """Lays out the positions: one row for each of `slots` slots of the endpoint table."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.bytes = aligned(CACHE_LINE * (1 + slots))
        super().__init__("positions", "stream positions 1", slots=slots)


class StreamPosition(NamedTuple):
    """Holds one row. `heard`: when the last message came, in monotonic seconds, or 0. `held`: number of blocks in all tiers.

    `messages`: how many live messages came. `dropped`: how many messages were dropped because too many waited for the end of a replay.
    """

    position: int
    check: int
    heard: float
    messages: int
    held: int
    dropped: int


class StreamPositions:
    """Reads and writes the rows. Only the kv-events process may call `write`, `forget` and `heartbeat`, and set `applying`."""

    def __init__(self, schema: StreamPositionsSchema, region: Region) -> None:
        self.schema = schema
        self._words = region.words
        self._floats: Floats = region.array(np.float64, 0, schema.bytes // WORD)

    @property
    def last_heartbeat(self) -> float:
        """Returns the time of the last heartbeat of the kv-events process, in monotonic seconds; 0 before the first."""
        return float(self._floats[HEARTBEAT])

    def heartbeat(self, now: float) -> None:
        self._floats[HEARTBEAT] = now

    @property
    def applying(self) -> bool:
        return self._words[APPLYING] != 0

    @applying.setter
    def applying(self, value: bool) -> None:
        self._words[APPLYING] = int(value)

    def read(self, slot: int) -> StreamPosition:
        """Returns the row of a slot."""
        at = (1 + slot) * ROW_WORDS
        words = self._words
        return StreamPosition(
            words[at + POSITION],
            words[at + CHECK],
            float(self._floats[at + HEARD]),
            words[at + MESSAGES],
            words[at + HELD],
            words[at + DROPPED],
        )

    def write(self, slot: int, position: StreamPosition) -> None:
        """Replaces the row of a slot."""
        at = (1 + slot) * ROW_WORDS
        words = self._words
        words[at + POSITION], words[at + CHECK] = position.position, position.check
        self._floats[at + HEARD] = position.heard
        words[at + MESSAGES], words[at + HELD], words[at + DROPPED] = position.messages, position.held, position.dropped
