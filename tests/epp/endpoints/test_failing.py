"""Failed answers as load: an endpoint that fails fast looks as busy as the others."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.endpoints.failing import with_failed


def loads(requests: list[int], tokens: list[float], shares: list[float]) -> tuple[list[int], list[float]]:
    found, counted = with_failed(np.array(requests), np.array(tokens), np.array(shares))
    assert counted is not None
    return found.tolist(), counted.tolist()


def test_an_endpoint_that_fails_all_requests_looks_as_busy_as_the_busiest() -> None:
    assert loads([0, 4, 6, 5], [0.0, 400.0, 600.0, 500.0], [1.0, 0.0, 0.0, 0.0]) == ([6, 4, 6, 5], [600.0, 400.0, 600.0, 500.0])


def test_one_that_fails_half_of_them_looks_as_if_it_had_them_still() -> None:
    requests, tokens = loads([2, 10, 10, 10], [200.0, 1000.0, 1000.0, 1000.0], [0.5, 0.0, 0.0, 0.0])
    assert requests == [5, 10, 10, 10]  # 2, as many failed ones, and one for the next request
    assert tokens == [500.0, 1000.0, 1000.0, 1000.0]


def test_in_a_pool_without_load_nothing_changes() -> None:
    assert loads([0, 0, 0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]) == ([0, 0, 0], [0.0, 0.0, 0.0])


def test_tokens_need_not_be_counted() -> None:
    assert with_failed(np.array([0, 3]), None, np.array([1.0, 0.0]))[1] is None


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1e6), st.floats(0, 1)), min_size=1, max_size=12))
def test_no_endpoint_looks_less_busy_than_it_is_or_busier_than_the_busiest(pool: list[tuple[int, float, float]]) -> None:
    requests, tokens, shares = (list(column) for column in zip(*pool, strict=True))
    found, counted = loads(requests, tokens, shares)
    for before, after, most in ((requests, found, max(requests)), (tokens, counted, max(tokens))):
        assert all(own <= seen <= max(own, most) for own, seen in zip(before, after, strict=True))
    assert [n for n, share in zip(found, shares, strict=True) if not share] == [
        n for n, share in zip(requests, shares, strict=True) if not share
    ]
