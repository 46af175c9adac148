"""Series: metrics with labels that come with requests. Each process writes a table in its own area; readers sum over all areas.

    area   | lives | overflowed | 0 ... |                              one cache line
           | block 0 | block 1 | ... | block n |                       block 0: all labels are `other`
    block  | life | size of label 0 | ... | texts | gauge 0 | ... | counter 0 | ... | sum | bucket 0 | ... | overflow | ...
    life   0 if the block is free; else a number that no other use of a block in this area has. `lives` is the last number
    texts  the labels in UTF-8, one after the other, TEXT_BYTES_PER_LABEL for each on average

Each cell except a text is one 8-byte word: int64, except sums (float64). Bucket i of a histogram counts values <= bound i, not
cumulative. An area holds `blocks` label tuples besides block 0.

- The writer clears a free block, stores its labels, and then its life with one store. To free a block, it stores the life 0. So a reader
  that finds the same life before and after it has copied a block has a whole block. A block that a killed writer left incomplete is free.
- `take_over` clears gauges, because the requests that they counted died with the predecessor. Counters and histograms continue.
- `sweep` frees blocks that have counted nothing since the last sweep, but only if few blocks are left. If it has freed a block, `epoch`
  grows: offsets of blocks that a caller remembers are then invalid.
- If there is no room for a tuple, its values are counted under the tuple that `Names.coarse` names. The last quarter of the blocks is for
  tuples that have no coarser tuple. As the last resort, they are counted in block 0. `overflowed` counts how often this happens.
- A label is cut to LABEL_BYTES_MAX bytes. Tuples that are equal after the cut share a block.
- The words of one block do not change together: a reader may see a histogram's bucket before its sum.
- Gauges are valid only while the parent marks the area as serving.

`shm.series_reader` reads the table. Clients cannot make the table or its writer grow without bound. This module does not know what the
labels mean, or which labels to fold.
"""

import sys
from collections.abc import Container
from typing import Final, Protocol

import numpy as np

from shm import fence
from shm.histograms import Histograms
from shm.layout import CACHE_LINE, ROW_ALIGNMENT, WORD, Layout, aligned
from shm.segment import Ints, Region

OTHER: Final = "other"
LIVES: Final = 0
OVERFLOWED: Final = 1
LIFE: Final = 0  # index in a block
FREE: Final = 0
SIZES: Final = 1  # index in a block
FIRST_BLOCK: Final = CACHE_LINE // WORD  # where block 0 begins in an area, in words
LABEL_BYTES_MAX: Final = 120
TEXT_BYTES_PER_LABEL: Final = 72
RESERVED: Final = 4  # the last quarter of the room is for tuples that have no coarser tuple to be counted in
SCARCE: Final = 4  # blocks are freed if less than a quarter of them is left

Labels = tuple[str, ...]
Bounds = tuple[tuple[str, tuple[float, ...]], ...]  # names and bounds of histograms


def most_fine(room: int) -> int:
    """Returns how much of a room is for tuples that have a coarser tuple."""
    return room - room // RESERVED


class Names(Protocol):
    """Says which label tuples a table names."""

    def fold(self, labels: Labels) -> Labels:
        """Returns the tuple under which a new tuple is counted; it may be the same tuple."""

    def coarse(self, labels: Labels) -> Labels:
        """Returns the coarser tuple that is counted instead if there is no room, or the same tuple."""

    def recall(self, labels: Labels) -> None:
        """Takes note of a tuple that the writer's predecessor has named."""


class Unnamed:
    """Names every label tuple."""

    def fold(self, labels: Labels) -> Labels:
        return labels

    def coarse(self, labels: Labels) -> Labels:
        return labels

    def recall(self, labels: Labels) -> None: ...


