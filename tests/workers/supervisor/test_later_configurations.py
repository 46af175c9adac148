"""After a reload, everything that the supervisor keeps asks the parts that are in use, not those that the reload has replaced."""

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from epp.config.load import load
from epp.config.written import KeySource, TenantsEntry
from epp.endpoints.label_selectors import of_labels
from shm.prefix_index import IndexReader
from shm.table import EJECTED
from tests.waiting import until
from tests.workers.instances import made
from tests.workers.supervisor.supervising import file_config, killed, page, run, supervised
from workers.process.generations import Bundle, TrialResult
from workers.process.instance import Instance
from workers.shared.ejection import POINTS_TO_EJECT, Ejections
from workers.shared.index_limits import IndexLimits
from workers.supervisor import config_watch, main
from workers.supervisor.config_watch import ConfigWatch
from workers.supervisor.data_layer import DataLayer
from workers.supervisor.endpoints import index_state
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.endpoints.scrape import Scraper
from workers.supervisor.kube.pool import InferencePool
from workers.supervisor.kubernetes import Kubernetes
from workers.supervisor.main import Supervisor

ENDPOINT = "- {{name: {name}, address: 127.0.0.1, port: {port}}}\n"
BLOCKS = np.array([11 << 32 | 5, 12 << 32 | 6], dtype=np.uint64)
FLOW = "featureGates: [flowControl]\nplugins: [{type: queue-scorer}]\n"
SOURCE = "- {type: metrics-data-source, parameters: {port: 1}}\n"
PLAIN = "plugins: [{type: queue-scorer}]\n"


def bundle(instance: Instance, text: str, number: int) -> Bundle:
    return Bundle(number, "c.yaml", text, "", {}, instance.layout.names, 0.0)


def publish(instance: Instance, text: str, number: int = 2) -> None:
    """Puts a later configuration in force, as the parent does."""
    later = instance.under(load(text, "c.yaml"), bundle(instance, text, number))
    instance.generations.store(number, TrialResult(0, "", bundle(later, text, number)))
    instance.generations.publish(number, number)


async def reloaded(supervisor: Supervisor, text: str, number: int = 2) -> None:
    publish(supervisor.instance, text, number)
    await until(lambda: supervisor.instance.number == number, "the supervisor uses it")


def endpoints_file(path: Path, **ports: int) -> None:
    listed = "".join(ENDPOINT.format(name=name, port=port) for name, port in ports.items())
    path.write_text(f"endpoints:\n{listed}")


