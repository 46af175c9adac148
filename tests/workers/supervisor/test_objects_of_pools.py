"""Objectives and rewrites of several pools: what each gets from the directory, and what changes when pools change."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from epp.request.pool_choice import PoolChoice
from loadtest.demo.ports import free_ports
from shm.documents import DocumentReader
from tests.reports import Reports
from tests.workers.instances import options, removed
from tests.workers.process.test_pool_views import found, pool
from tests.workers.supervisor.kube.test_object_files import objective
from workers.host.yaml_files import DiscoveryError
from workers.process import pool_views
from workers.process.instance import Instance
from workers.process.layout import POOL_BANDS_BYTES
from workers.process.places import DEFAULT, Places
from workers.process.pool_views import assigned, create_places
from workers.shared.documents import Placed, objectives_of
from workers.shared.objectives import decode
from workers.supervisor.objects_of_pools import PoolsObjects

OF = "  poolRef: {name: %s}\n"
OF_BOTH = "  poolRef: [{name: one}, {name: two}]\n"


class World:
    def __init__(self, instance: Instance, folder: Path) -> None:
        self.folder = folder
        self.reports = Reports()
        self.instance = instance
        self.objects = PoolsObjects(instance, self.reports)

    def write(self, *texts: str) -> None:
        (self.folder / "objects.yaml").write_text("# objects\n" + "---\n".join(texts))

    def priorities(self, number: int) -> Mapping[str, int]:
        read = DocumentReader(self.instance.layout.documents, self.instance.memory.documents).read(objectives_of(number))
        return decode(read[1]).priorities if read is not None else {}

    @property
    def all(self) -> list[Mapping[str, int]]:
        return [self.priorities(number) for number in range(len(self.instance.pools))]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    folder = tmp_path / "objects"
    folder.mkdir()
    given = [pool("one"), pool("two"), pool("three")]
    instance = pool_views.create(options(tmp_path, max_endpoints=12, objects_dir=str(folder)), given, PoolChoice([]), {})
    with removed(instance):
        yield World(instance, folder)


def test_each_pool_gets_its_objects_and_those_of_all(world: World) -> None:
    world.write(objective("a", 1), objective("b", 2, more=OF % "one"), objective("c", 3, more=OF_BOTH), objective("d", 4, more=OF % "x"))
    world.objects.start(successor=False)
    assert world.all == [{"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3}, {"a": 1}]
    assert [each for each in world.reports if "not served here" in each] == world.reports and len(world.reports) == 1


def test_pools_may_have_different_objects_of_one_name(world: World) -> None:
    world.write(objective("a", 1, more=OF % "one"), objective("a", 2, more=OF % "two"))
    world.objects.start(successor=False)
    assert world.all == [{"a": 1}, {"a": 2}, {}]


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ((objective("a", 1), objective("a", 2, more=OF % "one")), "'a' is given twice"),
        ((objective("a", 1), objective("a", 2)), "'a' is given twice"),
        ((objective("a", 1, more="  poolRef: []\n"),), "spec.poolRef: the list is empty"),
        ((objective("a", 1, more="  poolRef: [one]\n"),), "spec.poolRef[0] must be a mapping"),
        ((objective("a", 1, more=f"  poolRef: [{', '.join(['{name: one}'] * 257)}]\n"),), "spec.poolRef: more than 256"),
    ],
)
def test_a_bad_object_ends_the_start_with_one_fault_for_all_pools(world: World, texts: tuple[str, ...], why: str) -> None:
    world.write(*texts)
    with pytest.raises(DiscoveryError) as refused:
        world.objects.start(successor=False)
    assert len(refused.value.faults) == 1 and why in refused.value.faults[0]


def test_a_successor_keeps_what_its_predecessor_published_until_it_can_read_the_directory(world: World) -> None:
    world.write(objective("a", 1))
    world.objects.start(successor=False)
    (world.folder / "objects.yaml").unlink()
    world.folder.rmdir()
    PoolsObjects(world.instance, world.reports).start(successor=True)
    assert world.all == [{"a": 1}] * 3


def test_a_pool_without_objects_needs_no_memory_for_them(tmp_path: Path) -> None:
    with removed(pool_views.create(options(tmp_path, max_endpoints=8), [pool("one"), pool("two")], PoolChoice([]), {})) as instance:
        assert not PoolsObjects(instance, Reports()).asking
        assert instance.layout.documents.capacities[objectives_of(1)] == POOL_BANDS_BYTES


@contextlib.contextmanager
def places(folder: Path) -> Iterator[World]:
    files = folder / "objects"
    files.mkdir()
    given = options(folder, max_endpoints=8, pool_given=True, objects_dir=str(files))
    with removed(create_places(given, Places({DEFAULT: found("default")}, free_ports(2), service="epp"))) as instance:
        yield World(instance, files)


def test_a_pool_that_appears_gets_the_objects_of_its_name(tmp_path: Path) -> None:
    with places(tmp_path) as world:
        world.write(objective("a", 1), objective("b", 2, more=OF % "one"))
        world.objects.start(successor=False)
        assert world.all == [{"a": 1}] * 2, "the places are empty"
        told: list[str] = []
        world.objects.on_change(lambda: told.append("changed"))
        world.objects.use(assigned(world.instance, {1: Placed("one", 0)}).pools)
        assert world.all == [{"a": 1}, {"a": 1, "b": 2}] and told == ["changed"]
        world.objects.use(assigned(world.instance, {0: Placed("one", 0)}).pools)
        assert world.all == [{"a": 1, "b": 2}, {"a": 1}]
