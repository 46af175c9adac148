"""What a trial child reads of the files of several pools: which of them have changed, and what a pool has now."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epp.config.load import load
from loadtest.demo.ports import free_ports
from tests.workers.instances import options, removed
from workers.cli.flags import BadConfiguration
from workers.cli.trial import given_of, tried_list
from workers.process.generations import Attempt, Given
from workers.process.instance import Instance
from workers.process.places import DEFAULT, Places, Pool
from workers.process.pool_views import assigned, create_places
from workers.shared.documents import Placed

QUEUE = "plugins: [{type: queue-scorer}]\n"
CACHE = "plugins: [{type: kv-cache-utilization-scorer}]\n"


class Folder:
    """A picker that has found three InferencePools, of which `llama` has a file of its own in --config-dir."""

    def __init__(self, folder: Path, instance: Instance, ports: list[int]) -> None:
        self.folder = folder
        names = {place: Placed(name, ports[place]) for place, name in enumerate(("llama", "qwen", "phi"))}
        self.instance = assigned(instance, names)

    def changed(self) -> list[str]:
        result = tried_list(self.instance, Attempt(1, 2, self.instance.layout.names, key=4))
        assert result.bundle is not None and result.bundle.pool_list is None
        return [self.instance.pools[place].options.pool_name for place in result.changed]

    def text(self, pool: int) -> str | None:
        return given_of(self.instance.pools[pool]).text


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Folder]:
    folder = tmp_path / "configurations"
    folder.mkdir()
    configurations = {}
    for name, text in ((DEFAULT, QUEUE), ("llama", CACHE)):
        file = folder / f"{name}.yaml"
        file.write_text(text)
        configurations[name] = Pool(name, Given(text, str(file), {}), load(text, str(file)), "", 4)
    ports = free_ports(4)
    given: Any = options(tmp_path, max_endpoints=16, pool_given=True, config_dir=str(folder))
    with removed(create_places(given, Places(configurations, ports, service="epp"))) as instance:
        yield Folder(folder, instance, ports)


def test_a_changed_file_of_a_pool_reloads_that_pool_and_the_default_those_without_one(found: Folder) -> None:
    assert found.changed() == []
    (found.folder / "llama.yaml").write_text(QUEUE)
    assert found.changed() == ["llama"]
    assert (found.text(0), found.text(1)) == (QUEUE, QUEUE)
    (found.folder / "default.yaml").write_text(CACHE)
    assert found.changed() == ["llama", "qwen", "phi"]


def test_a_file_that_comes_for_a_pool_takes_the_place_of_the_default_one(found: Folder) -> None:
    (found.folder / "phi.yaml").write_text(CACHE)
    assert found.changed() == ["phi"]
    assert (found.text(1), found.text(2)) == (QUEUE, CACHE)
    (found.folder / "phi.yaml").unlink()
    assert found.changed() == []


def test_a_folder_that_cannot_be_read_is_refused(found: Folder) -> None:
    for file in found.folder.iterdir():
        file.unlink()
    found.folder.rmdir()
    with pytest.raises(BadConfiguration, match="--config-dir"):
        found.changed()
