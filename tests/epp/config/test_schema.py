import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp.config import registry, schema, schema_shape, yaml_nodes
from epp.config.findings import Findings
from epp.config.load import DEFAULT_TEXT, ConfigErrors, load
from epp.config.schema_shape import field_texts
from epp.plugin import Scorer, foreign
from tests.cases import cases
from tests.epp.json_schema import SAID_ONLY, pointed, violations
from tests.epp.test_mutations import EVERYTHING

DEPLOY = Path(__file__).parents[3] / "deploy" / "config"
SCHEMA = schema.schema(registry.known())
TYPES = registry.known().keys() | set()  # a copy, since tests register more types later


def wrong(text: str) -> list[str]:
    root = yaml_nodes.read(text, Findings("c.yaml"))
    assert root is not None
    plain = root.plain()
    return list(violations(plain, SCHEMA, SCHEMA))


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_in_deploy_fits_the_schema(file: Path) -> None:
    assert wrong(file.read_text()) == []


@pytest.mark.parametrize("text", [DEFAULT_TEXT, EVERYTHING, "plugins:\nschedulingProfiles: null\n"])
def test_text_that_the_reader_accepts_fits_the_schema(text: str) -> None:
    load(text, "c.yaml", allow_experimental=True)
    assert wrong(text) == []


def test_an_effective_configuration_fits_the_schema() -> None:
    assert wrong(load(DEFAULT_TEXT, "c.yaml").as_yaml()) == []


@cases(
    "text",
    [
        "plugins: queue-scorer",
        "plugin: []",
        "apiVersion: llm-d.ai/v2",
        "plugins: [{name: a}]",
        "plugins: [{type: queue-scorrer}]",
        "plugins: [{type: queue-scorer, parameters: 5}]",
        "plugins: [{type: file-discovery}]",
        "plugins: [{type: file-discovery, parameters: {path: ''}}]",
        "plugins: [{type: prefix-cache-scorer, parameters: {matchLengthWeight: 2}}]",
        "plugins: [{type: prefix-cache-scorer, parameters: {matchlengthweight: 1}}]",
        "schedulingProfiles: [{plugins: []}]",
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: b, weight: much}]}]",
        "schedulingProfiles: [{name: a, shadow: 1}]",
        "dataLayer: {discovery: endpoints}",
        "flowControl: {defaultRequestTTL: 5}",
        "flowControl: {priorityBands: [{priority: high}]}",
        "featureGates: [5]",
    ],
)
def test_text_with_a_wrong_form_does_not_fit_the_schema(text: str) -> None:
    with pytest.raises(ConfigErrors):
        load(text, "c.yaml")
    assert wrong(text) != []


def test_a_type_may_be_a_class_path() -> None:
    assert wrong("plugins: [{type: 'a.b:C', parameters: {anything: 1}}]") == []


def parts(node: Any) -> Any:
    """All schemas within a schema, found by its keywords."""
    if isinstance(node, bool):
        return
    yield node
    for keyword, value in node.items():
        if keyword in ("properties", "$defs"):
            for part in value.values():
                yield from parts(part)
        elif keyword in ("items", "additionalProperties", "if", "then", "else"):
            yield from parts(value)
        elif keyword in ("anyOf", "allOf", "oneOf", "prefixItems"):
            for part in value:
                yield from parts(part)


def test_the_schema_is_plain_json_of_the_2020_12_dialect_and_its_references_resolve() -> None:
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    for part in parts(SCHEMA):
        assert isinstance(part, dict)
        if "$ref" in part:
            assert pointed(SCHEMA, part["$ref"])
        if "type" in part:
            kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
            assert set(kinds) <= {"object", "array", "string", "number", "integer", "boolean", "null"}
        assert all(not word.startswith("$") or word in SAID_ONLY | {"$ref"} for word in part)


