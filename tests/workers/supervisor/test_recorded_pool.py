"""A recording of one of several pools has only this pool's requests, also if another pool gets its place."""

import asyncio
from pathlib import Path

from epp.config.load import load
from epp.request.pool_choice import Matched, PoolChoice
from tests.workers.instances import options, removed
from workers.process import pool_views
from workers.process.generations import Given
from workers.process.instance import Instance
from workers.process.layout import RECORDED_POOL, RECORDING
from workers.process.places import Pool
from workers.process.pool_list import Listed
from workers.process.pool_views import relisted
from workers.shared.recording import asks
from workers.supervisor.background import Background
from workers.supervisor.record_keeper import RecordKeeper

TEXT = "plugins: [{type: queue-scorer}]\n"
ENDPOINTS = "127.0.0.1:1"


def listed(name: str, since: int = 1) -> Listed:
    return Listed(name, 0, (f"{name}.svc",), (), ENDPOINTS, 4, since=since)


def test_a_recording_ends_when_its_pool_is_gone_and_goes_on_when_another_one_goes(tmp_path: Path) -> None:
    given = Given(TEXT, "c.yaml", {})
    pools = [Pool(name, given, load(TEXT, "c.yaml"), ENDPOINTS, 4) for name in ("a", "b", "c")]
    choice = PoolChoice([Matched(pool.name, 0, (f"{pool.name}.svc",)) for pool in pools])
    first = {place: listed(pool.name) for place, pool in enumerate(pools)}

    async def main(instance: Instance) -> None:
        area = instance.memory.areas.area(0)
        recording, only = (area.schema.scalar[name] for name in (RECORDING, RECORDED_POOL))
        keeper = RecordKeeper(instance, area)
        background = Background()
        keeper.start(background, successor=False)
        ask = asks.RecordAsk("1", str(tmp_path / "b"), 60.0, "b")
        asks.put(instance.options.run_dir, instance.options.instance, ask)
        keeper._look_for_questions()
        number = area.scalars[recording]
        assert number > 0 and area.scalars[only] == 2
        without_a = relisted(instance, first | {0: listed("d", 2)}, 2)
        keeper.use(without_a)
        assert (area.scalars[recording], area.scalars[only]) == (number, 2)
        keeper.use(relisted(without_a, dict(without_a.pool_list) | {1: listed("e", 3)}, 3))
        assert area.scalars[recording] != number
        state = asks.told(instance.options.run_dir, instance.options.instance, "1")
        assert state is not None and (state.state, state.why) == ("ended", "the pool 'b' is gone")
        keeper.end()
        background.close()

    with removed(pool_views.create(options(tmp_path), pools, choice, {}, pool_list=first)) as instance:
        asyncio.run(main(instance))
