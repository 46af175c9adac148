"""Tests of the one writer of the latency model: workers report, it learns and publishes, a successor and a restart continue."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epp.learning import samples
from epp.learning.model import FirstToken
from shm.areas import Areas, AreaSchema
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.prefills import PromptStarts, StartsSchema
from shm.segment import Region
from shm.table import State, TableSchema, TableWriter
from workers.process.layout import latency_schema_of
from workers.shared.documents import ENDPOINTS, EndpointRecord, encode
from workers.supervisor.endpoints.latency_state import FILE, GONE_MAX, POOLS, remove_oldest
from workers.supervisor.latency_keeper import LatencyKeeper, LatencyKeepers
from workers.worker.plugin_handles import SharedLearning

SLOTS = 4
COLUMNS = ("running_requests", "waiting_requests", "kv_cache_usage")


def region(size: int) -> Region:
    return Region(memoryview(bytearray(size)))


class Site:
    """The memory of an instance with a worker. Each call of `keeper` makes another supervisor's part."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder
        table, documents = TableSchema(COLUMNS, SLOTS), DocumentSchema((4096, 1, 1, 1))
        latency, starts = latency_schema_of((SLOTS,)), StartsSchema(SLOTS, 1)
        areas = AreaSchema(SLOTS, (), (), (), areas=2)
        memory = SimpleNamespace(
            table=region(table.bytes),
            documents=region(documents.bytes),
            latency=region(latency.bytes),
            starts=region(starts.bytes),
            areas=Areas(areas, region(areas.bytes)),
        )
        layout = SimpleNamespace(table=table, documents=documents, latency=latency, starts=starts)
        self.instance: Any = SimpleNamespace(
            layout=layout, memory=memory, options=SimpleNamespace(state_dir=folder, pool_name=""), pool=None
        )
        self.instance.every = [self.instance]
        self.frames: list[bytes] = []
        self.surprises: list[int] = []
        self.table = TableWriter(table, memory.table)
        self._documents = DocumentWriter(documents, memory.documents)
        self.worker = SharedLearning(DocumentReader(latency, memory.latency), PromptStarts(starts, memory.starts, 0), self.frames.append)

    def keeper(self) -> LatencyKeeper:
        return LatencyKeeper(self.instance, now=lambda: 50.0, surprised=self.surprises.append)

    def endpoints(self, *names: str, first: int = 0) -> None:
        """Publishes endpoints in the slots from `first` on, with the generation 1."""
        records = [EndpointRecord("ns", name, name, 80, {}, slot, 1, 9 + slot) for slot, name in enumerate(names, first)]
        self._documents.write(ENDPOINTS, encode(records))


def observe(keeper: LatencyKeeper, slot: int, seconds: float, times: int = 40) -> None:
    """Sends the keeper the frames of that many answers to prompts of 1000 tokens."""
    for step in range(times):
        sample = samples.first_token(FirstToken(1.0 + step, slot, 1, 1000.0, 0.0, 0.0, 1.0, seconds, seconds))
        keeper.take(samples.frame([sample]))


def predicted(site: Site, slot: int) -> float:
    return site.worker.model().first_token_s(slot, 1000.0, 0.0, 0.0, 1.0, 50.0)


def test_workers_predict_with_what_the_supervisor_has_learned() -> None:
    site = Site()
    keeper = site.keeper()
    site.endpoints("a", "b")
    observe(keeper, 0, 0.5)
    before = predicted(site, 0)
    keeper.look()
    assert abs(predicted(site, 0) - 0.5) < 0.1 < abs(before - 0.5)
    assert site.worker.model() is site.worker.model(), "a version is decoded once"


def test_a_successor_continues_the_model_in_shared_memory() -> None:
    site = Site()
    site.endpoints("a", "b")
    keeper = site.keeper()
    observe(keeper, 0, 0.5)
    keeper.look()
    successor = site.keeper()
    assert successor.model.endpoints[0].samples == 40
    observe(successor, 0, 0.5, 1)
    successor.look()
    assert site.worker.model().endpoints[0].samples == 41