class SeriesSchema(Layout):
    """Lays out one table: its labels and values, the number of label tuples per area, and the position of each word of a block."""

    def __init__(
        self,
        name: str,
        labels: tuple[str, ...],
        gauges: tuple[str, ...] = (),
        counters: tuple[str, ...] = (),
        histograms: Bounds = (),
        *,
        blocks: int,
        areas: int,
    ) -> None:
        if not labels or blocks < 1 or areas < 1:
            raise ValueError(f"series {name} need at least one label, block and area, not {labels}, {blocks} blocks, {areas} areas")
        self.name, self.labels, self.histograms = name, labels, histograms
        self.blocks, self.areas = blocks, areas
        self.texts_at = SIZES + len(labels)
        self.text_bytes = len(labels) * TEXT_BYTES_PER_LABEL
        values_at = self.texts_at + self.text_bytes // WORD
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
        self.area_bytes = aligned((FIRST_BLOCK + (blocks + 1) * self.block_words) * WORD, ROW_ALIGNMENT)
        self.bytes = areas * self.area_bytes
        super().__init__(
            "series",
            "series 2",
            name=name,
            labels=labels,
            gauges=gauges,
            counters=counters,
            histograms=histograms,
            blocks=blocks,
            areas=areas,
        )

    def counts(self, histogram_index: int) -> slice:
        """Returns which of a block's values are the buckets of a histogram."""
        first = self.histograms_at[histogram_index] + 1 - self.values_at
        return slice(first, first + len(self.histograms[histogram_index][1]) + 1)

    def area(self, region: Region, index: int) -> Region:
        """Returns one area's part of the table."""
        return region.part(index * self.area_bytes, self.area_bytes)


def _places(kind: str, names: tuple[str, ...], first: int) -> dict[str, int]:
    if len(set(names)) != len(names):
        raise ValueError(f"{kind} is named twice in {names}")
    return {name: first + index for index, name in enumerate(names)}


