import json
from typing import Annotated, Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from epp.config import registry
from epp.data import INFLIGHT_REQUESTS, Datum
from epp.plugin import Scorer
from workers.cli import main
from workers.cli.plugins import _text, listing


def plugins(*args: str) -> Result:
    return CliRunner().invoke(main, ["plugins", *args])


def test_every_type_is_listed_in_a_line_under_its_extension_point() -> None:
    result = plugins()
    assert result.exit_code == 0
    sections = dict(section.split("\n", 1) for section in result.stdout.split("\n\n"))
    assert any(line.startswith("  queue-scorer   ") for line in sections["Scorer"].splitlines())
    listed = [line.split()[0] for section in sections.values() for line in section.splitlines()]
    assert sorted(listed) == sorted({cls.type_name for cls in registry.known().values()})
    assert all(len(line) <= 120 for line in result.stdout.splitlines())


def test_a_type_is_shown_with_extension_points_parameters_ranges_and_data() -> None:
    text = plugins("queue-scorer").stdout
    assert text.startswith("queue-scorer  [Scorer]\n")
    assert "    reads: waiting_requests (from core-metrics-extractor)\n" in text
    text = plugins("prefix-cache-scorer").stdout
    assert "    matchLengthScaleTokens = 8192  (integer, tuned from 256 to 65,536, >= 0)\n" in text
    assert "    path (required)  (string, at least 1 characters)\n" in plugins("file-discovery").stdout
    assert '    scheme = "http"  (one of http, https)\n' in plugins("metrics-data-source").stdout


def test_json_has_a_schema_of_the_parameters_and_both_ends_of_each_datum() -> None:
    entries = {entry["type"]: entry for entry in json.loads(plugins("--json").stdout)}
    prefix = entries["prefix-cache-scorer"]
    (read,) = prefix["reads"]
    assert (read["key"], read["type"]) == ("prefix_match/approx-prefix-cache-producer", "PrefixMatch")
    assert "approx-prefix-cache-producer" in read["producers"]
    assert prefix["schema"]["$defs"]
    assert prefix["stability"] == "stable"
    (path,) = [p for p in entries["file-discovery"]["parameters"] if p["name"] == "path"]
    assert path == {
        "name": "path",
        "required": True,
        "type": "string",
        "range": "at least 1 characters",
        "description": "The path of the file.",
    }
    (emitted,) = entries["approx-prefix-cache-producer"]["emits"]
    assert "prefix-cache-scorer" in emitted["readers"]


def test_data_that_defaults_read_have_producers_except_of_types_that_do_not_exist_here() -> None:
    entries = json.loads(plugins("--json").stdout)
    gone = registry.REFERENCE_TYPES - registry.known().keys()
    alone = [(e["type"], r["key"]) for e in entries for r in e["reads"] if not (r["producers"] or r.get("optional"))]
    assert [(name, key) for name, key in alone if key.rpartition("/")[2] not in gone] == []


def test_one_type_is_shown_with_the_docstring_of_its_class() -> None:
    result = plugins("prefix-cache-scorer")
    assert result.exit_code == 0
    assert "module: epp.plugins.scorers.prefix_cache" in result.stdout
    assert "an endpoint scores 1 if it can reuse all tokens that a server can ever reuse" in result.stdout
    assert "queue-scorer" not in result.stdout
    assert json.loads(plugins("--json", "prefix-cache-scorer").stdout)["type"] == "prefix-cache-scorer"


def test_one_type_is_shown_with_its_metrics() -> None:
    text = plugins("disagg-profile-handler").stdout
    assert "    counter: llm_d_epp_disagg_decision_total{plugin_name,plugin_type,model_name,decision_type}\n" in text
    assert "    histogram: llm_d_epp_prefix_indexer_hit_ratio{plugin_name,plugin_type}\n" in plugins("approx-prefix-cache-producer").stdout


def test_a_type_with_required_parameters_is_listed_with_the_data_that_it_produces() -> None:
    assert "    emits: SessionIDDataKey/session-id-producer (" in plugins("session-id-producer").stdout


def test_one_type_is_shown_with_the_meaning_of_empty_values_and_with_nested_fields() -> None:
    text = plugins("active-request-scorer").stdout
    assert "    maxBusyScore = 1.0  (number)\n        The highest possible score of a busy endpoint" in text
    assert "\nParameters: When an endpoint is idle, and how high a busy endpoint can score.\n" in text
    text = plugins("disagg-profile-handler").stdout
    assert '\nStageProfiles: Scheduling profiles of the stages; empty means the default name.\n    decode = ""  (string)\n' in text
    assert '    mode = "dynamic"  (one of "", dynamic, static)\n' in plugins("token-producer").stdout
    assert plugins("queue-scorer").stdout.endswith("linear between.\n")


def test_a_queue_is_shown_with_its_capabilities_and_a_policy_with_its_needs() -> None:
    assert "    can: head, tail, scan\n" in plugins("fifo-queue").stdout
    assert "    needs of its queue: head, priority order\n" in plugins("edf-ordering-policy").stdout
    entries = {entry["type"]: entry for entry in json.loads(plugins("--json").stdout)}
    assert entries["newest-displacement-policy"]["queue"] == {"needs": "tail"}
    assert entries["queue-scorer"]["queue"] == {}


def test_an_unknown_type_is_an_error_with_a_hint() -> None:
    result = plugins("queue-scorr")
    assert result.exit_code == 1
    assert "plugin type 'queue-scorr' is not registered (did you mean 'queue-scorer'?)" in result.stderr


class Nested(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    many: Annotated[list[Nested], msgspec.Meta(min_length=1)]
    either: Annotated[int, msgspec.Meta(ge=1, le=5)] | str | None = None
    names: tuple[str, ...] = ("a",)
    anything: Any = None


class Sample(Scorer):
    """One line.

    More.
    """

    type_name = "new-name"
    aliases = ("old-name",)
    Params = Parameters
    consumes = (INFLIGHT_REQUESTS, Datum("missing", int))
    optional = (Datum("perhaps", int),)


def test_a_type_with_aliases_is_listed_once_with_all_kinds_of_parameters_and_data() -> None:
    entry = listing({"new-name": Sample, "old-name": Sample})["new-name"]
    assert (entry["aliases"], entry["summary"], entry["stability"]) == (["old-name"], "One line.", "external")
    assert [(p["name"], p["type"], p["range"]) for p in entry["parameters"]] == [
        ("many", "array of object", "at least 1"),
        ("either", "integer or string", ">= 1, <= 5"),
        ("names", "array of string", ""),
        ("anything", "", ""),
    ]
    text = _text(entry)
    assert "new-name  [Scorer, external]\n    aliases: old-name\n" in text
    assert "reads: inflight_requests (from the picker)" in text
    assert "reads: missing (from no registered type)" in text
    assert "reads: perhaps (from no registered type, optional)" in text
    assert '    names = ["a"]  (array of string)\n    anything = null' in text


def test_a_broken_plugin_module_is_an_error_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise registry.PluginImportError("plugin module epp.plugins.x cannot be imported")

    monkeypatch.setattr(registry, "known", broken)
    result = CliRunner().invoke(main, ["plugins"])
    assert result.exit_code == 1
    assert "epp.plugins.x" in result.stderr
