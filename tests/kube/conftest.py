"""One API server for the whole session. Tests of this folder are collected only if the command line names it: `make test-kube`."""

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.demo.children import Children
from tests.e2e.cluster import Cluster
from tests.kube.control_plane import ControlPlane
from tests.kube.objects import install
from tests.kube.silent import Silent
from tests.kube.world import World

HERE = Path(__file__).parent
OUTAGE_S = 3.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outage-s", type=float, default=OUTAGE_S, help="how long the API server stays away")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves this folder out of a run of all tests, because the API server takes minutes to build."""
    named = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    with tempfile.TemporaryDirectory(prefix="epp-kube-", dir=_fast()) as directory:
        children = Children(Path(directory))
        try:
            plane = ControlPlane(children, Path(directory)).start()
            install(plane.kube())
            yield plane
            plane.close()
        finally:
            asyncio.run(children.end())


def _fast() -> str | None:
    """A folder in memory, if there is one: etcd syncs every write, which is slow on a disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


_SPACES = itertools.count(1)


@pytest.fixture
def world(plane: ControlPlane) -> Iterator[World]:
    with Cluster() as cluster:
        yield World(plane, cluster, f"t{next(_SPACES)}")
        plane.close()


@pytest.fixture(scope="session", autouse=True)
def silent(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Silent | None]:
    """A watch that is silenced before all tests. The last test checks it, because a dead watch is detected after more than a minute."""
    if not any("silent_watch" in item.nodeid for item in request.session.items):
        yield None
        return
    with Cluster() as cluster:
        yield Silent(World(plane, cluster, "silent"))


@pytest.fixture
def outage_s(request: pytest.FixtureRequest) -> float:
    seconds: float = request.config.getoption("--outage-s")
    return seconds
