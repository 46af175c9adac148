import json

import pytest
from click.testing import CliRunner

from epp.config import registry
from epp.config.schema import schema
from workers.cli import main


def test_the_schema_is_printed_with_all_types() -> None:
    result = CliRunner().invoke(main, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == schema(registry.known())


def test_a_broken_plugin_module_is_an_error_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise registry.PluginImportError("plugin module epp.plugins.x cannot be imported")

    monkeypatch.setattr(registry, "known", broken)
    result = CliRunner().invoke(main, ["schema"])
    assert result.exit_code == 1
    assert "epp.plugins.x" in result.stderr
