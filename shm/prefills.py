"""Prefills under way: which prompts endpoints compute at this moment. Each worker writes its own row, all workers read all.

    worker 0 | key of place 0 | ... | key of place 63 | record of place 0 | ... | record of place 63 |
    worker 1 | ...
    key      | hash of the first marked block that is computed; 0: the place is free
    record   | since | owner | blocks held before | tokens to compute | blocks | hash of the last block | marks |
    marks    | hashes of the marked blocks: number 4, 5, 6, 7, 8, 10, 12, 15, ..., each a quarter further than the one before

A worker takes a place when it sends a request, and frees it at the first token or the end. So other workers know at once what the index
learns from the bus some milliseconds later. They find at least 4 of 5 blocks that two prompts share. Prefills without a marked block are
too short to be shown, and a request that finds no free place is not shown either.

A record is written before its key, and the key is cleared first. A reader that finds another key or another start after it has read a
record ignores the record. A worker clears its row at its start. Until then, the row of a worker that has died may name prefills that have
ended: places older than OLD_S do not count.
"""

from bisect import bisect_right
from struct import Struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from compiled import calls
from shm.layout import CACHE_LINE, WORD, aligned, layout_hash
from shm.segment import Region

PLACES: Final = 64
OLD_S: Final = 60.0
LEAST_BLOCKS: Final = 4
MOST_BLOCKS: Final = 1 << 15
GROWTH: Final = 1.25
FOUND_MAX: Final = 16
ROW_ALIGNMENT: Final = 2 * CACHE_LINE  # CPUs fetch cache lines in pairs

SINCE, OWNER, KNOWN, TOKENS, BLOCKS, LAST, MARKS = range(7)
_HEAD: Final = Struct("=dQQdQQ")  # the words of a record before its marks

Hashes = npt.NDArray[np.uint64]
Prefill = tuple[int, int, float, float]  # owner; leading blocks in common; since; tokens that it computes


def _marked() -> tuple[int, ...]:
    """Returns the numbers of the marked blocks, counted from 1."""
    numbers = [LEAST_BLOCKS]
    while numbers[-1] < MOST_BLOCKS:
        numbers.append(int(numbers[-1] * GROWTH))
    return tuple(numbers)


_NUMBERS: Final = _marked()
MARKED: Final = np.array(_NUMBERS, np.int64)
RECORD: Final = MARKS + len(MARKED)  # words


class PrefillsSchema:
    """Lays out the rows of a number of workers."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"prefills need at least one worker, not {workers}")
        self.workers = workers
        self.row_bytes = aligned(PLACES * (1 + RECORD) * WORD, ROW_ALIGNMENT)
        self.bytes = workers * self.row_bytes
        self.layout_hash = layout_hash("prefills 1", workers, PLACES, RECORD)

    def describe(self) -> dict[str, Any]:
        return {"kind": "prefills", "workers": self.workers}


class Prefills:
    """Writes the row of worker `index`, and reads all."""

    def __init__(self, schema: PrefillsSchema, region: Region, index: int) -> None:
        rows: Hashes = region.array(np.uint64, 0, (schema.workers, schema.row_bytes // WORD))
        self._rows = rows
        self._index = index
        rows[index, :PLACES] = 0
        self._keys = [memoryview(row[:PLACES]) for row in rows]
        self._records = [row[PLACES : PLACES * (1 + RECORD)].reshape(PLACES, RECORD) for row in rows]
        self._own_keys, self._own_records = self._keys[index], self._records[index]
        self._free = list(range(PLACES))

    def begins(self, hashes: Hashes, owner: int, known: int, tokens: float, now: float) -> int:
        """Shows that a prompt is sent to `owner`. Returns its place for `ends`; -1: it is not shown.

        `hashes`: its chain. `known`: how many leading blocks the endpoint holds. `tokens`: how many it has to compute.
        """
        if not self._free:
            return -1
        place = self._free[-1]
        if calls.show_prefill is not None:
            shown = calls.show_prefill(
                self._rows, PLACES, MARKED, self._index, place, hashes, owner, known, tokens, now
            )
        else:
            shown = self.reference_show(place, hashes, owner, known, tokens, now)
        return self._free.pop() if shown else -1

    def reference_show(self, place: int, hashes: Hashes, owner: int, known: int, tokens: float, now: float) -> bool:
        """Writes a record and then its key, without the C kernel. Returns whether there is anything to show."""
        count = len(hashes)
        marks = _marks_up_to(count)
        first = _marks_up_to(known)
        if first >= marks:
            return False
        record = self._own_records[place]
        record[MARKS : MARKS + marks] = hashes[MARKED[:marks] - 1]
        _HEAD.pack_into(record, 0, now, owner, known, tokens, count, hashes.item(-1))
        self._own_keys[place] = hashes.item(_NUMBERS[first] - 1)
        return True

    def ends(self, place: int) -> None:
        """Frees a place that `begins` has returned."""
        if place >= 0:
            self._own_keys[place] = 0
            self._free.append(place)

    def under_way(self, hashes: Hashes, now: float) -> list[Prefill]:
        """Returns prefills that compute leading blocks of this chain, at most FOUND_MAX."""
        if calls.prefills_under_way is not None:
            return calls.prefills_under_way(self._rows, PLACES, MARKED, hashes, now, OLD_S, FOUND_MAX)
        return self.reference_under_way(hashes, now)

    def reference_under_way(self, hashes: Hashes, now: float) -> list[Prefill]:
        """Computes `under_way` in NumPy, without the C kernel."""
        found: list[Prefill] = []
        marks = _marks_up_to(len(hashes))
        if not marks:
            return found
        own = {hashes.item(number - 1) for number in _NUMBERS[:marks]}
        for row, words in enumerate(self._keys):
            keys = words.tolist()
            for place in [] if own.isdisjoint(keys) else range(PLACES):
                if keys[place] not in own or len(found) == FOUND_MAX:
                    continue
                record = self._records[row][place].copy()
                moved = words[place] != keys[place] or self._records[row][place, SINCE] != record[SINCE]
                since, owner, known, tokens, _, _ = _HEAD.unpack_from(record)
                blocks = _shared(record, hashes)
                if not moved and now - since < OLD_S and blocks > known:
                    found.append((owner, blocks, since, tokens))
        return found


def local_prefills() -> Prefills:
    """Returns prefills in private memory: for one process without workers."""
    schema = PrefillsSchema(1)
    return Prefills(schema, Region(memoryview(bytearray(schema.bytes))), 0)


def _marks_up_to(blocks: int) -> int:
    """Returns how many of the first blocks of a prompt are marked."""
    return bisect_right(_NUMBERS, blocks)


def _shared(record: Hashes, hashes: Hashes) -> int:
    """Returns how many leading blocks a record and a chain are known to share. Equal hashes prove all blocks before them, too."""
    blocks, count = int(record[BLOCKS]), len(hashes)
    if blocks <= count and hashes[blocks - 1] == record[LAST]:
        return blocks
    marks = _marks_up_to(min(blocks, count))
    same = int(np.count_nonzero(record[MARKS : MARKS + marks] == hashes[MARKED[:marks] - 1]))
    return _NUMBERS[same - 1] if same else 0
