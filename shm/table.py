"""The endpoint table: one row per slot. The supervisor writes the table, and workers copy all used rows at once.

    control  | epoch | used | 0 ...                                               one cache line
    row      | version | generation | owner | state | flags | updated_at | inflight_at_scrape |
             | present | column 0 | ... | column n-1 | room for more | check |         each cell is one 8-byte word

- `version` is the row's seqlock; `check` is the XOR of all words between the two.
- `used` is one more than the highest slot in use. Readers copy only the rows of lower slots.
- `epoch` moves once after a batch of writes. A reader that has seen the current epoch copies nothing.
- A handle is (slot, generation). The generation grows only when a slot is taken. So the handle of an
  endpoint that left cannot touch the row of the endpoint that took its slot.
- Only `take` and `release` change the generation, the owner, or whether a row is free. `take` stores
  `state` last and a release stores it first. So if the writer is killed at any store, its successor
  still knows whether the row is taken, and by which owner. Only the scraped values are lost.
- Scraped values are float64 (counts are exact below 2**53). Bit i of `present` says that column i has a value.
- `updated_at` is in monotonic seconds.
- A killed writer leaves at most one torn row, and never a `used` that is too low. Any other damage comes from another
  program; the next writer frees such rows and recounts `used`.

This module does not decide when an endpoint is stale, or when a slot may be reused.
"""

import enum
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import xor
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from compiled.calls import seal
from shm import fence, seqlock
from shm.layout import CACHE_LINE, WORD, Layout, aligned
from shm.segment import Floats, Region

VERSION: Final = 0
GENERATION: Final = 1
OWNER: Final = 2
STATE: Final = 3
FLAGS: Final = 4
UPDATED_AT: Final = 5
INFLIGHT: Final = 6
PRESENT: Final = 7
COLUMNS: Final = 8
EPOCH: Final = 0
USED: Final = 1
COLUMNS_MAX: Final = 64  # bits of `present`
RETRIED_MAX: Final = 64  # torn rows of one copy that are read again

DRAINING: Final = 1
DOWN: Final = 2
EJECTED: Final = 4
FAILING_AT: Final = 4  # bit of the flags: the share of its answers that a failing endpoint fails, in fifteenths, in 4 bits
FAILING_MASK: Final = 0xF
# Bits of the flags: the area of the worker that may send one request, in 16 bits, then the number of the trial.
TRIAL_AREA_AT: Final = 8
TRIAL_NUMBER_AT: Final = 24
GENERATION_MAX: Final = (1 << 48) - 1  # limits the generation of a row that another program has overwritten, so that it does not overflow
AREA_MASK: Final = 0xFFFF
NUMBER_MASK: Final = 0xFFFF_FFFF

_FIXED: Final = "=QQQQddQ"
assert struct.calcsize(_FIXED) == (COLUMNS - 1) * WORD

Words = npt.NDArray[np.uint64]


def trial(area: int, number: int) -> int:
    """Returns the flags of an ejected endpoint on trial: only the worker of this area may send one request to it.

    `number` counts the trials, so that a worker can tell a new trial from the previous one.
    """
    return EJECTED | area << TRIAL_AREA_AT | (number & NUMBER_MASK) << TRIAL_NUMBER_AT


class State(enum.IntEnum):
    FREE = 0
    UNKNOWN = 1
    FRESH = 2
    STALE = 3


class Handle(NamedTuple):
    """Refers to an endpoint's row. The handle is stale once the row's generation has grown."""

    slot: int
    generation: int


class TableSchema(Layout):
    """Lays out the table: the columns of a row, and the number of rows."""

    def __init__(self, columns: tuple[str, ...], slots: int, width: int = 0) -> None:
        """`width`: the least number of columns for which a row has room. A later schema may use the spare room for more columns."""
        if len(columns) > COLUMNS_MAX or len(set(columns)) != len(columns):
            raise ValueError(f"a table has up to {COLUMNS_MAX} distinct columns, not {columns}")
        if slots < 1:
            raise ValueError(f"a table needs at least one slot, not {slots}")
        self.columns = columns
        self.slots = slots
        self.offsets = {name: COLUMNS + index for index, name in enumerate(columns)}
        self.width = max(width, len(columns))
        self.row_words = COLUMNS + self.width + 1
        self.bytes = aligned(CACHE_LINE + slots * self.row_words * WORD)
        super().__init__("table", "table 2", columns=columns, slots=slots, width=self.width)


