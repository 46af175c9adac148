"""Tests of carrying a part of shared memory over into another layout."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shm.carry import carry
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.lanes import Lanes, LaneSchema
from shm.table import TableReader, TableSchema, TableWriter
from tests.shm.memory import region_for

NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8).map(tuple)


def lane_schema(names: tuple[str, ...], bounds: tuple[float, ...] = (1.0,)) -> LaneSchema:
    return LaneSchema(slots=3, scalars=names, counters=names, histograms=(("size", bounds),), lanes=2)


@given(NAMES, NAMES)
def test_counters_and_the_supervisors_gauges_are_found_by_name(before: tuple[str, ...], after: tuple[str, ...]) -> None:
    old, new = lane_schema(before), lane_schema(after)
    source, target = region_for(old), region_for(new)
    lanes = Lanes(old, source)
    for lane in (lanes.lane(0), lanes.lane(1)):
        for number in range(len(before)):
            lane.counters[number] = lane.scalars[number] = number + 1
        lane.inflight[0] = 9
        lane.served[1] = 7
    assert carry(old, source, new, target)
    for index in (0, 1):
        lane = Lanes(new, target).lane(index)
        expected = [before.index(name) + 1 if name in before else 0 for name in after]
        assert list(lane.counters) == expected
        assert list(lane.scalars) == (expected if index == 0 else [0] * len(after)), "a worker's gauges end with it"
        assert (list(lane.inflight), list(lane.served)) == ([0, 0, 0], [0, 7, 0])


def test_a_histogram_with_other_bounds_starts_at_0() -> None:
    old = lane_schema(())
    source = region_for(old)
    Lanes(old, source).lane(1).observe(0, 0.5)
    for bounds, counts in (((1.0,), [1, 0]), ((2.0,), [0, 0])):
        new = lane_schema((), bounds)
        target = region_for(new)
        carry(old, source, new, target)
        at = new.histograms_at[0]
        assert list(Lanes(new, target).lane(1).words[at + 1 : at + 3]) == counts


@given(NAMES.filter(bool), NAMES.filter(bool), st.integers(0, 255))
def test_columns_are_found_by_name(before: tuple[str, ...], after: tuple[str, ...], present: int) -> None:
    old, new = TableSchema(before, 4), TableSchema(after, 6)
    source, target = region_for(old), region_for(new)
    writer = TableWriter(old, source)
    handle = writer.claim(3, lambda _: True)
    assert handle is not None
    present &= (1 << len(before)) - 1
    values = [float(number + 1) for number in range(len(before))]
    writer.write(handle, state=2, flags=0, updated_at=9.0, inflight_at_scrape=1.0, values=values, present=present)
    assert carry(old, source, new, target)
    copy = TableReader(new, target).copy()
    assert len(copy.rows) == 1
    for number, name in enumerate(after):
        has = name in before and bool(present >> before.index(name) & 1)
        assert bool(copy.present[0] >> np.uint64(number) & np.uint64(1)) == has
        if has:
            assert copy.column(number)[0] == before.index(name) + 1


def test_documents_keep_their_numbers_and_one_without_room_is_left_out() -> None:
    old, new = DocumentSchema((100, 100)), DocumentSchema((100, 10, 100))
    source, target = region_for(old), region_for(new)
    writer = DocumentWriter(old, source)
    writer.write(0, b"kept")
    writer.write(1, b"x" * 50)
    assert carry(old, source, new, target)
    found = DocumentReader(new, target).read(0)
    assert found is not None and found[1] == b"kept"
    assert DocumentReader(new, target).read(1) is None


def test_parts_of_different_kinds_cannot_be_carried() -> None:
    old, new = lane_schema(()), DocumentSchema((100,))
    assert not carry(old, region_for(old), new, region_for(new))
