"""The form of an `EndpointPickerConfig`: structs with all its fields and the meaning of each, and a JSON Schema for editors.

`epp.config.reader` takes the field names from these structs, so the two cannot differ. The structs are never filled, because messages need
places and the reader therefore goes through a file node by node. In the schema, `if` and `then` give each plugin type its own parameters.
The schema cannot express references, contracts and meaning, so `epp config check` checks those. The schema is stricter than the reader in
one point: a parameter must not be null.
"""

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from compiled.finder import docstring
from epp.config.schema_shape import described, pointed
from epp.plugin import Plugin

DIALECT = "https://json-schema.org/draft/2020-12/schema"
API_VERSION = "llm-d.ai/v1"
API_VERSIONS_DEPRECATED = ("llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
KIND = "EndpointPickerConfig"

Text = Annotated[str, Meta(min_length=1)]
Quantity = Annotated[str | int | float, Meta(description="A Kubernetes quantity, 0 or more: 1000, 500M, 1Gi.")]
Duration = Annotated[str, Meta(description="A Go duration, 0 or more: 200ms, 5s, 1m30s.", pattern=r"^\+?(0|([0-9.]+[a-zµμ]+)+)$")]
Weight = Annotated[float, Meta(description="For scorers: the factor for their scores (0 to 1) before all scores are added up. Default: 1.")]
_SENTENCE = re.compile(r".*?\.(?= [A-Z`])|.*")
_DEPRECATED = Meta(extra_json_schema={"deprecated": True})


class _Form(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Base class of all parts of the configuration. Unknown fields are refused."""


class PluginRef(_Form):
    """A reference to a plugin by its name."""

    plugin_ref: Annotated[Text, Meta(description="The name of a plugin in `plugins`.")]


class PluginEntry(_Form):
    """One plugin. The same type may be listed several times, with different names."""

    type: Text
    name: Annotated[Text | None, Meta(description="The name that references use. Default: its type.")] = None
    parameters: Annotated[Any, Meta(description="The parameters of this type: `epp config plugins TYPE`.")] = None


class ProfileMember(_Form):
    """A filter, scorer or picker of a profile."""

    plugin_ref: Annotated[Text, Meta(description="The name of a filter, scorer or picker in `plugins`.")]
    weight: Weight | None = None


class ProfileEntry(_Form):
    """A scheduling profile: filters (in this order) reduce the candidates, scorers rate them, one picker chooses."""

    name: Annotated[Text, Meta(description="The name that the profile handler and metrics use.")]
    plugins: Annotated[list[ProfileMember] | None, Meta(description="Filters, scorers and a picker. Default picker: max-score-picker.")] = (
        None
    )
    shadow: Annotated[bool | None, Meta(description="Run it after the decision, only for explanations and statistics. Default: false.")] = (
        None
    )


class SourceEntry(_Form):
    """A data source and the extractors that read its pages."""

    plugin_ref: Annotated[Text, Meta(description="The name of a data source in `plugins`.")]
    extractors: Annotated[list[PluginRef] | None, Meta(description="Plugins that read the pages of the source.")] = None


class Discovering(_Form):
    """The plugins that find endpoints and other pickers."""

    endpoints: Annotated[PluginRef | None, Meta(description="The plugin that finds endpoints.")] = None
    peers: Annotated[PluginRef | None, Meta(description="Has no effect.")] = None
    plugin_ref: Annotated[str | None, _DEPRECATED, Meta(description="Use endpoints.pluginRef.")] = None


class CrossReplica(_Form):
    """How replicas share state."""

    syncer_plugin_ref: Annotated[str | None, Meta(description="Not supported.")] = None
    sync_interval: Annotated[Duration | None, Meta(description="Has no effect.")] = None
    publish_timeout: Annotated[Duration | None, Meta(description="Has no effect.")] = None


class DataLayer(_Form):
    """Where endpoints and their metrics come from."""

    inject_defaults: Annotated[
        bool | None,
        Meta(description="Add metrics-data-source with core-metrics-extractor. Default: true. Without a source, nothing is scraped."),
    ] = None
    sources: Annotated[list[SourceEntry] | None, Meta(description="Data sources with their extractors. One of each is supported.")] = None
    discovery: Annotated[Discovering | None, Meta(description="The plugins that find endpoints and other pickers.")] = None
    cross_replica: Annotated[CrossReplica | None, Meta(description="How replicas share state.")] = None
    peer_discovery: Annotated[PluginRef | None, _DEPRECATED, Meta(description="Use discovery.peers.")] = None
    cross_replica_syncer_plugin_ref: Annotated[str | None, _DEPRECATED, Meta(description="Use crossReplica.syncerPluginRef.")] = None
    cross_replica_sync_interval: Annotated[Duration | None, _DEPRECATED, Meta(description="Use crossReplica.syncInterval.")] = None
    cross_replica_publish_timeout: Annotated[Duration | None, _DEPRECATED, Meta(description="Use crossReplica.publishTimeout.")] = None


class Band(_Form):
    """Limits and policies for the requests of one priority."""

    priority: Annotated[
        int | None, Meta(description="The priority: 32 bits, higher is served first, below 0 is sheddable. Default: 0.")
    ] = None
    max_bytes: Annotated[Quantity | None, Meta(description="Bytes that may wait at most. Default: 1G.")] = None
    max_requests: Annotated[Quantity | None, Meta(description="Requests that may wait at most. Default: 5000.")] = None
    fairness_policy_ref: Annotated[str | None, Meta(description="Decides which flow is served next.")] = None
    ordering_policy_ref: Annotated[str | None, Meta(description="Decides which request of a flow is served next.")] = None
    default_request_ttl: Annotated[
        Duration | None,
        Meta(description="How long a request may wait, at most as long as in flowControl. Default: as there; 0s: no limit of its own."),
    ] = msgspec.field(default=None, name="defaultRequestTTL")
    queue_ref: Annotated[
        str | None, Meta(description="The queue that holds a flow. Default: the first one that can do what the policies need.")
    ] = None
    displacement_policy_ref: Annotated[
        str | None, Meta(description="Decides which waiting request gives way to a more important one at a limit over all bands.")
    ] = None


class Detector(_Form):
    """A reference to a saturation detector by its name."""

    plugin_ref: Annotated[
        str | None, Meta(description="The name of a saturation detector in `plugins`. Default: utilization-detector.")
    ] = None


class FlowControl(_Form):
    """How requests wait while the pool is full. Without the feature gate flowControl, only `saturationDetector` is used."""

    max_bytes: Annotated[
        Quantity | None,
        Meta(description="Bytes that may wait in all bands; at this limit, less important requests give way. Default: 0, no limit."),
    ] = None
    max_requests: Annotated[
        Quantity | None,
        Meta(description="Requests that may wait in all bands; at this limit, less important ones give way. Default: 0, no limit."),
    ] = None
    default_request_ttl: Annotated[Duration | None, Meta(description="How long a request may wait. Default: 60s; 0s: no limit.")] = (
        msgspec.field(default=None, name="defaultRequestTTL")
    )
    no_endpoint_request_ttl: Annotated[
        Duration | None,
        Meta(description="How long a request may wait while there is no endpoint. Default: defaultRequestTTL; 0s: no limit."),
    ] = msgspec.field(default=None, name="noEndpointRequestTTL")
    default_priority_band: Annotated[Band | None, Meta(description="The template for priorities that priorityBands does not list.")] = None
    default_negative_priority_band: Annotated[
        Band | None, Meta(description="The template for priorities below 0. Default: defaultPriorityBand.")
    ] = None
    priority_bands: Annotated[list[Band] | None, Meta(description="Bands for single priorities.")] = None
    usage_limit_policy_plugin_ref: Annotated[
        str | None, Meta(description="The plugin that sets how full the pool may be for each band. Default: static-usage-limit-policy.")
    ] = None
    saturation_detector: Annotated[Detector | None, Meta(description="The plugin that says how full the pool is.")] = None
    enable_eviction: Annotated[
        bool | None, Meta(description="End sheddable requests that are being served when more important ones wait.")
    ] = None


class RequestHandler(_Form):
    """How requests are parsed. The parser with the longest matching path is used; one without paths takes the rest."""

    parsers: Annotated[
        list[PluginRef] | None, Meta(description="Parsers in `plugins`. Default: those for the APIs of OpenAI, Anthropic and vLLM.")
    ] = None
    propagate_priority: Annotated[bool | None, Meta(description="Write the priority into the request's body. Only false is supported.")] = (
        None
    )
    response_phase: Annotated[
        Literal["full", "none"] | None,
        Meta(description="none: the stream ends after the decision, and the picker does not see the server's answer. Default: full."),
    ] = None


class TenantMetadata(_Form):
    """A value in the metadata that the gateway's filters add to a request. The gateway must forward the namespace to the picker."""

    namespace: Annotated[Text, Meta(description="The namespace, such as envoy.filters.http.jwt_authn.")]
    path: Annotated[Text, Meta(description="Up to 8 names with dots between them, such as payload.sub.")]


class TenantKeys(_Form):
    """API keys. The file has one line per key: TENANT sha256:HEX."""

    header: Annotated[Text, Meta(description="The header with the key, with or without the word Bearer before it.")]
    file: Annotated[Text, Meta(description="The path of the file of keys.")]
    pass_on: Annotated[bool | None, Meta(description="Whether model servers get the header. Default: false.")] = None


class TenantSource(_Form):
    """One source of the tenant's name: `metadata`, `header` or `apiKey`."""

    metadata: Annotated[TenantMetadata | None, Meta(description="The name is in the gateway's metadata, such as a claim of a JWT.")] = None
    header: Annotated[Text | None, Meta(description="The name is in a header that the gateway sets or removes in every request.")] = None
    trusted: Annotated[bool | None, Meta(description="Must be true beside a header: the gateway sets or removes it.")] = None
    pass_on: Annotated[bool | None, Meta(description="Whether model servers get the header. Default: true.")] = None
    api_key: Annotated[TenantKeys | None, Meta(description="The tenant is that of an API key.")] = None


class TenantBudget(_Form):
    """What a tenant may use, over all workers and replicas. At least one of tokensPerMinute, requests and concurrent."""

    tokens_per_minute: Annotated[Quantity | None, Meta(description="Tokens of prompts and answers per minute. Default: no limit.")] = None
    burst: Annotated[Quantity | None, Meta(description="Tokens that may be used at once after a pause. Default: those of a minute.")] = None
    requests: Annotated[Quantity | None, Meta(description="Requests per minute. Default: no limit.")] = None
    concurrent: Annotated[Quantity | None, Meta(description="Requests in flight at once, waiting ones included. Default: no limit.")] = None
    cached_price: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None, Meta(description="What a cached token of a prompt costs, in tokens. Default: 1.")
    ] = None
    mode: Annotated[
        Literal["shed", "queue", "none"] | None,
        Meta(description="Beyond the budget, requests get 429 (shed) or wait behind all others (queue). none: no limits. Default: shed."),
    ] = None


class OneTenant(_Form):
    """What differs for one tenant from the others."""

    salt_group: Annotated[
        Text | None, Meta(description="Tenants with the same name here share cached prefixes, with cacheSalt. Default: only with itself.")
    ] = None
    budget: Annotated[TenantBudget | None, Meta(description="In place of tenants.budget. Default: that.")] = None
    objectives: Annotated[list[Text] | None, Meta(description="In place of tenants.objectives. Default: those.")] = None


class Tenants(_Form):
    """Who sends a request, according to the gateway or an API key. The tenant is the fairness id of its requests."""

    from_: Annotated[
        list[TenantSource], Meta(description="Sources of the tenant's name; the first that gives a valid name is used.", min_length=1)
    ] = msgspec.field(name="from")
    unknown: Annotated[
        Literal["refuse", "share"] | None,
        Meta(description="What happens without a known tenant: status 401, or all share a tenant named unknown. Default: refuse."),
    ] = None
    objectives: Annotated[
        list[Text] | None,
        Meta(description="The InferenceObjectives that tenants may claim; in place of others or none, the first is used. Default: any."),
    ] = None
    budget: Annotated[TenantBudget | None, Meta(description="What each tenant may use. Default: no limits.")] = None
    cache_salt: Annotated[
        Literal["tenant", "none"] | None,
        Meta(description="tenant: requests get a cache salt of their tenant, so that tenants share no prefixes. Default: none."),
    ] = None
    per_tenant: Annotated[dict[str, OneTenant] | None, Meta(description="What is different for single tenants, by name.")] = None


class Configuration(_Form):
    """The configuration of an endpoint picker. Missing fields get defaults; `epp config check FILE` prints all of them."""

    api_version: Annotated[
        Literal["llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"] | None,
        Meta(description="llm-d.ai/v1; the others are deprecated."),
    ] = None
    kind: Annotated[Literal["EndpointPickerConfig"] | None, Meta(description="Always EndpointPickerConfig.")] = None
    feature_gates: Annotated[
        list[Annotated[str, Meta(pattern="^[A-Za-z]+(=.*)?$")]] | None, Meta(description="name, name=true or name=false.")
    ] = None
    plugins: Annotated[list[PluginEntry] | None, Meta(description="All plugins that other sections name.")] = None
    scheduling_profiles: Annotated[
        list[ProfileEntry] | None,
        Meta(description="How endpoints are chosen. Default: one profile with all filters, scorers and pickers of `plugins`."),
    ] = None
    data_layer: Annotated[DataLayer | None, Meta(description="Where endpoints and their metrics come from.")] = None
    flow_control: Annotated[FlowControl | None, Meta(description="How requests wait while the pool is full.")] = None
    request_handler: Annotated[RequestHandler | None, Meta(description="How requests are parsed.")] = None
    tenants: Annotated[Tenants | None, Meta(description="Who sends a request. Default: clients name their fairness ids.")] = None
    saturation_detector: Annotated[Detector | None, _DEPRECATED, Meta(description="Use flowControl.saturationDetector.")] = None
    parser: Annotated[PluginRef | None, _DEPRECATED, Meta(description="Use requestHandler.parsers.")] = None


@functools.cache
def names(form: type[msgspec.Struct]) -> tuple[str, ...]:
    """Returns the field names as a configuration file has them."""
    return tuple(field.encode_name for field in msgspec.structs.fields(form))


def schema(types: Mapping[str, type[Plugin]]) -> dict[str, Any]:
    """Returns the JSON Schema of a configuration with plugins of these types (by name and alias)."""
    (root,), parts = msgspec.json.schema_components([Configuration], ref_template="#/$defs/{name}")
    for part in parts.values():
        for field in part["properties"].values():
            # The default null means that the field is not given; showing it in an editor does not help.
            if field.get("default", "") is None:
                del field["default"]
    parts["PluginEntry"] = _plugin_entry(parts["PluginEntry"], types)
    for cls in set(types.values()):
        parts |= _parameters(cls)
    parts = pointed(parts)
    whole = {"$schema": DIALECT, "title": KIND, **root, "$defs": dict(sorted(parts.items()))}
    # Convert to JSON and back, because defaults may be Python objects.
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(whole))
    return plain