def test_a_restart_finds_endpoints_again_by_their_identity(tmp_path: Path) -> None:
    site = Site(str(tmp_path))
    site.endpoints("a", "b")
    keeper = site.keeper()
    keeper.look()
    for slot, seconds in ((0, 0.2), (1, 0.8)):
        observe(keeper, slot, seconds, 100)
    keeper.save()
    later = Site(str(tmp_path))
    restarted = later.keeper()
    later.endpoints("b", "c", first=2)
    restarted.look()
    assert restarted.model.endpoints[2].samples == 100
    assert 3 not in restarted.model.endpoints
    assert later.worker.model().speed(2, 50.0) == pytest.approx(1.0), "alone, it is the pool's mean"
    assert restarted.model.first.theta == pytest.approx(keeper.model.first.theta)


@pytest.mark.parametrize("content", [b"", b"EPPLEARN", b"something else that is long enough", b"EPPLEARN\x09\0\0\0" + b"\0" * 40])
def test_a_file_that_is_no_model_is_refused_and_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    site = Site(str(tmp_path))
    site.endpoints("a")
    keeper = site.keeper()
    assert not keeper.model.endpoints
    observe(keeper, 0, 0.2)
    keeper.save()
    assert Site(str(tmp_path)).keeper().model.first.theta == pytest.approx(keeper.model.first.theta)


def test_an_endpoint_that_has_left_is_forgotten() -> None:
    site = Site()
    site.endpoints("a", "b")
    keeper = site.keeper()
    keeper.look()
    observe(keeper, 0, 0.5)
    observe(keeper, 1, 0.5)
    site.endpoints("a")
    keeper.look()
    assert set(keeper.model.endpoints) == {0}


def test_before_the_first_sample_nothing_is_published_or_saved(tmp_path: Path) -> None:
    site = Site(str(tmp_path))
    site.endpoints("a")
    keeper = site.keeper()
    keeper.look()
    keeper.save()
    assert DocumentReader(site.instance.layout.latency, site.instance.memory.latency).read(0) is None
    assert list(tmp_path.iterdir()) == []


def test_batch_limits_come_from_scrapes_and_each_scrape_counts_once() -> None:
    site = Site()
    site.endpoints("a")
    keeper = site.keeper()
    handle = site.table.take(9, lambda slot: True)
    assert handle is not None
    observe(keeper, 3, 0.2, 1)

    def write(at: float, usage: float) -> None:
        page = (6.0, 2.0, usage)
        site.table.write(handle, state=State.FRESH, flags=0, updated_at=at, inflight_at_scrape=0.0, values=page, present=0b111)
        site.table.publish()

    write(0.5, usage=0.97)
    keeper.look()
    assert keeper.model.endpoints[handle.slot].full == 0, "they may wait for memory"
    for scrape in range(1, 30):
        write(float(scrape), usage=0.3)
        keeper.look()
        site.table.publish()
        keeper.look()
        assert keeper.model.endpoints[handle.slot].full == scrape
    assert keeper.model.limit(handle.slot) == 6.0


def test_a_first_token_far_later_than_predicted_is_a_surprise() -> None:
    site = Site()
    keeper = site.keeper()
    for slot, observed in ((1, 0.1), (2, 0.45), (3, 0.55)):
        first = FirstToken(40.0, slot, 1, 100.0, 0.0, 0.0, 1.0, 0.1, observed)
        keeper.take(samples.frame([samples.first_token(first)]))
    assert site.surprises == [3]


def test_prompt_starts_are_shared_and_samples_are_sent_in_batches() -> None:
    site = Site()
    site.worker.begins(2, 7.5)
    site.worker.follows(2, 300.0)
    site.worker.follows(2, 200.0)
    site.worker.counts(1, 3)
    site.worker.counts(1, -1)
    assert site.worker.starts().max(axis=0)[:, 1:3].tolist() == [[0.0, 7.5], [0.0, 7.5], [0.0, 500.0], [2.0, 0.0]]


