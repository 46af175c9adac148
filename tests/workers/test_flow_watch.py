"""Who waits because metrics cannot be read is told why, once."""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from shm.table import State
from tests.workers.flow_world import world
from workers.flow_watch import AGAIN_S, LONG_S, BlindWatch, Unseen, blind_watch

STEP_S = 5.0
LOOKS = int(LONG_S / STEP_S) + 1


class Looks:
    """A watch, and what it is told at each look."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.waiting = 3
        self.unseen = Unseen(2, 3)
        self.told: list[str] = []
        self._watch = BlindWatch("detector", lambda: self.waiting, lambda: self.unseen, self.told.append)

    def look(self, times: int = 1) -> int:
        """How many warnings there are after so many looks more."""
        for _ in range(times):
            self._watch.look(self.now)
            self.now += STEP_S
        return len(self.told)


def test_requests_that_wait_for_long_while_most_endpoints_are_unseen_are_told_once() -> None:
    looks = Looks()
    assert looks.look(LOOKS - 1) == 0
    assert looks.look() == 1
    assert looks.look(1000) == 1
    assert "3 now, while the metrics of 2 of 3 endpoints" in looks.told[0]


@pytest.mark.parametrize(
    ("waiting", "unseen"), [(0, Unseen(3, 3)), (9, Unseen(1, 2)), (9, Unseen(0, 0))], ids=["none", "half", "empty pool"]
)
def test_nothing_is_told_while_nobody_waits_or_half_are_seen(waiting: int, unseen: Unseen) -> None:
    looks = Looks()
    looks.waiting, looks.unseen = waiting, unseen
    assert looks.look(100) == 0


def test_a_pause_begins_it_anew_and_it_is_not_told_again_soon() -> None:
    looks = Looks()
    for waiting in interrupted(LOOKS - 1, 5):
        looks.waiting = waiting
        assert looks.look() == 0
    looks.waiting = 1
    assert looks.look(LOOKS) == 1
    looks.waiting = 0
    looks.look()
    looks.waiting = 1
    assert looks.look(LOOKS) == 1
    assert looks.look(int(AGAIN_S / STEP_S)) == 2


def interrupted(each: int, times: int) -> Iterable[int]:
    for _ in range(times):
        yield from [1] * each
        yield 0


def test_of_an_instance_it_sees_who_waits_in_its_workers_and_what_its_detector_cannot_see(tmp_path: Path) -> None:
    async def test() -> None:
        unread = "{type: utilization-detector, parameters: {queueDepthThreshold: 1}}"
        async with world(tmp_path, "", unread, detector="utilization-detector") as w:
            told: list[str] = []
            watch = blind_watch(w.instance, told.append)
            assert watch is not None
            w.shards[0].ask("held")
            assert w.shards[0].ask("waits").waits
            start = time.monotonic()
            watch.look(start)
            watch.look(start + LONG_S)
            assert told == [], "it is fresh"
            w.mark_all(State.UNKNOWN)
            await asyncio.sleep(0.06)  # a snapshot of the pool is kept for a moment
            watch.look(start + 2 * LONG_S)
            watch.look(start + 3 * LONG_S)
            assert len(told) == 1
            assert "1 of 1 endpoints" in told[0]

    asyncio.run(test())


def test_without_flow_control_there_is_nothing_to_watch(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, gate=False) as w:
            assert blind_watch(w.instance, print) is None

    asyncio.run(test())
