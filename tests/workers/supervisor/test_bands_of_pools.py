"""The memory of one of several pools has room for few bands: no reload gives a band a place beyond it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from epp.config.load import load
from epp.request.pool_choice import Matched, PoolChoice
from shm.documents import DocumentReader
from tests.reports import Reports
from tests.workers.flow_world import config, objective
from tests.workers.instances import options, removed
from workers.process import StartError, pool_views
from workers.process.generations import Bundle, Given
from workers.process.instance import Instance
from workers.process.places import Pool
from workers.shared.documents import objectives_of
from workers.shared.objectives import decode
from workers.supervisor.objects_of_pools import PoolsObjects

NAMES = ("a", "b")
OFF = "plugins: [{type: random-picker}]\n"
OBJECTIVES = 10


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    """Two pools without flow control, with more objectives than their memory has room for bands."""
    folder = tmp_path / "objects"
    folder.mkdir()
    for priority in range(1, 1 + OBJECTIVES):
        (folder / f"{priority}.yaml").write_text(objective(f"o{priority}", priority))
    pools = [Pool(name, Given(OFF, "c.yaml", {}), load(OFF, "c.yaml"), "127.0.0.1:1", 4) for name in NAMES]
    choice = PoolChoice([Matched(name, 0, (f"{name}.svc",)) for name in NAMES])
    with removed(pool_views.create(options(tmp_path, objects_dir=str(folder)), pools, choice, {})) as made:
        yield made


def later(view: Instance, text: str) -> Instance:
    """Returns a pool under a later configuration."""
    bundle = Bundle(2, "c.yaml", text, "", {}, view.layout.names, 0.0, pool=view.options.pool_name)
    return view.under(load(text, "c.yaml"), bundle)


def test_a_pool_that_gets_flow_control_by_a_reload_has_places_for_as_many_bands_as_its_memory(instance: Instance) -> None:
    objects, view = PoolsObjects(instance, Reports()), instance.pools[0]
    objects.start(successor=False)
    objects.reconfigured(view, later(view, config()))
    published = DocumentReader(instance.layout.documents, instance.memory.documents).read(objectives_of(0))
    assert published is not None
    places = decode(published[1]).places
    assert sorted(places.values()) == list(range(view.memory.flow.schema.bands))
    assert places.keys() == {0, *range(1 + OBJECTIVES + 1 - len(places), 1 + OBJECTIVES)}, "the most important bands have places"


def test_a_configuration_with_more_bands_than_the_memory_has_room_for_needs_a_restart(instance: Instance) -> None:
    view = instance.pools[0]
    most = view.memory.flow.schema.bands

    def bands(count: int) -> str:
        return config(f"priorityBands: [{', '.join(f'{{priority: {priority}}}' for priority in range(1, count))}]")

    assert later(view, bands(most)).config.flow is not None
    with pytest.raises(StartError, match=f"flow control has {most + 1} bands, and the memory of the pool has room for {most}"):
        later(view, bands(most + 1))