def test_every_type_is_offered_with_its_summary_and_parameters() -> None:
    entry = SCHEMA["$defs"]["PluginEntry"]
    names = entry["properties"]["type"]["else"]
    offered = dict(zip(names["enum"], names["enumDescriptions"], strict=True))
    assert offered.keys() == TYPES
    assert all(offered.values())
    assert {rule["if"]["properties"]["type"]["const"] for rule in entry["allOf"]} == TYPES


def test_a_summary_is_a_whole_sentence_also_if_the_first_line_ends_within_it() -> None:
    class Wrapped(Scorer):
        """Scores by
        the weather. Rain is bad.

        More.
        """

    class Short(Scorer):
        """Scores. Fast."""

    assert (schema.summary(Wrapped), schema.summary(Short)) == ("Scores by the weather.", "Scores. Fast.")
    assert all(schema.summary(cls).endswith(".") for cls in registry.known().values() if not foreign(cls))


def test_parts_and_fields_have_descriptions() -> None:
    missing = [
        (name, field)
        for name, part in SCHEMA["$defs"].items()
        for field, value in part.get("properties", {}).items()
        if not value.get("description")
    ]
    assert missing == [], "describe each field in the docstring of its struct: `field_name: text`"
    assert all(part.get("description") for part in SCHEMA["$defs"].values())
    gate = SCHEMA["$defs"]["ProfileEntry"]["properties"]["shadow"]
    assert "explanations" in gate["description"]
    assert "default" not in gate


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("flowControl: {priorityBands: [{priority: high}]}", "$.flowControl.priorityBands[0].priority"),
        ("flowControl: {defaultPriorityBand: {maxBytes: []}}", "$.flowControl.defaultPriorityBand.maxBytes"),
        ("plugins: [{type: queue-scorrer}]", "$.plugins[0].type"),
        (
            "plugins: [{type: session-affinity-scorer, parameters: {sessionIdConfig: {sources: [{header: 5}]}}}]",
            "$.plugins[0].parameters.sessionIdConfig.sources[0].header",
        ),
        ("plugins: [{type: active-request-scorer, parameters: {maxBusyScore: much}}]", "$.plugins[0].parameters.maxBusyScore"),
        ("dataLayer: {sources: [{pluginRef: a, extractors: [{pluginRef: ''}]}]}", "$.dataLayer.sources[0].extractors[0].pluginRef"),
        ("requestHandler: {responsePhase: half}", "$.requestHandler.responsePhase"),
        ("kind: Pod", "$.kind"),
    ],
)
def test_a_violation_is_at_the_wrong_item_and_not_at_a_value_around_it(text: str, at: str) -> None:
    assert [each.partition(":")[0] for each in wrong(text)] == [at]


def test_there_is_no_choice_between_types_for_which_a_validator_could_not_point_at_the_wrong_item() -> None:
    assert not [part for part in parts(SCHEMA) if "anyOf" in part or "oneOf" in part]


def test_alternatives_with_other_keywords_stay_as_they_are() -> None:
    low, high = {"type": "integer", "maximum": 3}, {"type": "number", "maximum": 1}
    node = {"type": "object", "properties": {"a": {"anyOf": [low, high]}}}
    assert schema_shape.pointed({"Part": node}) == {"Part": node}


def test_descriptions_come_from_the_docstrings_of_a_struct_and_its_bases() -> None:
    class Base(msgspec.Struct, rename="camel"):
        """About the base.

        first_one: The first. With `second_one`
            it is complete.
        """

        first_one: int

    class Derived(Base):
        """About all. `third_one`: the third, for example. It is not here.

        second_one: The second.
        """

        second_one: int
        third_one: int

    assert field_texts(Derived) == (
        "About all. `thirdOne`: the third, for example. It is not here.",
        {"second_one": "The second.", "third_one": "The third, for example.", "first_one": "The first. With `secondOne` it is complete."},
    )


def test_field_names_are_written_as_in_a_file() -> None:
    assert schema.names(schema.FlowControl)[2:4] == ("defaultRequestTTL", "noEndpointRequestTTL")

    class Odd(msgspec.Struct, rename="camel"):
        some_thing: int

    assert schema.names(Odd) == ("someThing",)
