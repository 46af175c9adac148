"""Candidates: settled values of endpoints without fresh metrics, and load in flight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import weights_by_age
from epp.data import ACTIVE_MODELS, INFLIGHT_REQUESTS, KV_USAGE, MAX_LORA, WAITING
from tests.fakes import candidates


def test_a_stale_value_fades_into_the_worst_fresh_one() -> None:
    shown = []
    for weight in (1.0, 0.5, 0.0):
        c = candidates({"kv_cache_usage": [0.2, 0.6, 0.0]}, fresh=[True, True, False], weights=[1.0, 1.0, weight])
        shown.append(c[KV_USAGE].tolist())
    assert shown == [[0.2, 0.6, 0.0], [0.2, 0.6, 0.3], [0.2, 0.6, 0.6]]
    assert candidates({"kv_cache_usage": [0.2, 0.6, 0.0]}, fresh=[True, True, False])[KV_USAGE].tolist() == shown[2]


def test_a_stale_queue_fades_into_the_mean_of_the_fresh_ones_plus_everything_in_flight() -> None:
    shown = []
    for weight in (1.0, 0.5, 0.0):
        c = candidates(
            {"waiting_requests": [2, 4, 9]},
            fresh=[True, True, False],
            weights=[1.0, 1.0, weight],
            inflight=[0, 0, 11],
            inflight_at_scrape=[0, 0, 10],
        )
        shown.append(c[WAITING].tolist()[2])
    assert shown == [9 + 1, 6 + 6, 3 + 11]


def test_without_a_fresh_endpoint_stale_queues_still_count_until_they_have_faded() -> None:
    shown = []
    for weight in (1.0, 0.5, 0.0):
        c = candidates({"waiting_requests": [8, 0]}, fresh=[False] * 2, weights=[weight] * 2, inflight=[1, 2])
        shown.append(c[WAITING].tolist())
    assert shown == [[8 + 1, 2], [4 + 1, 2], [1, 2]]


def test_a_value_counts_fully_up_to_the_limit_of_freshness_and_then_fades_for_four_times_that() -> None:
    weights = weights_by_age(np.array([0.0, 2.0, 4.0, 6.0, 10.0, 99.0]), 2.0)
    assert weights.tolist() == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]


def test_the_worst_value_is_the_lowest_if_more_is_better() -> None:
    c = candidates({"max_lora": [4, 2, 9]}, fresh=[True, True, False])
    assert c[MAX_LORA].tolist() == [4, 2, 2]


def test_an_unknown_endpoint_gets_the_mean_of_the_fresh_values() -> None:
    c = candidates({"kv_cache_usage": [0.2, 0.6, 0.0]}, fresh=[True, True, False], known=[True, True, False])
    np.testing.assert_allclose(c[KV_USAGE], [0.2, 0.6, 0.4])


def test_an_unreported_value_is_the_mean_of_the_fresh_values() -> None:
    c = candidates({"kv_cache_usage": [0.2, 0.6, float("nan")]})
    np.testing.assert_allclose(c[KV_USAGE], [0.2, 0.6, 0.4])


def test_without_a_fresh_endpoint_only_the_load_in_flight_counts() -> None:
    c = candidates({"waiting_requests": [9, 0, 3]}, fresh=[False] * 3, inflight=[0, 2, 1], inflight_at_scrape=[0, 2, 1])
    assert c[WAITING].tolist() == [0, 2, 1]


def test_waiting_is_the_scraped_value_plus_the_requests_sent_since() -> None:
    c = candidates({"waiting_requests": [1, 1, 1]}, inflight=[5, 2, 0], inflight_at_scrape=[3, 2, 4])
    assert c[WAITING].tolist() == [3, 1, 1]


def test_kept_candidates_have_only_their_own_values() -> None:
    c = candidates({"waiting_requests": [1, 2, 3], "kv_cache_usage": [0.1, 0.9, 0.0]}, inflight=[0, 1, 5], fresh=[True, True, False])
    narrow = c.keep(np.array([True, False, True]))
    assert [e.name for e in narrow.endpoints] == ["pod-0", "pod-2"]
    assert narrow[KV_USAGE].tolist() == [0.1, 0.1]
    assert narrow[INFLIGHT_REQUESTS].tolist() == [0, 5]
    again = narrow.keep(np.array([False, True]))
    assert [e.name for e in again.endpoints] == ["pod-2"]
    assert again.endpoint(0).name == "pod-2"


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_the_index_of_a_row_is_that_of_its_endpoint_and_minus_one_without_a_candidate(kept: list[bool]) -> None:
    every = candidates({"waiting_requests": [0.0] * len(kept)})
    some = every.keep(np.array(kept))
    rows = [row for row, keeps in enumerate(kept) if keeps]
    assert [some.index_of(row) for row in range(len(kept))] == [rows.index(row) if row in rows else -1 for row in range(len(kept))]


def test_name_columns_are_in_the_order_of_the_candidates() -> None:
    names = {"active_models": [frozenset("a"), frozenset("b")]}
    c = candidates({"max_lora": [1, 1]}, names=names)
    assert c.keep(np.array([False, True]))[ACTIVE_MODELS] == [frozenset("b")]


def test_endpoints_that_are_down_are_dropped_unless_all_are_down() -> None:
    c = candidates({"waiting_requests": [0, 0, 0]}, down=[True, False, True])
    assert [e.name for e in c.without_down().endpoints] == ["pod-1"]
    only_down = c.keep(np.array([True, False, True]))
    assert len(only_down.without_down()) == 2


def test_columns_are_read_only() -> None:
    column = candidates({"kv_cache_usage": [0.2, 0.6]})[KV_USAGE]
    with pytest.raises(ValueError, match="read-only"):  # all decisions share it
        column[0] = 1.0


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_settled_values_are_finite_and_within_the_range_of_fresh_values(rows: list[tuple[float, bool, bool]]) -> None:
    values, fresh, known = zip(*rows, strict=True)
    c = candidates({"kv_cache_usage": list(values)}, fresh=list(fresh), known=list(known))
    settled = c[KV_USAGE]
    good = [v for v, f in zip(values, fresh, strict=True) if f]
    assert np.isfinite(settled).all()
    if good:
        assert settled.min() >= min(good) - 1e-12 and settled.max() <= max(good) + 1e-12
    else:
        assert len(set(settled.tolist())) == 1