class TableWriter:
    """Writes the table. Only one process has a writer.

    The constructor repairs the row that a killed predecessor left half-written, and frees the rows that another program has
    overwritten. `overwritten`: how many rows another program had overwritten.
    """

    def __init__(self, schema: TableSchema, region: Region) -> None:
        self.schema = schema
        self._words = region.words
        self._body_bytes = bytearray((schema.row_words - 1) * WORD)
        self._body = memoryview(self._body_bytes).cast("Q")
        self._pack = struct.Struct(f"{_FIXED}{len(schema.columns)}d").pack_into
        self._nothing = (0.0,) * len(schema.columns)
        # No slot below this one is free. `take` starts to look here, so that thousands of calls do not each scan the whole table.
        self._first_free = 0
        self.overwritten = self._repair()

    def take(self, owner: int, may_reuse: Callable[[int], bool]) -> Handle | None:
        """Takes the lowest free slot; its state becomes UNKNOWN. Returns None if there is no slot to take.

        A slot that another endpoint had before is taken only if `may_reuse(slot)` returns True.
        """
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
                words[USED] = slot + 1  # before the row: otherwise a kill could hide a taken slot
            self._fill(generation + 1, owner, State.UNKNOWN, 0, 0.0, 0.0, 0, self._nothing)
            self._store_taken(row)
            return Handle(slot, generation + 1)
        return None

    def write(
        self, handle: Handle, *, state: int, flags: int, updated_at: float, inflight_at_scrape: float, values: Sequence[float], present: int
    ) -> bool:
        """Replaces a row's values. Returns False, without any change, if the handle is stale. Raises ValueError for State.FREE."""
        if state == State.FREE:
            raise ValueError("write cannot free a row: use release")
        row = self._live_row(handle)
        if row is None:
            return False
        owner = self._words[row + OWNER]
        self._fill(handle.generation, owner, state, flags, updated_at, inflight_at_scrape, present, values)
        seqlock.write_row(self._words, row, self._body)
        return True

    def mark(self, handle: Handle, *, state: int | None = None, flags: int | None = None) -> bool:
        """Changes state or flags and keeps the values. Returns False if the handle is stale. Raises ValueError for State.FREE."""
        if state == State.FREE:
            raise ValueError("mark cannot free a row: use release")
        row = self._live_row(handle)
        if row is None:
            return False
        body = self._body
        body[:] = self._words[row + 1 : row + self.schema.row_words]
        body[STATE - 1] = body[STATE - 1] if state is None else state
        body[FLAGS - 1] = body[FLAGS - 1] if flags is None else flags
        seal(body)
        seqlock.write_row(self._words, row, body)
        return True

    def release(self, handle: Handle) -> bool:
        """Frees the row, so that the handle becomes stale. Returns False if the handle was stale before."""
        row = self._live_row(handle)
        if row is None:
            return False
        self._free(row)
        self._first_free = min(self._first_free, handle.slot)
        self._words[USED] = self._highest_below(self._words[USED]) + 1
        return True

    @property
    def used(self) -> int:
        """Returns one more than the highest slot that is not free."""
        return self._words[USED]

    def intact(self, handles: Iterable[Handle]) -> bool:
        """Returns whether no handle is stale, and `used` covers the rows of all handles. If not, another program has written to the
        table.
        """
        used = self._words[USED]
        return used <= self.schema.slots and all(h.slot < used and self._live_row(h) is not None for h in handles)

    def publish(self) -> None:
        """Increments the epoch, which tells readers that rows have changed."""
        self._words[EPOCH] = (self._words[EPOCH] + 1) & seqlock.VERSION_MASK

    def taken(self) -> list[Handle]:
        """Returns the handles of all rows that are not free, in slot order."""
        words = self._words
        rows = ((slot, self._row(slot)) for slot in range(words[USED]))
        return [Handle(slot, words[row + GENERATION]) for slot, row in rows if words[row + STATE] != State.FREE]

    def owner(self, handle: Handle) -> int | None:
        """Returns the owner id with which the slot was taken; None if the handle is stale."""
        row = self._live_row(handle)
        return None if row is None else self._words[row + OWNER]

    def _row(self, slot: int) -> int:
        return CACHE_LINE // WORD + slot * self.schema.row_words

    def _live_row(self, handle: Handle) -> int | None:
        row = self._row(handle.slot)
        words = self._words
        if words[row + GENERATION] != handle.generation or words[row + STATE] == State.FREE:
            return None
        return row

    def _fill(
        self, generation: int, owner: int, state: int, flags: int, updated_at: float, inflight: float, present: int, values: Sequence[float]
    ) -> None:
        self._pack(self._body_bytes, 0, *(generation, owner, state, flags, updated_at, inflight, present), *values)
        seal(self._body)

    def _store_taken(self, row: int) -> None:
        words, body = self._words, self._body
        odd = seqlock.begin(words, row)
        words[row + GENERATION] = body[GENERATION - 1]
        words[row + OWNER] = body[OWNER - 1]
        words[row + FLAGS : row + self.schema.row_words] = body[FLAGS - 1 :]
        words[row + STATE] = body[STATE - 1]  # stored last: before this store, a successor sees a free row
        seqlock.end(words, row, odd)

    def _free(self, row: int) -> None:
        words = self._words
        odd = seqlock.begin(words, row)
        words[row + STATE] = State.FREE  # stored first: after this store, a successor sees a free row
        self._fill(words[row + GENERATION], 0, State.FREE, 0, 0.0, 0.0, 0, self._nothing)
        words[row + 1 : row + self.schema.row_words] = self._body
        seqlock.end(words, row, odd)

    def _highest_below(self, used: int) -> int:
        for slot in range(used - 1, -1, -1):
            if self._words[self._row(slot) + STATE] != State.FREE:
                return slot
        return -1

    def _repair(self) -> int:
        """Repairs all torn rows and `used`. Returns the number of rows that another program has overwritten."""
        words, overwritten, torn = self._words, 0, 0
        for slot in range(self.schema.slots):
            row = self._row(slot)
            half_written = words[row] & 1
            if not half_written and not reduce(xor, words[row + 1 : row + self.schema.row_words]):
                continue
            torn += 1
            words[row + GENERATION] &= GENERATION_MAX
            known = words[row + STATE] <= State.STALE
            overwritten += not (half_written and known)
            if half_written and known and words[row + STATE] != State.FREE:
                generation, owner, flags = (words[row + word] for word in (GENERATION, OWNER, FLAGS))
                self._fill(generation, owner, State.UNKNOWN, flags, 0.0, 0.0, 0, self._nothing)
                seqlock.write_row(words, row, self._body)
            else:
                self._free(row)
        words[USED] = self._highest_below(self.schema.slots) + 1
        if torn:
            self.publish()
        return overwritten


