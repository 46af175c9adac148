"""The pace of TLS handshakes: a burst is allowed, a flood waits or is refused, and other hosts do not notice."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workers.transport.handshakes import BURST, GAP_S, HOSTS_MAX, PER_SECOND, WAIT_S_MAX, HandshakePace

SLACK = 1e-6


def test_the_first_handshake_of_a_host_begins_at_once() -> None:
    assert HandshakePace().wait_s("a", 10.0) == 0.0


def test_a_burst_begins_with_short_gaps() -> None:
    pace = HandshakePace()
    waits = [pace.wait_s("a", 10.0) for _ in range(BURST)]
    assert all(wait is not None and abs(wait - n * GAP_S) < SLACK for n, wait in enumerate(waits))


def test_a_host_that_was_quiet_has_its_burst_again() -> None:
    pace = HandshakePace()
    while pace.wait_s("a", 10.0) is not None:
        pass
    later = 10.0 + WAIT_S_MAX + (BURST + 1) / PER_SECOND
    waits = [pace.wait_s("a", later) for _ in range(BURST)]
    assert waits[0] == 0.0 and waits[-1] is not None and waits[-1] < BURST * GAP_S


def test_a_flood_of_one_host_does_not_delay_another() -> None:
    pace = HandshakePace()
    while pace.wait_s("a", 10.0) is not None:
        pass
    assert pace.wait_s("b", 10.0) == 0.0


@given(st.lists(st.floats(0.0, 0.1), max_size=600))
def test_begins_keep_their_distance_and_rate_and_no_wait_is_long(pauses: list[float]) -> None:
    pace, now, begins = HandshakePace(), 10.0, []
    for pause in pauses:
        now += pause
        wait = pace.wait_s("a", now)
        if wait is not None:
            assert 0.0 <= wait <= WAIT_S_MAX
            begins.append(now + wait)
    assert all(later - earlier >= GAP_S - SLACK for earlier, later in pairwise(begins))
    for number in range(BURST, len(begins)):
        assert begins[number] - begins[number - BURST] >= 1 / PER_SECOND - SLACK
    if begins:
        assert len(begins) <= BURST + (begins[-1] - begins[0]) * PER_SECOND + 1


def test_a_host_whose_connections_carry_requests_is_limited_by_the_gap_alone() -> None:
    pace, now = HandshakePace(), 10.0
    for _ in range(20 * BURST):
        now += GAP_S
        wait = pace.wait_s("a", now)
        assert wait is not None and wait < SLACK
        pace.give_back("a")
    assert pace.wait_s("a", now) is not None
    pace.give_back("nobody")
    assert pace.wait_s("nobody", now) == 0.0


def test_the_table_of_hosts_is_bounded_and_forgets_quiet_hosts() -> None:
    pace = HandshakePace()
    for number in range(2 * HOSTS_MAX):
        pace.wait_s(str(number), 10.0)
    assert len(pace) == HOSTS_MAX + 1
    assert pace.wait_s("new", 20.0) == 0.0
    assert len(pace) == 1
