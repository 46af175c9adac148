"""Series: metrics with labels that come with requests. Each process writes a table in its own lane; readers sum over all lanes.

    lane   | used | overflowed | 0 ... |                                one cache line
           | block 0 | block 1 | ... | block n |                        block 0: all labels are `other`
           | text | text | ...                                          UTF-8, padded to whole words, each label value once
    block  | label 0 | ... | gauge 0 | ... | counter 0 | ... | sum | bucket 0 | ... | overflow | ...
    label  the offset of its text in words, times 2**16, plus the length of the text in bytes

Each cell except a text is one 8-byte word: int64, except sums (float64). Bucket i of a histogram counts values <= bound i, not
cumulative. A lane holds `blocks` label tuples besides block 0, and TEXT_BYTES_PER_BLOCK bytes of text for each.

- A block always belongs to the same label tuple. The writer stores texts and labels first and then increments `used` with one store.
  So a reader never sees half a block. A block that a killed writer left incomplete is not published, and its successor overwrites it.
- `take_over` clears gauges, because what they counted died with the predecessor. Counters and histograms continue in the same
  blocks, so exported counters never decrease.
- If a lane has no block or no text space left, a new tuple counts in block 0. `overflowed` counts how often a tuple lost labels in that
  way or by `fold`, the function that maps a new label tuple to the tuple that it counts as.
- A label is cut to LABEL_BYTES_MAX bytes. Tuples that are equal after the cut share a block.
- The words of one block do not change together: a reader may see a histogram's bucket before its sum.
- Gauges count only while the parent marks the lane as serving.

Clients cannot make anything here grow without bound: neither the table, nor the label tuples that writer and reader remember.

This module does not know what the labels mean, or which of them to fold.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shm import fence
from shm.histograms import Histograms
from shm.layout import CACHE_LINE, WORD, aligned, layout_hash
from shm.segment import Region

OTHER: Final = "other"
USED: Final = 0
OVERFLOWED: Final = 1
FIRST_BLOCK: Final = CACHE_LINE // WORD  # where block 0 begins in a lane, in words
LABEL_BYTES_MAX: Final = 120
TEXT_BYTES_PER_BLOCK: Final = 64
PLACE_SHIFT: Final = 16
PLACE_BYTES: Final = 65535
NO_ROOM: Final = -1
LANE_ALIGNMENT: Final = 2 * CACHE_LINE  # CPUs fetch cache lines in pairs, so two lanes must not share a pair
BLOCKS_AT_ONCE: Final = 200  # blocks that a reader takes in one step of about 1 ms
ALIASES_PER_BLOCK: Final = 4  # label tuples that a writer remembers for each block

Labels = tuple[str, ...]
Bounds = tuple[tuple[str, tuple[float, ...]], ...]  # names and bounds of histograms
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class SeriesSchema:
    """Lays out one table: its labels and values, the number of label tuples per lane, and the position of each word of a block."""

    def __init__(
        self,
        name: str,
        labels: tuple[str, ...],
        gauges: tuple[str, ...] = (),
        counters: tuple[str, ...] = (),
        histograms: Bounds = (),
        *,
        blocks: int,
        lanes: int,
    ) -> None:
        if not labels or blocks < 1 or lanes < 1:
            raise ValueError(
                f"series {name} need at least one label, block and lane, not {labels}, {blocks} blocks, {lanes} lanes"
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
                raise ValueError(f"{name}: the bounds of histogram {histogram} must ascend, not {bounds}")
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
        """Return which of a block's values are the buckets of a histogram."""
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
    """Writes one lane. It needs plain stores only, because no other process writes here.

    Change a value with `words[block(labels) + counter_at[name]] += 1`. `fold` maps a new label tuple to the tuple that it counts as;
    None: each tuple counts as itself.
    """

    def __init__(self, schema: SeriesSchema, region: Region, *, fold: Callable[[Labels], Labels] | None = None) -> None:
        self.schema = schema
        self.words: memoryview = region.bytes.cast("q")
        self.floats: memoryview[float] = region.bytes.cast("d")
        self.gauge_at, self.counter_at = schema.gauge_at, schema.counter_at
        self.histogram_index = schema.histogram_index
        self._fold = fold
        self._other: Labels = (OTHER,) * len(schema.labels)
        self._histograms = Histograms(
            region, schema.lane_bytes // WORD, schema.histograms_at, [bounds for _, bounds in schema.histograms]
        )
        self._aliases_max = ALIASES_PER_BLOCK * schema.blocks
        self._stored: dict[Labels, int] = {}
        # Label tuple -> its block, for stored tuples and for the tuples that `fold` mapped to them.
        self._known: dict[Labels, int] = {}
        self._texts: dict[str, int] = {}
        self._texts_end = 0
        self._recall()

    def block(self, labels: Labels) -> int:
        """The offset of this label tuple's block, in words. Creates the block if the tuple is new."""
        at = self._known.get(labels)
        return self._find(labels) if at is None else at

    def observe(self, block: int, histogram_index: int, value: float) -> None:
        """Count a value in its bucket of a histogram, and add it to the histogram's sum. `block`: as `block()` returned it."""
        self._histograms.observe(block, histogram_index, value)

    def observe_each(self, block: int, values: tuple[float, ...]) -> None:
        """Count one value in each of the first histograms of the schema. NaN counts nowhere."""
        self._histograms.observe_each(block, values)

    def take_over(self) -> None:
        """Read the predecessor's blocks and clear their gauges. Counters and histograms continue."""
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
                self._fold(labels)  # the predecessor admitted this tuple, so it stays admitted
        self._known = dict(self._stored)

    def _find(self, raw: Labels) -> int:
        cut = tuple(map(_cut, raw))
        labels = cut if self._fold is None else self._fold(cut)
        if labels != cut:
            self._count_overflow()
        block = self._stored.get(labels)
        if block is None:
            block = self._make(labels)
        # A client may send long texts, and those must not fill the memory.
        if all(len(label) <= LABEL_BYTES_MAX for label in raw):
            if len(self._known) >= len(self._stored) + self._aliases_max:
                self._known = dict(self._stored)
            self._known[raw] = block
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
        fence.order()
        words[USED] = used + 1  # publishes the block; test_a_writer_killed_at_any_store_leaves_whole_blocks_only
        self._stored[labels] = self._known[labels] = block
        return block

    def _place(self, label: str) -> int:
        """Return the word that refers to this text (see `label` in the drawing), or NO_ROOM. Stores the text if it is new."""
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
    """The label as it is stored: at most LABEL_BYTES_MAX bytes of valid UTF-8."""
    return label[:LABEL_BYTES_MAX].encode("utf-8", "replace")[:LABEL_BYTES_MAX].decode("utf-8", "ignore")


