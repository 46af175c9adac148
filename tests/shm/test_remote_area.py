"""Tests of the remote area: sums of other replicas, which count while they are fresh."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.areas import Areas, AreaSchema
from shm.remote_area import FRESH_S, RemoteArea, RemoteSchema
from tests.shm.memory import region_for

SLOTS, BANDS = 5, 3
SCHEMA = RemoteSchema(SLOTS, BANDS)
AREAS = AreaSchema(slots=SLOTS, scalars=(), counters=(), histograms=(), areas=2)


def test_load_of_other_replicas_counts_only_while_it_is_fresh() -> None:
    remote = RemoteArea(SCHEMA, region_for(SCHEMA))
    areas = Areas(AREAS, region_for(AREAS), remote)
    areas.set_serving(1, True)
    areas.area(1).inflight[2] = 1
    areas.area(1).tokens[2] = 10
    remote.set(2, 4, 400)
    remote.heartbeat(100.0, replicas=2)
    assert areas.inflight(SLOTS).tolist() == [0, 0, 1, 0, 0], "no reader has looked at the remote area yet"
    areas.add_remote(100.0 + FRESH_S)
    assert areas.added is remote
    assert areas.inflight(SLOTS).tolist() == [0, 0, 5, 0, 0]
    assert areas.tokens(3).tolist() == [0, 0, 410]
    assert areas.slot_load(2) == 5
    assert (areas.slot_inflight(2), remote.replicas, remote.age(101.0)) == (1, 2, 1.0)
    areas.add_remote(100.1 + FRESH_S)
    assert areas.inflight(SLOTS).tolist() == [0, 0, 1, 0, 0]
    assert areas.tokens(3).tolist() == [0, 0, 10]


def test_cleared_sums_are_0_and_what_waits_stays() -> None:
    remote = RemoteArea(SCHEMA, region_for(SCHEMA))
    remote.set(0, 1, 2)
    remote.set_band(1, 3, 4)
    remote.clear()
    assert not np.any(remote.requests) and not np.any(remote.tokens)
    assert remote.band(1) == (3, 4)


@given(st.lists(st.tuples(st.integers(0, BANDS - 1), st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=20))
def test_what_waits_is_kept_for_each_band_and_for_all(changes: list[tuple[int, int, int]]) -> None:
    remote = RemoteArea(SCHEMA, region_for(SCHEMA))
    bands = {}
    for band, requests, size in changes:
        remote.set_band(band, requests, size)
        bands[band] = requests, size
    remote.set_waiting(7, 8)
    assert {band: remote.band(band) for band in bands} == bands
    assert remote.waiting() == (7, 8)
    assert not np.any(remote.requests) and not np.any(remote.tokens)


@pytest.mark.parametrize(("slots", "bands"), [(0, 1), (1, 0)])
def test_an_area_without_slots_or_bands_is_refused(slots: int, bands: int) -> None:
    with pytest.raises(ValueError, match=f"not {slots}, {bands}"):
        RemoteSchema(slots, bands)
