"""Reads series (`shm.series`): sums over all areas, by label tuple.

The values of a tuple never decrease while any area has a block for the tuple: the counts of a freed block stay in the sum. When no area
has such a block any more, the tuple is gone. If the tuple comes back, it begins at 0, like the counters of a restarted program.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from shm import fence
from shm.layout import WORD
from shm.segment import Floats, Ints, Region
from shm.series import FIRST_BLOCK, FREE, LIFE, OTHER, OVERFLOWED, Labels, SeriesSchema, labels_of, most_fine

BLOCKS_AT_ONCE: Final = 200  # blocks that a reader takes in one step of about 1 ms
READINGS_MAX: Final = 4  # how often a reading begins again because blocks were freed during the reading
UNLIMITED: Final = 1 << 60
NOWHERE: Final = -1  # the row of a block that is not counted


def itself(labels: Labels) -> Labels:
    return labels


class Values(NamedTuple):
    """Holds the values of one label tuple, in the schema's order. A histogram is a pair: counts per bucket (last: overflow), sum."""

    gauges: tuple[int, ...]
    counters: tuple[int, ...]
    histograms: tuple[tuple[list[int], float], ...]


class Totals(NamedTuple):
    """Holds the values of all label tuples, one row each.

    `ints`: int64, shape (tuples, words): the words of a block after its labels. `sums`: float64, shape (tuples, histograms).
    `version`: later totals with the same version have the same rows, and perhaps further rows after them.
    """

    labels: list[Labels]
    ints: Ints
    sums: Floats
    version: int


class _Place:
    """Says in which row a reader counts one label tuple. `row`: the row of this or a coarser tuple. `uses`: the number of blocks with the
    tuple.
    """

    __slots__ = ("labels", "row", "uses")

    def __init__(self, labels: Labels, row: int) -> None:
        self.labels = labels
        self.row = row
        self.uses = 0


class Rows:
    """The rows of a reader: which tuples have their own row, within limits of number and weight."""

    # `of`: label tuple -> its row, for tuples with their own row, in the order in which they got a row.

    def __init__(self, other: Labels, count: int, coarse: Callable[[Labels], Labels], weigh: Callable[[Labels], int], room: int) -> None:
        self._coarse = coarse
        self._weigh = weigh
        self._count = count
        self._room = room or UNLIMITED
        self._free = list(range(count, 0, -1))
        self._taken = self._fine = self._fine_weight = 0
        self._users = [1, *[0] * count]  # by row: how many tuples are counted in the row
        self.of: dict[Labels, int] = {other: 0}
        self._labels: dict[int, Labels] = {0: other}

    def enter(self, labels: Labels) -> int:
        """Returns the row in which a tuple that is new or has come back is counted."""
        row = self.of.get(labels)
        if row is None:
            row = self._own(labels)
        if row is None:
            coarse = self._coarse(labels)
            row = self.of.get(coarse) if coarse != labels else 0
            row = self._own(coarse) if row is None else row
        self._users[row or 0] += 1
        return row or 0

    def leave(self, row: int) -> bool:
        """Notes that a tuple of this row is gone. Returns whether the row is gone, too."""
        self._users[row] -= 1
        if self._users[row]:
            return False
        labels = self._labels.pop(row)
        del self.of[labels]
        self._free.append(row)
        weight, fine = self._weigh(labels), self._coarse(labels) != labels
        self._taken -= weight
        self._fine -= fine
        self._fine_weight -= weight * fine
        return True

    def _own(self, labels: Labels) -> int | None:
        weight, fine = self._weigh(labels), self._coarse(labels) != labels
        if not self._free or self._taken + weight > self._room:
            return None
        if fine and (self._fine >= most_fine(self._count) or self._fine_weight + weight > most_fine(self._room)):
            return None
        row = self.of[labels] = self._free.pop()
        self._labels[row] = labels
        self._taken += weight
        self._fine += fine
        self._fine_weight += weight * fine
        return row


