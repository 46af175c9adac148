"""Deadlines of open streams come due once and in order. Deadlines of ended streams don't accumulate."""

from hypothesis import given
from hypothesis import strategies as st

from workers.transport.timeouts import SLACK, Deadlines


class Stream:
    """Stands for an open stream."""


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60), st.floats(0, 100))
def test_open_streams_come_due_in_the_order_of_their_times(given_, now):
    streams = {number: Stream() for number in range(len(given_))}
    deadlines = Deadlines(streams)
    for number, (at, _) in enumerate(given_):
        deadlines.add(at, number)
    for number, (_, ends) in enumerate(given_):
        if ends:
            del streams[number]
    due = list(deadlines.due(now))
    expected = sorted((at, n) for n, (at, ends) in enumerate(given_) if not ends and at <= now)
    assert due == [streams[number] for _, number in expected]
    assert list(deadlines.due(now)) == []


@given(st.integers(0, 50), st.integers(0, 2000))
def test_the_number_of_entries_is_bounded_by_the_open_streams(open_, ended):
    streams = {-number: Stream() for number in range(1, open_ + 1)}
    deadlines = Deadlines(streams)
    for number in streams:
        deadlines.add(1e9, number)
    for number in range(ended):
        deadlines.add(1e9 + number, number)
        assert len(deadlines) <= 2 * open_ + SLACK
