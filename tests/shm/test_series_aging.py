"""Tests of series that count nothing for a while: their blocks are freed and used anew, and sums stay right for all who read."""

import contextlib
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.series import OTHER, SeriesPart, SeriesSchema, SeriesWriter
from shm.series_reader import READINGS_MAX, SeriesReader
from tests.examples import examples
from tests.interleave import Killed, every_point, kill
from tests.shm.memory import region_for
from tests.shm.test_series import FakeArea, Names, always

SCHEMA = SeriesSchema("request", ("model", "tenant"), ("running",), ("total",), (("wait_s", (0.1, 1.0)),), blocks=8, areas=2)
ONE = SeriesSchema("one", ("model", "tenant"), ("running",), ("total",), (("wait_s", (0.1, 1.0)),), blocks=2, areas=1)
RUNNING, TOTAL = SCHEMA.gauge_at["running"], SCHEMA.counter_at["total"]
ALL_OTHER = (OTHER, OTHER)


class World:
    """The writers of two areas, and a reader."""

    def __init__(self, schema: SeriesSchema = SCHEMA, **limits: int) -> None:
        self.schema = schema
        self.region = region_for(schema)
        self.writers = [self.writer(area) for area in range(schema.areas)]
        self.reader = SeriesReader(
            schema, self.region, serving=always, coarse=Names().coarse, weigh=lambda labels: len(labels[1]), **limits
        )

    def writer(self, area: int) -> SeriesWriter:
        return SeriesWriter(self.schema, self.schema.area(self.region, area))

    def count(self, area: int, *labels: str, n: int = 1) -> int:
        writer = self.writers[area]
        block = writer.block(labels)
        for _ in range(n):
            writer.words[block + TOTAL] += 1
            writer.observe(block, 0, 0.5)
        return block

    def fill(self, area: int = 0) -> None:
        for index in range(self.schema.blocks):
            self.count(area, f"m{index}", "t")

    def totals(self) -> dict[tuple[str, ...], int]:
        rows = self.reader.rows()
        assert all(values.counters[0] == sum(values.histograms[0][0]) for values in rows.values())
        return {labels: values.counters[0] for labels, values in rows.items()}

    def age(self, area: int = 0) -> bool:
        """Sweeps twice, as after a while in which nothing is counted."""
        self.writers[area].sweep()
        return self.writers[area].sweep()


def test_series_that_count_nothing_for_a_while_give_their_room_to_new_ones() -> None:
    world = World()
    world.fill()
    assert world.count(0, "new", "t") and ("new", "t") not in world.totals()
    world.writers[0].sweep()
    world.count(0, "m3", "t")
    assert world.writers[0].sweep()
    assert world.totals() == {("m3", "t"): 2, ALL_OTHER: 1}
    world.count(0, "new", "t")
    assert world.totals() == {("m3", "t"): 2, ("new", "t"): 1, ALL_OTHER: 1}
    assert world.reader.used() == [2, 0]


def test_series_stay_as_long_as_there_is_room() -> None:
    world = World()
    for index in range(5):
        world.count(0, f"m{index}", "t")
    assert not world.age()
    assert len(world.totals()) == 5


def test_series_with_a_gauge_and_those_that_a_caller_uses_stay() -> None:
    world = World()
    world.fill()
    writer = world.writers[0]
    writer.words[writer.block(("m1", "t")) + RUNNING] += 1
    held = {writer.block(("m2", "t"))}
    writer.sweep(held)
    assert writer.sweep(held)
    assert set(world.totals()) == {("m1", "t"), ("m2", "t")}


def test_the_epoch_grows_when_blocks_were_freed() -> None:
    world = World()
    world.fill()
    writer = world.writers[0]
    assert not writer.sweep() and writer.epoch == 0
    assert writer.sweep() and writer.epoch == 1


def test_the_sum_of_a_tuple_does_not_fall_when_one_area_frees_its_block() -> None:
    world = World()
    world.fill()
    world.count(0, "m0", "t", n=9)
    world.count(1, "m0", "t", n=5)
    assert world.totals()["m0", "t"] == 15
    assert world.age(0)
    assert world.totals() == {("m0", "t"): 15}
    world.count(0, "m0", "t")
    world.count(1, "m0", "t")
    assert world.totals() == {("m0", "t"): 17}