class SeriesReader:
    """Sums a table over all areas. `serving` says whether the gauges of an area are valid.

    A reader shows the label tuples that it meets first: besides `other`, at most `rows` tuples (by default as many as one area holds),
    with a sum of weights of at most `room`. As in an area, the last quarter is for tuples that have no coarser tuple. Further tuples are
    counted under the coarser tuple, or under `other`, as long as they exist. Another reader may meet the tuples in another order, and show
    different tuples.
    """

    def __init__(
        self,
        schema: SeriesSchema,
        region: Region,
        *,
        serving: Callable[[int], bool],
        coarse: Callable[[Labels], Labels] = itself,
        weigh: Callable[[Labels], int] = lambda _: 0,
        rows: int = 0,
        room: int = 0,
    ) -> None:
        self.schema = schema
        self._serving = serving
        area_words = schema.area_bytes // WORD
        block_words, blocks = schema.block_words, schema.blocks + 1
        ints: Ints = region.array(np.int64, 0, (schema.areas, area_words))
        floats: Floats = region.array(np.float64, 0, (schema.areas, area_words))
        end = FIRST_BLOCK + blocks * block_words
        shape = (schema.areas, blocks, block_words)
        self._heads = ints[:, :FIRST_BLOCK]
        self._ints = ints[:, FIRST_BLOCK:end].reshape(shape)
        self._floats = floats[:, FIRST_BLOCK:end].reshape(shape)
        self._other: Labels = (OTHER,) * len(schema.labels)
        count = rows or schema.blocks
        self._rows = Rows(self._other, count, coarse, weigh, room)
        self._places: dict[Labels, _Place] = {}
        self._met: list[dict[int, _Place]] = [{} for _ in range(schema.areas)]  # for each area: block -> its tuple's place
        self._lives: Ints = np.zeros(shape[:2], np.int64)
        self._row_of = np.full(shape[:2], NOWHERE, np.intp)
        self._row_of[:, 0] = 0
        # The values of each block at the last reading, and the sums of freed blocks by row.
        self._seen: list[tuple[Ints, Floats] | None] = [None] * schema.areas
        self._kept: Ints = np.zeros((count + 1, block_words - schema.values_at), np.int64)
        self._kept_sums: Floats = np.zeros((count + 1, len(schema.histograms)))
        self._freed = 0  # how many blocks were found freed
        self._gone = 0  # how many rows are gone

    def totals(self) -> Totals:
        """Returns the values of all label tuples. Row 0 is the tuple of `other`."""
        *_, totals = self.reading()
        assert totals is not None
        return totals

    def reading(self) -> Iterator[Totals | None]:
        """Yields None after each short step and the totals at the end, so a caller can do other work in between.

        The values of one area are read in one step. If blocks are found freed between two steps, the reading begins again.
        """
        for _ in range(READINGS_MAX):
            # First `_forget` for all areas, so that new tuples find the room of tuples that are gone.
            for look in (self._forget, self._meet):
                for area in range(self.schema.areas):
                    while look(area):
                        yield None
            freed, ints, sums = self._freed, self._kept.copy(), self._kept_sums.copy()
            for area in range(self.schema.areas):
                if self._add(area, ints, sums):
                    yield None
            if freed == self._freed:
                break
        rows = self._rows.of
        order = list(rows.values())
        yield Totals(list(rows), ints[order], sums[order], self._gone)

    def rows(self) -> dict[Labels, Values]:
        """Returns the values by label tuple. The tuple of `other` is included only if it has counted something."""
        labels, ints, sums, _ = self.totals()
        shown = zip(labels, ints.tolist(), sums.tolist(), strict=True)
        return {label: self._values(words, total) for label, words, total in shown if label != self._other or any(words)}

    def overflowed(self) -> int:
        """Returns how often, over all areas, a tuple lost labels because there was no room."""
        return int(self._heads[:, OVERFLOWED].sum())

    def used(self) -> list[int]:
        """Returns the number of label tuples in each area."""
        counts: list[int] = (self._ints[:, :, LIFE] != FREE).sum(axis=1).tolist()
        return counts

    def _changed(self, area: int) -> tuple[list[int], Ints]:
        """Returns the blocks of an area that were freed or used anew since they were met, and the lives of all blocks."""
        lives = self._ints[area][:, LIFE].copy()
        fence.order()
        return np.flatnonzero(lives != self._lives[area]).tolist(), lives

    def _forget(self, area: int) -> bool:
        """Forgets freed blocks of an area, at most BLOCKS_AT_ONCE. Returns whether more are left."""
        changed, _ = self._changed(area)
        known = [block for block in changed if block in self._met[area]]
        for block in known[:BLOCKS_AT_ONCE]:
            self._leave(area, block)
        return len(known) > BLOCKS_AT_ONCE

    def _meet(self, area: int) -> bool:
        """Takes note of new blocks of an area, at most BLOCKS_AT_ONCE. Returns whether more are left."""
        cells = self._ints[area]
        changed, lives = self._changed(area)
        # the other blocks were freed after the call of `_forget`
        new = [block for block in changed if block not in self._met[area]]
        for block in new[:BLOCKS_AT_ONCE]:
            labels = labels_of(cells[block, : self.schema.values_at].tobytes(), self.schema)
            fence.order()
            if cells[block, LIFE] != lives[block]:
                continue  # the block was freed in the meantime
            self._lives[area, block] = lives[block]
            place = self._places.get(labels)
            if place is None:
                place = self._places[labels] = _Place(labels, self._rows.enter(labels))
            place.uses += 1
            self._met[area][block] = place
            self._row_of[area, block] = place.row
        return len(new) > BLOCKS_AT_ONCE

    def _leave(self, area: int, block: int) -> None:
        """Keeps the values that a freed block had at the last reading, as long as its row exists."""
        place, seen = self._met[area].pop(block), self._seen[area]
        self._lives[area, block] = FREE
        self._row_of[area, block] = NOWHERE
        self._freed += 1
        if seen is not None:
            gauges = len(self.schema.gauge_at)
            self._kept[place.row, gauges:] += seen[0][block, gauges:]
            self._kept_sums[place.row] += seen[1][block]
            seen[0][block], seen[1][block] = 0, 0.0
        place.uses -= 1
        if not place.uses:
            del self._places[place.labels]
            if self._rows.leave(place.row):
                self._kept[place.row], self._kept_sums[place.row] = 0, 0.0
                self._gone += 1

    def _add(self, area: int, ints: Ints, sums: Floats) -> bool:
        """Adds the values of an area to the sums of its rows. Returns False if the area has no values."""
        schema, cells = self.schema, self._ints[area]
        rows = self._row_of[area].copy()
        if not (rows > 0).any() and not cells[0, schema.values_at :].any():
            return False
        words = cells[:, schema.values_at :].copy()
        totals = self._floats[area][:, schema.histograms_at]
        fence.order()
        stale = cells[:, LIFE] != self._lives[area]  # freed or used anew: the next call notices this
        seen = self._seen[area]
        words[stale] = 0 if seen is None else seen[0][stale]
        totals[stale] = 0.0 if seen is None else seen[1][stale]
        self._seen[area] = words.copy(), totals.copy()
        if not self._serving(area):
            words[:, : len(schema.gauge_at)] = 0
        words[stale, : len(schema.gauge_at)] = 0
        blocks = np.flatnonzero(rows >= 0)
        shared = np.bincount(rows[blocks], minlength=1)[rows[blocks]] > 1
        alone = blocks[~shared]
        ints[rows[alone]] += words[alone]
        sums[rows[alone]] += totals[alone]
        for block in blocks[shared].tolist():
            ints[rows[block]] += words[block]
            sums[rows[block]] += totals[block]
        return True

    def _values(self, words: list[int], sums: list[float]) -> Values:
        schema = self.schema
        gauges, counters = len(schema.gauge_at), len(schema.counter_at)
        counts = [words[schema.counts(index)] for index in range(len(schema.histograms))]
        return Values(tuple(words[:gauges]), tuple(words[gauges : gauges + counters]), tuple(zip(counts, sums, strict=True)))