class TableCopy:
    """A copy of the used rows in this process's memory. Each row is consistent; the rows may be of different moments.

    Each property is a view of shape (used,), one element per slot. A copy of a part of the table begins with the first slot of that part.
    """

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

    def row_states(self) -> bytes:
        """Returns generation, owner, state, flags and `present` of all rows: the words that a scrape rarely changes.

        Compare the result with that of another copy; its format has no other use.
        """
        return self.rows[:, GENERATION:UPDATED_AT].tobytes() + self.rows[:, PRESENT].tobytes()

    def column(self, index: int) -> Floats:
        """Returns the values of the schema's column `index`: float64, shape (used,)."""
        return self._floats[:, COLUMNS + index]


class TableReader:
    """Copies the table, and never writes it."""

    def __init__(self, schema: TableSchema, region: Region) -> None:
        self.schema = schema
        self._words = region.words.toreadonly()
        self._rows: Words = region.array(np.uint64, CACHE_LINE, (schema.slots, schema.row_words))
        self._rows.flags.writeable = False
        self._used = -1
        self._part = self._rows[:0]

    def epoch(self) -> int:
        """Returns the current epoch. It moves when rows have changed."""
        return self._words[EPOCH]

    def copy_part(self, first: int, end: int, previous: TableCopy | None = None) -> TableCopy:
        """Copies the rows from `first` to before `end`, as `copy` does. `previous`: a copy of the same part."""
        epoch = self._words[EPOCH]
        fence.order()
        rows, torn = seqlock.read_rows(self._rows[first:end])
        if torn.any():
            self._settle(rows, torn, previous, first)
        return TableCopy(self.schema, epoch, rows)

    def moved(self, first: int, copy: TableCopy) -> bool:
        """Returns whether rows have changed since `copy` of the part that begins with `first`. If none has changed, that copy is still up
        to date.
        """
        epoch = self._words[EPOCH]
        if epoch == copy.epoch:
            return False
        fence.order()
        if (self._rows[first : first + len(copy.rows), VERSION] != copy.rows[:, VERSION]).any():
            return True
        copy.epoch = epoch
        return False

    def copy(self, previous: TableCopy | None = None) -> TableCopy:
        """Copies all used rows. If a row stays torn after all tries, it is taken from `previous`; without `previous`, it reads as free."""
        words = self._words
        epoch = words[EPOCH]
        fence.order()  # `used` is at least as new as the epoch; the fences of the rows order the rest
        used = words[USED]
        if used != self._used:
            self._used, self._part = used, self._rows[: min(used, self.schema.slots)]
        rows, torn = seqlock.read_rows(self._part)
        if torn.any():
            self._settle(rows, torn, previous)
        return TableCopy(self.schema, epoch, rows)

    def _settle(self, rows: Words, torn: Words, previous: TableCopy | None, first: int = 0) -> None:
        known = 0 if previous is None else len(previous.rows)
        for number, slot in enumerate(np.flatnonzero(torn).tolist()):
            # A writer tears few rows during a copy. If more than RETRIED_MAX are torn, another program has overwritten the table.
            for _ in range(seqlock.READ_TRIES_MAX if number < RETRIED_MAX else 0):
                row, still_torn = seqlock.read_rows(self._rows[first + slot : first + slot + 1])
                if not still_torn[0]:
                    rows[slot] = row[0]
                    break
            else:
                rows[slot] = previous.rows[slot] if previous is not None and slot < known else 0
