from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.data import INFLIGHT_REQUESTS, KV_USAGE, RUNNING, WAITING
from tests.epp.plugins.calls import kept, made, only
from tests.fakes import candidates

NAN = float("nan")
METRICS = ("active-requests", "running-requests", "waiting-queue", "kv-cache-utilization")


def limits(fallback: bool = False, **conditions: float) -> Any:
    """`kv_cache_utilization=0.5` is a condition on kv-cache-utilization."""
    listed = [{"metric": name.replace("_", "-"), "maxValue": most} for name, most in conditions.items()]
    return made("utilization-filter", conditions=listed, fallbackOnEmpty=fallback)


BUSY = {"running_requests": [5, 6, 0, 0], "waiting_requests": [0, 0, 3, 0], "kv_cache_usage": [0.9, 0.1, 0.1, 0.91]}


@pytest.mark.parametrize(
    ("conditions", "rows"),
    [
        ({"running_requests": 5}, [0, 2, 3]),
        ({"waiting_queue": 2.5}, [0, 1, 3]),
        ({"kv_cache_utilization": 0.9}, [0, 1, 2]),
        ({"active_requests": 7}, [1, 2, 3]),
        ({"running_requests": 5, "kv_cache_utilization": 0.9}, [0, 2]),
        ({"running_requests": 5, "waiting_queue": 0, "kv_cache_utilization": 0.9, "active_requests": 8}, [0]),
        ({"running_requests": 5, "waiting_queue": 0, "kv_cache_utilization": 0.9, "active_requests": 7}, []),
    ],
)
def test_any_metric_over_its_limit_drops_an_endpoint(conditions: dict[str, float], rows: list[int]) -> None:
    c = candidates(BUSY, inflight=[8, 7, 0, 0], inflight_at_scrape=[8, 7, 0, 0])
    assert kept(limits(**conditions), c) == rows


def test_the_lower_of_two_limits_for_one_metric_counts() -> None:
    listed = [{"metric": metric, "maxValue": most} for metric in METRICS[:2] for most in (9, 4)]
    c = candidates({"running_requests": [4, 5, 0]}, inflight=[4, 0, 5])
    assert kept(made("utilization-filter", conditions=listed), c) == [0]


def test_requests_sent_since_the_scrape_count_as_waiting() -> None:
    c = candidates({"waiting_requests": [2, 2]}, inflight=[4, 9], inflight_at_scrape=[4, 4])
    assert kept(limits(waiting_queue=5), c) == [0]


def test_a_missing_or_stale_value_drops_no_endpoint_but_requests_in_flight_still_count() -> None:
    c = candidates(
        {"kv_cache_usage": [0.99, NAN, 0.99, 0.99]},
        fresh=[True, True, False, False],
        known=[True, True, True, False],
        inflight=[0, 0, 0, 9],
    )
    assert kept(limits(kv_cache_utilization=0.5), c) == [1, 2, 3]
    assert kept(limits(kv_cache_utilization=0.5, active_requests=5), c) == [1, 2]
    assert kept(limits(running_requests=0), c) == [0, 1, 2, 3]


def test_all_endpoints_stay_if_none_is_left_and_the_fallback_is_configured() -> None:
    c = only(candidates(BUSY), 0, 3)
    assert kept(limits(kv_cache_utilization=0), c) == []
    assert kept(limits(True, kv_cache_utilization=0), c) == [0, 1]
    assert kept(limits(True, kv_cache_utilization=0.9), c) == [0]


def test_only_limited_metrics_are_read() -> None:
    assert limits(active_requests=1, waiting_queue=1).consumes == (INFLIGHT_REQUESTS, WAITING)
    assert limits(running_requests=1, kv_cache_utilization=1).consumes == (RUNNING, KV_USAGE)


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ([], "length >= 1"),
        ([{"metric": "gpu", "maxValue": 1}], "Invalid enum value 'gpu'"),
        ([{"metric": "waiting-queue"}], "required field `maxValue`"),
        ([{"metric": "waiting-queue", "maxValue": -1}], ">= 0"),
        (
            [{"metric": "waiting-queue", "maxValue": 9}, {"metric": "kv-cache-utilization", "maxValue": 1.1}],
            r"^conditions\[1\].maxValue: 1.1 is more than 1",
        ),
    ],
)
def test_invalid_limits_are_refused(conditions: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made("utilization-filter", conditions=conditions)


def test_a_named_load_producer_is_needed_only_for_active_requests() -> None:
    def needs(metric: str) -> bool:
        condition = {"metric": metric, "maxValue": 1}
        return bool(made("utilization-filter", conditions=[condition], inFlightLoadProducerName="mine").needs)

    assert [metric for metric in METRICS if needs(metric)] == ["active-requests"]


VALUES = st.one_of(st.floats(0, 1), st.just(NAN))


@given(st.lists(st.tuples(VALUES, VALUES, st.booleans()), min_size=1, max_size=10), st.floats(0, 1), st.floats(0, 1))
def test_exactly_the_endpoints_with_a_fresh_value_above_a_limit_are_dropped(
    rows: list[tuple[float, float, bool]], running: float, kv: float
) -> None:
    c = candidates(
        {"running_requests": [row[0] for row in rows], "kv_cache_usage": [row[1] for row in rows]}, fresh=[row[2] for row in rows]
    )
    left = kept(limits(running_requests=running, kv_cache_utilization=kv), c)
    assert left == [i for i, (r, k, fresh) in enumerate(rows) if not (fresh and (r > running or k > kv))]
