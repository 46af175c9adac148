"""After a reload, nothing of the configuration before is kept, and a configuration that cannot be used changes nothing."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epp.config.load import load
from tests.waiting import turns
from tests.workers.flow_world import Shard, config
from tests.workers.instances import made
from workers.process.generations import Bundle
from workers.process.instance import Instance
from workers.worker import setup
from workers.worker.adoption import Adoption
from workers.worker.extproc.app import App
from workers.worker.extproc.pool import SharedPool
from workers.worker.plugin_work import Background
from workers.worker.setup import WorkerParts

FLOW = config()
EVICTS = config("enableEviction: true")
PLAIN = "plugins: [{type: queue-scorer}, {type: prefix-cache-scorer}]\n"
OTHER = "plugins: [{type: kv-cache-utilization-scorer}]\n"


def under(instance: Instance, text: str, number: int) -> Instance:
    bundle = Bundle(number, "c.yaml", text, "", {}, instance.layout.names, 0.0)
    return instance.under(load(text, "c.yaml"), bundle)


def alive(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.fixture
def one_worker(tmp_path: Path) -> Iterator[Callable[[str, Callable[[Shard], Any]], None]]:
    """Runs a function with the only worker of a picker with this configuration."""

    def run(text: str, main: Callable[[Shard], Any]) -> None:
        with made(tmp_path, text, workers=1) as instance:

            async def scenario() -> None:
                shard = Shard(instance, 0)
                try:
                    await main(shard)
                finally:
                    shard.close()

            asyncio.run(scenario())

    yield run


@pytest.mark.parametrize(
    "texts",
    [(PLAIN, OTHER, PLAIN), (PLAIN, FLOW, OTHER, FLOW), (FLOW, EVICTS, FLOW), (EVICTS, PLAIN, EVICTS)],
    ids=["scorers", "flow control on, off, on", "eviction on and off", "eviction, no flow control, eviction"],
)
def test_nothing_keeps_the_parts_of_earlier_configurations(one_worker: Any, texts: tuple[str, ...]) -> None:
    async def main(shard: Shard) -> None:
        gc.collect()
        before = alive(App), alive(SharedPool), alive(WorkerParts)
        parts = shard.parts
        for number, text in enumerate(texts[1:], start=2):
            later = under(shard.instance, text, number)
            last, parts = parts, parts.under(later, later.memory.areas.area(1))
            await last.retire()
            del last
        shard.parts, shard.app = parts, parts.app
        adoption = shard.worker._adoption
        assert isinstance(adoption, Adoption)
        adoption.parts = parts
        gc.collect()
        assert (alive(App), alive(SharedPool), alive(WorkerParts)) == before

    one_worker(texts[0], main)


def test_a_candidate_that_is_withdrawn_or_promoted_leaves_nothing_of_the_other(one_worker: Any) -> None:
    async def main(shard: Shard) -> None:
        gc.collect()
        before = alive(App), alive(SharedPool), alive(WorkerParts)
        parts = shard.parts
        for number, promoted in ((2, False), (3, True), (4, True)):
            later = under(shard.instance, EVICTS if number % 2 else FLOW, number)
            candidate = parts.under(later, later.memory.areas.area(1), beside=True)
            assert (candidate.app.admission, candidate.app.evictions) == (parts.app.admission, parts.app.evictions)
            if promoted:
                candidate.promote()
                parts, candidate = candidate, parts
            await candidate.retire()
            del candidate
        shard.parts, shard.app = parts, parts.app
        adoption = shard.worker._adoption
        assert isinstance(adoption, Adoption)
        adoption.parts = parts
        gc.collect()
        assert (alive(App), alive(SharedPool), alive(WorkerParts)) == before

    one_worker(FLOW, main)


@pytest.mark.parametrize("part", ["App", "Telemetry", "Isolation", "Guards"])
def test_a_configuration_of_which_a_part_cannot_be_made_leaves_flow_control_as_it_is(
    one_worker: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError(part)

    async def main(shard: Shard) -> None:
        flow, gate = shard.flow, shard.flow.gate
        later = under(shard.instance, EVICTS, 2)
        monkeypatch.setattr(setup, part, fails)
        with pytest.raises(MemoryError, match=part):
            shard.parts.under(later, later.memory.areas.area(1))
        assert shard.parts.own.flow is flow
        assert flow.gate is gate
        assert (flow.evictions, flow.evicts) == (None, False)

    one_worker(FLOW, main)


def test_attempts_to_make_a_configuration_that_fail_leave_nothing_running_or_kept(one_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker tries again and again, and plugins that have started before the fault have timers."""

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("App")

    async def main(shard: Shard) -> None:
        band = "priorityBands: [{priority: 0, fairnessPolicyRef: program-aware-fairness}]"
        later = under(shard.instance, config(band, "{type: program-aware-fairness}"), 2)
        kept, worker = shard.parts.kept, shard.worker
        monkeypatch.setattr(setup, "App", fails)
        gc.collect()
        before = alive(Background), list(kept.pools)
        for _ in range(3):
            with pytest.raises(MemoryError):
                shard.parts.under(later, later.memory.areas.area(1))
            with pytest.raises(MemoryError):
                WorkerParts(later, 0, worker.area, bus=shard.bus, faults=worker.faults, clock=worker._clock, kept=kept)
        await turns()
        gc.collect()
        assert (alive(Background), kept.pools) == before

    one_worker(FLOW, main)


def test_flow_control_stays_as_it_is_if_eviction_cannot_be_prepared(one_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("evictions")

    async def main(shard: Shard) -> None:
        gate = shard.flow.gate
        later = under(shard.instance, EVICTS, 2)
        monkeypatch.setattr("workers.worker.flow_setup.Evictions", fails)
        with pytest.raises(MemoryError, match="evictions"):
            shard.parts.under(later, later.memory.areas.area(1))
        assert shard.flow.gate is gate
        assert not shard.flow.evicts

    one_worker(FLOW, main)
