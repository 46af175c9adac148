"""The effective configuration has all defaults and loads to itself. Any other text loads too or is refused with places."""

import json
from textwrap import dedent

from hypothesis import given
from hypothesis import strategies as st

from epp.config.load import ConfigErrors, load
from tests.epp.config.loading import BENCH, ok
from tests.epp.config_plugins import HERE
from tests.examples import examples


def test_the_effective_configuration_has_all_defaults_and_loads_to_itself() -> None:
    config = ok(BENCH)
    text = config.as_yaml()
    again = load(text, "effective.yaml")
    assert again.as_yaml() == text
    assert [warning.rule for warning in again.warnings] == ["prefix-outweighs-load"]
    assert again.parameters == config.parameters
    assert list(again.pipeline.plugins) == list(config.pipeline.plugins)
    assert "matchLengthScaleTokens: 8192" in text


NAMES = st.one_of(
    st.sampled_from(["on", "1e8", "~", "null", "a: b", "- x", "0o17", "1_000", "é", "#", "'", '"', "<<", "y", "!x", "*a", "&a", "%", "@"]),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8),
)


SCORERS = st.sampled_from(
    ["queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer", "lora-affinity-scorer", f"{HERE}:ReadsTokens"]
)


@given(
    plugins=st.dictionaries(NAMES, st.tuples(SCORERS, st.floats(-5, 5)), max_size=5),
    picker=st.sampled_from([None, "max-score-picker", "random-picker", "weighted-random-picker"]),
    own_profile=st.booleans(),
    count=st.integers(-3, 9),
)
@examples(60)
def test_the_effective_form_of_any_valid_configuration_loads_to_itself(
    plugins: dict[str, tuple[str, float]], picker: str | None, own_profile: bool, count: int
) -> None:
    listed: list[object] = [{"name": name, "type": kind} for name, (kind, _) in plugins.items()]
    if picker:
        listed.append({"type": picker, "parameters": {"maxNumOfEndpoints": count}})
    document: dict[str, object] = {"plugins": listed}
    if own_profile:
        members = [{"pluginRef": name, "weight": weight} for name, (_, weight) in plugins.items()]
        document["schedulingProfiles"] = [{"name": "p", "plugins": members}]
    try:
        config = load(json.dumps(document), "c.json")
    except ConfigErrors as refused:
        assert {error.rule for error in refused.errors} <= {"name-taken", "yaml-syntax"}
        return
    text = config.as_yaml()
    again = load(text, "e.yaml")
    assert again.as_yaml() == text
    assert again.parameters == config.parameters


FULL = BENCH + dedent("""\
    featureGates: [haPopulateNonLeaderDatastore=true]
    flowControl:
      maxBytes: 1Gi
      defaultRequestTTL: 1m30s
      priorityBands: &bands
      - {priority: 5, maxRequests: 1k, fairnessPolicyRef: x}
      - &band {priority: -1}
      defaultPriorityBand: {<<: *band, maxBytes: 500M}
    requestHandler: {parsers: [{pluginRef: passthrough-parser}]}
    """)


PIECES = st.sampled_from(
    ["", " ", "\n", "-", ":", "{", "}", "[", "]", "null", "5", "-1", "1e999", "true", "'", '"', "&a ", "*band", "<<: *band",
     "!!str ", "#", "\t",
     "pluginRef", "type", "- ", "  ", "9" * 30, "é", "\x00", "---\n", "random-picker",
     "parameters: {a: [1, {b: 2}]}", "0x", "._", "tests.epp:x"]
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, len(FULL)), st.integers(0, 12), PIECES), min_size=1, max_size=4))
@examples(300)
def test_a_mutated_configuration_loads_or_is_refused_with_places(edits: list[tuple[int, int, str]]) -> None:
    text = FULL
    for at, cut, piece in edits:
        text = text[:at] + piece + text[at + cut :]
    try:
        config = load(text, "c.yaml")
    except ConfigErrors as refused:
        assert refused.errors
        lines = text.count("\n") + 2
        assert all(error.line <= lines and error.message for error in refused.errors)
    else:
        assert load(config.as_yaml(), "e.yaml").as_yaml() == config.as_yaml()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "plugins",
                        "type",
                        "name",
                        "parameters",
                        "schedulingProfiles",
                        "pluginRef",
                        "weight",
                        "dataLayer",
                        "sources",
                        "extractors",
                        "discovery",
                        "flowControl",
                        "priorityBands",
                        "featureGates",
                        "requestHandler",
                        "parsers",
                        "parser",
                        "x",
                    ]
                ),
                inner,
                max_size=6,
            )
        ),
        max_leaves=25,
    )
)
@examples(200)
def test_any_json_document_loads_or_is_refused(document: object) -> None:  # fmt: skip
    try:
        load(json.dumps(document), "c.json")
    except ConfigErrors as refused:
        assert refused.errors
