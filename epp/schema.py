"""The form of an `EndpointPickerConfig`: all its fields with what they mean, as structs, and as a JSON Schema for editors.

`epp.document` reads by the names that stand here, so the two cannot differ. The structs are never filled: a file is read node by
node, for the sake of places in messages. In the schema every plugin type brings its own parameters, by `if` and `then`; what it
cannot say (references, contracts, meaning) is for `epp check`. It is stricter than the reader in one point: parameters are not null.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from epp.plugin import Plugin

DIALECT = "https://json-schema.org/draft/2020-12/schema"
API_VERSION = "llm-d.ai/v1alpha1"
API_VERSION_DEPRECATED = "inference.networking.x-k8s.io/v1alpha1"
KIND = "EndpointPickerConfig"

Text = Annotated[str, Meta(min_length=1)]
Quantity = Annotated[str | int | float, Meta(description="A Kubernetes quantity, 0 or more: 1000, 500M, 1Gi.")]
Duration = Annotated[
    str, Meta(description="A Go duration, 0 or more: 200ms, 5s, 1m30s.", pattern=r"^\+?(0|([0-9.]+[a-zµμ]+)+)$")
]
Weight = Annotated[
    float,
    Meta(description="Of a scorer: what its scores (0 to 1) are multiplied with before they are added up. Default: 1."),
]
_DEPRECATED = Meta(extra_json_schema={"deprecated": True})


class _Form(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """What all parts share: unknown fields are refused."""


class PluginRef(_Form):
    """A plugin by its name."""

    plugin_ref: Text


class PluginEntry(_Form):
    """One plugin. The same type may be given several times, under different names."""

    type: Text
    name: Annotated[Text | None, Meta(description="What others refer to it by. Default: its type.")] = None
    parameters: Any = None


class ProfileMember(_Form):
    """A filter, scorer or picker of a profile."""

    plugin_ref: Text
    weight: Weight | None = None


class ProfileEntry(_Form):
    """Who is left (filters, in this order), who is best (scorers, added up), who is taken (one picker)."""

    name: Text
    plugins: list[ProfileMember] | None = None
    shadow: Annotated[
        bool | None,
        Meta(description="Run it after the decision, for explanations alone: nothing depends on it. Default: false."),
    ] = None


class SourceEntry(_Form):
    """A data source, and what reads its pages."""

    plugin_ref: Text
    extractors: list[PluginRef] | None = None


class DataLayer(_Form):
    """What is known of endpoints, and which there are."""

    inject_defaults: Annotated[
        bool | None, Meta(description="Add metrics-data-source with core-metrics-extractor. Default: true.")
    ] = None
    sources: list[SourceEntry] | None = None
    discovery: Annotated[PluginRef | None, Meta(description="Where endpoints come from.")] = None
    peer_discovery: Annotated[PluginRef | None, Meta(description="Has no effect.")] = None
    cross_replica_syncer_plugin_ref: Annotated[str | None, Meta(description="Not supported.")] = None
    cross_replica_sync_interval: Annotated[Duration | None, Meta(description="Has no effect.")] = None


class Band(_Form):
    """Limits and policies of requests of one priority."""

    priority: int | None = None
    max_bytes: Annotated[Quantity | None, Meta(description="Bytes that may wait. Default: 1G.")] = None
    max_requests: Annotated[Quantity | None, Meta(description="Requests that may wait. Default: 5000.")] = None
    fairness_policy_ref: Annotated[str | None, Meta(description="Whose turn it is.")] = None
    ordering_policy_ref: Annotated[str | None, Meta(description="What comes first of one flow.")] = None
    default_request_ttl: Annotated[
        Duration | None, Meta(description="How long a request may wait. Default: that of flowControl; 0s: no limit.")
    ] = msgspec.field(default=None, name="defaultRequestTTL")
    queue_ref: Annotated[
        str | None,
        Meta(description="What holds one flow. Default: the first queue that can do what the policies need."),
    ] = None
    displacement_policy_ref: Annotated[
        str | None,
        Meta(description="Who gives way to something more important when a limit over all bands is reached."),
    ] = None


class Detector(_Form):
    """A saturation detector by its name."""

    plugin_ref: str | None = None


class FlowControl(_Form):
    """What waits while the pool is full. Without the feature gate flowControl only `saturationDetector` is used."""

    max_bytes: Annotated[
        Quantity | None,
        Meta(
            description="Bytes that may wait in all; at this limit less important requests give way. Default: 0, no limit."
        ),
    ] = None
    max_requests: Annotated[
        Quantity | None,
        Meta(
            description="Requests that may wait in all; at this limit less important ones give way. Default: 0, no limit."
        ),
    ] = None
    default_request_ttl: Annotated[
        Duration | None, Meta(description="How long a request may wait. Default: 60s; 0s: no limit.")
    ] = msgspec.field(default=None, name="defaultRequestTTL")
    no_endpoint_request_ttl: Annotated[
        Duration | None,
        Meta(description="The same while there is no endpoint. Default: defaultRequestTTL; 0s: no limit."),
    ] = msgspec.field(default=None, name="noEndpointRequestTTL")
    default_priority_band: Band | None = None
    default_negative_priority_band: Band | None = None
    priority_bands: list[Band] | None = None
    usage_limit_policy_plugin_ref: str | None = None
    saturation_detector: Detector | None = None
    enable_eviction: Annotated[
        bool | None,
        Meta(description="Give up sheddable requests that are being served for more important ones that wait."),
    ] = None


class RequestHandler(_Form):
    """How requests are read. The parser of the longest matching path is taken; one without paths takes the rest."""

    parsers: list[PluginRef] | None = None
    response_phase: Annotated[
        Literal["full", "none"] | None,
        Meta(
            description="none: the stream ends with the answer to the request; what the model server says passes unseen. Default: full."
        ),
    ] = None


class Configuration(_Form):
    """The configuration of an endpoint picker. What is not given gets its default; `epp check FILE` prints all of them."""

    api_version: Literal["llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"] | None = None
    kind: Literal["EndpointPickerConfig"] | None = None
    feature_gates: Annotated[
        list[Annotated[str, Meta(pattern="^[A-Za-z]+(=.*)?$")]] | None,
        Meta(description="name, name=true or name=false."),
    ] = None
    plugins: list[PluginEntry] | None = None
    scheduling_profiles: list[ProfileEntry] | None = None
    data_layer: DataLayer | None = None
    flow_control: FlowControl | None = None
    request_handler: RequestHandler | None = None
    saturation_detector: Annotated[
        Detector | None, _DEPRECATED, Meta(description="Use flowControl.saturationDetector.")
    ] = None
    parser: Annotated[PluginRef | None, _DEPRECATED, Meta(description="Use requestHandler.parsers.")] = None


def names(form: type[msgspec.Struct]) -> tuple[str, ...]:
    """The names of the fields as a file has them."""
    return tuple(field.encode_name for field in msgspec.structs.fields(form))


def schema(types: Mapping[str, type[Plugin]]) -> dict[str, Any]:
    """The JSON Schema of a configuration with plugins of these types (by name and alias)."""
    (root,), parts = msgspec.json.schema_components([Configuration], ref_template="#/$defs/{name}")
    for part in parts.values():
        for field in part["properties"].values():
            if field.get("default", "") is None:  # null stands for not given, which says nothing in an editor
                del field["default"]
    parts["PluginEntry"] = _plugin_entry(parts["PluginEntry"], types)
    for cls in set(types.values()):
        parts |= _parameters(cls)
    made = {"$schema": DIALECT, "title": KIND, **root, "$defs": dict(sorted(parts.items()))}
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))  # defaults may be Python's own
    return plain


def parameters_schema(cls: type[Plugin]) -> dict[str, Any]:
    """The JSON Schema of a type's parameters alone."""
    return msgspec.json.schema(cls.Params)


