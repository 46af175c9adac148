"""Tests of areas: sums over processes, serving words, successors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.areas import SUPERVISOR_AREA, Areas, AreaSchema
from shm.layout import CACHE_LINE
from tests.examples import examples
from tests.shm.memory import region_for

SCHEMA = AreaSchema(
    slots=6, scalars=("streams", "queued"), counters=("requests", "errors"), histograms=(("wait_s", (0.1, 1.0)), ("size", (10.0,))), areas=4
)


def serving_areas(schema: AreaSchema = SCHEMA) -> Areas:
    areas = Areas(schema, region_for(schema))
    for index in range(schema.areas):
        areas.set_serving(index, True)
    return areas


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(-5, 5)), max_size=30))
@examples(50)
def test_in_flight_numbers_are_summed_over_worker_areas(changes: list) -> None:
    areas = serving_areas()
    owners = [areas.area(index) for index in range(SCHEMA.areas)]
    expected = [0] * SCHEMA.slots
    for index, slot, change in changes:
        owners[index].inflight[slot] += change
        owners[index].tokens[slot] += 100 * change
        expected[slot] += change
    assert areas.inflight(6).tolist() == expected
    assert areas.inflight(2).tolist() == expected[:2]
    assert areas.tokens(6).tolist() == [100 * n for n in expected]
    assert [areas.slot_inflight(slot) for slot in range(6)] == expected


def test_outcomes_count_in_all_areas_of_workers_even_of_those_that_do_not_serve() -> None:
    areas = serving_areas()
    for index in range(SCHEMA.areas):
        areas.area(index).served[1] = 10
        areas.area(index).failed[2] = index
    areas.set_serving(3, False)
    served, failed = areas.outcomes(4)
    assert (served.tolist(), failed.tolist()) == ([0, 30, 0, 0], [0, 0, 1 + 2 + 3, 0])


def test_the_supervisors_area_does_not_count_in_flight() -> None:
    areas = serving_areas()
    areas.area(SUPERVISOR_AREA).inflight[1] = 9
    assert areas.slot_inflight(1) == 0
    assert areas.inflight(2).tolist() == [0, 0]


def test_an_area_that_is_not_serving_does_not_count_in_flight() -> None:
    areas = serving_areas()
    areas.area(2).inflight[0] = 5
    areas.area(3).inflight[0] = 1
    areas.set_serving(2, False)
    assert not areas.serving(2)
    assert areas.serving(3)
    assert areas.slot_inflight(0) == 1
    assert areas.inflight(1).tolist() == [1]


def test_a_successor_clears_gauges_and_continues_counters() -> None:
    areas = serving_areas()
    first = areas.area(1)
    first.inflight[2], first.tokens[3], first.scalars[SCHEMA.scalar["queued"]] = 4, 500, 7
    first.add(SCHEMA.counter["requests"], 3)
    first.observe(SCHEMA.histogram["wait_s"], 0.5)
    first.heartbeat(10.0)
    second = areas.area(1)
    second.take_over()
    assert areas.inflight(6).tolist() == areas.tokens(6).tolist() == [0] * 6
    assert areas.scalars("queued") == [0, 0, 0, 0]
    assert areas.ages(11.0)[1] == math.inf
    assert areas.successions() == [0, 1, 0, 0]
    second.add(SCHEMA.counter["requests"])
    assert areas.counters() == {"requests": 4, "errors": 0}
    assert areas.histograms()["wait_s"] == ([0, 1, 0], 0.5)


def test_histograms_count_values_up_to_and_including_each_bound() -> None:
    areas = serving_areas()
    for index, value in ((0, 0.1), (1, 0.11), (2, 1.0), (3, 7.0)):
        areas.area(index).observe(SCHEMA.histogram["wait_s"], value)
    counts, total = areas.histograms()["wait_s"]
    assert counts == [1, 2, 1]
    assert total == pytest.approx(8.21)
    assert areas.histograms()["size"] == ([0, 0], 0.0)


@pytest.mark.parametrize("values", [[0.1], [7.0, 0.0], [0.11, 0.1, 1.0, 1.5, 0.05, 0.5]])
def test_many_values_at_once_count_like_single_values(values: list[float]) -> None:
    together, apart = serving_areas(), serving_areas()
    index = SCHEMA.histogram["wait_s"]
    together.area(1).observe_all(index, values, 3)
    for value in values * 3:
        apart.area(1).observe(index, value)
    counts, total = apart.histograms()["wait_s"]
    assert together.histograms()["wait_s"] == (counts, pytest.approx(total))
    assert together.histograms()["size"] == apart.histograms()["size"]


def test_scalars_are_listed_per_area() -> None:
    areas = serving_areas()
    areas.area(3).scalars[SCHEMA.scalar["streams"]] = 12
    assert areas.scalars("streams") == [0, 0, 0, 12]


def test_a_heartbeat_has_an_age_and_no_heartbeat_is_infinitely_old() -> None:
    areas = serving_areas()
    areas.area(1).heartbeat(100.0)
    assert areas.ages(100.5) == [math.inf, 0.5, math.inf, math.inf]


def test_areas_share_no_cache_line() -> None:
    assert SCHEMA.area_bytes % CACHE_LINE == 0
    assert SCHEMA.areas_at % CACHE_LINE == 0
    assert SCHEMA.areas_at + SCHEMA.areas * SCHEMA.area_bytes == SCHEMA.bytes


def test_filling_every_word_of_one_area_leaves_the_others_alone() -> None:
    areas = serving_areas()
    area = areas.area(2)
    for index in range(len(area.words)):
        area.words[index] = 1
    assert areas.inflight(6).tolist() == [1] * 6
    assert areas.successions() == [0, 0, 1, 0]
    assert all(areas.serving(index) for index in range(4))


@pytest.mark.parametrize(
    "change", [{"slots": 0}, {"areas": 0}, {"scalars": ("a", "a")}, {"counters": ("a", "a")}, {"histograms": (("h", (2.0, 1.0)),)}]
)
def test_an_impossible_schema_is_refused(change: dict) -> None:
    schema = {"slots": 1, "scalars": (), "counters": (), "histograms": (), "areas": 1}
    with pytest.raises(ValueError, match=r"area|twice|ascend"):
        AreaSchema(**(schema | change))
