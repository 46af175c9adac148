"""Full queues: what is rejected, what is displaced, and when a refused client may retry."""

import pytest

from epp.flow.outcomes import EVICTED_DISPLACED, REJECTED_CAPACITY, REJECTED_FAULT, REJECTED_NO_ENDPOINTS
from tests.epp.flow.policies import band, plan
from tests.epp.flow.shards import Shard, outcomes


@pytest.mark.parametrize("limits", [{"max_requests": 2}, {"max_bytes": 20}], ids=["requests", "bytes"])
def test_a_full_band_rejects_and_accepts_again_when_there_is_space(limits: dict[str, int]) -> None:
    shard = Shard(plan(band(0, **limits)))
    first, second, third = shard.call(), shard.call(), shard.call()
    assert outcomes(first, second, third) == ["", "", "RejectedCapacity"]
    assert third.error.ending is REJECTED_CAPACITY
    first.leave()
    assert shard.call().outcome == ""


def test_displacement_does_not_help_at_the_limit_of_a_band() -> None:
    shard = Shard(plan(band(5, max_requests=1), band(-1)))
    low, high = shard.call(priority=-1), shard.call(priority=5)
    assert shard.call(priority=5).outcome == "RejectedCapacity"
    assert outcomes(low, high) == ["", ""]


def test_without_limits_over_all_bands_nothing_is_displaced() -> None:
    shard = Shard(plan(band(-1)))
    low = shard.call(priority=-1)
    for _ in range(50):
        shard.call()
    assert low.outcome == ""


def test_as_many_requests_are_displaced_as_the_arrivals_bytes_need() -> None:
    shard = Shard(plan(band(-1), band(5), max_bytes=100))
    low = [shard.call(priority=-1, size=20) for _ in range(5)]
    high = shard.call(priority=5, size=45)
    assert outcomes(*low) == ["", "", "EvictedDisplaced", "EvictedDisplaced", "EvictedDisplaced"], "the newest first"
    assert high.outcome == ""
    assert shard.controller.waiting_bytes == 85


def test_if_not_enough_can_be_freed_nothing_is_displaced() -> None:
    shard = Shard(plan(band(-1), band(5), max_bytes=100))
    low, middle = shard.call(priority=-1, size=20), shard.call(size=80)
    assert shard.call(size=30).outcome == "RejectedCapacity"
    assert shard.call(priority=5, size=101).outcome == "RejectedCapacity"
    assert outcomes(low, middle) == ["", ""]


def test_a_displaced_request_ends_as_evicted_and_displaced() -> None:
    shard = Shard(plan(band(-1), max_requests=1))
    low = shard.call(priority=-1)
    shard.call()
    assert low.outcome == "EvictedDisplaced"
    assert low.error.ending is EVICTED_DISPLACED


def test_a_full_queue_over_an_empty_pool_is_refused_for_lack_of_endpoints() -> None:
    shard = Shard(plan(band(0, max_requests=1)))
    shard.gate.empty = True
    shard.call()
    rejected = shard.call()
    assert rejected.outcome == "RejectedNoEndpoints"
    assert rejected.error.ending is REJECTED_NO_ENDPOINTS


def test_a_broken_item_is_a_fault_and_leaves_nothing_behind() -> None:
    shard = Shard()
    call = shard.call(size=-1)
    assert call.outcome == "RejectedOther"
    assert call.error.ending is REJECTED_FAULT
    assert shard.seen.flows == {}


def test_retry_after_is_the_waiting_requests_over_the_recent_dispatches() -> None:
    shard = Shard(plan(band(0, max_requests=20)))
    shard.gate.places = 10
    for _ in range(10):
        shard.call()
    for _ in range(20):
        shard.call()
    shard.clock.now += 1.0
    rejected = shard.call()
    assert rejected.error is not None
    assert rejected.error.retry_after_s == 3, "20 wait, and 10 were dispatched in the last second"


def test_retry_after_is_a_minute_at_most_and_a_second_at_least() -> None:
    shard = Shard(plan(band(0, max_requests=1)))
    shard.call()
    rejected = shard.call()
    assert rejected.error is not None
    assert rejected.error.retry_after_s == 60, "nothing moves"
    shard.room(1_001)
    for _ in range(1_000):
        shard.call()
    shard.call()
    rejected = shard.call()
    assert rejected.error is not None
    assert rejected.error.retry_after_s == 1