def _parameters(cls: type[Plugin]) -> dict[str, Any]:
    """The parts for one type; each is named `<type>.<struct>`, since many call theirs alike."""
    _, parts = msgspec.json.schema_components([cls.Params], ref_template=f"#/$defs/{cls.type_name}.{{name}}")
    return {f"{cls.type_name}.{name}": part for name, part in parts.items()}


def _plugin_entry(entry: dict[str, Any], types: Mapping[str, type[Plugin]]) -> dict[str, Any]:
    """With the known types, and each type's parameters where that type is given."""
    known: list[dict[str, Any]] = [
        {"const": name, "description": summary(cls)} | ({"deprecated": True} if name in cls.aliases else {})
        for name, cls in sorted(types.items())
    ]
    by_path = {"pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", "description": "package.module:Class"}
    entry["properties"]["type"] = {"type": "string", "anyOf": [*known, by_path]}
    entry["properties"]["parameters"] = {"type": ["object", "null"]}
    entry["allOf"] = [
        {"if": {"properties": {"type": {"const": name}}, "required": ["type"]}, "then": _then(cls)}
        for name, cls in sorted(types.items())
    ]
    return entry


def _then(cls: type[Plugin]) -> dict[str, Any]:
    given = msgspec.json.schema_components([cls.Params], ref_template=f"#/$defs/{cls.type_name}.{{name}}")[0][0]
    required = any(field.required for field in msgspec.structs.fields(cls.Params))
    then: dict[str, Any] = {"properties": {"parameters": given if required else {"anyOf": [given, {"type": "null"}]}}}
    return then | {"required": ["parameters"]} if required else then


def summary(cls: type[Plugin]) -> str:
    """The first line of what a type says about itself."""
    return (cls.__doc__ or "").strip().partition("\n")[0]