def test_a_tuple_that_all_areas_have_freed_is_gone_and_begins_again_at_0() -> None:
    world = World()
    for area in (0, 1):
        world.fill(area)
    world.totals()
    for area in (0, 1):
        assert world.age(area)
    assert world.totals() == {}
    world.count(1, "m0", "t")
    assert world.totals() == {("m0", "t"): 1}


def test_a_successor_continues_with_blocks_that_were_used_anew() -> None:
    world = World()
    world.fill()
    world.totals()
    world.age()
    assert world.totals() == {}
    world.count(0, "new", "t", n=3)
    world.writers[0] = world.writer(0)
    world.writers[0].take_over()
    world.count(0, "new", "t")
    world.count(0, "m5", "t")
    assert world.totals() == {("new", "t"): 4, ("m5", "t"): 1}


def test_new_totals_have_the_same_rows_and_more_until_the_version_changes() -> None:
    world = World()
    world.fill()
    first = world.reader.totals()
    world.count(1, "other area", "t")
    second = world.reader.totals()
    assert second.version == first.version
    assert second.labels[: len(first.labels)] == first.labels
    world.age()
    assert world.reader.totals().version != first.version


def test_a_reader_shows_tuples_within_its_room_and_the_others_as_coarser_ones() -> None:
    """The weight of a tuple is the length of its tenant; `other` weighs 5."""
    world = World(rows=8, room=40)
    for index in range(4):
        world.count(0, "m", f"tenant-{index}")
    assert world.totals() == {**{("m", f"tenant-{index}"): 1 for index in range(3)}, ("m", OTHER): 1}
    world.count(1, "m", "tenant-3")
    assert world.totals()["m", OTHER] == 2
    for index in range(5):
        world.count(0, "m", f"another-{index}")  # now few blocks of area 0 are left
    world.totals()
    world.age()
    world.count(0, "m", "tenant-0")
    # The tenant-3 of area 1 counts where it did, and so does what area 0 counted there.
    assert world.totals() == {("m", OTHER): 6, ("m", "tenant-0"): 1, ALL_OTHER: 1}


def test_a_reading_begins_again_when_blocks_are_freed_meanwhile() -> None:
    world = World()
    world.fill(0)
    world.fill(1)
    world.totals()
    reading = world.reader.reading()
    assert next(reading) is None
    world.age(0)
    other = world.reader.totals()
    *_, last = reading
    assert last is not None
    assert (last.labels, last.ints.tolist()) == (other.labels, other.ints.tolist())
    assert READINGS_MAX > 1


def use(writer: SeriesWriter, labels: tuple[str, ...]) -> None:
    writer.words[writer.block(labels) + ONE.counter_at["total"]] += 1


def reused(memory: FakeArea) -> SeriesWriter:
    """A writer with one block in use, of (a, x), and one that was freed."""
    writer = SeriesWriter(ONE, memory)
    for labels in (("a", "x"), ("b", "x")):
        use(writer, labels)
        use(writer, labels)
    writer.sweep()
    use(writer, ("a", "x"))
    assert writer.sweep()
    return writer


def counts(reader: SeriesReader) -> dict[tuple[str, ...], int]:
    return {labels: values.counters[0] for labels, values in reader.rows().items()}


def test_a_writer_killed_at_any_store_while_it_uses_a_block_anew_leaves_whole_blocks() -> None:
    def scenario(n: int) -> bool:
        memory = FakeArea(ONE)
        writer = reused(memory)
        reader = SeriesReader(ONE, memory.real, serving=always)
        counts(reader)
        memory.words.arm(n, kill)
        with contextlib.suppress(Killed):
            use(writer, ("a model with a long name", "x"))
        memory.words.disarm()
        for each in (reader, SeriesReader(ONE, memory.real, serving=always)):
            seen = counts(each)
            assert seen.pop(("a", "x")) == 3
            assert seen in ({}, {("a model with a long name", "x"): 0}, {("a model with a long name", "x"): 1})
        successor = SeriesWriter(ONE, memory)
        successor.take_over()
        before = counts(reader).get(("new", "x"), 0)
        use(successor, ("a", "x"))
        assert counts(reader)["a", "x"] == 4 and before == 0
        return memory.words.fired

    assert every_point(scenario) > 10


