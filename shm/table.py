"""The endpoint table: one row per slot, written by the supervisor, copied whole by the workers.

    control  | epoch | used | 0 ...                                               one cache line
    row      | version | generation | owner | state | flags | updated_at | inflight_at_scrape |
             | present | column 0 | ... | column n-1 | check |         each cell is one 8-byte word

- `version` is the row's seqlock; `check` is the XOR of all words between the two.
- `used` is one more than the highest slot ever worth looking at; readers copy that part only.
- `epoch` moves once after a batch of writes: a reader whose epoch still stands copies nothing.
- A handle is (slot, generation). The generation grows when a slot is claimed, never otherwise, so
  a handle of an endpoint that left cannot touch the row of its successor.
- Ordinary writes never change generation, owner or whether a row is free; a claim stores `state`
  last and a release stores it first. So a writer that is killed at any store leaves a row of which
  its successor can say whether it is claimed, and by whom; only its scraped values are lost.
- Scraped values are float64 (counts are exact below 2**53); bit i of `present` says that column i
  has a value.

What this does not do: decide when an endpoint is stale, or when a slot may be used again.
"""

import enum
import struct
from collections.abc import Callable, Sequence
from functools import reduce
from operator import xor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shm import seqlock
from shm.layout import CACHE_LINE, WORD, aligned, layout_hash
from shm.segment import Region

VERSION, GENERATION, OWNER, STATE, FLAGS, UPDATED_AT, INFLIGHT, PRESENT, COLUMNS = range(9)
EPOCH, USED = range(2)
COLUMNS_MAX = 64  # bits of `present`

DRAINING = 1
DOWN = 2

_FIXED = "=QQQQddQ"
assert struct.calcsize(_FIXED) == (COLUMNS - 1) * WORD

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


class State(enum.IntEnum):
    FREE = 0
    UNKNOWN = 1
    FRESH = 2
    STALE = 3


class Handle(NamedTuple):
    """An endpoint's place in the table; stale once the generation has moved on."""

    slot: int
    generation: int


class TableSchema:
    """Which columns a row has, and how many rows there are."""

    def __init__(self, columns: tuple[str, ...], slots: int) -> None:
        if len(columns) > COLUMNS_MAX or len(set(columns)) != len(columns):
            raise ValueError(f"a table has up to {COLUMNS_MAX} distinct columns, not {columns}")
        if slots < 1:
            raise ValueError(f"a table needs at least one slot, not {slots}")
        self.columns = columns
        self.slots = slots
        self.offsets = {name: COLUMNS + index for index, name in enumerate(columns)}
        self.row_words = COLUMNS + len(columns) + 1
        self.bytes = aligned(CACHE_LINE + slots * self.row_words * WORD)
        self.layout_hash = layout_hash("table 1", columns, slots)

    def describe(self) -> dict[str, Any]:
        return {"kind": "table", "columns": self.columns, "slots": self.slots}


