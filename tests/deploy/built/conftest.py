"""Tests that need helm, kustomize, an API server or a package index. They run only if this folder is named, by `make test-kube`."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.demo.children import Children
from tests.deploy.built.definitions import DEFINITIONS
from tests.deploy.renderers import built
from tests.kube.control_plane import ControlPlane
from tests.kube.objects import install

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves these tests out of a run of all tests: their tools take minutes to build."""
    named = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


@pytest.fixture(scope="session", autouse=True)
def _renderers() -> None:
    assert built(), "helm and kustomize are not built: python -m tests.deploy.renderers"


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    """An API server that knows all rendered kinds."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="epp-deploy-", dir=memory if memory.is_dir() else None) as directory:
        children = Children(Path(directory))
        try:
            plane = ControlPlane(children, Path(directory)).start()
            kube = plane.kube()
            install(kube)
            install(kube, DEFINITIONS)
            yield plane
            plane.close()
        finally:
            asyncio.run(children.end())
