"""Displacement: the choice of shards and bands by what all shards show."""

from hypothesis import given
from hypothesis import strategies as st

from epp.flow.displacement import OWN, Holding, giving_way
from epp.flow.ports import Wanted


def test_nothing_gives_way_if_nothing_is_needed() -> None:
    assert giving_way(5, 0, -10, [Holding(OWN, 0, 3, 30)]) == []


def test_the_lowest_band_goes_first_and_within_it_the_shard_with_the_most_bytes() -> None:
    holdings = [Holding(OWN, 0, 9, 90), Holding(2, -1, 1, 50), Holding(OWN, -1, 2, 20), Holding(1, -5, 1, 1)]
    assert giving_way(5, 3, 0, holdings) == [(1, Wanted(-5, 1, 0)), (2, Wanted(-1, 1, 0)), (OWN, Wanted(-1, 1, 0))]


def test_this_shard_goes_first_among_equals() -> None:
    assert giving_way(0, 1, 0, [Holding(3, -1, 1, 10), Holding(OWN, -1, 1, 10)]) == [(OWN, Wanted(-1, 1, 0))]


def test_a_shard_that_frees_all_its_bytes_frees_all_its_requests() -> None:
    holdings = [Holding(OWN, -1, 4, 40), Holding(1, 0, 2, 100)]
    assert giving_way(5, 5, 60, holdings) == [(OWN, Wanted(-1, 4, 40)), (1, Wanted(0, 1, 20))]


def test_items_without_bytes_are_not_displaced_to_free_bytes() -> None:
    assert giving_way(5, 0, 5, [Holding(OWN, -1, 3, 0), Holding(1, 0, 1, 9)]) == [(1, Wanted(0, 0, 5))]


holdings_lists = st.lists(st.builds(Holding, st.integers(-1, 3), st.integers(-3, 6), st.integers(0, 5), st.integers(0, 60)), max_size=12)


@given(st.integers(-3, 6), st.integers(0, 12), st.integers(-5, 200), holdings_lists)
def test_it_takes_what_is_needed_from_strictly_lower_bands_or_nothing_at_all(
    priority: int, requests: int, size: int, holdings: list[Holding]
) -> None:
    parts = giving_way(priority, requests, size, holdings)
    lower = [h for h in holdings if h.priority < priority and h.requests]
    if parts is None:
        assert sum(h.requests for h in lower) < requests or sum(h.bytes for h in lower) < size
        return
    assert all(wanted.priority < priority for _, wanted in parts)
    assert sum(wanted.requests for _, wanted in parts) >= requests
    assert sum(wanted.bytes for _, wanted in parts) >= size
    assert [wanted.priority for _, wanted in parts] == sorted(wanted.priority for _, wanted in parts)
    assert all(wanted.requests or wanted.bytes for _, wanted in parts)