def parameters_schema(cls: type[Plugin]) -> dict[str, Any]:
    """Returns the JSON Schema of the parameters of one plugin type."""
    (root,), parts = msgspec.json.schema_components([cls.Params], ref_template="#/$defs/{name}")
    structs = _structs(cls.Params)
    return {**root, "$defs": {name: _of_struct(name, part, structs) for name, part in parts.items()}}


def _parameters(cls: type[Plugin]) -> dict[str, Any]:
    """Returns the schema parts of one plugin type. Their names are `<type>.<struct>`, since many types have structs of the same name."""
    _, parts = msgspec.json.schema_components([cls.Params], ref_template=f"#/$defs/{cls.type_name}.{{name}}")
    structs = _structs(cls.Params)
    return {f"{cls.type_name}.{name}": _of_struct(name, part, structs) for name, part in parts.items()}


def _of_struct(name: str, part: dict[str, Any], structs: Mapping[str, type[msgspec.Struct]]) -> dict[str, Any]:
    return described(part, structs[name]) if name in structs else part


def _structs(kind: Any) -> dict[str, type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        within = (field.type for field in msgspec.structs.fields(kind))
        return {kind.__name__: kind} | {name: each for inner in within for name, each in _structs(inner).items()}
    return {name: each for part in get_args(kind) for name, each in _structs(part).items()}


def _plugin_entry(entry: dict[str, Any], types: Mapping[str, type[Plugin]]) -> dict[str, Any]:
    """Adds all known types to the schema of a plugin entry, and for each type its parameters, which apply if `type` names it."""
    # Names come before aliases, because an editor offers the first ones first.
    known = sorted(types, key=lambda name: (name in types[name].aliases, name))
    aliases = {name: f"Deprecated: use {cls.type_name}." for name, cls in types.items() if name in cls.aliases}
    entry["properties"]["type"] = {
        "description": "The type: a name that `epp config plugins` lists, or package.module:Class.",
        "type": "string",
        "if": {"pattern": ":"},
        "then": {"pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"},
        "else": {"enum": known, "enumDescriptions": [aliases.get(name, summary(types[name])) for name in known]},
    }
    entry["properties"]["parameters"] |= {"type": ["object", "null"]}
    entry["allOf"] = [
        {"if": {"properties": {"type": {"const": name}}, "required": ["type"]}, "then": _then(cls)} for name, cls in sorted(types.items())
    ]
    return entry


def _then(cls: type[Plugin]) -> dict[str, Any]:
    parameters = msgspec.json.schema_components([cls.Params], ref_template=f"#/$defs/{cls.type_name}.{{name}}")[0][0]
    required = any(field.required for field in msgspec.structs.fields(cls.Params))
    then: dict[str, Any] = {"properties": {"parameters": parameters if required else {"anyOf": [parameters, {"type": "null"}]}}}
    return then | {"required": ["parameters"]} if required else then


def summary(cls: type[Plugin]) -> str:
    """Returns the first line of a type's docstring if it ends with a sentence, else the first sentence."""
    text = docstring(cls)
    if (line := text.partition("\n")[0]).endswith("."):
        return line
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return _SENTENCE.match(paragraph)[0]  # type: ignore[index]  # it matches any text
