"""The remote area: the sums of requests in flight and in queues of other replicas of the picker. The supervisor writes these sums, and
workers read them.

    | heartbeat | replicas | epoch | head | progress | waiting requests | waiting bytes | 0 |
    | band 0: waiting requests | bytes | band 1 ... |
    | requests in flight, one per slot |
    | tokens in flight, one per slot |
Each line of the drawing starts on its own cache line. Every cell is one 8-byte word: int64, except the heartbeat (monotonic seconds), which
is float64. A heartbeat older than 1 s means that the supervisor has ended or hangs; readers then ignore the area. The epoch numbers the
writer among all replicas; a successor takes a higher number. The head is the number of the most important band with a waiting request,
plus 1; 0 if no request waits. The progress changes when a replica with a waiting request of this band lets a request through. The first
line also has the waiting requests of all bands, which workers read for each request. The area exists only with a replica store.
"""

from typing import Final

import numpy as np

from shm.layout import CACHE_LINE, WORD, Layout, aligned
from shm.segment import Ints, Region

FRESH_S: Final = 1.0
HEARTBEAT: Final = 0
REPLICAS: Final = 1
EPOCH: Final = 2
HEAD: Final = 3
PROGRESS: Final = 4
WAITING: Final = 5
WAITING_BYTES: Final = 6
LINE: Final = CACHE_LINE // WORD


class RemoteSchema(Layout):
    """Lays out the remote area for a number of slots and bands: the position of each word."""

    def __init__(self, slots: int, bands: int) -> None:
        if slots < 1 or bands < 1:
            raise ValueError(f"the remote area needs at least one slot and one band, not {slots}, {bands}")
        self.slots, self.bands = slots, bands
        self.requests_at = aligned((LINE + 2 * bands) * WORD) // WORD
        self.tokens_at = aligned((self.requests_at + slots) * WORD) // WORD
        self.bytes = aligned((self.tokens_at + slots) * WORD)
        super().__init__("remote", "remote 4", slots=slots, bands=bands)


class RemoteArea:
    """Reads and writes the remote area. Only the supervisor writes."""

    def __init__(self, schema: RemoteSchema, region: Region) -> None:
        self.schema = schema
        self.requests_at = schema.requests_at
        self.words: memoryview = region.bytes.cast("q")
        self.floats: memoryview[float] = region.bytes.cast("d")
        self.requests: Ints = region.array(np.int64, schema.requests_at * WORD, schema.slots)
        self.tokens: Ints = region.array(np.int64, schema.tokens_at * WORD, schema.slots)

    def fresh(self, now: float) -> bool:
        """Returns whether the last heartbeat is recent enough at `now` (monotonic seconds), so that the sums may be used."""
        return self.age(now) <= FRESH_S

    def age(self, now: float) -> float:
        """Returns the seconds from the last heartbeat to `now` (monotonic seconds)."""
        return now - self.floats[HEARTBEAT]

    @property
    def replicas(self) -> int:
        """Returns how many other replicas the sums include."""
        return self.words[REPLICAS]

    @property
    def epoch(self) -> int:
        """Returns the last number that this replica had among all replicas; 0 before the first."""
        return self.words[EPOCH]

    @epoch.setter
    def epoch(self, number: int) -> None:
        self.words[EPOCH] = number

    def set(self, slot: int, requests: int, tokens: int) -> None:
        """Stores the requests and tokens that other replicas have in flight on the endpoint of one slot."""
        self.words[self.schema.requests_at + slot] = requests
        self.words[self.schema.tokens_at + slot] = tokens

    def set_band(self, band: int, requests: int, size: int) -> None:
        """Stores the requests and bytes that wait in one band."""
        at = LINE + 2 * band
        self.words[at] = requests
        self.words[at + 1] = size

    def band(self, band: int) -> tuple[int, int]:
        """Returns the requests and bytes that wait in one band."""
        at = LINE + 2 * band
        return self.words[at], self.words[at + 1]

    def set_waiting(self, requests: int, size: int) -> None:
        """Stores the requests and bytes that wait in all bands."""
        self.words[WAITING] = requests
        self.words[WAITING_BYTES] = size

    def set_head(self, band: int | None, progress: int) -> None:
        """Stores the most important band with a waiting request, and the progress of this band."""
        self.words[PROGRESS] = progress
        self.words[HEAD] = 0 if band is None else band + 1

    def head(self) -> tuple[int, int] | None:
        """Returns the band and the progress that `set_head` stored, or None if no request waits."""
        band = self.words[HEAD]
        return (band - 1, self.words[PROGRESS]) if band else None

    def waiting(self) -> tuple[int, int]:
        """Returns the requests and bytes in all bands that `set_waiting` stored."""
        return self.words[WAITING], self.words[WAITING_BYTES]

    def clear(self) -> None:
        """Stores 0 requests and tokens for all slots. The sums of the bands stay."""
        self.requests[:] = 0
        self.tokens[:] = 0

    def heartbeat(self, now: float, replicas: int) -> None:
        """Records that the sums are those of the time `now` (monotonic seconds). With `now` 0, readers ignore the sums."""
        self.words[REPLICAS] = replicas
        self.floats[HEARTBEAT] = now