def _end(place: int) -> int:
    return (place >> PLACE_SHIFT) + -(-(place & PLACE_BYTES) // WORD)


def _text(texts: Any, place: int) -> str:
    """The text to which the word `place` refers. `texts`: the words of all texts of a lane, as a memoryview or an array."""
    words = texts[place >> PLACE_SHIFT : _end(place)]
    return bytes(words.tobytes())[: place & PLACE_BYTES].decode("utf-8", "replace")


class Values(NamedTuple):
    """Holds the values of one label tuple, in the schema's order. A histogram is a pair: counts per bucket (last: overflow), sum."""

    gauges: tuple[int, ...]
    counters: tuple[int, ...]
    histograms: tuple[tuple[list[int], float], ...]


class Totals(NamedTuple):
    """Holds the values of all label tuples, one row each.

    `ints`: int64, shape (tuples, words): the words of a block after its labels. `sums`: float64, shape (tuples, histograms).
    """

    labels: list[Labels]
    ints: Ints
    sums: Floats


class SeriesReader:
    """Sums a table over all lanes. `serving` says whether the gauges of a lane count.

    A reader shows at most as many label tuples as one lane holds: those that it meets first. It counts all later ones as `other`, for
    good, so that no sum ever decreases. Another reader may meet the tuples in another order, and show different ones.
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
        """The values of all label tuples. Row 0 is the tuple of `other`."""
        *_, totals = self.reading()
        assert totals is not None
        return totals

    def reading(self) -> Iterator[Totals | None]:
        """Yield None after each short step and the totals at the end, so a caller can do other work in between.

        The values of one lane are read in one step.
        """
        schema = self.schema
        for lane in range(schema.lanes):
            while self._meet(lane):
                yield None
        ints = np.zeros((len(self._rows), schema.block_words - schema.values_at), np.int64)
        sums = np.zeros((len(self._rows), len(schema.histograms)))
        labels = list(self._rows)
        for lane, rows in enumerate([np.array(rows) for rows in self._row_of]):  # another read may add rows meanwhile
            if len(rows) > 1 or self._ints[lane, 0, schema.values_at :].any():
                self._add(lane, rows, ints, sums)
                yield None
        yield Totals(labels, ints, sums)

    def rows(self) -> dict[Labels, Values]:
        """Return the values by label tuple. The tuple of `other` is included only if it has counted something."""
        labels, ints, sums = self.totals()
        shown = zip(labels, ints.tolist(), sums.tolist(), strict=True)
        return {
            label: self._values(words, total) for label, words, total in shown if label != self._other or any(words)
        }

    def overflowed(self) -> int:
        """Return how often, over all lanes, a tuple lost labels: it counted as `other` for want of room, or `fold` changed it."""
        return int(self._heads[:, OVERFLOWED].sum())

    def used(self) -> list[int]:
        """The number of label tuples in each lane."""
        counts: list[int] = self._heads[:, USED].tolist()
        return counts

    def _meet(self, lane: int) -> bool:
        """Assign a row of the totals to each newly published block of a lane, at most BLOCKS_AT_ONCE. Return whether more are left."""
        rows, size = self._row_of[lane], self.schema.values_at
        used = int(self._heads[lane, USED])
        fence.order()
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
        named = rows > 0  # apart from row 0, which many blocks may share, no two blocks of a lane have the same row
        ints[rows[named]] += words[named]
        sums[rows[named]] += totals[named]
        ints[0] += words[~named].sum(axis=0)
        sums[0] += totals[~named].sum(axis=0)

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
