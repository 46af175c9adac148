"""Buckets fill by time and by useful work; limits that make no sense are refused."""

import pytest

from workers.transport.limits import Bucket, Limits


def test_a_bucket_gives_a_burst_and_then_its_rate():
    bucket = Bucket(Limits(burst=3, per_second=2.0), 0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(2.0) for _ in range(4)] == [True, True, True, False]


def test_a_bucket_never_holds_more_than_its_burst():
    bucket = Bucket(Limits(burst=2), 0.0)
    assert [bucket.take(1000.0) for _ in range(3)] == [True, True, False]


def test_work_earns_tokens():
    bucket = Bucket(Limits(burst=1, per_second=0.0), 0.0)
    assert [bucket.take(0.0, earned) for earned in (0, 1, 2, 2)] == [True, True, True, False]


@pytest.mark.parametrize("bad", [{"message": 1000}, {"streams_first": 0}, {"streams_first": 9, "streams_max": 8}])
def test_senseless_limits_are_refused(bad):
    with pytest.raises(ValueError, match="limit"):
        Limits(**bad)