class TableWriter:
    """The only writer. Made over a live table it repairs what a killed predecessor left."""

    def __init__(self, schema: TableSchema, region: Region) -> None:
        self.schema = schema
        self._words = region.words
        self._body_bytes = bytearray((schema.row_words - 1) * WORD)
        self._body = memoryview(self._body_bytes).cast("Q")
        self._fields = self._body[:-1]
        self._pack = struct.Struct(f"{_FIXED}{len(schema.columns)}d").pack_into
        self._nothing = (0.0,) * len(schema.columns)
        self._first_free = 0  # no slot below it is: claiming thousands must not look at all of them each time
        self._repair()

    def claim(self, owner: int, may_reuse: Callable[[int], bool]) -> Handle | None:
        """The lowest free slot, as UNKNOWN; a used one only if `may_reuse(slot)`; None = full."""
        words = self._words
        first_free: int | None = None
        for slot in range(self._first_free, self.schema.slots):
            row = self._row(slot)
            generation = words[row + GENERATION]
            if words[row + STATE] != State.FREE:
                continue
            if generation and not may_reuse(slot):
                first_free = slot if first_free is None else first_free
                continue
            self._first_free = slot + 1 if first_free is None else first_free
            if words[USED] <= slot:
                words[USED] = slot + 1  # before the row, or a kill could hide a claimed slot
            self._fill(generation + 1, owner, State.UNKNOWN, 0, 0.0, 0.0, 0, self._nothing)
            self._store_claim(row)
            return Handle(slot, generation + 1)
        return None

    def write(
        self,
        handle: Handle,
        *,
        state: int,
        flags: int,
        updated_at: float,
        inflight_at_scrape: float,
        values: Sequence[float],
        present: int,
    ) -> bool:
        """Replace a row's values; False, and nothing done, when the handle is stale."""
        if state == State.FREE:
            raise ValueError("a row becomes free by release, not by write")
        row = self._live_row(handle)
        if row is None:
            return False
        owner = self._words[row + OWNER]
        self._fill(handle.generation, owner, state, flags, updated_at, inflight_at_scrape, present, values)
        seqlock.write_row(self._words, row, self._body)
        return True

    def mark(self, handle: Handle, *, state: int | None = None, flags: int | None = None) -> bool:
        """Change state or flags and keep the values; False when the handle is stale."""
        if state == State.FREE:
            raise ValueError("a row becomes free by release, not by mark")
        row = self._live_row(handle)
        if row is None:
            return False
        body = self._body
        body[:] = self._words[row + 1 : row + self.schema.row_words]
        body[STATE - 1] = body[STATE - 1] if state is None else state
        body[FLAGS - 1] = body[FLAGS - 1] if flags is None else flags
        body[-1] = reduce(xor, self._fields)
        seqlock.write_row(self._words, row, body)
        return True

    def release(self, handle: Handle) -> bool:
        """Free the row; its generation stays, so the handle is stale from now on."""
        row = self._live_row(handle)
        if row is None:
            return False
        self._free(row)
        self._first_free = min(self._first_free, handle.slot)
        self._words[USED] = self._highest() + 1
        return True

    def publish(self) -> None:
        """Let readers see, by one moved word, that rows have changed."""
        self._words[EPOCH] = (self._words[EPOCH] + 1) & seqlock.VERSION_MASK

    def claimed(self) -> list[Handle]:
        """Handles of all rows that are not free, in order of their slots."""
        words = self._words
        rows = ((slot, self._row(slot)) for slot in range(words[USED]))
        return [Handle(slot, words[row + GENERATION]) for slot, row in rows if words[row + STATE] != State.FREE]

    def owner(self, handle: Handle) -> int | None:
        """The owner id with which the slot was claimed."""
        row = self._live_row(handle)
        return None if row is None else self._words[row + OWNER]

    def _row(self, slot: int) -> int:
        return CACHE_LINE // WORD + slot * self.schema.row_words

    def _live_row(self, handle: Handle) -> int | None:
        row = CACHE_LINE // WORD + handle.slot * self.schema.row_words
        words = self._words
        if words[row + GENERATION] != handle.generation or words[row + STATE] == State.FREE:
            return None
        return row

    def _fill(
        self,
        generation: int,
        owner: int,
        state: int,
        flags: int,
        updated_at: float,
        inflight: float,
        present: int,
        values: Sequence[float],
    ) -> None:
        self._pack(
            self._body_bytes,
            0,
            *(generation, owner, state, flags, updated_at, inflight, present),
            *values,
        )
        self._body[-1] = reduce(xor, self._fields)

    def _store_claim(self, row: int) -> None:
        words, body = self._words, self._body
        odd = seqlock.begin(words, row)
        words[row + GENERATION] = body[GENERATION - 1]
        words[row + OWNER] = body[OWNER - 1]
        words[row + FLAGS : row + self.schema.row_words] = body[FLAGS - 1 :]
        words[row + STATE] = body[STATE - 1]  # last: until now a successor sees a free row
        seqlock.end(words, row, odd)

    def _free(self, row: int) -> None:
        words = self._words
        odd = seqlock.begin(words, row)
        words[row + STATE] = State.FREE  # first: from now on a successor sees a free row
        self._fill(words[row + GENERATION], 0, State.FREE, 0, 0.0, 0.0, 0, self._nothing)
        words[row + 1 : row + self.schema.row_words] = self._body
        seqlock.end(words, row, odd)

    def _highest(self) -> int:
        for slot in range(self._words[USED] - 1, -1, -1):
            if self._words[self._row(slot) + STATE] != State.FREE:
                return slot
        return -1

    def _repair(self) -> None:
        words = self._words
        torn = [slot for slot in range(self.schema.slots) if words[self._row(slot)] & 1]
        for slot in torn:
            row = self._row(slot)
            if words[row + STATE] == State.FREE:
                self._free(row)
                continue
            generation, owner, flags = (words[row + word] for word in (GENERATION, OWNER, FLAGS))
            self._fill(generation, owner, State.UNKNOWN, flags, 0.0, 0.0, 0, self._nothing)
            seqlock.write_row(words, row, self._body)
        if torn:
            self.publish()


