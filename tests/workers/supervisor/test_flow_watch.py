"""The supervisor warns once if requests wait because metrics cannot be read."""

import asyncio
import copy
import itertools
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from epp.config.load import load
from shm.table import State
from tests.reports import Reports
from tests.waiting import until
from tests.workers.flow_world import world
from tests.workers.instances import made
from workers.supervisor.watches import AGAIN_S, LONG_S, BlindWatch, Unseen, Watches, blind_watch

STEP_S = 5.0
INDEX: Any = SimpleNamespace(lost=0)
LOOKS = int(LONG_S / STEP_S) + 1


class Looks:
    """A watch, the values that it reads at each look, and its warnings."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.waiting = 3
        self.unseen = Unseen(2, 3)
        self.warnings = Reports()
        self._watch = BlindWatch("detector", lambda: self.waiting, lambda: self.unseen, self.warnings)

    def look(self, times: int = 1) -> int:
        """Looks `times` more times. Returns the number of warnings so far."""
        for _ in range(times):
            self._watch.look(self.now)
            self.now += STEP_S
        return len(self.warnings)


def test_there_is_one_warning_if_requests_wait_for_long_while_most_endpoints_have_no_metrics() -> None:
    looks = Looks()
    assert looks.look(LOOKS - 1) == 0
    assert looks.look() == 1
    assert looks.look(1000) == 1
    assert looks.warnings[0].startswith(
        "requests wait because metrics are missing seconds=30 waiting=3 endpoints=3 without_metrics=2 reason=detector counts"
    )


@pytest.mark.parametrize(
    ("waiting", "unseen"), [(0, Unseen(3, 3)), (9, Unseen(1, 2)), (9, Unseen(0, 0))], ids=["none", "half", "empty pool"]
)
def test_there_is_no_warning_while_no_request_waits_or_half_of_the_endpoints_have_metrics(waiting: int, unseen: Unseen) -> None:
    looks = Looks()
    looks.waiting, looks.unseen = waiting, unseen
    assert looks.look(100) == 0


def test_an_interruption_restarts_the_time_and_the_next_warning_comes_after_a_pause() -> None:
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


def test_the_watch_of_an_instance_sees_waiting_requests_and_endpoints_without_metrics(tmp_path: Path) -> None:
    async def test() -> None:
        unread = "{type: utilization-detector, parameters: {queueDepthThreshold: 1}}"
        async with world(tmp_path, "", unread, detector="utilization-detector") as w:
            warnings = Reports()
            watch = blind_watch(w.instance, warnings)
            assert watch is not None
            w.shards[0].ask("held")
            assert w.shards[0].ask("waits").waits
            start = time.monotonic()
            watch.look(start)
            watch.look(start + LONG_S)
            assert warnings == [], "the endpoint is fresh"
            w.mark_all(State.UNKNOWN)
            hours = itertools.count(2)
            await until(lambda: watch.look(start + next(hours) * LONG_S) or warnings, "the cached snapshot expires")
            assert len(warnings) == 1
            assert "waiting=1 endpoints=1 without_metrics=1" in warnings[0]

    asyncio.run(test())


def test_there_is_no_watch_without_flow_control(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, gate=False) as w:
            assert blind_watch(w.instance, print) is None

    asyncio.run(test())


def test_the_reload_of_another_pool_does_not_begin_the_watch_of_a_pool_anew(tmp_path: Path) -> None:
    """A picker with many pools reloads some pool more often than every LONG_S."""

    async def test() -> None:
        unread = "{type: utilization-detector, parameters: {queueDepthThreshold: 1}}"
        async with world(tmp_path, "", unread, detector="utilization-detector") as w:
            w.mark_all(State.UNKNOWN)
            assert w.shards[0].ask("held").sent
            assert w.shards[0].ask("waits").waits
            warnings, start = Reports(), time.monotonic()
            watches = Watches(warnings)
            one, other = (replace(w.instance, options=structs.replace(w.instance.options, pool_name=name)) for name in ("one", "other"))
            for seconds in range(0, int(LONG_S) + 1, 5):
                pools = one, replace(other, config=copy.copy(other.config))
                for look in watches.of(replace(w.instance, pools=pools), INDEX):
                    look(start + seconds)
            assert [line.split(" seconds")[0] for line in warnings] == ["requests wait because metrics are missing"]

    asyncio.run(test())


def test_predictions_are_watched_if_any_pool_has_a_prefix_producer(tmp_path: Path) -> None:
    text = "plugins: [{type: prefix-cache-scorer}]\n"
    with made(tmp_path, "plugins: [{type: queue-scorer}]\n") as instance:
        plain = replace(instance, options=structs.replace(instance.options, pool_name="plain"))
        prefix = replace(plain, config=load(text, "c.yaml"))
        one, two = (Watches(Reports()).of(replace(instance, pools=pools), INDEX) for pools in ((plain,), (plain, prefix)))
        assert (len(one), len(two)) == (1, 2)
