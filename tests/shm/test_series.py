"""Tests of series: blocks per label tuple, writers killed at any store, sums over areas, limits."""

import contextlib
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.layout import CACHE_LINE
from shm.segment import Region
from shm.series import LABEL_BYTES_MAX, OTHER, TEXT_BYTES_PER_LABEL, SeriesSchema, SeriesWriter
from shm.series_reader import SeriesReader
from tests.examples import examples
from tests.interleave import Killed, Words, every_point, kill
from tests.shm.memory import region_for

SCHEMA = SeriesSchema(
    "request",
    ("model", "tenant"),
    gauges=("running",),
    counters=("total", "errors"),
    histograms=(("wait_s", (0.1, 1.0)), ("size", (10.0,))),
    blocks=8,
    areas=3,
)
RUNNING, TOTAL = SCHEMA.gauge_at["running"], SCHEMA.counter_at["total"]
ALL_OTHER = (OTHER, OTHER)


def always(_area: int) -> bool:
    return True


def reader_of(schema: SeriesSchema, region: Region, serving: Callable[[int], bool] = always) -> SeriesReader:
    return SeriesReader(schema, region, serving=serving)


def writers_of(schema: SeriesSchema, region: Region) -> list[SeriesWriter]:
    return [SeriesWriter(schema, schema.area(region, area)) for area in range(schema.areas)]


def totals(reader: SeriesReader) -> dict[tuple[str, ...], int]:
    """The first counter per label tuple."""
    return {labels: values.counters[0] for labels, values in reader.rows().items()}


