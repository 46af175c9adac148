from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config.edit import Removed, rewritten
from epp.config.load import ConfigErrors, load
from epp.config.migrate import migrate
from epp.config.yaml_nodes import dump, plain
from tests.examples import examples

FOLDER = Path(__file__).parents[2] / "fuzz" / "corpus" / "config"
CORPUS = sorted(path for path in FOLDER.iterdir() if path.name != "pools")  # a file of pools
OLD = """\
# my file
apiVersion: llm-d.ai/v1alpha1   # the old one
featureGates: [dataLayer, flowControl]
plugins:
- type: pd-profile-handler
  parameters:
    deciderPluginName: always-disagg-pd-decider  # always
- type: always-disagg-pd-decider
- type: prefill-header-handler
# keep me
- type: by-label
  parameters: {label: a, validValues: [x, 'y']}
- type: queue-scorer   # queues
- name: disc
  type: file-discovery
  parameters:
    path: /e.yaml
- type: approx-prefix-cache-producer
  parameters:
    blockSize: 64   # tokens
schedulingProfiles:
- name: decode
  plugins:
  - pluginRef: by-label
  - pluginRef: queue-scorer
- name: prefill
saturationDetector: {pluginRef: utilization-detector}
parser:
  pluginRef: openai-parser
dataLayer:
  # where they come from
  discovery:
    pluginRef: disc  # a file
  peerDiscovery: {pluginRef: p}
  crossReplicaSyncInterval: 1s  # often
  crossReplicaPublishTimeout: 2s
"""
CURRENT = """\
# my file
apiVersion: llm-d.ai/v1   # the old one
featureGates: [flowControl]
plugins:
- type: disagg-profile-handler
  parameters:
    deciders:
      prefill: always-disagg-pd-decider  # always
- type: always-disagg-pd-decider
# keep me
- type: label-selector-filter
  parameters: {matchExpressions: [{key: a, operator: In, values: [x, 'y']}]}
  name: by-label
- type: queue-scorer   # queues
- name: disc
  type: file-discovery
  parameters:
    path: /e.yaml
- type: approx-prefix-cache-producer
  parameters:
    blockSizeTokens: 64   # tokens
schedulingProfiles:
- name: decode
  plugins:
  - pluginRef: by-label
  - pluginRef: queue-scorer
- name: prefill
flowControl:
  saturationDetector:
    pluginRef: utilization-detector
requestHandler:
  parsers:
  - pluginRef: openai-parser
dataLayer:
  # where they come from
  discovery:
    endpoints:
      pluginRef: disc  # a file
    peers:
      pluginRef: p
  crossReplica:
    syncInterval: 1s
    publishTimeout: 2s  # often
"""


def test_everything_that_has_a_newer_form_gets_it_and_comments_and_layout_stay() -> None:
    text, remarks = migrate(OLD, "c.yaml")
    assert plain(text) == plain(CURRENT)
    comments, expected = ([line.partition("#")[2] for line in t.splitlines() if "#" in line] for t in (text, CURRENT))
    assert comments == expected
    assert migrate("plugins: []\n", "c.yaml")[0] == "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: []\n"
    assert remarks == []
    assert "deprecated" not in {warning.rule for warning in load(text, "c.yaml").warnings}


ROLLOUT = """\
apiVersion: llm-d.ai/v1alpha1
plugins:
- type: disaggregatedset-rollout-screener
  parameters:
    scope: {labelSelector: set=a}
    revisionGating:
      mode: sum
      requireRoles:
        values: [prefill, decode]  # both
- {type: redis-state-store, name: shared, parameters: {ttl: 60s}}
- {type: precise-prefix-cache-producer, parameters: {tokenProcessorConfig: {blockSize: 64, hashSeed: "1"}}}
dataLayer:
  crossReplicaSyncerPluginRef: shared
"""


def test_a_parameter_in_sections_moves_and_sections_that_are_empty_then_go() -> None:
    text, remarks = migrate(ROLLOUT, "c.yaml")
    moved = plain(text)
    assert moved["plugins"][0]["parameters"] == {
        "scope": {"labelSelector": "set=a"},
        "revisionGating": {"mode": "sum", "requiredRoles": ["prefill", "decode"]},
    }
    assert moved["plugins"][1]["parameters"] == {"coordinationTTL": "60s"}
    assert moved["plugins"][2]["parameters"] == {"tokenProcessorConfig": {"blockSizeTokens": 64, "hashSeed": "1"}}
    assert moved["dataLayer"] == {"crossReplica": {"syncerPluginRef": "shared"}}
    assert remarks == []
    (told,) = [w for w in load(ROLLOUT, "c.yaml", allow_experimental=True).warnings if w.rule == "deprecated"]
    assert "--migrate" in str(told)
    assert "deprecated" not in {w.rule for w in load(text, "c.yaml", allow_experimental=True).warnings}


