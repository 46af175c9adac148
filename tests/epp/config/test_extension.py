"""Files of the Gateway API Inference Extension: the errors say where each name went, and `epp config check --migrate` moves it."""

import pytest

from epp.config import extension, registry
from epp.config.load import ConfigErrors, EffectiveConfig, load
from epp.config.migrate import migrate
from epp.config.yaml_nodes import plain

TREE = """\
# the chart of version 0.5
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: low-queue-filter
  parameters:
    threshold: 128
- type: lora-affinity-filter   # adapters
  parameters:
    threshold: 0.999
- type: least-queue-filter
- type: least-kv-cache-filter
- type: decision-tree-filter
  name: low-latency-filter
  parameters:
    current: {pluginRef: low-queue-filter}
    nextOnSuccess:
      decisionTree:
        current: {pluginRef: lora-affinity-filter}
        nextOnSuccessOrFailure:
          decisionTree:
            current: {pluginRef: least-queue-filter}
            nextOnSuccessOrFailure: {decisionTree: {current: {pluginRef: least-kv-cache-filter}}}
    nextOnFailure: {decisionTree: {current: {pluginRef: least-queue-filter}}}
- type: random-picker
  parameters:
    maxNumOfEndpoints: 1
- type: single-profile-handler
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: low-latency-filter  # the tree
  - pluginRef: random-picker
"""
CACHE = """\
plugins:
- type: prefix-cache-scorer  # prefixes
  parameters:
    hashBlockSize: 256
    maxPrefixBlocksToMatch: 512
    lruCapacityPerServer: 31250
    autoTune: false
    matchLengthWeight: 0.5
- type: queue-scorer
# the end
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 1}
  - {pluginRef: queue-scorer, weight: 1}
"""


def errors(text: str) -> list[str]:
    with pytest.raises(ConfigErrors) as refused:
        load(text, "c.yaml", allow_experimental=True)
    return [str(error) for error in refused.value.errors]


def migrated(text: str) -> tuple[EffectiveConfig, str, list[str]]:
    new, remarks = migrate(text, "c.yaml")
    assert migrate(new, "c.yaml") == (new, [])
    return load(new, "c.yaml", allow_experimental=True), new, remarks


@pytest.mark.parametrize("older", [*extension.RENAMED, *extension.SCORERS, extension.TREE, *extension.SPLIT])
def test_the_error_about_an_older_type_says_what_to_write_instead(older: str) -> None:
    (error,) = errors(f"plugins: [{{type: {older}}}]\n")
    assert error.startswith(f"c.yaml:1:18: error[unknown-type]: plugin type '{older}' is not registered (")
    newer = extension.RENAMED.get(older) or extension.SCORERS.get(older) or extension.SPLIT.get(older, "scorers")
    assert newer in error
    assert ("epp config check --migrate writes that" in error) is (older not in extension.SPLIT)


def test_what_replaces_an_older_type_exists() -> None:
    for newer in (*extension.RENAMED.values(), *extension.SCORERS.values(), extension.PREFIX_PRODUCER):
        assert registry.find(newer).type_name == newer
    for text in extension.SPLIT.values():
        assert all(registry.find(word) for word in text.split() if "-" in word)
    assert not {*extension.RENAMED, *extension.SCORERS, extension.TREE, *extension.SPLIT} & set(registry.names())


def test_the_error_about_a_cache_parameter_of_the_scorer_names_the_producer() -> None:
    said = errors(CACHE)
    assert len(said) == 4
    assert "unknown field 'hashBlockSize' (it belongs to approx-prefix-cache-producer, as 'blockSizeTokens'; " in said[0]
    assert all(line.endswith("; epp config check --migrate moves it)") for line in said)
    (other,) = errors("plugins: [{type: queue-scorer}, {type: prefix-cache-scorer, parameters: {mode: x}}]\n")
    assert "--migrate" not in other


@pytest.mark.parametrize(("older", "newer"), extension.RENAMED.items())
def test_a_type_with_another_name_is_renamed_and_references_stay(older: str, newer: str) -> None:
    text = f"plugins:\n- type: {older}\n- type: queue-scorer\nschedulingProfiles:\n- name: d\n  plugins:\n  - pluginRef: {older}\n"
    new, remarks = migrate(text, "c.yaml")
    assert remarks == []
    assert plain(new)["plugins"][0] == {"type": newer, "name": older}
    assert f"pluginRef: {older}" in new


def test_cache_parameters_move_to_the_producer_and_everything_else_stays() -> None:
    config, text, remarks = migrated(CACHE)
    scorer, _, producer = plain(text)["plugins"]
    assert scorer == {"type": "prefix-cache-scorer", "parameters": {"matchLengthWeight": 0.5}}
    assert producer == {
        "type": "approx-prefix-cache-producer",
        "parameters": {"blockSizeTokens": 64, "maxPrefixBlocksToMatch": 512, "lruCapacityPerServer": 31250, "autoTune": False},
    }
    assert remarks == ["changed: the block size of 'prefix-cache-scorer' was 256 characters; it is 64 tokens now"]
    assert "prefix-cache-scorer  # prefixes\n" in text and "\n# the end\n" in text
    assert config.warnings == ()