class TableCopy:
    """The used rows as they were at one moment each, in this process's own memory."""

    __slots__ = ("_floats", "_schema", "epoch", "rows")

    def __init__(self, schema: TableSchema, epoch: int, rows: Words) -> None:
        self._schema = schema
        self._floats: Floats = rows.view(np.float64)
        self.epoch = epoch
        self.rows = rows

    @property
    def generation(self) -> Words:
        return self.rows[:, GENERATION]

    @property
    def owner(self) -> Words:
        return self.rows[:, OWNER]

    @property
    def state(self) -> Words:
        return self.rows[:, STATE]

    @property
    def flags(self) -> Words:
        return self.rows[:, FLAGS]

    @property
    def updated_at(self) -> Floats:
        return self._floats[:, UPDATED_AT]

    @property
    def inflight_at_scrape(self) -> Floats:
        return self._floats[:, INFLIGHT]

    @property
    def present(self) -> Words:
        return self.rows[:, PRESENT]

    def standing(self) -> bytes:
        """What scrapes seldom change: generation, owner, state, flags and present bits of all rows, to be compared."""
        return self.rows[:, GENERATION:UPDATED_AT].tobytes() + self.rows[:, PRESENT].tobytes()

    def column(self, index: int) -> Floats:
        """The values of the schema's column `index`."""
        return self._floats[:, COLUMNS + index]


class TableReader:
    """Copies the table; never writes it."""

    def __init__(self, schema: TableSchema, region: Region) -> None:
        self.schema = schema
        self._words = region.words.toreadonly()
        self._rows: Words = region.array(np.uint64, CACHE_LINE, (schema.slots, schema.row_words))
        self._rows.flags.writeable = False
        self._used = -1
        self._part = self._rows[:0]

    def epoch(self) -> int:
        """Moves when rows have changed."""
        return self._words[EPOCH]

    def copy(self, previous: TableCopy | None = None) -> TableCopy:
        """All used rows. One that stays torn is taken from `previous`, else it reads as free."""
        words = self._words
        epoch, used = words[EPOCH], words[USED]
        if used != self._used:
            self._used, self._part = used, self._rows[: min(used, self.schema.slots)]
        rows, torn = seqlock.read_rows(self._part)
        if torn.any():
            self._settle(rows, torn, previous)
        return TableCopy(self.schema, epoch, rows)

    def _settle(self, rows: Words, torn: Words, previous: TableCopy | None) -> None:
        known = 0 if previous is None else len(previous.rows)
        for slot in np.flatnonzero(torn).tolist():
            for _ in range(seqlock.READ_TRIES_MAX):
                row, still_torn = seqlock.read_rows(self._part[slot : slot + 1])
                if not still_torn[0]:
                    rows[slot] = row[0]
                    break
            else:
                rows[slot] = previous.rows[slot] if previous is not None and slot < known else 0
