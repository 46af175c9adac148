"""The configurations in deploy/config are read, fit together, and say what they mean."""

from pathlib import Path

import pytest

from epp.config import EffectiveConfig, load
from epp.registry import EXPERIMENTAL_TYPES

FOLDER = Path(__file__).parents[2] / "deploy" / "config"
FILES = sorted(FOLDER.glob("*.yaml"))


def loaded(file: Path) -> EffectiveConfig:
    return load(file.read_text(encoding="utf-8"), file.name, allow_experimental=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_configuration_loads_with_nothing_to_be_told(file: Path) -> None:
    config = loaded(file)
    assert [str(warning) for warning in config.warnings] == []
    assert config.discovery is not None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_says_how_it_is_started_and_with_the_flag_that_its_plugins_need(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    (command,) = [line for line in text.splitlines() if line.startswith("#   epp serve ")]
    assert f"--config-file deploy/config/{file.name}" in command
    types = {plugin["type"] for plugin in loaded(file).document["plugins"]}
    assert ("--allow-experimental-plugins" in command) is bool(types & EXPERIMENTAL_TYPES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_with_all_defaults_written_out_it_means_the_same(file: Path) -> None:
    config = loaded(file)
    again = load(config.as_yaml(), "effective.yaml", allow_experimental=True)
    assert again.as_yaml() == config.as_yaml()
    assert again.warnings == ()