def test_a_producer_that_is_listed_keeps_its_own_values_and_gets_the_others() -> None:
    text = CACHE.replace(
        "- type: queue-scorer\n",
        "- {type: approx-prefix-cache-producer, name: mine, parameters: {lruCapacityPerServer: 5}}\n- type: queue-scorer\n",
    ).replace("matchLengthWeight: 0.5", "prefixMatchInfoProducerName: mine")
    config, new, remarks = migrated(text)
    assert plain(config.as_yaml())["plugins"][1]["parameters"]["lruCapacityPerServer"] == 5
    assert plain(config.as_yaml())["plugins"][1]["parameters"]["maxPrefixBlocksToMatch"] == 512
    assert len(plain(new)["plugins"]) == 3
    assert "changed: 'lruCapacityPerServer: 31250' of 'prefix-cache-scorer' is dropped" in remarks[1]


def test_cache_parameters_of_a_precise_scorer_stay_and_are_named() -> None:
    text = CACHE.replace("- type: queue-scorer\n", "- {type: precise-prefix-cache-producer, name: p}\n- type: queue-scorer\n")
    new, remarks = migrate(text.replace("matchLengthWeight: 0.5", "prefixMatchInfoProducerName: p"), "c.yaml")
    assert "hashBlockSize: 256" in new
    assert remarks == ["not migrated: the cache parameters of 'prefix-cache-scorer' stay: 'p' has none of them"]


def test_zero_meant_the_default() -> None:
    _, text, _ = migrated("plugins:\n- {type: prefix-cache-scorer, parameters: {lruCapacityPerServer: 0, blockSizeTokens: 0}}\n")
    assert plain(text)["plugins"] == [{"type": "prefix-cache-scorer"}, {"type": "approx-prefix-cache-producer"}]


def test_a_tree_of_filters_becomes_scorers_and_the_best_endpoint_is_picked() -> None:
    config, text, remarks = migrated(TREE)
    profile = config.pipeline.profiles["default"]
    assert sorted(scorer.__self__.type_name for scorer, _ in (*profile.scorers, *profile.static_scorers)) == [  # type: ignore[attr-defined]
        "kv-cache-utilization-scorer",
        "lora-affinity-scorer",
        "queue-scorer",
    ]
    assert profile.picker.type_name == "max-score-picker"
    assert plain(text)["plugins"][-1] == {"type": "max-score-picker", "parameters": {"maxNumOfEndpoints": 1}}
    (remark,) = remarks
    assert remark.startswith("changed: least-kv-cache-filter, least-queue-filter, lora-affinity-filter, low-latency-filter, ")
    assert text.startswith("# the chart of version 0.5\n") and "# adapters" in text and "# the tree" in text


def test_filters_without_a_tree_become_scorers_too_and_a_scorer_that_is_listed_is_used() -> None:
    text = """\
plugins:
- {type: low-queue-filter, name: short}
- {type: queue-scorer, name: mine}
- type: max-score-picker
schedulingProfiles:
- name: a
  plugins:
  - pluginRef: short
  - pluginRef: max-score-picker
- name: b
  plugins:
  - {pluginRef: mine, weight: 2}
  - pluginRef: short
"""
    new, _ = migrate(text, "c.yaml")
    found = plain(new)
    assert found["plugins"] == [{"type": "queue-scorer", "name": "mine"}, {"type": "max-score-picker"}]
    assert found["schedulingProfiles"] == [
        {"name": "a", "plugins": [{"pluginRef": "mine"}, {"pluginRef": "max-score-picker"}]},
        {"name": "b", "plugins": [{"pluginRef": "mine", "weight": 2}]},
    ]


def test_a_random_picker_that_another_profile_needs_stays() -> None:
    text = TREE + "- name: other\n  plugins: [{pluginRef: random-picker}]\n"
    new, _ = migrate(text, "c.yaml")
    assert {"random-picker", "max-score-picker"} < {entry["type"] for entry in plain(new)["plugins"]}


@pytest.mark.parametrize("text", [
    "plugins: 5\n",
    "plugins:\n- 5\n- {type: low-queue-filter, parameters: 7}\n- {type: decision-tree-filter, parameters: [1, {pluginRef: x}]}\n",
    "plugins:\n- {type: prefix-cache-scorer, parameters: {hashBlockSize: x, autoTune: []}}\n",
    "plugins:\n- {type: low-queue-filter}\nschedulingProfiles: {a: b}\n",
    "plugins:\n- {type: low-queue-filter}\nschedulingProfiles: 5\n",
    "plugins:\n- {type: low-queue-filter}\nschedulingProfiles: [1, {plugins: [2, {pluginRef: low-queue-filter}]}]\n",
])  # fmt: skip
def test_files_of_another_shape_are_no_trouble(text: str) -> None:
    new, _ = migrate(text, "c.yaml")
    assert plain(new)["apiVersion"] == "llm-d.ai/v1"
