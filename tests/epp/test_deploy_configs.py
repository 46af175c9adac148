"""The configurations in deploy/config load without warnings and document the command that starts them."""

from pathlib import Path

import pytest

from epp.config.load import EffectiveConfig, load
from epp.config.registry import EXPERIMENTAL_TYPES

FOLDER = Path(__file__).parents[2] / "deploy" / "config"
FILES = sorted(FOLDER.glob("*.yaml"))


def loaded(file: Path) -> EffectiveConfig:
    return load(file.read_text(encoding="utf-8"), file.name, allow_experimental=True)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_configuration_loads_without_warnings(file: Path) -> None:
    config = loaded(file)
    assert [str(warning) for warning in config.warnings] == []
    assert config.discovery is not None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_comment_has_the_command_with_the_flags_that_its_plugins_need(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    (command,) = [line for line in text.splitlines() if line.startswith("#   epp serve ")]
    assert f"--config-file deploy/config/{file.name}" in command
    types = {plugin["type"] for plugin in loaded(file).document["plugins"]}
    assert ("--allow-experimental-plugins" in command) is bool(types & EXPERIMENTAL_TYPES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_marks_experimental_plugins_and_names_its_schema_and_the_sample_of_its_endpoints(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=epp.schema.json\n")
    assert (FOLDER / "epp.schema.json").exists()
    assert "deploy/endpoints.yaml is a sample" in text
    used = {plugin["type"] for plugin in loaded(file).document["plugins"]} & EXPERIMENTAL_TYPES
    assert {line.split()[-3] for line in text.splitlines() if line.endswith("  # experimental")} == used


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_is_unchanged_when_all_defaults_are_written_out(file: Path) -> None:
    config = loaded(file)
    again = load(config.as_yaml(), "effective.yaml", allow_experimental=True)
    assert again.as_yaml() == config.as_yaml()
    assert again.warnings == ()