def test_a_reader_at_any_point_of_freeing_and_using_anew_sees_no_mixture() -> None:
    new = ("a model with a long name", "x")

    def scenario(n: int) -> bool:
        memory = FakeArea(ONE)
        writer = SeriesWriter(ONE, memory)
        for labels in (("a", "x"), ("b", "x")):
            for _ in range(2):
                use(writer, labels)
        reader = SeriesReader(ONE, memory.real, serving=always)
        counts(reader)
        writer.sweep()
        use(writer, ("a", "x"))
        seen: list[dict[tuple[str, ...], int]] = []
        memory.words.arm(n, lambda: seen.append(counts(reader)))
        writer.sweep()
        for _ in range(3):
            use(writer, new)
        memory.words.disarm()
        for view in seen:
            assert view.pop(("a", "x")) == 3
            assert view in ({("b", "x"): 2}, {}, *({new: count} for count in range(4)))
        assert counts(reader) == {("a", "x"): 3, new: 3}
        return memory.words.fired

    assert every_point(scenario) > 20


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.integers(0, 1), st.integers(0, 11)),
        st.tuples(st.just("sweep"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("die"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("read"), st.just(0), st.just(0)),
    ),
    max_size=80,
)


@pytest.mark.parametrize("limits", [{}, {"rows": 4}, {"rows": 8, "room": 12}])
@given(steps=STEPS)
@examples(60)
def test_the_sum_of_a_tuple_that_is_shown_never_falls_and_never_exceeds_what_was_counted(
    limits: dict[str, int], steps: list[tuple[str, int, int]]
) -> None:
    world = World(**limits)
    counted = 0
    before: dict[tuple[str, ...], int] = {}
    gone: set[tuple[str, ...]] = set()  # tuples that no writer had at some moment since the last reading
    for what, area, number in steps:
        if what == "count":
            world.count(area, f"m{number % 3}", f"t{number}")
            counted += 1
        elif what == "sweep":
            world.writers[area].sweep()
        elif what == "die":
            world.writers[area] = world.writer(area)
            world.writers[area].take_over()
        else:
            now = world.totals()
            assert sum(now.values()) <= counted
            assert len(now) <= limits.get("rows", SCHEMA.blocks) + 1
            assert all(now[labels] >= value for labels, value in before.items() if labels in now.keys() - gone)
            assert before.get(ALL_OTHER, 0) <= now.get(ALL_OTHER, 0)
            before, gone = now, set()
        gone |= before.keys() - {labels for writer in world.writers for labels in writer._stored}


def test_what_freed_blocks_have_counted_is_bounded() -> None:
    world = World()
    for number in range(200):
        world.count(number % 2, f"m{number}", "t")
        world.writers[number % 2].sweep()
        world.totals()
    assert len(world.reader._places) <= 2 * SCHEMA.blocks
    assert len(world.reader.rows()) <= SCHEMA.blocks + 1


def test_parts_of_a_writer_set_one_label_and_share_its_blocks() -> None:
    world = World()
    whole = world.writers[0]
    parts = [whole.part(1, tenant) for tenant in ("a", "b")]
    for part, labels, n in ((parts[0], ("m",), 2), (parts[1], ("m",), 3), (parts[1], ("m", "ignored"), 4)):
        block = part.block(labels)
        part.words[block + TOTAL] += n
        for _ in range(n):
            part.observe(block, 0, 0.5)
    assert world.totals() == {("m", "a"): 2, ("m", "b"): 7}
    world.fill()
    world.age()
    assert {part.epoch for part in parts} == {whole.epoch} != {0}


def test_a_writer_does_not_keep_the_parts_that_it_has_made() -> None:
    """Each configuration of a pool asks for its parts anew, and pools come and go."""
    whole = World().writers[0]
    gc.collect()
    before = sum(isinstance(each, SeriesPart) for each in gc.get_objects())
    for _ in range(3):
        whole.part(1, "a")
    gc.collect()
    assert sum(isinstance(each, SeriesPart) for each in gc.get_objects()) == before
