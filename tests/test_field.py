"""The trial of configurations: what it changes in them, and what it reports."""

from pathlib import Path

import pytest

from epp.config.load import load
from epp.config.yaml_nodes import plain
from epp.plugins.discovery import FileDiscovery
from loadtest.demo.children import python
from tests import field
from tests.e2e.cluster import run

REFUSED = "plugins: [{type: no-such-scorer}]\n"
NOWHERE = """\
plugins:
- {type: label-selector-filter, parameters: {matchExpressions: [{key: zone, operator: Exists}]}}
- {type: random-picker}
"""
ROUTES = """\
plugins:
- {type: label-selector-filter, parameters: {matchLabels: {tier: gold}}}
- {type: queue-scorer}
- {type: file-discovery, name: mine, parameters: {path: /nowhere.yaml}}
dataLayer: {discovery: {pluginRef: mine}}
"""


def test_only_the_discovery_of_a_configuration_is_replaced(tmp_path: Path) -> None:
    config = load(field.with_endpoints(ROUTES, tmp_path / "e.yaml"), "c.yaml")
    assert isinstance(config.discovery, FileDiscovery)
    assert config.discovery.params.path == str(tmp_path / "e.yaml")
    assert "mine" not in config.pipeline.plugins
    assert {"label-selector-filter", "queue-scorer"} <= config.pipeline.plugins.keys()


def test_endpoints_have_a_role_each_and_the_labels_that_the_configuration_selects_by(tmp_path: Path) -> None:
    labels = field.selected_labels(
        {
            "plugins": [
                {"matchLabels": {"tier": "gold"}},
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]},
                {"label": "kind", "validValues": ["decode"]},
                {"labelSelector": "set=x,other=y"},
            ]
        }
    )
    assert labels == {"tier": "gold", "zone": "a", "kind": "decode", "set": "x", "other": "y"}
    field.write_endpoints(tmp_path / "e.yaml", [f"h:{n}" for n in range(6)], labels)
    entries = plain((tmp_path / "e.yaml").read_text())["endpoints"]
    assert [entry["labels"]["llm-d.ai/role"] for entry in entries] == [*("prefill", "decode", "encode"), *("prefill", "decode", "encode")]
    assert [entry["labels"].get("kind") for entry in entries] == ["prefill", "decode", "encode", None, None, None]
    assert [entry["labels"].get("tier") for entry in entries] == ["gold"] * 3 + [None] * 3


def tried(*arguments: str) -> tuple[int, str]:
    """Runs `tests.field` in a process of its own, because it forks. Returns its exit code and its output."""
    done = run(python("tests.field", *arguments))
    return done.returncode, done.stdout


def test_a_folder_is_judged_by_refusals_and_by_requests_that_get_no_endpoint(tmp_path: Path) -> None:
    for name, text in (("refused", REFUSED), ("nowhere", NOWHERE), ("routes", ROUTES)):
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "expected.txt").write_text("# reasons\nrefused  an unknown type\n")
    expected = ["--expected", str(tmp_path / "expected.txt")]
    code, out = tried(str(tmp_path), *expected)
    assert code == 1
    assert "nowhere.yaml: no endpoint was chosen: ValueError: 429" in out
    assert "1 of 2 accepted files start and route a request" in out
    assert "refused: 1, 0 not expected" in out
    assert tried(str(tmp_path), "--only", "routes", *expected)[0] == 0


def test_a_folder_that_does_not_exist_is_skipped_with_a_clear_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert field.main([str(tmp_path / "none")]) == 0
    assert "skipped: there is no folder" in capsys.readouterr().out
