"""A successor of the supervisor, or a restarted picker, keeps what its predecessor knew."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from shm.table import State, TableReader
from tests.waiting import until
from tests.workers.instances import made
from tests.workers.supervisor.supervising import file_config, killed, model_server, page, run, serve_worker, supervised
from workers.host.exit_codes import ExitCode
from workers.supervisor import main
from workers.supervisor.main import Supervisor
from workers.transport.tls import self_signed


def test_a_restarted_picker_keeps_the_index_entries_of_endpoints_that_still_exist(tmp_path: Path) -> None:
    from shm.prefix_index import IndexReader

    hashes = np.random.default_rng(1).integers(1, 2**64, 199, dtype=np.uint64)
    known: dict[str, int] = {}

    async def life(endpoints: str, check: Callable[[Supervisor, IndexReader], None], **more: object) -> None:
        options = {"state_dir": str(tmp_path / "state"), **more}
        with made(tmp_path / "run", endpoints=endpoints, **options) as instance:
            async with supervised(instance) as supervisor:
                check(supervisor, IndexReader(instance.layout.index, instance.memory.index))

    def learn(supervisor: Supervisor, _index: IndexReader) -> None:
        owners = supervisor.data.table.owners()
        known.update({name: owner for (_, (_, name, *_)), owner in owners.items()})
        for number, owner in enumerate(owners.values()):
            supervisor.index.writer.insert(hashes[number * 50 : number * 50 + 50], owner, 1)

    def find(supervisor: Supervisor, index: IndexReader) -> None:
        owners = {name: owner for (_, (_, name, *_)), owner in supervisor.data.table.owners().items()}
        assert owners["127.0.0.1:2"] == known["127.0.0.1:2"]
        assert index.match(hashes[50:100]) == {owners["127.0.0.1:2"]: 50}
        assert sorted(supervisor.index.writer.owners()) == sorted(owners.values())  # the owner id of :1 is retired

    def find_nothing(_supervisor: Supervisor, index: IndexReader) -> None:
        assert index.match(hashes[50:100]) == {}

    async def scenario() -> None:
        await life("127.0.0.1:1,127.0.0.1:2", learn)
        await life("127.0.0.1:2,127.0.0.1:3", find)
        await life("127.0.0.1:2,127.0.0.1:3", find)
        await life("127.0.0.1:2,127.0.0.1:3", find_nothing, state_dir="")
        await life("127.0.0.1:2", find_nothing, index_entries=8192)

    run(scenario)


def test_a_successor_does_not_read_the_certificate_files_of_scrapes(tmp_path: Path) -> None:
    """The parent has read them, so a successor can start even after the files were removed."""
    authority = tmp_path / "ca.pem"
    authority.write_bytes(self_signed()[0])
    parameters = f"{{scheme: https, insecureSkipVerify: false, caCertPath: {authority}}}"

    async def scenario() -> None:
        source = f"plugins:\n- {{type: metrics-data-source, parameters: {parameters}}}\n"
        with made(tmp_path / "run", source) as instance:
            authority.unlink()
            async with supervised(instance):
                pass

    run(scenario)


def test_a_successor_keeps_the_index_in_shared_memory_and_ignores_the_snapshot(tmp_path: Path) -> None:
    from shm.prefix_index import IndexReader

    hashes = np.random.default_rng(1).integers(1, 2**64, 199, dtype=np.uint64)

    async def scenario() -> None:
        with made(tmp_path / "run", state_dir=str(tmp_path / "state")) as instance:
            first = Supervisor(instance)
            serving = asyncio.ensure_future(first.serve())
            await until(instance.reports.received, "ready")
            (owner,) = first.index.writer.owners()
            first.index.writer.insert(hashes[:50], owner, 1)
            assert first.index.snapshot is not None
            await first.index.snapshot.save(first.data.table.owners)
            first.index.writer.insert(hashes, owner, 1)
            await killed(serving)
            async with supervised(instance) as second:
                assert second.index.writer.owners() == [owner]
                assert IndexReader(instance.layout.index, instance.memory.index).match(hashes) == {owner: 199}

    run(scenario)


def test_a_successor_keeps_slots_owners_and_counters(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with model_server(3) as port:
            with made(tmp_path, endpoints=f"127.0.0.1:{port}") as instance:
                table = TableReader(instance.layout.table, instance.memory.table)
                first = Supervisor(instance)
                serving = asyncio.ensure_future(first.serve())
                await until(lambda: (table.copy().state == State.FRESH).sum() == 1, "fresh")
                await until(lambda: instance.memory.areas.counters()["scrapes_total"] > 2, "counted")
                before, owners = table.copy(), first.index.writer.owners()
                counted = instance.memory.areas.counters()["scrapes_total"]
                await killed(serving)
                assert instance.reports.received()
                second = Supervisor(instance)
                after = table.copy()
                assert after.generation.tolist() == before.generation.tolist()
                serving = asyncio.ensure_future(second.serve())
                await until(instance.reports.received, "the successor is ready")
                assert second.predecessor.existed and not first.predecessor.existed
                assert second.index.writer.owners() == owners
                assert table.copy().generation.tolist() == before.generation.tolist()
                await until(lambda: instance.memory.areas.counters()["scrapes_total"] > counted, "counting on")
                instance.pipes.release_children()
                assert await serving == ExitCode.OK

    run(scenario)


def test_a_successor_with_a_bad_file_keeps_and_scrapes_the_endpoints_of_its_predecessor(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints:\n- {name: a, address: 127.0.0.1, port: 1}\n")
        with made(tmp_path / "run", file_config(path), endpoints="") as instance:
            serving = asyncio.ensure_future(Supervisor(instance).serve())
            await until(instance.reports.received, "ready")
            await killed(serving)
            path.write_text("endpoints: nonsense")
            failed = instance.memory.areas.counters()["datalayer_poll_errors_total"]
            async with supervised(instance):
                table = TableReader(instance.layout.table, instance.memory.table).copy()
                assert (table.state != State.FREE).sum() == 1
                await until(lambda: instance.memory.areas.counters()["datalayer_poll_errors_total"] > failed, "scraped")

    run(scenario)


def test_a_successor_starts_after_all_names_of_the_picker_were_removed_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "WATCH_EVERY_S", 0.01)

    async def scenario() -> None:
        with made(tmp_path / "run") as instance:
            first = asyncio.ensure_future(Supervisor(instance).serve())
            await until(instance.reports.received, "ready")
            await killed(first)
            instance.memory.unlink()
            shutil.rmtree(tmp_path / "run")
            serve_worker(instance)
            with capture_logs() as lines:
                async with supervised(instance):
                    assert (await page(instance, "/readyz"))[0] == 200
                    assert (await page(instance, "/metrics"))[0] == 200
                    # Ten looks: only the first one says it.
                    await asyncio.sleep(0.1)
            (named,) = [line for line in lines if line["event"].startswith("another program has removed names")]
            assert len(named["names"]) == len(instance.memory.segments) + 1

    run(scenario)
