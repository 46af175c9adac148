"""A worker follows which InferencePools have which places, and ends the work of one that is gone when its last stream has ended."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epp.config.load import load
from epp.errors import Cause, Refused
from epp.request.pool_choice import UNDECIDED
from loadtest.demo.ports import free_ports
from tests.modes import interpreted_only
from tests.waiting import turns
from tests.workers.instances import options, removed
from workers.process.generations import Given
from workers.process.instance import FIRST, Instance
from workers.process.places import DEFAULT, Places, Pool
from workers.process.pool_views import create_places, tell_assigned
from workers.shared.documents import Placed
from workers.shared.pool_crashes import CRASHES, Culprit, PoolCrashes
from workers.worker import adoption, worker_pools
from workers.worker.worker_pools import WorkerPools


class Parts(SimpleNamespace):
    """Stands for `workers.worker.setup.WorkerParts`: knows its pool, and whether it was retired."""

    def __init__(self, instance: Instance, kept: Any) -> None:
        super().__init__(
            name=instance.options.pool_name, retired=False, gone=False, app=object(), kept=kept, own=object(), instance=instance
        )
        kept.pools.append(self.own)

    __hash__ = object.__hash__

    def lobby(self) -> object:
        return "lobby"

    def leave(self) -> None:
        self.gone = True

    def heartbeat(self, now: float) -> None:
        """Has nothing to do."""

    async def retire(self) -> None:
        self.retired = True


class World:
    """The pools of a worker with two places. `open`: the apps of open streams. `ended`: those with a pool that was gone, and why.

    `in_lobby`: the pools of streams that wait until their pools are loaded.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.made: list[Parts] = []
        self.open: list[Any] = []
        self.in_lobby: list[int] = []
        self.ended: list[tuple[Any, str]] = []
        self.moves = 0
        self.beats: list[float] = []
        self.kept = SimpleNamespace(pools=[], heartbeat=self.beats.append)
        self.pools = WorkerPools(instance, self._make, instance.memory.areas.area(1), 1, self._streams, self._moved)
        self.made.clear()

    def _moved(self) -> None:
        self.moves += 1

    def _streams(self) -> list[Any]:
        places = {parts.app: parts.instance.pool for parts in self.made}
        streams = [(app, places[app]) for app in self.open] + [("lobby", pool) for pool in self.in_lobby]
        return [
            SimpleNamespace(app=app, pool=pool, leave=lambda refused, app=app: self.ended.append((app, refused.detail)))
            for app, pool in streams
        ]

    def _make(self, instance: Instance) -> Any:
        self.made.append(Parts(instance, self.kept))
        return self.made[-1]

    def assign(self, names: Mapping[int, str]) -> None:
        places = self.instance.places
        assert places is not None
        tell_assigned(self.instance, {number: Placed(name, places.ports[number]) for number, name in names.items()})
        assert os.eventfd_read(self.instance.pipes.wakeups[0]) == 1, "the worker is woken"
        self.pools.look()

    def places(self) -> list[int]:
        assert self.instance.places is not None
        return [self.pools.choice.of_stream(port, "") for port in self.instance.places.ports]

    async def app(self, place: int) -> object:
        loaded = asyncio.Event()
        self.pools.wanted(place, loaded.set)
        await loaded.wait()
        return self.pools.app(place)


def scenario(folder: Path, main: Callable[[World], Awaitable[None]], places: int = 2) -> None:
    configuration = Pool(DEFAULT, Given(None, "", {}), load(None, ""), "", 4)
    found = Places({DEFAULT: configuration}, free_ports(places), service="epp")
    with removed(create_places(options(folder, pool_given=True), found)) as instance:

        async def run() -> None:
            await main(World(instance))

        asyncio.run(run())


def test_a_pool_is_served_in_its_place_from_the_next_look_on(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        assert world.places() == [UNDECIDED, UNDECIDED]
        world.assign({1: "llama"})
        assert world.places() == [UNDECIDED, 1] and world.pools.app(1) is None and world.moves == 1
        app = await world.app(1)
        assert [parts.name for parts in world.made] == ["llama"] and app is world.made[0].app
        world.assign({1: "llama", 0: "qwen"})
        assert world.places() == [0, 1] and world.pools.app(1) is app, "the other pool stays"

    scenario(tmp_path, main)


def test_the_work_of_a_pool_that_is_gone_ends_after_its_last_stream(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        world.assign({1: "llama"})
        app = await world.app(1)
        (llama,) = world.made
        world.open = [app]
        world.assign({1: "qwen"})
        assert world.pools.app(1) is None, "streams of the new pool get parts of their own"
        assert world.ended == [(app, "the pool 'llama' is gone")] and llama.gone
        world.pools.look()
        await turns()
        assert not llama.retired
        world.open = []
        world.pools.look()
        await turns()
        assert llama.retired and llama.own not in world.kept.pools
        assert await world.app(1) is world.made[-1].app and world.made[-1].name == "qwen"

    scenario(tmp_path, main)


def test_a_request_that_waits_for_its_pool_is_refused_when_another_pool_gets_the_place(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        world.assign({0: "other", 1: "llama"})
        world.in_lobby = [0, 1, UNDECIDED]
        world.assign({0: "other", 1: "qwen"})
        assert world.ended == [("lobby", "the pool 'llama' is gone")]

    scenario(tmp_path, main)


def test_a_pool_that_goes_out_of_service_while_it_is_loaded_serves_no_request(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        world.assign({1: "llama"})
        loaded = asyncio.Event()
        world.pools.wanted(1, loaded.set)
        crashes = PoolCrashes(world.instance.words.out_of_service)
        for request in range(1, 1 + CRASHES):
            crashes.crashed(Culprit(1), "llama", FIRST, request, 0.0)
        world.pools.look()
        await loaded.wait()
        assert world.pools.app(1) is None
        with pytest.raises(Refused) as refused:
            world.pools.wanted(1, loaded.set)
        assert refused.value.cause is Cause.POOL_OUT

    scenario(tmp_path, main)


def test_the_records_and_times_of_answers_are_sent_at_each_heartbeat_also_while_no_stream_begins(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        world.assign({1: "llama"})
        await world.app(1)
        for now in (1.0, 1.1):
            world.pools.beat(now)
        assert world.beats == [1.0, 1.1]

    scenario(tmp_path, main)


@interpreted_only("replaces a class")
def test_a_reload_does_not_wait_until_all_pools_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a start, hundreds of pools may have to be loaded, and the parent waits only for SPREAD_S."""
    begun: list[tuple[int | None, int]] = []
    ends: list[Callable[[], None]] = []

    class Loading:
        def __init__(self, instance: Instance, then: Callable[[Any, Any], None], *, load: Any = None, number: int = 0) -> None:
            self.number = number or instance.generations.number
            begun.append((instance.pool, instance.generations.number))
            ends.append(lambda: then(self, OSError("not in this test")))

    async def main(world: World) -> None:
        world.assign({0: "one", 1: "two"})
        await world.app(0)
        monkeypatch.setattr(adoption, "Loading", Loading)
        monkeypatch.setattr(worker_pools, "Loading", Loading)
        world.assign({0: "one", 1: "two", 2: "three", 3: "four"})
        for place in (1, 2, 3):
            world.pools.wanted(place, lambda: None)
        world.instance.generations.of(0).publish(1, 2)
        world.pools.look()
        for _ in range(3):
            ends[-1]()
            await turns(2)
            world.pools.look()
        assert begun == [(1, 0), (0, 2), (2, 0), (3, 0)]

    scenario(tmp_path, main, places=4)
