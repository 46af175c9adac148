import json

import pytest
from click.testing import CliRunner

from epp import registry
from epp.plugin import Scorer
from workers.cli import main
from workers.cli.plugins import describe


def test_every_type_is_listed_with_kind_parameters_and_what_it_reads_and_emits() -> None:
    result = CliRunner().invoke(main, ["plugins"])
    assert result.exit_code == 0
    text = result.stdout
    assert "queue-scorer  [Scorer]\n" in text
    assert "    reads: waiting_requests\n" in text
    assert "    matchLengthScaleTokens = 8192\n" in text
    assert "    path (required)\n" in text
    assert all(f"{cls.type_name}  [" in text for cls in registry.known().values())


def test_json_has_a_schema_of_the_parameters() -> None:
    entries = {entry["type"]: entry for entry in json.loads(CliRunner().invoke(main, ["plugins", "--json"]).stdout)}
    prefix = entries["prefix-cache-scorer"]
    assert prefix["reads"] == ["prefix_match/approx-prefix-cache-producer"]
    assert prefix["schema"]["$defs"]
    assert {"name": "path", "required": True} in entries["file-discovery"]["parameters"]


def test_a_type_with_aliases_is_listed_once_with_them() -> None:
    class Aliased(Scorer):
        """One line.

        More.
        """

        type_name = "new-name"
        aliases = ("old-name",)

    entry = describe(Aliased)
    assert (entry["aliases"], entry["summary"], entry["parameters"]) == (["old-name"], "One line.", [])


def test_a_broken_plugin_module_is_a_fault_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise registry.PluginImportError("plugin module epp.plugins.x cannot be imported")

    monkeypatch.setattr(registry, "known", broken)
    result = CliRunner().invoke(main, ["plugins"])
    assert result.exit_code == 1
    assert "epp.plugins.x" in result.stderr
