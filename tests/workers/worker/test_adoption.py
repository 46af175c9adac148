"""A configuration that cannot be used is tried again; the memory of ended ones is freed at rest, or when it is much."""

import asyncio
import gc
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from epp.config.load import load
from shm.areas import Areas, AreaSchema
from shm.segment import Region
from tests.fakes import FakePool, candidates
from tests.modes import interpreted_only
from tests.pair import Pair
from tests.waiting import turns, until
from workers.process.layout import CANDIDATE, GENERATION
from workers.worker.adoption import AGAIN_S, FREE_AFTER_S, FREE_AT, Adoption, Loading

STALL_S = 1000.0  # longer than this machine may stand still


class Ended:
    """Parts of a configuration without streams."""

    app = Pair(load(None, "test").pipeline, FakePool(candidates({"waiting_requests": [0.0]}))).app

    async def retire(self) -> None:
        pass


def adoption() -> Adoption:
    generations = SimpleNamespace(number=1, candidate_number=0, key=0)
    parts = SimpleNamespace(instance=SimpleNamespace(number=1, outdated=False, generations=generations, pool=None, named={}))
    schema = AreaSchema(1, (GENERATION, CANDIDATE), (), (), areas=1)
    area = Areas(schema, Region(memoryview(bytearray(schema.bytes)))).area(0)
    return Adoption(cast("Any", parts), area, 1, lambda: ())


async def end_one(adopting: Adoption) -> None:
    adopting._retired.append(cast("Any", Ended()))
    adopting.look()
    await turns(2)


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


@interpreted_only("replaces the part that loads")
def test_a_configuration_that_cannot_be_used_and_stays_in_force_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []
    begun: list[object] = []
    monkeypatch.setattr(
        "workers.worker.adoption.Loading",
        lambda instance, then: begun.append(SimpleNamespace(number=instance.generations.number)) or begun[-1],
    )

    async def change() -> None:
        adopting = adoption()
        instance = cast("Any", adopting.parts.instance)
        instance.reports = SimpleNamespace(refused=lambda ordinal, number, text, key: refused.append(number))
        now = [asyncio.get_running_loop().time()]
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
        instance.outdated, instance.generations.number = True, 2
        adopting.look()
        for _ in range(3):
            adopting._finish(cast("Any", begun[-1]), TimeoutError("no CPU"))
            tries = len(begun)
            adopting.look()
            assert len(begun) == tries
            now[0] += AGAIN_S
            adopting.look()
            assert len(begun) == tries + 1
        adopting._finish(cast("Any", begun[-1]), TimeoutError("no CPU"))
        instance.generations.number = 3
        adopting.look()
        assert len(begun) == 5, "another one is tried at once"

    asyncio.run(change())
    assert refused == [2] * 4


def test_while_a_constructor_hangs_further_attempts_fail_without_a_thread_of_their_own() -> None:
    released, begun = threading.Event(), threading.Semaphore(0)
    found: list[object] = []

    def hangs(_instance: object) -> Any:
        begun.release()
        released.wait()
        return "loaded"

    async def attempts() -> None:
        instance = cast("Any", SimpleNamespace(generations=SimpleNamespace(number=7), pool=None, named={}))
        first = Loading(instance, lambda _, result: found.append(result), load=hangs)
        await asyncio.to_thread(begun.acquire)
        first._late()
        for _ in range(3):
            Loading(instance, lambda _, result: found.append(result), load=hangs)
            await turns(2)
        assert [type(each) for each in found] == [TimeoutError] * 4
        assert not begun.acquire(blocking=False)
        Loading(instance, lambda _, result: found.append(result), number=8, load=lambda _instance: cast("Any", "another"))
        await until(lambda: len(found) == 5)
        Loading(instance, lambda _, result: found.append(result), number=8, load=lambda _instance: cast("Any", "again"))
        await until(lambda: len(found) == 6)
        released.set()
        await until(lambda: not any(each.name == "load" for each in threading.enumerate()))
        await turns(2)
        Loading(instance, lambda _, result: found.append(result), load=hangs)
        await until(lambda: len(found) == 7)

    asyncio.run(attempts())
    assert found[4:] == ["another", "again", "loaded"]


@interpreted_only("replaces the part that loads")
def test_a_candidate_that_was_promoted_and_is_not_withdrawn_yet_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr("workers.worker.adoption.Loading", lambda *_, **__: begun.append(1))

    async def look() -> None:
        adopting = adoption()
        instance = cast("Any", adopting.parts.instance)
        instance.outdated = False
        instance.number = instance.generations.number = instance.generations.candidate_number = 2
        adopting.look()
        assert not begun
        instance.generations.candidate_number = 3
        adopting.look()
        assert begun, "another candidate is"

    asyncio.run(look())