class Typed:
    """`Words` in another format. It stores a slice word by word, so a test can kill the writer inside."""

    def __init__(self, words: Words, form: str) -> None:
        self.words, self.view = words, memoryview(words.cells).cast("B").cast(form)

    def __getitem__(self, at: Any) -> Any:
        self.words.step()
        return array("q", self.view[at]) if isinstance(at, slice) else self.view[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        places: Iterable[tuple[int, Any]] = [(at, value)]
        if isinstance(at, slice):
            places = zip(range(*at.indices(len(self.view))), value, strict=True)
        for place, one in places:
            self.words.step()
            self.view[place] = one


class FakeArea:
    """Stands in for the region of one area."""

    def __init__(self, schema: SeriesSchema) -> None:
        self.words = Words([0] * (schema.bytes // 8))
        self.bytes = self

    def cast(self, form: str) -> Typed:
        return Typed(self.words, form)

    def array(self, kind: Any, at: int, count: int) -> Any:
        return self.real.array(kind, at, count)

    @property
    def real(self) -> Region:
        return Region(memoryview(self.words.cells).cast("B"))


ONE = SeriesSchema("one", ("model", "tenant"), ("running",), ("total",), (("wait_s", (0.1, 1.0)),), blocks=4, areas=1)


class Names:
    """Knows some tenants (None: all). Tuples that differ only in the tenant can count together."""

    def __init__(self, known: set[str] | None = None) -> None:
        self.known = known
        self.recalled: list[tuple[str, ...]] = []

    def fold(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        named = self.known is None or labels[1] in self.known or not labels[1]
        return labels if named else (labels[0], OTHER)

    def coarse(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        return (labels[0], OTHER)

    def recall(self, labels: tuple[str, ...]) -> None:
        self.recalled.append(labels)


def count(writer: SeriesWriter, *labels: str) -> None:
    writer.words[writer.block(labels) + TOTAL] += 1


def use(writer: SeriesWriter, labels: tuple[str, ...], value: float = 0.5) -> None:
    """Count one request: in a gauge, a counter and a histogram."""
    block = writer.block(labels)
    writer.words[block + ONE.gauge_at["running"]] += 1
    writer.words[block + ONE.counter_at["total"]] += 1
    writer.observe(block, 0, value)


def test_values_are_summed_over_areas_by_label_tuple() -> None:
    region = region_for(SCHEMA)
    reader = reader_of(SCHEMA, region)
    writers = writers_of(SCHEMA, region)
    for area, labels, count in ((0, ("a", "x"), 2), (1, ("b", "x"), 3), (1, ("a", "x"), 4), (2, ("a", "y"), 5)):
        writer = writers[area]
        writer.words[writer.block(labels) + writer.counter_at["total"]] += count
        writer.words[writer.block(labels) + writer.counter_at["errors"]] += 1
    assert totals(reader) == {("a", "x"): 6, ("b", "x"): 3, ("a", "y"): 5}
    assert reader.rows()["a", "x"].counters == (6, 2)
    assert reader.used() == [1, 2, 1]
    assert reader.overflowed() == 0


def test_histograms_count_values_up_to_and_including_each_bound() -> None:
    region = region_for(SCHEMA)
    writer = writers_of(SCHEMA, region)[0]
    for value in (0.1, 0.11, 1.0, 7.0):
        writer.observe(writer.block(("a", "x")), writer.histogram_index["wait_s"], value)
    wait, size = reader_of(SCHEMA, region).rows()["a", "x"].histograms
    assert wait[0] == [1, 2, 1]
    assert wait[1] == pytest.approx(8.21)
    assert size == ([0, 0], 0.0)


def test_gauges_count_in_serving_areas_only_counters_in_all() -> None:
    region = region_for(SCHEMA)
    for writer in writers_of(SCHEMA, region):
        block = writer.block(("a", "x"))
        writer.words[block + RUNNING] += 2
        writer.words[block + TOTAL] += 10
    values = reader_of(SCHEMA, region, lambda area: area != 1).rows()["a", "x"]
    assert values.gauges == (4,)
    assert values.counters[0] == 30


def test_a_successor_continues_its_predecessors_blocks_and_clears_the_gauges() -> None:
    region = region_for(SCHEMA)
    reader = reader_of(SCHEMA, region)
    first = writers_of(SCHEMA, region)[1]
    for labels in (("a", "x"), ("b", "")):
        block = first.block(labels)
        first.words[block + RUNNING] += 1
        first.words[block + TOTAL] += 1
        first.observe(block, 0, 0.5)
    second = writers_of(SCHEMA, region)[1]
    second.take_over()
    assert [second.block(labels) for labels in (("a", "x"), ("b", ""))] == [first.block(labels) for labels in (("a", "x"), ("b", ""))]
    second.words[second.block(("b", "")) + TOTAL] += 1
    second.block(("c", "z"))
    rows = reader.rows()
    assert [values.gauges for values in rows.values()] == [(0,)] * 3
    assert totals(reader) == {("a", "x"): 1, ("b", ""): 2, ("c", "z"): 0}
    assert rows["a", "x"].histograms[0] == ([0, 1, 0], 0.5)


def test_take_over_reads_blocks_that_the_predecessor_added_after_the_successor_was_created() -> None:
    region = region_for(SCHEMA)
    first, second = writers_of(SCHEMA, region)[0], writers_of(SCHEMA, region)[0]
    block = first.block(("a", "x"))
    second.take_over()
    assert second.block(("a", "x")) == block


def test_a_writer_killed_at_any_store_leaves_whole_blocks_only() -> None:
    known, new = ("llama", "gold"), ("a model with a long name", "silver")

    def scenario(n: int) -> bool:
        memory = FakeArea(ONE)
        first = SeriesWriter(ONE, memory)
        use(first, known)
        memory.words.arm(n, kill)
        with contextlib.suppress(Killed):
            use(first, new)
        memory.words.disarm()
        reader = reader_of(ONE, memory.real)
        left = totals(reader)
        assert left.pop(known) == 1
        assert left in ({}, {new: 0}, {new: 1})
        second = SeriesWriter(ONE, memory)
        second.take_over()
        for _ in range(3):
            use(second, new)
        use(second, ("third", ""))
        rows = reader.rows()
        assert totals(reader) == {known: 1, new: left.get(new, 0) + 3, ("third", ""): 1}
        assert [values.gauges for values in rows.values()] == [(0,), (3,), (1,)]
        assert sum(rows[new].histograms[0][0]) in (3, 4)
        assert reader.used() == [3]
        return memory.words.fired

    assert every_point(scenario) > 10


def test_a_reader_at_any_point_of_a_new_block_sees_it_whole_or_not_at_all() -> None:
    new = ("a model with a long name", "silver")

    def scenario(n: int) -> bool:
        memory = FakeArea(ONE)
        writer = SeriesWriter(ONE, memory)
        reader, seen = reader_of(ONE, memory.real), []
        memory.words.arm(n, lambda: seen.append(totals(reader)))
        use(writer, new)
        memory.words.disarm()
        assert all(view in ({}, {new: 0}, {new: 1}) for view in seen)
        assert totals(reader) == {new: 1}
        return memory.words.fired

    assert every_point(scenario) > 10


def test_the_next_successor_completes_a_take_over_that_was_killed_at_any_point() -> None:
    def scenario(n: int) -> bool:
        memory = FakeArea(ONE)
        first = SeriesWriter(ONE, memory)
        use(first, ("a", ""))
        use(first, ("b", ""))
        memory.words.arm(n, kill)
        with contextlib.suppress(Killed):
            SeriesWriter(ONE, memory).take_over()
        memory.words.disarm()
        SeriesWriter(ONE, memory).take_over()
        rows = reader_of(ONE, memory.real).rows()
        assert {labels: (v.gauges, v.counters) for labels, v in rows.items()} == {("a", ""): ((0,), (1,)), ("b", ""): ((0,), (1,))}
        return memory.words.fired

    assert every_point(scenario) > 5


LABELS = st.tuples(st.sampled_from(["", "a", "b", "other", "ü", "x" * 300]), st.sampled_from(["", "s", "t", "other"]))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.integers(0, 2), LABELS, st.integers(1, 5)),
        st.tuples(st.just("die"), st.integers(0, 2), st.just(ALL_OTHER), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
@examples(60)
def test_everything_counted_is_shown_and_no_sum_decreases(steps: list) -> None:
    region = region_for(SCHEMA)
    reader, writers = reader_of(SCHEMA, region), writers_of(SCHEMA, region)
    before: dict[tuple[str, ...], int] = {}
    expected = 0
    for what, area, labels, count in steps:
        if what == "die":
            writers[area] = writers_of(SCHEMA, region)[area]
            writers[area].take_over()
        else:
            block = writers[area].block(labels)
            writers[area].words[block + TOTAL] += count
            writers[area].observe(block, 1, float(count))
            expected += count
        now = totals(reader)
        assert all(now[labels] >= value for labels, value in before.items())
        assert sum(now.values()) == expected
        before = now
    assert sum(totals(reader_of(SCHEMA, region)).values()) == expected
    assert sum(values.histograms[1][1] for values in reader.rows().values()) == expected


def test_in_a_full_table_new_label_tuples_count_as_other() -> None:
    region = region_for(SCHEMA)
    writer = writers_of(SCHEMA, region)[0]
    for index in range(SCHEMA.blocks + 3):
        count(writer, f"m{index}", "t")
    reader = reader_of(SCHEMA, region)
    rows = totals(reader)
    assert len(rows) == SCHEMA.blocks + 1
    assert rows[ALL_OTHER] == 3
    assert reader.overflowed() == 3
    assert reader.used() == [SCHEMA.blocks, 0, 0]
    count(writer, "m0", "t")
    assert totals(reader)["m0", "t"] == 2


def test_a_label_tuple_with_too_much_text_counts_as_other() -> None:
    region = region_for(SCHEMA)
    writer = writers_of(SCHEMA, region)[0]
    fits = ("m" * LABEL_BYTES_MAX, "t" * (2 * TEXT_BYTES_PER_LABEL - LABEL_BYTES_MAX))
    count(writer, *fits)
    count(writer, fits[0], fits[1] + "t")
    reader = reader_of(SCHEMA, region)
    assert totals(reader) == {fits: 1, ALL_OTHER: 1}
    assert reader.overflowed() == 1


@pytest.mark.parametrize(
    ("given_", "stored"),
    [
        ("m" * 500, "m" * LABEL_BYTES_MAX),
        ("ü" * 500, "ü" * (LABEL_BYTES_MAX // 2)),
        ("x" + "€" * 500, "x" + "€" * ((LABEL_BYTES_MAX - 1) // 3)),
        ("", ""),
        ("nul\0inside\0", "nul\0inside\0"),
        ("lone \ud800 surrogate", "lone ? surrogate"),
        ('quo"te\nand \\', 'quo"te\nand \\'),
    ],
)
def test_a_label_is_kept_as_text_of_bounded_length(given_: str, stored: str) -> None:
    region = region_for(SCHEMA)
    first = writers_of(SCHEMA, region)[0]
    first.words[first.block((given_, "t")) + TOTAL] += 1
    assert totals(reader_of(SCHEMA, region)) == {(stored, "t"): 1}
    second = writers_of(SCHEMA, region)[0]
    second.take_over()
    assert second.block((given_, "t")) == second.block((stored, "t")) == first.block((given_, "t"))


def test_the_literal_label_tuple_of_other_is_the_first_block() -> None:
    region = region_for(SCHEMA)
    writer = writers_of(SCHEMA, region)[2]
    writer.words[writer.block(ALL_OTHER) + TOTAL] += 1
    reader = reader_of(SCHEMA, region)
    assert totals(reader) == {ALL_OTHER: 1}
    assert reader.used() == [0, 0, 0]


def test_a_tuple_counts_as_the_one_that_it_is_folded_to_at_the_time() -> None:
    region, names = region_for(SCHEMA), Names(known={"gold"})
    writer = SeriesWriter(SCHEMA, SCHEMA.area(region, 0), names=names)
    for tenant in ("gold", "a", "b", "a", ""):
        count(writer, "m", tenant)
    names.known.add("a")
    count(writer, "m", "a")
    assert totals(reader_of(SCHEMA, region)) == {("m", "gold"): 1, ("m", OTHER): 3, ("m", ""): 1, ("m", "a"): 1}
    assert reader_of(SCHEMA, region).overflowed() == 0
    SeriesWriter(SCHEMA, SCHEMA.area(region, 0), names=(successor := Names(known=set())))
    assert successor.recalled == [("m", "gold"), ("m", OTHER), ("m", ""), ("m", "a")]


def test_without_room_a_tuple_counts_as_a_coarser_one_for_which_there_is_room_left() -> None:
    region = region_for(SCHEMA)
    writer = SeriesWriter(SCHEMA, SCHEMA.area(region, 0), names=Names())
    for index in range(20):
        count(writer, "m", f"t{index}")
    count(writer, "new model", "t0")
    assert totals(reader_of(SCHEMA, region)) == {**{("m", f"t{index}"): 1 for index in range(6)}, ("m", OTHER): 14, ("new model", OTHER): 1}
    assert reader_of(SCHEMA, region).overflowed() == 15


def test_a_hundred_thousand_label_tuples_do_not_grow_the_memory() -> None:
    schema = SeriesSchema("flood", ("model", "tenant"), counters=("total",), blocks=64, areas=2)
    region, rng = region_for(schema), random.Random(7)
    writers = writers_of(schema, region)
    at = schema.counter_at["total"]
    for index in range(100_000):
        writer = writers[index % 2]
        labels = (f"model-{rng.getrandbits(40)}", "t" * rng.choice((1, 30, 1000)))
        writer.words[writer.block(labels) + at] += 1
    reader = reader_of(schema, region)
    rows = totals(reader)
    assert len(rows) <= schema.blocks + 1
    assert sum(rows.values()) == 100_000
    assert reader.overflowed() >= 100_000 - 2 * schema.blocks
    for writer in writers:
        assert len(writer._stored) <= schema.blocks + 1


def test_a_reader_always_shows_the_same_label_tuples_and_at_most_as_many_as_one_area_holds() -> None:
    region = region_for(SCHEMA)
    reader, writers = reader_of(SCHEMA, region), writers_of(SCHEMA, region)
    before: Counter[tuple[str, ...]] = Counter()
    for index in range(3 * SCHEMA.blocks):
        writer = writers[index % 3]
        writer.words[writer.block((f"m{index}", "t")) + TOTAL] += 1
        now = totals(reader)
        assert len(now) <= SCHEMA.blocks + 1
        assert all(now[labels] >= value for labels, value in before.items())
        before = Counter(now)
    assert before[ALL_OTHER] == 2 * SCHEMA.blocks
    assert sum(before.values()) == 3 * SCHEMA.blocks


def test_a_schema_can_be_rebuilt_from_its_description() -> None:
    described = dict(SCHEMA.description)
    assert described.pop("kind") == "series"
    again = SeriesSchema(**described)
    assert (again.layout_hash, again.bytes, again.block_words) == (SCHEMA.layout_hash, SCHEMA.bytes, SCHEMA.block_words)


def test_areas_share_no_cache_line_and_blocks_begin_on_one() -> None:
    assert SCHEMA.area_bytes % (2 * CACHE_LINE) == 0
    assert SCHEMA.block_words * 8 % CACHE_LINE == 0


@pytest.mark.parametrize(
    "change",
    [
        {"labels": ()},
        {"blocks": 0},
        {"areas": 0},
        {"gauges": ("a", "a")},
        {"counters": ("a", "a")},
        {"histograms": (("h", (2.0, 1.0)),)},
        {"histograms": (("h", (1.0,)), ("h", (1.0,)))},
    ],
)
def test_an_impossible_schema_is_refused(change: dict) -> None:
    schema = {"name": "n", "labels": ("a",), "blocks": 1, "areas": 1}
    with pytest.raises(ValueError, match=r"at least|twice|ascend"):
        SeriesSchema(**(schema | change))
