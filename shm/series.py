"""Series: metrics whose labels come with the requests; one table per lane, its owner writes, everybody reads and sums.

    lane   | used | overflowed | 0 ... |                                one cache line
           | block 0 | block 1 | ... | block n |                        block 0: all labels are `other`
           | text | text | ...                                          UTF-8, each on whole words, each label value once
    block  | label 0 | ... | gauge 0 | ... | counter 0 | ... | sum | bucket 0 | ... | overflow | ...
    label  where its text begins, in words, times 2**16, plus the text's bytes

Each cell but a text is one 8-byte word: int64, except sums (float64). Bucket i of a histogram counts values <= bound i, not
cumulated. A lane holds `blocks` label tuples besides block 0, and TEXT_BYTES_PER_BLOCK bytes of text for each.

- A block belongs to one label tuple for ever. Texts and labels are stored first, and then `used` moves on by one store, so a
  reader never sees half a block, and what a killed owner left half-made is not published: its successor stores over it.
- `take_over` clears gauges, since what they counted died with the predecessor. Counters and histograms go on in the same
  blocks, so exported counters never fall.
- No block or no text left: the tuple counts in block 0. `overflowed` says how often a tuple lost labels that way or by `fold`.
- A label is cut to LABEL_BYTES_MAX bytes; tuples that are equal once cut share a block.
- Words of one block are not changed together: a reader may see a histogram's bucket before its sum.
- Gauges count only while the parent says that the lane is serving.

Nothing here grows with what clients send: not the table, not the names that owner and reader remember. Where loads are not
ordered (see `fence`) a reader may find a block's last words late, and sums them up at its next look.

What this does not do: know what the labels mean, or which of them to fold.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shm.layout import CACHE_LINE, WORD, aligned, layout_hash
from shm.segment import Region

OTHER = "other"
USED, OVERFLOWED = range(2)
FIRST_BLOCK = CACHE_LINE // WORD  # in words
LABEL_BYTES_MAX = 120
TEXT_BYTES_PER_BLOCK = 64
PLACE_SHIFT, PLACE_BYTES = 16, (1 << 16) - 1
NO_ROOM = -1
LANE_ALIGNMENT = 2 * CACHE_LINE  # CPUs fetch cache lines in pairs
BLOCKS_AT_ONCE = 200  # 1 ms of a reader's time
ALIASES_PER_BLOCK = 4  # label tuples that an owner remembers, for each block

Labels = tuple[str, ...]
Histograms = tuple[tuple[str, tuple[float, ...]], ...]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class SeriesSchema:
    """The labels and values of one table, how many label tuples it holds per lane, and where each word of a block lies."""

    def __init__(
        self,
        name: str,
        labels: tuple[str, ...],
        gauges: tuple[str, ...] = (),
        counters: tuple[str, ...] = (),
        histograms: Histograms = (),
        *,
        blocks: int,
        lanes: int,
    ) -> None:
        if not labels or blocks < 1 or lanes < 1:
            raise ValueError(
                f"series {name} need a label, a block and a lane at least, not {labels}, {blocks} blocks, {lanes} lanes"
            )
        self.name, self.labels, self.histograms = name, labels, histograms
        self.blocks, self.lanes = blocks, lanes
        values_at = len(labels)
        self.gauge_at = _places(f"{name}: gauge", gauges, values_at)
        self.counter_at = _places(f"{name}: counter", counters, values_at + len(gauges))
        self.histogram_index = _places(f"{name}: histogram", tuple(n for n, _ in histograms), 0)
        self.histograms_at: list[int] = []
        end = values_at + len(gauges) + len(counters)
        for histogram, bounds in histograms:
            if list(bounds) != sorted(set(bounds)):
                raise ValueError(f"{name}: bounds of histogram {histogram} must ascend, not {bounds}")
            self.histograms_at.append(end)
            end += 2 + len(bounds)
        self.values_at = values_at
        self.block_words = aligned(end * WORD) // WORD
        self.texts_at = FIRST_BLOCK + (blocks + 1) * self.block_words
        self.text_words = blocks * TEXT_BYTES_PER_BLOCK // WORD
        self.lane_bytes = aligned((self.texts_at + self.text_words) * WORD, LANE_ALIGNMENT)
        self.bytes = lanes * self.lane_bytes
        self.layout_hash = layout_hash("series 1", name, labels, gauges, counters, histograms, blocks, lanes)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "series",
            "name": self.name,
            "labels": self.labels,
            "gauges": tuple(self.gauge_at),
            "counters": tuple(self.counter_at),
            "histograms": self.histograms,
            "blocks": self.blocks,
            "lanes": self.lanes,
        }

    def counts(self, histogram_index: int) -> slice:
        """Where a histogram's buckets stand among a block's values."""
        first = self.histograms_at[histogram_index] + 1 - self.values_at
        return slice(first, first + len(self.histograms[histogram_index][1]) + 1)

    def lane(self, region: Region, index: int) -> Region:
        """One lane's part of the table."""
        return region.part(index * self.lane_bytes, self.lane_bytes)


