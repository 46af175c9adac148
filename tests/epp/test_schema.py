import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp import registry, schema, yaml_nodes
from epp.config import DEFAULT_TEXT, ConfigErrors, load
from epp.findings import Findings
from tests.epp.json_schema import SAID_ONLY, pointed, violations
from tests.epp.test_mutations import EVERYTHING

DEPLOY = Path(__file__).parents[2] / "deploy" / "config"
SCHEMA = schema.schema(registry.known())
TYPES = registry.known().keys() | set()  # of that moment: tests make types of their own


def wrong(text: str) -> list[str]:
    root = yaml_nodes.read(text, Findings("c.yaml"))
    assert root is not None
    plain = root.plain()
    return list(violations(plain, SCHEMA, SCHEMA))


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_that_comes_along_fits_the_schema(file: Path) -> None:
    assert wrong(file.read_text()) == []


@pytest.mark.parametrize("text", [DEFAULT_TEXT, EVERYTHING, "plugins:\nschedulingProfiles: null\n"])
def test_what_the_reader_takes_fits_the_schema(text: str) -> None:
    load(text, "c.yaml", allow_experimental=True)
    assert wrong(text) == []


def test_an_effective_configuration_fits_the_schema() -> None:
    assert wrong(load(DEFAULT_TEXT, "c.yaml").as_yaml()) == []


@pytest.mark.parametrize(
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
def test_what_the_reader_refuses_for_its_form_does_not_fit_the_schema(text: str) -> None:
    with pytest.raises(ConfigErrors):
        load(text, "c.yaml")
    assert wrong(text) != []


def test_a_class_may_be_named_by_its_path() -> None:
    assert wrong("plugins: [{type: 'a.b:C', parameters: {anything: 1}}]") == []


def parts(node: Any) -> Any:
    """All schemas in a schema, by its keywords."""
    if isinstance(node, bool):
        return
    yield node
    for word, said in node.items():
        if word in ("properties", "$defs"):
            for part in said.values():
                yield from parts(part)
        elif word in ("items", "additionalProperties", "if", "then", "else"):
            yield from parts(said)
        elif word in ("anyOf", "allOf", "oneOf", "prefixItems"):
            for part in said:
                yield from parts(part)


def test_the_schema_is_plain_json_of_the_2020_12_dialect_whose_references_lead_somewhere() -> None:
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


def test_every_type_is_offered_with_its_summary_and_brings_its_parameters() -> None:
    entry = SCHEMA["$defs"]["PluginEntry"]
    offered = {
        option["const"]: option["description"] for option in entry["properties"]["type"]["anyOf"] if "const" in option
    }
    assert offered.keys() == TYPES
    assert all(offered.values())
    assert {rule["if"]["properties"]["type"]["const"] for rule in entry["allOf"]} == TYPES


def test_parts_and_fields_say_what_they_are() -> None:
    for form in (schema.Configuration, schema.ProfileEntry, schema.FlowControl, schema.Band):
        assert SCHEMA["$defs"][form.__name__]["description"]
    gate = SCHEMA["$defs"]["ProfileEntry"]["properties"]["shadow"]
    assert "explanations" in gate["description"]
    assert "default" not in gate


def test_names_are_those_of_the_file() -> None:
    assert schema.names(schema.FlowControl)[2:4] == ("defaultRequestTTL", "noEndpointRequestTTL")

    class Odd(msgspec.Struct, rename="camel"):
        some_thing: int

    assert schema.names(Odd) == ("someThing",)
