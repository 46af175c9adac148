"""Prefills under way: which prompts endpoints compute at this moment (`Prefills`), and since when (`PromptStarts`).

Each worker writes its own row of both structures, and all workers read all rows. Rows of prefills:

    worker 0 | key of place 0 | ... | key of place 63 | record of place 0 | ... | record of place 63 |
    worker 1 | ...
    key      | hash of the first marked block that is computed; 0 for a free place
    record   | since | owner | blocks held before | tokens to compute | blocks | hash of the last block | marks |
    marks    | hashes of the marked blocks: number 4, 5, 6, 7, 8, 10, 12, 15, ..., each a quarter more than the previous number

A worker takes a place in its row when it sends a request, and frees the place at the first token or the end. So other workers know at once
what the index learns from the bus some milliseconds later. They find at least 4 of 5 blocks that two prompts share. Prefills without a
marked block are too short to be shown. A request that finds no free place is not shown either.

A record is written before its key, and the key is cleared first. After it has read a record, a reader checks key and start again, and
ignores the record if one has changed. A worker clears its row at its start. Until then, the row of a worker that has died may name prefills
that have ended, so places older than OLD_S are ignored.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from compiled import calls
from compiled.outlook import CELLS, PROMPTS, START
from shm.layout import ROW_ALIGNMENT, WORD, Layout, aligned
from shm.segment import Floats, Region

PLACES: Final = 64
OLD_S: Final = 60.0
LEAST_BLOCKS: Final = 4
MOST_BLOCKS: Final = 1 << 15
GROWTH: Final = 1.25
FOUND_MAX: Final = 16

MARKS: Final = 6  # the words of a record before its marks

Hashes = npt.NDArray[np.uint64]
Prefill = tuple[int, int, float, float]  # owner; leading blocks in common; since; tokens that the owner computes


def _marked() -> list[int]:
    """Returns the numbers of the marked blocks, counted from 1."""
    numbers = [LEAST_BLOCKS]
    while numbers[-1] < MOST_BLOCKS:
        numbers.append(int(numbers[-1] * GROWTH))
    return numbers


MARKED: Final = np.array(_marked(), np.int64)
RECORD: Final = MARKS + len(MARKED)  # words


class PrefillsSchema(Layout):
    """Lays out the rows of a number of workers."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"prefills need at least one worker, not {workers}")
        self.workers = workers
        self.row_bytes = aligned(PLACES * (1 + RECORD) * WORD, ROW_ALIGNMENT)
        self.bytes = workers * self.row_bytes
        super().__init__("prefills", "prefills 1", PLACES, RECORD, workers=workers)


class Prefills:
    """Writes the row of worker `index`, and reads all rows."""

    def __init__(self, schema: PrefillsSchema, region: Region, index: int) -> None:
        rows: Hashes = region.array(np.uint64, 0, (schema.workers, schema.row_bytes // WORD))
        self._rows = rows
        self._index = index
        rows[index, :PLACES] = 0
        self._own_keys = memoryview(rows[index][:PLACES])
        self._free = list(range(PLACES))

    def begins(self, hashes: Hashes, owner: int, known: int, tokens: float, now: float) -> int:
        """Shows that a prompt is sent to `owner`. Returns the place of the prefill for `ends`; -1 if the prefill is not shown.

        `hashes`: the prompt's chain. `known`: how many leading blocks the endpoint holds. `tokens`: how many tokens it has to compute.
        """
        if not self._free:
            return -1
        place = self._free[-1]
        shown = calls.show_prefill(self._rows, PLACES, MARKED, self._index, place, hashes, owner, known, tokens, now)
        return self._free.pop() if shown else -1

    def ends(self, place: int) -> None:
        """Frees a place that `begins` has returned."""
        if place >= 0:
            self._own_keys[place] = 0
            self._free.append(place)

    def under_way(self, hashes: Hashes, now: float) -> list[Prefill]:
        """Returns prefills that compute leading blocks of this chain, at most FOUND_MAX."""
        return calls.prefills_under_way(self._rows, PLACES, MARKED, hashes, now, OLD_S, FOUND_MAX)


def local_prefills() -> Prefills:
    """Returns prefills in private memory, for one process without workers."""
    schema = PrefillsSchema(1)
    return Prefills(schema, Region(memoryview(bytearray(schema.bytes))), 0)


class StartsSchema(Layout):
    """Lays out the rows for a number of slots and workers."""

    def __init__(self, slots: int, workers: int) -> None:
        if slots < 1 or workers < 1:
            raise ValueError(f"prompt starts need at least one slot and one worker, not {slots}, {workers}")
        self.slots, self.workers = slots, workers
        self.cells_bytes = aligned(slots * WORD, ROW_ALIGNMENT)
        self.bytes = workers * CELLS * self.cells_bytes
        super().__init__("starts", "starts 3", slots=slots, workers=workers)


class PromptStarts:
    """Holds since when each endpoint computes its first prompt without a token: a start per slot, in monotonic seconds; 0 if not known.

    Writes one row, and reads all rows. `own`, `prompts`: the cells START and PROMPTS of worker `index`, one per slot. `rows`: all cells
    (`compiled.outlook`), shape (workers, CELLS, slots), padded to whole cache lines. The newest start of a slot is valid, so the starts of
    a worker that has ended do no harm. A worker clears its numbers of prompts at its start.
    """

    def __init__(self, schema: StartsSchema, region: Region, index: int) -> None:
        rows: Floats = region.array(np.float64, 0, (schema.workers, CELLS, schema.cells_bytes // WORD))
        self.rows = rows
        self.index = index
        self.own: Floats = rows[index, START, : schema.slots]
        self.prompts = rows[index, PROMPTS, : schema.slots].data
        rows[index, PROMPTS] = 0.0
