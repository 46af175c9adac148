"""Tests of lanes: sums over processes, serving words, successors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.lanes import SUPERVISOR_LANE, Lanes, LaneSchema
from shm.layout import CACHE_LINE
from tests.examples import examples
from tests.shm.memory import region_for

SCHEMA = LaneSchema(
    slots=6, scalars=("streams", "queued"), counters=("requests", "errors"), histograms=(("wait_s", (0.1, 1.0)), ("size", (10.0,))), lanes=4
)


def serving_lanes(schema: LaneSchema = SCHEMA) -> Lanes:
    lanes = Lanes(schema, region_for(schema))
    for index in range(schema.lanes):
        lanes.set_serving(index, True)
    return lanes


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(-5, 5)), max_size=30))
@examples(50)
def test_in_flight_numbers_are_summed_over_worker_lanes(changes: list) -> None:
    lanes = serving_lanes()
    owners = [lanes.lane(index) for index in range(SCHEMA.lanes)]
    expected = [0] * SCHEMA.slots
    for index, slot, change in changes:
        owners[index].inflight[slot] += change
        owners[index].tokens[slot] += 100 * change
        expected[slot] += change
    assert lanes.inflight(6).tolist() == expected
    assert lanes.inflight(2).tolist() == expected[:2]
    assert lanes.tokens(6).tolist() == [100 * n for n in expected]
    assert [lanes.slot_inflight(slot) for slot in range(6)] == expected


def test_outcomes_count_in_all_lanes_of_workers_even_of_those_that_do_not_serve() -> None:
    lanes = serving_lanes()
    for index in range(SCHEMA.lanes):
        lanes.lane(index).served[1] = 10
        lanes.lane(index).failed[2] = index
    lanes.set_serving(3, False)
    served, failed = lanes.outcomes(4)
    assert (served.tolist(), failed.tolist()) == ([0, 30, 0, 0], [0, 0, 1 + 2 + 3, 0])


def test_the_supervisors_lane_does_not_count_in_flight() -> None:
    lanes = serving_lanes()
    lanes.lane(SUPERVISOR_LANE).inflight[1] = 9
    assert lanes.slot_inflight(1) == 0
    assert lanes.inflight(2).tolist() == [0, 0]


def test_a_lane_that_is_not_serving_does_not_count_in_flight() -> None:
    lanes = serving_lanes()
    lanes.lane(2).inflight[0] = 5
    lanes.lane(3).inflight[0] = 1
    lanes.set_serving(2, False)
    assert not lanes.serving(2)
    assert lanes.serving(3)
    assert lanes.slot_inflight(0) == 1
    assert lanes.inflight(1).tolist() == [1]


def test_a_successor_clears_gauges_and_continues_counters() -> None:
    lanes = serving_lanes()
    first = lanes.lane(1)
    first.inflight[2], first.tokens[3], first.scalars[SCHEMA.scalar["queued"]] = 4, 500, 7
    first.add(SCHEMA.counter["requests"], 3)
    first.observe(SCHEMA.histogram["wait_s"], 0.5)
    first.heartbeat(10.0)
    second = lanes.lane(1)
    second.take_over()
    assert lanes.inflight(6).tolist() == lanes.tokens(6).tolist() == [0] * 6
    assert lanes.scalars("queued") == [0, 0, 0, 0]
    assert lanes.ages(11.0)[1] == math.inf
    assert lanes.successions() == [0, 1, 0, 0]
    second.add(SCHEMA.counter["requests"])
    assert lanes.counters() == {"requests": 4, "errors": 0}
    assert lanes.histograms()["wait_s"] == ([0, 1, 0], 0.5)


def test_histograms_count_values_up_to_and_including_each_bound() -> None:
    lanes = serving_lanes()
    for index, value in ((0, 0.1), (1, 0.11), (2, 1.0), (3, 7.0)):
        lanes.lane(index).observe(SCHEMA.histogram["wait_s"], value)
    counts, total = lanes.histograms()["wait_s"]
    assert counts == [1, 2, 1]
    assert total == pytest.approx(8.21)
    assert lanes.histograms()["size"] == ([0, 0], 0.0)


@pytest.mark.parametrize("values", [[0.1], [7.0, 0.0], [0.11, 0.1, 1.0, 1.5, 0.05, 0.5]])
def test_many_values_at_once_count_like_single_values(values: list[float]) -> None:
    together, apart = serving_lanes(), serving_lanes()
    index = SCHEMA.histogram["wait_s"]
    together.lane(1).observe_all(index, values, 3)
    for value in values * 3:
        apart.lane(1).observe(index, value)
    counts, total = apart.histograms()["wait_s"]
    assert together.histograms()["wait_s"] == (counts, pytest.approx(total))
    assert together.histograms()["size"] == apart.histograms()["size"]


def test_scalars_are_listed_per_lane() -> None:
    lanes = serving_lanes()
    lanes.lane(3).scalars[SCHEMA.scalar["streams"]] = 12
    assert lanes.scalars("streams") == [0, 0, 0, 12]


def test_a_heartbeat_has_an_age_and_no_heartbeat_is_infinitely_old() -> None:
    lanes = serving_lanes()
    lanes.lane(1).heartbeat(100.0)
    assert lanes.ages(100.5) == [math.inf, 0.5, math.inf, math.inf]


def test_lanes_share_no_cache_line() -> None:
    assert SCHEMA.lane_bytes % CACHE_LINE == 0
    assert SCHEMA.lanes_at % CACHE_LINE == 0
    assert SCHEMA.lanes_at + SCHEMA.lanes * SCHEMA.lane_bytes == SCHEMA.bytes


def test_filling_every_word_of_one_lane_leaves_the_others_alone() -> None:
    lanes = serving_lanes()
    lane = lanes.lane(2)
    for index in range(len(lane.words)):
        lane.words[index] = 1
    assert lanes.inflight(6).tolist() == [1] * 6
    assert lanes.successions() == [0, 0, 1, 0]
    assert all(lanes.serving(index) for index in range(4))


@pytest.mark.parametrize(
    "change", [{"slots": 0}, {"lanes": 0}, {"scalars": ("a", "a")}, {"counters": ("a", "a")}, {"histograms": (("h", (2.0, 1.0)),)}]
)
def test_an_impossible_schema_is_refused(change: dict) -> None:
    schema = {"slots": 1, "scalars": (), "counters": (), "histograms": (), "lanes": 1}
    with pytest.raises(ValueError, match=r"lane|twice|ascend"):
        LaneSchema(**(schema | change))