def test_a_new_replica_predicts_like_the_one_that_it_copies() -> None:
    site, other = Site(), Site()
    site.endpoints("a", "b")
    keeper, joins = site.keeper(), other.keeper()
    assert joins.learned() == b"", "it has nothing to give"
    for slot, seconds in ((0, 0.2), (1, 0.8)):
        observe(keeper, slot, seconds, 100)
    keeper.look()
    other.endpoints("b", "a", first=2)
    assert joins.adopt(keeper.learned(), {0: 3, 1: 2})
    joins.look()
    assert sorted(joins.model.endpoints) == [2, 3]
    for there, here in ((0, 3), (1, 2)):
        assert predicted(other, here) == pytest.approx(predicted(site, there))
    assert joins.model.first.theta == pytest.approx(keeper.model.first.theta)
    observe(joins, 2, 0.8, 10)
    assert not joins.adopt(keeper.learned(), {}), "by now it has learned more"


def test_a_model_of_an_endpoint_that_has_left_here_is_not_taken_over() -> None:
    site, other = Site(), Site()
    site.endpoints("a")
    keeper, joins = site.keeper(), other.keeper()
    observe(keeper, 0, 0.2)
    assert joins.adopt(keeper.learned(), {0: 3})
    assert not joins.model.endpoints


def test_the_time_per_prompt_follows_from_what_servers_compute() -> None:
    site = Site()
    keeper = site.keeper()
    assert keeper.prompt_s() == 0.0
    for tokens in (1_000.0, 3_000.0):
        keeper.take(samples.frame([samples.first_token(FirstToken(50.0, 1, 1, tokens, 0.0, 0.0, 1.0, 0.1, 0.1))]))
    theta = keeper.model.first.theta
    assert keeper.prompt_s() == pytest.approx(2.0 * min(theta[1], theta[2]))