def test_a_migrated_file_stays_as_it_is() -> None:
    text, _ = migrate(OLD, "c.yaml")
    assert migrate(text, "c.yaml") == (text, [])


@pytest.mark.parametrize("file", CORPUS, ids=lambda path: path.name)
def test_a_migrated_file_means_the_same(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    migrated, _ = migrate(text, "c.yaml")
    before, after = (load(t, "c.yaml", allow_experimental=True) for t in (text, migrated))
    assert after.as_yaml() == before.as_yaml()
    assert "deprecated" not in {warning.rule for warning in after.warnings}


@pytest.mark.parametrize(
    ("plugin", "remark"),
    [
        ("{type: pd-profile-handler, parameters: {primaryPort: 80}}", "'pd-profile-handler' stays: disagg-profile-handler has no"),
        ("{type: by-label, parameters: {label: a, validValues: [b], allowsNoLabel: true}}", "'by-label' stays: label-selector"),
        ("{type: precise-prefix-cache-scorer}", "'precise-prefix-cache-scorer' stays: it is split"),
    ],
)
def test_what_has_no_current_form_stays_and_is_named(plugin: str, remark: str) -> None:
    text, remarks = migrate(f"plugins:\n- {plugin}\n", "c.yaml")
    assert plugin in text
    assert len(remarks) == 1
    assert remark in remarks[0]


def test_a_header_handler_that_something_names_stays() -> None:
    text = "plugins:\n- {type: disagg-headers-handler}\n- {type: disagg-profile-handler}\n"
    assert "headers" not in migrate(text, "c.yaml")[0]
    named = text + "schedulingProfiles:\n- name: decode\n  plugins:\n  - pluginRef: disagg-headers-handler\n"
    assert "type: disagg-headers-handler" in migrate(named, "c.yaml")[0]


def test_labels_and_flat_parameters_of_every_kind() -> None:
    nothing = "plugins:\n- {type: by-label, name: l, parameters: {label: a, allowsNoLabel: true}}\n"
    assert "{key: a, operator: DoesNotExist}" in migrate(nothing, "c.yaml")[0]
    flat = "plugins:\n- type: disagg-profile-handler\n  parameters: {decodeProfile: d, deciderPluginName: x}\n"
    (entry,) = plain(migrate(flat, "c.yaml")[0])["plugins"]
    assert entry["parameters"] == {"profiles": {"decode": "d"}, "deciders": {"prefill": "x"}}


def test_anchors_and_other_shapes_are_written_anew() -> None:
    text = "plugins:\n- &a {type: tokenizer, parameters: {modelName: m}}\n"
    assert plain(migrate(text, "c.yaml")[0])["plugins"][0]["type"] == "token-producer"
    assert migrate("- 1\n", "c.yaml") == ("- 1\n", ["not migrated: there is nothing to migrate, the text is no mapping"])
    with pytest.raises(ConfigErrors):
        migrate("a: [", "c.yaml")


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab #:-'\n", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(st.sampled_from("abcdef"), values, min_size=1, max_size=4)


@given(documents, documents)
@examples(300)
def test_whatever_changes_the_text_has_the_new_values(old: dict[str, object], new: dict[str, object]) -> None:
    assert plain(rewritten(dump(old), new)) == new
    assert rewritten(dump(old), old) == dump(old)


@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_items_go_with_their_lines(kept: list[bool]) -> None:
    lines = [f"- n: {number}  # c{number}" for number in range(len(kept))]
    text = "a:\n" + "\n".join(lines) + "\nz: 1\n"
    new = {"a": [{"n": n} if keep else Removed for n, keep in enumerate(kept)], "z": 1}
    result = rewritten(text, new)
    assert plain(result) == {"a": [{"n": n} for n, keep in enumerate(kept) if keep], "z": 1}
    if any(kept):
        shown = (line if keep else line[line.index("#") :] for line, keep in zip(lines, kept, strict=True))
        assert result == "a:\n" + "\n".join(shown) + "\nz: 1\n"
