"""Time and useful work refill token buckets. Senseless limits are refused."""

import pytest

from workers.transport.abuse import Bucket
from workers.transport.limits import CONNECTIONS_MAX, CONNECTIONS_MIN, Limits, connections_allowed


def test_a_bucket_gives_a_burst_and_then_its_rate():
    bucket = Bucket(3, 2.0, 0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(2.0) for _ in range(4)] == [True, True, True, False]


def test_a_bucket_never_holds_more_than_its_burst():
    bucket = Bucket(2, 33.0, 0.0)
    assert [bucket.take(1000.0) for _ in range(3)] == [True, True, False]


def test_useful_work_earns_tokens():
    bucket = Bucket(1, 0.0, 0.0)
    assert [bucket.take(0.0, earned) for earned in (0, 1, 2, 2)] == [True, True, True, False]


@pytest.mark.parametrize("bad", [{"message": 1000}, {"streams_first": 0}, {"streams_first": 9, "streams_max": 8}])
def test_senseless_limits_are_refused(bad):
    with pytest.raises(ValueError, match="limit"):
        Limits(**bad)


def test_a_fifth_of_the_allowed_open_files_stays_free_for_other_uses():
    assert connections_allowed(1 << 20, 100) == CONNECTIONS_MAX
    assert connections_allowed(500, 100) == 300
    assert connections_allowed(64, 60) == CONNECTIONS_MIN