def _places(kind: str, names: tuple[str, ...], first: int) -> dict[str, int]:
    if len(set(names)) != len(names):
        raise ValueError(f"{kind} is named twice in {names}")
    return {name: first + index for index, name in enumerate(names)}


class SeriesWriter:
    """The owner's side of one lane: plain stores, no other process writes here.

    A value is changed as `words[block(labels) + counter_at[name]] += 1`. `fold` says what a new label tuple is counted as.
    """

    def __init__(self, schema: SeriesSchema, region: Region, *, fold: Callable[[Labels], Labels] | None = None) -> None:
        self.schema = schema
        self.words: memoryview = region.bytes.cast("q")
        self.floats: memoryview[float] = region.bytes.cast("d")
        self.gauge_at, self.counter_at = schema.gauge_at, schema.counter_at
        self.histogram_index = schema.histogram_index
        self._fold = fold
        self._other: Labels = (OTHER,) * len(schema.labels)
        self._histograms = [
            (at, at + 1, bounds) for at, (_, bounds) in zip(schema.histograms_at, schema.histograms, strict=True)
        ]
        self._aliases_max = ALIASES_PER_BLOCK * schema.blocks
        self._stored: dict[Labels, int] = {}
        self._known: dict[Labels, int] = {}  # what is stored, and aliases of it
        self._texts: dict[str, int] = {}
        self._texts_end = 0
        self._recall()

    def block(self, labels: Labels) -> int:
        """Where this label tuple's values begin, in words; made if it is new."""
        at = self._known.get(labels)
        return self._find(labels) if at is None else at

    def observe(self, block: int, histogram_index: int, value: float) -> None:
        """Count a value in its bucket."""
        sum_at, counts_at, bounds = self._histograms[histogram_index]
        self.words[block + counts_at + bisect_left(bounds, value)] += 1
        self.floats[block + sum_at] += value

    def take_over(self) -> None:
        """Know the predecessor's blocks, clear its gauges, go on with its counters and histograms."""
        self._recall()
        gauges, words = tuple(self.gauge_at.values()), self.words
        for block in self._blocks(words[USED] + 1):
            for at in gauges:
                words[block + at] = 0

    def _blocks(self, count: int) -> range:
        width = self.schema.block_words
        return range(FIRST_BLOCK, FIRST_BLOCK + count * width, width)

    def _recall(self) -> None:
        words, texts_at = self.words, self.schema.texts_at
        texts = words[texts_at : texts_at + self.schema.text_words]
        self._stored, self._texts, self._texts_end = {self._other: FIRST_BLOCK}, {}, 0
        for block in self._blocks(words[USED] + 1)[1:]:
            places = list(words[block : block + self.schema.values_at])
            labels = tuple(_text(texts, place) for place in places)
            self._stored[labels] = block
            self._texts.update(zip(labels, places, strict=True))
            self._texts_end = max(self._texts_end, *map(_end, places))
            if self._fold is not None:
                self._fold(labels)  # what was admitted stays so
        self._known = dict(self._stored)

    def _find(self, given: Labels) -> int:
        cut = tuple(map(_cut, given))
        labels = cut if self._fold is None else self._fold(cut)
        if labels != cut:
            self._count_overflow()
        block = self._stored.get(labels)
        if block is None:
            block = self._make(labels)
        if all(len(label) <= LABEL_BYTES_MAX for label in given):  # what clients send is not kept whatever its length
            if len(self._known) >= len(self._stored) + self._aliases_max:
                self._known = dict(self._stored)
            self._known[given] = block
        return block

    def _make(self, labels: Labels) -> int:
        words, used = self.words, self.words[USED]
        places = list(map(self._place, labels)) if used < self.schema.blocks else [NO_ROOM]
        if NO_ROOM in places:
            self._count_overflow()
            return FIRST_BLOCK
        block: int = FIRST_BLOCK + (used + 1) * self.schema.block_words
        for at, place in enumerate(places, start=block):
            words[at] = place
        words[USED] = used + 1  # published: test_an_owner_killed_at_any_store_leaves_whole_blocks_only
        self._stored[labels] = self._known[labels] = block
        return block

    def _place(self, label: str) -> int:
        """Where this text is; stored if it is new."""
        place = self._texts.get(label)
        if place is None:
            text, begin, at = label.encode(), self._texts_end, self.schema.texts_at
            place = begin << PLACE_SHIFT | len(text)
            if _end(place) > self.schema.text_words:
                return NO_ROOM
            self._texts_end = end = _end(place)
            self.words[at + begin : at + end] = memoryview(text.ljust((end - begin) * WORD, b"\0")).cast("q")
            self._texts[label] = place
        return place

    def _count_overflow(self) -> None:
        self.words[OVERFLOWED] += 1


