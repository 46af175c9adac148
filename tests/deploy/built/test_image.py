"""The image's steps in a fresh directory: about a minute."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import image
from workers.host.build import version


@pytest.fixture(scope="module")
def built() -> Iterator[image.Image]:
    with tempfile.TemporaryDirectory(prefix="epp-image-") as directory:
        os.chmod(directory, 0o755)  # the image's user must be able to read it
        yield image.build(Path(directory))


@pytest.mark.timeout(400)
def test_the_installed_command_runs_as_the_images_user(built: image.Image) -> None:
    assert image.run(built, "--version") == f"epp {version()}, compiled\n"
    image.run(built, "check", "--quiet", "/etc/epp/config.yaml")


def test_the_chart_is_in_it(built: image.Image) -> None:
    assert list((built.root / "opt").rglob("workers/cli/manifests/chart/Chart.yaml"))


def test_no_compiler_or_installer_remains(built: image.Image) -> None:
    assert image.superfluous(built) == []


def test_it_serves_and_writes_only_shared_memory(built: image.Image) -> None:
    assert image.serve(built)