def test_after_a_reload_with_other_data_sources_a_snapshot_gives_each_server_its_own_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picker is killed afterwards, so the snapshot is one of those that are written regularly."""
    monkeypatch.setattr(index_state, "EVERY_S", 0.05)
    monkeypatch.setattr(index_state, "LOOK_S", 0.01)
    path, state = tmp_path / "endpoints.yaml", tmp_path / "state"
    state.mkdir(mode=0o700)
    first = file_config(path)
    source = "- {type: metrics-data-source, parameters: {port: 1}}\n"
    other = first.replace("- type: queue-scorer\n", f"- type: queue-scorer\n{source}", 1)
    (tmp_path / "run").mkdir()
    endpoints_file(path, a=1, b=2)

    async def until_killed() -> None:
        with made(tmp_path / "run", first, endpoints="", state_dir=str(state)) as instance:
            instance.begin(bundle(instance, first, 1))
            supervisor = Supervisor(instance)
            serving = asyncio.ensure_future(supervisor.serve())
            await until(instance.reports.received, "ready")
            await reloaded(supervisor, other)
            endpoints_file(path, c=3, b=2)
            await until(lambda: "c" in {key[1][1] for key in supervisor.data.table.owners()}, "found")
            (new,) = [owner for key, owner in supervisor.data.table.owners().items() if key[1][1] == "c"]
            supervisor.index.writer.insert(BLOCKS, new, 1)
            saved = supervisor.index.writer.changes
            await until(lambda: supervisor.index.snapshot._saved >= saved, "saved")  # type: ignore[union-attr]
            await killed(serving)

    async def afterwards() -> None:
        with made(tmp_path / "run", other, endpoints="", state_dir=str(state)) as instance:
            async with supervised(instance) as successor:
                owners = successor.data.table.owners()
                matched = IndexReader(instance.layout.index, instance.memory.index).match(BLOCKS)
                assert {key[1][1] for key, owner in owners.items() if owner in matched} == {"c"}

    run(until_killed)
    run(afterwards)


def test_nothing_keeps_the_data_layer_that_a_reload_has_replaced(tmp_path: Path) -> None:
    """A part that kept a bound method of it would ask it for endpoints that it no longer follows."""
    path = tmp_path / "endpoints.yaml"
    first = file_config(path)
    (tmp_path / "run").mkdir()
    endpoints_file(path, a=1)
    kinds = (DataLayer, EndpointTable, Scraper, Ejections, IndexLimits)

    def alive() -> list[int]:
        gc.collect()
        return [sum(type(each) is kind for each in gc.get_objects()) for kind in kinds]

    async def scenario() -> None:
        before = alive()
        state = str(tmp_path / "state")
        with made(tmp_path / "run", first, endpoints="", state_dir=state) as instance:
            instance.begin(bundle(instance, first, 1))
            async with supervised(instance) as supervisor:
                assert (await page(instance, "/metrics"))[0] == 200
                one = [now - then for now, then in zip(alive(), before, strict=True)]
                assert one == [1] * len(kinds)
                replaced = id(supervisor.data)
                for number, port in ((2, 1), (3, 2)):
                    source = f"- {{type: metrics-data-source, parameters: {{port: {port}}}}}\n"
                    other = first.replace("- type: queue-scorer\n", f"- type: queue-scorer\n{source}", 1)
                    await reloaded(supervisor, other, number)
                    assert (await page(instance, "/metrics"))[0] == 200
                assert id(supervisor.data) != replaced
                await until(lambda: [now - then for now, then in zip(alive(), before, strict=True)] == one, "freed")

    run(scenario)


def test_a_reload_with_other_data_sources_takes_no_ejection_back(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    first = file_config(path)
    endpoints_file(path, a=1, b=2)

    async def scenario() -> None:
        with made(tmp_path, first, endpoints="") as instance:
            instance.begin(bundle(instance, first, 1))
            async with supervised(instance) as supervisor:
                slot = supervisor.data.table.handles()[0].slot
                failed = instance.memory.areas.area(1).failed

                def ejected() -> bool:  # failures before the first look at a slot do not count
                    failed[slot] += POINTS_TO_EJECT
                    return supervisor.data.ejections.count() == 1

                await until(ejected)
                replaced = supervisor.data
                await reloaded(supervisor, first.replace("- type: queue-scorer\n", f"- type: queue-scorer\n{SOURCE}", 1))
                await until(lambda: len(supervisor.data.table) == 2, "the endpoints stay")
                assert (await page(instance, "/metrics"))[0] == 200  # by now, the endpoints file is followed again
                assert supervisor.data is not replaced
                assert [supervisor.data.ejections.flags(each) & EJECTED for each in (slot, 1 - slot)] == [EJECTED, 0]

    run(scenario)


def test_flow_control_that_a_reload_switches_on_counts_for_the_scaling_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[[], int]] = []
    original = main.ScalingSignal

    def signal(*parts: Any) -> Any:
        asked.append(parts[-1])
        return original(*parts)

    monkeypatch.setattr(main, "ScalingSignal", signal)

    async def scenario() -> None:
        with made(tmp_path, PLAIN) as instance:
            instance.begin(bundle(instance, PLAIN, 1))
            async with supervised(instance) as supervisor:
                instance.memory.areas.set_serving(1, True)
                instance.memory.flow.area(0).publish(0, 3, 30, 1.0)
                assert asked[0]() == 0, "flow control is off"
                await reloaded(supervisor, FLOW)
                assert asked[0]() == 3

    run(scenario)


def test_a_snapshot_names_the_block_size_of_the_present_configuration(tmp_path: Path) -> None:
    def prefixes(tokens: int) -> str:
        producer = f"{{type: approx-prefix-cache-producer, parameters: {{blockSizeTokens: {tokens}}}}}"
        return f"plugins: [{{type: prefix-cache-scorer}}, {producer}]\n"

    async def scenario() -> None:
        with made(tmp_path, prefixes(64), state_dir=str(tmp_path)) as instance:
            instance.begin(bundle(instance, prefixes(64), 1))
            async with supervised(instance) as supervisor:
                snapshot = supervisor.index.snapshot
                assert snapshot is not None and snapshot._header()[2] == 64
                await reloaded(supervisor, prefixes(128))
                assert snapshot._header()[2] == 128

    run(scenario)


def test_files_to_which_a_later_configuration_refers_are_watched_and_their_appearance_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_watch, "SETTLE_S", 0.0)
    authority, keys = tmp_path / "ca.pem", tmp_path / "keys"
    authority.write_text("one")
    keys.write_text("one")
    config = tmp_path / "c.yaml"
    config.write_text("")
    options = SimpleNamespace(config_file=str(config), plugin_path="", pools_file="", config_dir="")

    def using(config: SimpleNamespace, *sources: SimpleNamespace) -> SimpleNamespace:
        found = SimpleNamespace(options=options, sources=SimpleNamespace(all=sources), config=config, pool=None, pool_list={})
        found.every = (found,)
        return found

    tenants = SimpleNamespace(tenants=TenantsEntry((KeySource("authorization", str(keys), False),)))
    present = [using(SimpleNamespace(tenants=None))]
    changes: list[int] = []
    watch = ConfigWatch(lambda: present[-1], lambda: changes.append(1))  # type: ignore[arg-type,return-value]

    async def scenario() -> None:
        source = SimpleNamespace(files=[str(authority)])
        present.append(using(tenants, source))
        await watch.look()
        await watch.look()
        assert not changes
        authority.write_text("another")
        await watch.look()
        await watch.look()
        assert len(changes) == 1
        keys.write_text("another")
        await watch.look()
        await watch.look()
        assert len(changes) == 2

    asyncio.run(scenario())


def test_the_parsers_of_a_later_configuration_are_compared_with_the_pool(tmp_path: Path) -> None:
    def configured(*parsers: str) -> Any:
        found = [SimpleNamespace(name=name, app_protocols=("http",)) for name in parsers]
        wiring = SimpleNamespace(parsers=found)
        options = SimpleNamespace(ha_enable_leader_election=False, endpoint_selector="", pool_name="pool")
        instance = SimpleNamespace(config=SimpleNamespace(pipeline=SimpleNamespace(wiring=wiring)), options=options)
        instance.pool, instance.pools, instance.every, instance.kube, instance.places = None, (), [instance], None, None
        instance.sources = SimpleNamespace(asks_objects=True)
        return instance

    present = [configured("one")]
    nothing: Any = None
    predecessor: Any = SimpleNamespace(existed=False)
    kubernetes = Kubernetes(lambda: present[-1], nothing, predecessor, nothing, nothing, lambda *_: None, nothing)
    kubernetes.api = SimpleNamespace()  # type: ignore[assignment]
    discovery = kubernetes._discovery_of("ns", present, nothing)
    discovery.pools, discovery._listed = {0: InferencePool(of_labels({}), (8000,), "h2c")}, True
    assert "which parser 'one' does not read" in discovery.missing()
    present.append(configured("another"))
    assert "which parser 'another' does not read" in discovery.missing()
