"""A half-open watch. This test runs last because of its file name: a fixture silences the connections before the first test."""

import time

import pytest

from tests.kube.silent import AFTER, BEFORE, Silent
from tests.kube.world import until

REPLACED_S_MAX = 150.0  # a bookmark is due every minute; a watch that misses one is replaced soon after


@pytest.mark.timeout(200)
def test_a_silent_watch_is_replaced_and_the_missed_changes_are_found(silent: Silent | None) -> None:
    assert silent is not None
    assert silent.connections

    def names() -> set[str]:
        return {row.name for row in silent.table.look()}

    if time.monotonic() - silent.since < 60:
        assert names() == BEFORE, "the picker cannot know the changes yet"
    until(lambda: names() == AFTER, "a new watch", REPLACED_S_MAX - (time.monotonic() - silent.since))
    print(f"found at most {time.monotonic() - silent.since:.0f} s after the watch became silent")
    assert silent.picker.ready()