def _cut(label: str) -> str:
    """As it is stored: at most LABEL_BYTES_MAX bytes of UTF-8, nothing that UTF-8 cannot say."""
    return label[:LABEL_BYTES_MAX].encode("utf-8", "replace")[:LABEL_BYTES_MAX].decode("utf-8", "ignore")


def _end(place: int) -> int:
    return (place >> PLACE_SHIFT) + -(-(place & PLACE_BYTES) // WORD)


def _text(texts: Any, place: int) -> str:
    """`texts`: the words of all texts, as view or array."""
    words = texts[place >> PLACE_SHIFT : _end(place)]
    return bytes(words.tobytes())[: place & PLACE_BYTES].decode("utf-8", "replace")


class Values(NamedTuple):
    """What one label tuple has come to, in the schema's order. A histogram is counts per bucket, the last is overflow, and the sum."""

    gauges: tuple[int, ...]
    counters: tuple[int, ...]
    histograms: tuple[tuple[list[int], float], ...]


class Totals(NamedTuple):
    """Values of all label tuples, a row each. `ints` are a block's words behind its labels; sums of histograms are in `sums`."""

    labels: list[Labels]
    ints: Ints
    sums: Floats


class SeriesLedger:
    """Observations of several histograms of one block at a time, kept back and stored together.

    Nine values cost 0.3 us to add and 0.7 us to store among a hundred others, where nine calls of `observe` cost 2.4. `add` starts a
    timer by `later(seconds, call)` when nothing was kept back before; at `ROWS_MAX` rows they are stored at once. What is kept back
    is lost with the process: at most KEEP_S of it. Histograms with large bounds come last: what stands behind them is found with
    fewer digits.
    """

    ROWS_MAX = 256
    KEEP_S = 0.02

    def __init__(
        self, series: SeriesWriter, histograms: tuple[int, ...], later: Callable[[float, Callable[[], None]], object]
    ) -> None:
        schema = series.schema
        self._width = 1 + len(histograms)
        self._later = later
        self._kept = array("d")
        self._full = self.ROWS_MAX * self._width
        self._ints = np.frombuffer(series.words, dtype=np.int64)
        self._floats = np.frombuffer(series.words, dtype=np.float64)
        bounds = [np.array(schema.histograms[index][1]) for index in histograms]
        # All bounds in one ascending row, each histogram's behind those of the one before: one search places all values.
        widths = np.array([2.0 * b[-1] for b in bounds])
        self._largest = 0.75 * widths
        self._shifts = np.cumsum(widths) - widths
        self._bounds = np.concatenate([b + shift for b, shift in zip(bounds, self._shifts, strict=True)])
        self._sums_at = np.array([schema.histograms_at[index] for index in histograms])
        before = np.cumsum([0, *(len(b) for b in bounds)])[:-1]
        self._counts_at = self._sums_at + 1 - before

    def add(self, *row: float) -> None:
        """`block`, then a value for each histogram; NaN where there is none. Values count as at least 0."""
        kept = self._kept
        if not kept:
            self._later(self.KEEP_S, self.store)
        kept.extend(row)
        if len(kept) >= self._full:
            self.store()

    def store(self) -> None:
        """Count all that was kept back."""
        kept, self._kept = self._kept, array("d")
        if not kept:
            return
        rows = np.frombuffer(kept).reshape(-1, self._width)
        values = rows[:, 1:]
        row, column = np.nonzero(values == values)
        found = values[row, column]
        blocks = rows[:, 0].astype(np.int64)[row]
        sought = np.minimum(np.maximum(found, 0.0), self._largest[column]) + self._shifts[column]
        places = self._bounds.searchsorted(sought) + self._counts_at[column]
        np.add.at(self._ints, blocks + places, 1)
        np.add.at(self._floats, blocks + self._sums_at[column], found)


class SeriesReader:
    """All lanes of a table, summed. `serving` says whether the gauges of a lane count.

    It shows as many label tuples as one lane holds. Tuples found after that are counted as `other`, always the same ones, so that
    sums do not fall. Only where there are more than that, another reader may choose others.
    """

    def __init__(self, schema: SeriesSchema, region: Region, *, serving: Callable[[int], bool]) -> None:
        self.schema = schema
        self._serving = serving
        lane_words = schema.lane_bytes // WORD
        block_words, blocks = schema.block_words, schema.blocks + 1
        ints: Ints = region.array(np.int64, 0, (schema.lanes, lane_words))
        floats: Floats = region.array(np.float64, 0, (schema.lanes, lane_words))
        end = FIRST_BLOCK + blocks * block_words
        shape = (schema.lanes, blocks, block_words)
        self._heads = ints[:, :FIRST_BLOCK]
        self._ints = ints[:, FIRST_BLOCK:end].reshape(shape)
        self._floats = floats[:, FIRST_BLOCK:end].reshape(shape)
        self._texts = ints[:, end : end + schema.text_words]
        self._other: Labels = (OTHER,) * len(schema.labels)
        self._rows: dict[Labels, int] = {self._other: 0}
        self._row_of: list[list[int]] = [[0] for _ in range(schema.lanes)]

    def totals(self) -> Totals:
        """All at once, for whoever reads all. Row 0 is the tuple of `other`."""
        *_, totals = self.reading()
        assert totals is not None
        return totals

    def reading(self) -> Iterator[Totals | None]:
        """The totals at last; before them None now and then, for whoever must not take long at a time. One lane is read at once."""
        schema = self.schema
        for lane in range(schema.lanes):
            while self._meet(lane):
                yield None
        ints = np.zeros((len(self._rows), schema.block_words - schema.values_at), np.int64)
        sums = np.zeros((len(self._rows), len(schema.histograms)))
        labels = list(self._rows)
        for lane, rows in enumerate([np.array(rows) for rows in self._row_of]):  # others may meet more meanwhile
            if len(rows) > 1 or self._ints[lane, 0, schema.values_at :].any():
                self._add(lane, rows, ints, sums)
                yield None
        yield Totals(labels, ints, sums)

    def rows(self) -> dict[Labels, Values]:
        """Label tuple -> values. The tuple of `other` only if something was counted there."""
        labels, ints, sums = self.totals()
        shown = zip(labels, ints.tolist(), sums.tolist(), strict=True)
        return {
            label: self._values(words, total) for label, words, total in shown if label != self._other or any(words)
        }

    def overflowed(self) -> int:
        """How often labels were lost, over all lanes."""
        return int(self._heads[:, OVERFLOWED].sum())

    def used(self) -> list[int]:
        """Label tuples per lane."""
        counts: list[int] = self._heads[:, USED].tolist()
        return counts

    def _meet(self, lane: int) -> bool:
        """Find the rows of blocks that were published since the last look; whether there may be more."""
        rows, size = self._row_of[lane], self.schema.values_at
        used = int(self._heads[lane, USED])
        for block in range(len(rows), min(used, len(rows) + BLOCKS_AT_ONCE) + 1):
            labels = tuple(_text(self._texts[lane], place) for place in self._ints[lane, block, :size].tolist())
            if labels not in self._rows and len(self._rows) <= self.schema.blocks:
                self._rows[labels] = len(self._rows)
            rows.append(self._rows.get(labels, 0))
        return len(rows) <= used

    def _add(self, lane: int, rows: Ints, ints: Ints, sums: Floats) -> None:
        schema = self.schema
        words = self._ints[lane, : len(rows), schema.values_at :].copy()
        totals = self._floats[lane, : len(rows)][:, schema.histograms_at]
        if not self._serving(lane):
            words[:, : len(schema.gauge_at)] = 0
        own = rows > 0  # no two blocks of a lane have the same row, but for row 0
        ints[rows[own]] += words[own]
        sums[rows[own]] += totals[own]
        ints[0] += words[~own].sum(axis=0)
        sums[0] += totals[~own].sum(axis=0)

    def _values(self, words: list[int], sums: list[float]) -> Values:
        schema = self.schema
        gauges, counters = len(schema.gauge_at), len(schema.counter_at)
        return Values(
            tuple(words[:gauges]),
            tuple(words[gauges : gauges + counters]),
            tuple(zip(self._counts(words), sums, strict=True)),
        )

    def _counts(self, words: list[int]) -> Iterator[list[int]]:
        for index in range(len(self.schema.histograms)):
            yield words[self.schema.counts(index)]
