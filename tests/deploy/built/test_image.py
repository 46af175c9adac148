"""The image's steps in a fresh directory; about a minute."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import image
from workers.cli.manifests import version


@pytest.fixture(scope="module")
def built() -> Iterator[image.Image]:
    with tempfile.TemporaryDirectory(prefix="epp-image-") as directory:
        os.chmod(directory, 0o755)  # the image's user is another one
        yield image.build(Path(directory))


@pytest.mark.timeout(400)
def test_the_installed_command_runs_as_the_images_user(built: image.Image) -> None:
    assert image.run(built, "--version") == f"epp {version()}\n"
    image.run(built, "check", "--quiet", "/etc/epp/config.yaml")


def test_the_manifests_are_in_it(built: image.Image) -> None:
    assert "kind: Deployment" in image.run(built, "manifests", "--selector=app=vllm")


def test_nothing_that_builds_or_installs_is_left(built: image.Image) -> None:
    assert image.superfluous(built) == []


def test_it_serves_and_writes_nothing_but_shared_memory(built: image.Image) -> None:
    assert image.serve(built)