class Pools(Site):
    """Two pools: slots 0 and 1 belong to the first one, 2 and 3 to the second."""

    def __init__(self, folder: str = "", names: Sequence[str] = ("one", "two")) -> None:
        super().__init__(folder)
        self.now = 50.0
        latency = latency_schema_of((SLOTS, SLOTS))
        self.instance.layout.latency, self.instance.memory.latency = latency, region(latency.bytes)
        self.instance.every = self.instance.pools = self.named(*names)
        starts = PromptStarts(self.instance.layout.starts, self.instance.memory.starts, 0)
        reader = DocumentReader(latency, self.instance.memory.latency)
        self.workers = [SharedLearning(reader, starts, self.frames.append, pool) for pool in range(2)]
        records = [EndpointRecord("ns", name, name, 80, {}, slot, 1, 9 + slot, pool=slot // 2) for slot, name in enumerate("abcd")]
        self._documents.write(ENDPOINTS, encode(records))

    def named(self, *names: str) -> list[Any]:
        """The views of pools with these names."""
        of = [{"pool": pool, "options": SimpleNamespace(state_dir=self.folder, pool_name=name)} for pool, name in enumerate(names)]
        return [SimpleNamespace(**(vars(self.instance) | each)) for each in of]

    def keepers(self) -> LatencyKeepers:
        return LatencyKeepers(self.instance, lambda slot: slot // 2 if slot < 4 else None, now=lambda: self.now)


def test_each_pool_learns_from_its_own_answers_and_publishes_its_own_model() -> None:
    site = Pools()
    keepers = site.keepers()
    for slot, seconds in ((0, 1.0), (1, 1.0), (2, 4.0)):
        observe(keepers, slot, seconds)  # type: ignore[arg-type]
    keepers.look()
    one, two = (worker.model() for worker in site.workers)
    assert one.first_token_s(0, 1000.0, 0.0, 0.0, 1.0, 50.0) == pytest.approx(1.0, rel=0.2)
    assert two.first_token_s(2, 1000.0, 0.0, 0.0, 1.0, 50.0) > 2.0
    assert sorted(one.endpoints) == [0, 1] and sorted(two.endpoints) == [2]
    later = site.keepers()
    assert later.model_of(1) is not None and later.model_of(1) is not keepers.model_of(1), "a successor learns on"


def test_samples_of_an_endpoint_that_has_left_are_dropped() -> None:
    site = Pools()
    keepers = site.keepers()
    observe(keepers, 7, 1.0)  # type: ignore[arg-type]
    keepers.look()
    assert keepers.model_of(0) is None


def models_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / POOLS).glob(f"*/{FILE}"))


def test_each_pool_has_a_folder_of_its_own_and_goes_on_where_it_was(tmp_path: Path) -> None:
    site = Pools(str(tmp_path))
    keepers = site.keepers()
    observe(keepers, 2, 0.7)  # type: ignore[arg-type]
    keepers.look()
    keepers.save()
    assert models_in(tmp_path) == ["two"] and not (tmp_path / FILE).exists()
    later = Pools(str(tmp_path), ("two", "one")).keepers()
    assert set(later.keepers()) == {0}, "the pool has another number now"
    assert later.keepers()[0].model.first.theta == pytest.approx(keepers.keepers()[1].model.first.theta)


def test_models_are_saved_in_turn_and_only_if_they_have_changed(tmp_path: Path) -> None:
    site = Pools(str(tmp_path))
    keepers = site.keepers()
    for slot in (0, 2):
        observe(keepers, slot, 0.7)  # type: ignore[arg-type]

    def turns(count: int) -> list[int]:
        """Lets the keepers save in so many seconds. Returns how many models there were in the end of each."""
        saved = []
        for _ in range(count):
            site.now += 1.0
            keepers.save_some()
            saved.append(len(models_in(tmp_path)))
        return saved

    assert turns(60)[-2:] == [0, 0]
    assert turns(3) == [1, 2, 2]
    for name in models_in(tmp_path):
        (tmp_path / POOLS / name / FILE).unlink()
    assert turns(60)[-1] == 0
    observe(keepers, 0, 0.7)  # type: ignore[arg-type]
    assert turns(60)[-1] == 1


def test_a_pool_that_takes_the_place_of_another_gets_its_own_model_and_not_that_of_the_other(tmp_path: Path) -> None:
    site = Pools(str(tmp_path))
    keepers = site.keepers()
    observe(keepers, 2, 4.0)  # type: ignore[arg-type]
    keepers.look()
    assert site.workers[1].model().first.count == 40
    views = site.named("one", "three")
    views[0] = site.instance.pools[0]
    keepers.use(SimpleNamespace(every=views))  # type: ignore[arg-type]
    assert site.workers[1].model().first.count == 0, "its own model begins anew"
    back = site.named("one", "two")
    back[0] = site.instance.pools[0]
    keepers.use(SimpleNamespace(every=back))  # type: ignore[arg-type]
    assert site.workers[1].model().first.count == 40, "it was saved when the pool went"
    keepers.use(SimpleNamespace(every=site.named("one", "")))  # type: ignore[arg-type]
    keepers.save()
    assert models_in(tmp_path) == ["two"], "an empty place has no folder"


def test_folders_of_pools_that_are_gone_are_bounded_and_files_of_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / POOLS
    for number in range(GONE_MAX + 4):
        (folder / f"gone-{number}").mkdir(parents=True)
        (folder / f"gone-{number}" / FILE).write_bytes(b"x")
        if number == 1:
            (folder / "gone-1" / "notes").write_text("of somebody")
        os.utime(folder / f"gone-{number}", (number, number))
    (folder / "served").mkdir()
    os.utime(folder / "served", (0, 0))
    remove_oldest(str(tmp_path), {"served"}, 2)
    left = {path.name for path in folder.iterdir()}
    assert left == {f"gone-{number}" for number in range(GONE_MAX + 4) if number not in (0, 2)} | {"served"}
    assert [path.name for path in (folder / "gone-1").iterdir()] == ["notes"]
    remove_oldest(str(tmp_path / "nothing"), (), 1)
