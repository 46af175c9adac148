"""What endpoints without fresh values count as, and what is in flight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.data import ACTIVE_MODELS, INFLIGHT_REQUESTS, KV_USAGE, MAX_LORA, WAITING
from tests.fakes import candidates


def test_a_stale_endpoint_counts_as_the_worst_fresh_one() -> None:
    c = candidates({"kv_cache_usage": [0.2, 0.6, 0.0]}, fresh=[True, True, False])
    assert c[KV_USAGE].tolist() == [0.2, 0.6, 0.6]


def test_worst_is_the_lowest_where_more_is_better() -> None:
    c = candidates({"max_lora": [4, 2, 9]}, fresh=[True, True, False])
    assert c[MAX_LORA].tolist() == [4, 2, 2]


def test_an_unknown_endpoint_counts_as_the_mean_of_the_fresh_ones() -> None:
    c = candidates({"kv_cache_usage": [0.2, 0.6, 0.0]}, fresh=[True, True, False], known=[True, True, False])
    np.testing.assert_allclose(c[KV_USAGE], [0.2, 0.6, 0.4])


def test_a_value_that_its_engine_does_not_report_counts_as_the_mean() -> None:
    c = candidates({"kv_cache_usage": [0.2, 0.6, float("nan")]})
    np.testing.assert_allclose(c[KV_USAGE], [0.2, 0.6, 0.4])


def test_with_none_fresh_all_count_alike_and_the_load_in_flight_decides() -> None:
    c = candidates({"waiting_requests": [9, 0, 3]}, fresh=[False] * 3, inflight=[0, 2, 1], inflight_at_scrape=[0, 2, 1])
    assert c[WAITING].tolist() == [0, 2, 1]


def test_waiting_is_what_was_scraped_and_what_was_sent_since() -> None:
    c = candidates({"waiting_requests": [1, 1, 1]}, inflight=[5, 2, 0], inflight_at_scrape=[3, 2, 4])
    assert c[WAITING].tolist() == [3, 1, 1]


def test_a_narrowed_view_sees_only_its_own_candidates() -> None:
    c = candidates(
        {"waiting_requests": [1, 2, 3], "kv_cache_usage": [0.1, 0.9, 0.0]},
        inflight=[0, 1, 5],
        fresh=[True, True, False],
    )
    narrow = c.keep(np.array([True, False, True]))
    assert [e.name for e in narrow.endpoints] == ["pod-0", "pod-2"]
    assert narrow[KV_USAGE].tolist() == [0.1, 0.1]
    assert narrow[INFLIGHT_REQUESTS].tolist() == [0, 5]
    again = narrow.keep(np.array([False, True]))
    assert [e.name for e in again.endpoints] == ["pod-2"]
    assert again.endpoint(0).name == "pod-2"


def test_names_come_in_the_order_of_the_candidates() -> None:
    names = {"active_models": [frozenset("a"), frozenset("b")]}
    c = candidates({"max_lora": [1, 1]}, names=names)
    assert c.keep(np.array([False, True]))[ACTIVE_MODELS] == [frozenset("b")]


def test_endpoints_that_are_down_leave_unless_all_are() -> None:
    c = candidates({"waiting_requests": [0, 0, 0]}, down=[True, False, True])
    assert [e.name for e in c.without_down().endpoints] == ["pod-1"]
    only_down = c.keep(np.array([True, False, True]))
    assert len(only_down.without_down()) == 2


def test_columns_are_read_only() -> None:
    column = candidates({"kv_cache_usage": [0.2, 0.6]})[KV_USAGE]
    with pytest.raises(ValueError, match="read-only"):  # what all decisions share
        column[0] = 1.0


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_settled_values_are_finite_and_inside_what_fresh_endpoints_report(rows: list[tuple[float, bool, bool]]) -> None:
    values, fresh, known = zip(*rows, strict=True)
    c = candidates({"kv_cache_usage": list(values)}, fresh=list(fresh), known=list(known))
    settled = c[KV_USAGE]
    good = [v for v, f in zip(values, fresh, strict=True) if f]
    assert np.isfinite(settled).all()
    if good:
        assert settled.min() >= min(good) - 1e-12 and settled.max() <= max(good) + 1e-12
    else:
        assert len(set(settled.tolist())) == 1
