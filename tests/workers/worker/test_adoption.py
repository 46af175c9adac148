"""The memory of ended configurations is freed when changes have come to rest, or when it is much."""

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from epp.config.load import load
from shm.lanes import Lanes, LaneSchema
from shm.segment import Region
from tests.fakes import FakePool, candidates
from tests.pair import Pair
from workers.process.layout import CANDIDATE, GENERATION
from workers.worker.adoption import FREE_AFTER_S, FREE_AT, Adoption

STALL_S = 1000.0  # longer than this machine may stand still


class Ended:
    """Parts of a configuration without streams."""

    app = Pair(load(None, "test").pipeline, FakePool(candidates({"waiting_requests": [0.0]}))).app

    async def retire(self) -> None:
        pass


def adoption() -> Adoption:
    generations = SimpleNamespace(number=1, candidate_number=0)
    parts = SimpleNamespace(instance=SimpleNamespace(number=1, outdated=False, generations=generations))
    schema = LaneSchema(1, (GENERATION, CANDIDATE), (), (), lanes=1)
    lane = Lanes(schema, Region(memoryview(bytearray(schema.bytes)))).lane(0)
    return Adoption(cast("Any", parts), lane, 1, lambda: ())


async def end_one(adopting: Adoption) -> None:
    adopting._retired.append(cast("Any", Ended()))
    adopting.look()
    await asyncio.sleep(0)
    await asyncio.sleep(0)


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: found.append(1))
    return found


def test_one_configuration_is_freed_after_a_rest_and_once(freed: list[int]) -> None:
    async def change() -> None:
        adopting = adoption()
        adopting._changed_at += STALL_S
        await end_one(adopting)
        adopting.look()
        assert not freed
        adopting._changed_at -= STALL_S + 2 * FREE_AFTER_S
        adopting.look()
        adopting.look()
        assert len(freed) == 1

    asyncio.run(change())


def test_many_are_freed_together_while_changes_go_on(freed: list[int]) -> None:
    async def change() -> None:
        adopting = adoption()
        for _ in range(2 * FREE_AT):
            adopting._changed_at += STALL_S  # another configuration is in force
            await end_one(adopting)
        assert len(freed) == 2

    asyncio.run(change())