class SeriesWriter:
    """Writes one area. Plain stores are enough, because no other process writes this area.

    Change a value with `words[block(labels) + counter_at[name]] += 1`. `epoch`: see `sweep`.
    """

    def __init__(self, schema: SeriesSchema, region: Region, *, names: Names | None = None) -> None:
        """`names`: None if each tuple is counted under its own name."""
        self.schema = schema
        self.words: memoryview = region.bytes.cast("q")
        self.gauge_at, self.counter_at = schema.gauge_at, schema.counter_at
        self.histogram_index = schema.histogram_index
        self._epoch = 0
        self._names: Names = names if names is not None else Unnamed()
        self._histograms = Histograms(region, schema.area_bytes // WORD, schema.histograms_at, [bounds for _, bounds in schema.histograms])
        # The words of a block that stay the same while the block counts nothing: all but its labels and gauges.
        shape = (schema.blocks + 1) * schema.block_words
        cells: Ints = region.array(np.int64, FIRST_BLOCK * WORD, shape)
        self._cells = cells.reshape(schema.blocks + 1, schema.block_words)
        self._before: Ints = np.zeros(schema.blocks + 1, np.int64)
        self._stored: dict[Labels, int] = {}
        self._free: list[int] = []
        self._fine = 0  # the number of stored tuples that have a coarser tuple to be counted in
        self._recall()

    @property
    def epoch(self) -> int:
        """A number that grows when blocks are freed."""
        return self._epoch

    def block(self, labels: Labels) -> int:
        """Returns the offset of this label tuple's block, in words. Creates the block if the tuple is new."""
        at = self._stored.get(labels)
        return self._find(labels) if at is None else at

    def count(self, name: str, labels: Labels, n: int = 1) -> None:
        """Adds to a counter of this label tuple. This is for rare events; to count often, keep the offset."""
        self.words[self.block(labels) + self.counter_at[name]] += n

    def observe(self, block: int, histogram_index: int, value: float) -> None:
        """Counts a value in its bucket of a histogram, and adds it to the histogram's sum. `block`: the result of `block()`."""
        self._histograms.observe(block, histogram_index, value)

    def observe_each(self, block: int, values: tuple[float, ...]) -> None:
        """Counts one value in each of the first histograms of the schema. NaN counts nowhere."""
        self._histograms.observe_each(block, values)

    def take_over(self) -> None:
        """Reads the predecessor's blocks and clears their gauges. Counters and histograms continue."""
        self._recall()
        gauges, words = tuple(self.gauge_at.values()), self.words
        for block in self._stored.values():
            for at in gauges:
                words[block + at] = 0

    def sweep(self, held: Container[int] = ()) -> bool:
        """Frees the blocks that have counted nothing since the last sweep, if few blocks are left. Returns whether it freed a block.

        Keeps blocks with a gauge that is not 0. `held`: offsets of blocks to keep, because the caller goes on using them.
        """
        schema = self.schema
        counts: Ints = self._cells[:, schema.values_at + len(schema.gauge_at) :].sum(axis=1)
        counts = counts * 31 + self._cells[:, LIFE]  # a block in a new life is not idle
        idle = counts == self._before
        self._before = counts
        blocks = schema.blocks
        if len(self._free) * SCARCE >= blocks and (most_fine(blocks) - self._fine) * SCARCE >= blocks:
            return False
        freed = [
            labels
            for labels, block in self._stored.items()
            if idle[(block - FIRST_BLOCK) // schema.block_words] and block != FIRST_BLOCK and block not in held
            if not any(self.words[block + at] for at in self.gauge_at.values())
        ]
        for labels in freed:
            block = self._stored.pop(labels)
            self.words[block + LIFE] = FREE
            self._free.append(block)
            self._fine -= self._names.coarse(labels) != labels
        self._epoch += bool(freed)
        return bool(freed)

    def part(self, place: int, value: str) -> "SeriesPart":
        """Returns a writer of the same area for tuples with this value as the label at `place`."""
        return SeriesPart(self, place, value)

    def _recall(self) -> None:
        schema, words, names = self.schema, self.words, self._names
        self._stored, self._free, self._fine = {(OTHER,) * len(schema.labels): FIRST_BLOCK}, [], 0
        width = schema.block_words
        for block in range(FIRST_BLOCK + width, FIRST_BLOCK + (schema.blocks + 1) * width, width):
            if words[block + LIFE] == FREE:
                self._free.append(block)
                continue
            labels = labels_of(words[block : block + schema.values_at].tobytes(), schema)
            names.recall(labels)  # the predecessor has named this tuple, so it stays named
            self._stored[labels] = block
            self._fine += names.coarse(labels) != labels
        self._free.reverse()  # the first block is used first

    def _find(self, raw: Labels) -> int:
        labels = self._names.fold(tuple(map(_cut, raw)))
        block = self._stored.get(labels)
        return self._make(labels) if block is None else block

    def _make(self, labels: Labels) -> int:
        schema, words = self.schema, self.words
        coarse = self._names.coarse(labels)
        fine = coarse != labels
        texts = [label.encode() for label in labels]
        full = not self._free or (fine and self._fine >= most_fine(schema.blocks))
        if full or sum(map(len, texts)) > schema.text_bytes:
            words[OVERFLOWED] += 1
            if not fine:
                return FIRST_BLOCK
            block = self._stored.get(coarse)
            return self._make(coarse) if block is None else block
        at = self._free.pop()
        begin, end = at + schema.values_at, at + schema.block_words
        words[begin:end] = memoryview(bytes((end - begin) * WORD)).cast("q")
        for place, text in enumerate(texts, start=at + SIZES):
            words[place] = len(text)
        text = b"".join(texts)
        size = -(-len(text) // WORD)
        words[at + schema.texts_at : at + schema.texts_at + size] = memoryview(text.ljust(size * WORD, b"\0")).cast("q")
        words[LIVES] += 1
        fence.order()
        # Publishes the block; test_a_writer_killed_at_any_store_leaves_whole_blocks_only
        words[at + LIFE] = words[LIVES]
        self._stored[labels] = at
        self._fine += fine
        return at


class SeriesPart(SeriesWriter):
    """Writes tuples into the area of another writer, and sets one of their labels. Callers may omit this label if it is the last one.

    Only its maker calls `take_over` and `sweep`.
    """

    def __init__(self, whole: SeriesWriter, place: int, value: str) -> None:
        self.schema, self.words = whole.schema, whole.words
        self.gauge_at, self.counter_at = whole.gauge_at, whole.counter_at
        self.histogram_index, self._histograms = whole.histogram_index, whole._histograms
        self._whole = whole
        self._place = place
        self._value = value

    @property
    def epoch(self) -> int:
        return self._whole.epoch

    def block(self, labels: Labels) -> int:
        return self._whole.block((*labels[: self._place], self._value, *labels[self._place + 1 :]))


def _cut(label: str) -> str:
    """Returns the label as it is stored: at most LABEL_BYTES_MAX bytes of valid UTF-8."""
    return label[:LABEL_BYTES_MAX].encode("utf-8", "replace")[:LABEL_BYTES_MAX].decode("utf-8", "ignore")


def labels_of(head: bytes, schema: SeriesSchema) -> Labels:
    """Returns the labels of a block. `head`: its bytes up to its values."""
    at, labels = schema.texts_at * WORD, []
    for place in range(SIZES, schema.texts_at):
        size = int.from_bytes(head[place * WORD : (place + 1) * WORD], sys.byteorder)
        labels.append(head[at : at + size].decode("utf-8", "replace"))
        at += size
    return tuple(labels)
