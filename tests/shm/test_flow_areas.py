"""Tests of flow areas: sums over serving workers, asked and answered amounts, successors."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.areas import Areas, AreaSchema
from shm.flow_areas import (
    BACKLOGGED,
    BYTES,
    DISPATCHED,
    END,
    HASH_LINES,
    PENDING,
    PLACES,
    TIME,
    WAITING,
    WAITING_BYTES,
    FlowAreas,
    FlowSchema,
    HeadCell,
    VictimCell,
)
from shm.layout import CACHE_LINE, WORD
from tests.examples import examples
from tests.shm.memory import region_for

WORKERS = 3
BANDS = 4
SCHEMA = FlowSchema(BANDS, WORKERS)


def areas_of(workers: int) -> Areas:
    schema = AreaSchema(1, (), (), (), areas=workers + 1)
    areas = Areas(schema, region_for(schema))
    for ordinal in range(1, workers + 1):
        areas.set_serving(ordinal, True)
    return areas


def flow_areas(areas: Areas | None = None) -> FlowAreas:
    return FlowAreas(SCHEMA, region_for(SCHEMA), areas or areas_of(WORKERS))


@given(
    st.lists(
        st.tuples(st.integers(0, WORKERS - 1), st.integers(0, BANDS - 1), st.integers(0, 9), st.integers(0, 900), st.floats(1.0, 99.0)),
        max_size=40,
    ),
    st.sets(st.integers(0, WORKERS - 1)),
)
@examples(100)
def test_sums_run_over_the_last_values_of_serving_workers(published: list, silent: set) -> None:
    areas = areas_of(WORKERS)
    flow = flow_areas(areas)
    last: dict[tuple[int, int], tuple[int, int, float]] = {}
    for worker, band, requests, size, oldest in published:
        flow.area(worker).publish(band, requests, size, oldest)
        last[worker, band] = requests, size, oldest
    for worker in silent:
        areas.set_serving(worker + 1, False)
    for band in range(BANDS):
        shown = [cell for (worker, b), cell in last.items() if b == band and worker not in silent]
        expected = sum(c[0] for c in shown), sum(c[1] for c in shown), min((c[2] for c in shown), default=0.0)
        assert flow.band(band) == expected
    shown = [cell for (worker, _), cell in last.items() if worker not in silent]
    assert flow.total(WAITING) == sum(cell[0] for cell in shown)
    assert flow.total(WAITING_BYTES) == sum(cell[1] for cell in shown)


class OpenAmounts:
    """The amounts that were asked and not answered, per worker and band."""

    def __init__(self) -> None:
        self.open = [[[0, 0] for _ in range(BANDS)] for _ in range(WORKERS)]


ASK = st.tuples(
    st.just("ask"),
    st.integers(0, WORKERS - 1),
    st.integers(0, WORKERS - 1),
    st.integers(0, BANDS - 1),
    st.integers(0, 5),
    st.integers(0, 500),
)
ANSWER = st.tuples(st.just("answer"), st.integers(0, WORKERS - 1), st.integers(0, BANDS - 1))
SUCCEED = st.tuples(st.just("succeed"), st.integers(0, WORKERS - 1))


@given(st.lists(st.one_of(ASK, ANSWER, SUCCEED), max_size=60))
@examples(150)
def test_the_open_amount_is_what_was_asked_minus_what_was_answered_over_all_successors(steps: list) -> None:
    flow, model = flow_areas(), OpenAmounts()
    for step in steps:
        match step:
            case ("ask", asker, target, band, requests, size):
                before = flow.asked_ever(target)
                flow.area(asker).ask(target, band, requests, size)
                assert flow.asked_ever(target) - before == requests + size
                model.open[target][band][0] += requests
                model.open[target][band][1] += size
            case ("answer", target, band):
                requests, size = flow.asked(target, band)
                flow.area(target).answer(band, requests, size)
                model.open[target][band] = [0, 0]
            case ("succeed", worker):
                flow.area(worker).take_over()
                model.open[worker] = [[0, 0] for _ in range(BANDS)]
        for target in range(WORKERS):
            for band in range(BANDS):
                assert flow.asked(target, band) == tuple(model.open[target][band])


def test_a_successor_clears_the_queue_and_continues_the_dispatched_count() -> None:
    flow = flow_areas()
    area = flow.area(1)
    area.publish(2, 3, 300, 7.0)
    area.head(5, 7.0)
    area.show_victim(VictimCell(4, -1, 6.0, 8.0))
    area.words[PENDING], area.words[DISPATCHED] = 2, 11
    flow.area(1).take_over()
    assert flow.band(2) == (0, 0, 0.0)
    assert flow.head(1) is None
    assert flow.victim(1) == (0, 0, 0.0, 0.0)
    assert flow.total(WAITING) == flow.total(WAITING_BYTES) == flow.total(PENDING) == 0
    assert flow.total(DISPATCHED) == 11


def test_the_queue_of_a_killed_worker_stops_counting_when_it_no_longer_serves() -> None:
    areas = areas_of(WORKERS)
    flow = flow_areas(areas)
    flow.area(0).publish(0, 1, 10, 2.0)
    flow.area(2).publish(0, 5, 50, 1.0)
    assert flow.band(0) == (6, 60, 1.0)
    areas.set_serving(3, False)
    assert flow.serving() == (0, 1)
    assert flow.band(0) == (1, 10, 2.0)
    assert flow.total(WAITING) == 1


def test_a_head_has_the_priority_and_claim_of_the_most_important_band() -> None:
    flow = flow_areas()
    flow.area(0).head(-7, 1.5)
    assert flow.head(0) == HeadCell(-7, 1.5)
    flow.area(0).no_head()
    assert flow.head(0) is None


def test_a_band_is_empty_when_no_request_waits_and_none_is_to_be_displaced() -> None:
    flow = flow_areas()
    assert flow.empty(1)
    flow.area(0).publish(1, 1, 0, 1.0)
    assert not flow.empty(1)
    flow.area(0).publish(1, 0, 0, 0.0)
    flow.area(0).ask(2, 1, 0, 5)
    assert not flow.empty(1)
    flow.area(2).answer(1, 0, 5)
    assert flow.empty(1)


def test_no_word_of_one_worker_lies_in_anothers_area() -> None:
    flow = flow_areas()
    for worker in range(WORKERS):
        for band in range(BANDS):
            flow.area(worker).publish(band, 1, 1, 1.0)
            for target in range(WORKERS):
                flow.area(worker).ask(target, band, 1, 1)
    for worker in range(WORKERS):
        assert all(flow.cell(worker, band) == (1, 1, 1.0) for band in range(BANDS))
        assert all(flow.asked(worker, band) == (WORKERS, WORKERS) for band in range(BANDS))
    assert SCHEMA.area_bytes % (2 * CACHE_LINE) == 0
    assert SCHEMA.asked_of(WORKERS) * WORD <= SCHEMA.area_bytes
    assert SCHEMA.band_at(BANDS) + BYTES < SCHEMA.area_words


def test_sixteen_workers_with_all_bands_take_less_than_a_mebibyte() -> None:
    assert FlowSchema(64, 16).bytes < 1024 * 1024


def test_another_number_of_bands_or_workers_is_another_layout() -> None:
    hashes = {FlowSchema(b, w).layout_hash for b in (1, 2) for w in (1, 2)}
    assert len(hashes) == 4


@pytest.mark.parametrize(("bands", "workers"), [(0, 1), (1, 0)])
def test_an_area_without_a_band_or_a_worker_is_refused(bands: int, workers: int) -> None:
    with pytest.raises(ValueError, match="at least one band and one worker"):
        FlowSchema(bands, workers)


def everywhere(flow: FlowAreas) -> tuple[int, ...]:
    return flow.serving_bases()


@given(st.lists(st.tuples(st.integers(0, WORKERS - 1), st.integers(1, 5), st.floats(0.0, 1e12)), max_size=30))
@examples(50)
def test_a_flows_position_is_the_largest_of_all_workers(moves: list[tuple[int, int, float]]) -> None:
    flow = flow_areas()
    owners = [flow.area(worker) for worker in range(WORKERS)]
    last: dict[tuple[int, int], float] = {}
    for worker, flow_hash, position in moves:
        owners[worker].move(flow_hash * HASH_LINES + flow_hash, position)
        last[worker, flow_hash] = position
    for flow_hash in range(1, 6):
        known = [position for (_, of), position in last.items() if of == flow_hash]
        assert flow.position(flow_hash * HASH_LINES + flow_hash, everywhere(flow)) == max(known, default=-inf)


def test_a_full_line_forgets_its_oldest_flow_and_never_confuses_two_flows() -> None:
    flow = flow_areas()
    owner, flow_hashes = flow.area(0), [1 + n * HASH_LINES for n in range(len(PLACES) + 1)]
    for flow_hash in flow_hashes:
        owner.move(flow_hash, float(flow_hash))
    assert flow.position(flow_hashes[0], everywhere(flow)) == -inf
    assert [flow.position(flow_hash, everywhere(flow)) for flow_hash in flow_hashes[1:]] == [
        float(flow_hash) for flow_hash in flow_hashes[1:]
    ]
    assert flow.position(2, everywhere(flow)) == -inf
    assert flow.asked(1, 0) == (0, 0)


def test_a_reader_in_the_middle_of_a_change_of_marks_sees_the_old_flow_or_none() -> None:
    flow = flow_areas()
    owner, old = flow.area(0), [1 + n * HASH_LINES for n in range(len(PLACES))]
    for flow_hash in old:
        owner.move(flow_hash, 1.0)
    new, seen = 1 + 9 * HASH_LINES, []

    class Watched:
        """The writer's floats. A reader looks right before and right after each write of a position."""

        def __setitem__(self, at: int, position: float) -> None:
            for _ in range(2):
                seen.append([flow.position(flow_hash, everywhere(flow)) for flow_hash in (new, *old)])
                floats[at] = position

    floats = owner.floats
    owner.floats = Watched()  # type: ignore[assignment]
    owner.move(new, 7.0)
    assert seen == [[-inf, -inf, 1.0, 1.0, 1.0]] * 2
    assert flow.position(new, everywhere(flow)) == 7.0


def test_a_successor_continues_positions_and_times_and_clears_gauges() -> None:
    flow = flow_areas()
    owner = flow.area(1)
    owner.move(5, 3.0)
    owner.show_time(2, 1.5, 4.5, 7)
    flow.area(1).take_over()
    at = flow.base(1) + SCHEMA.band_at(2)
    assert flow.position(5, everywhere(flow)) == 3.0
    assert (flow.floats[at + TIME], flow.floats[at + END], flow.words[at + BACKLOGGED]) == (1.5, 4.5, 0)
    assert flow.cell(1, 2) == (0, 0, 0.0)
