"""A half-open watch. This file's name puts it last: the fixture has silenced the connections before the first test of the session."""

import time

import pytest

from tests.kube.silent import AFTER, BEFORE, Silent
from tests.kube.world import until

GIVEN_UP_S_MAX = 150.0  # a bookmark is due every minute; a watch that misses one is given up soon after


@pytest.mark.timeout(200)
def test_a_watch_that_fell_silent_is_given_up_and_what_it_missed_is_seen(silent: Silent | None) -> None:
    assert silent is not None
    assert silent.connections

    def names() -> set[str]:
        return {seat.name for seat in silent.table.look()}

    if time.monotonic() - silent.since < 60:
        assert names() == BEFORE, "nothing has told it yet"
    until(lambda: names() == AFTER, "a new watch", GIVEN_UP_S_MAX - (time.monotonic() - silent.since))
    print(f"seen at most {time.monotonic() - silent.since:.0f} s after the watch fell silent")
    assert silent.picker.ready()
