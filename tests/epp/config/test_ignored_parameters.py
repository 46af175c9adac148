"""Parameters that the value of another parameter switches off: `epp config check` names them, and what would make them count."""

from typing import Any

import msgspec

from epp.config import registry
from epp.config.findings import ConfigWarning
from epp.config.load import ConfigErrors, load
from epp.config.plugin_instances import _value
from tests.cases import cases

RULES = [(name, path) for name, cls in sorted(registry.known().items()) for path in cls.counts_with]


def ignored(text: str) -> list[ConfigWarning]:
    return [w for w in load(text, "c.yaml", allow_experimental=True).warnings if w.rule == "without-effect"]


def field(struct: Any, step: str) -> msgspec.structs.FieldInfo:
    (found,) = (field for field in msgspec.structs.fields(struct) if field.encode_name == step)
    return found


def structs(kind: Any) -> list[Any]:
    """The struct types of a field, also those in a union with None."""
    if isinstance(kind, msgspec.inspect.StructType):
        return [kind.cls]
    return [inner for part in getattr(kind, "types", ()) for inner in structs(part)]


def at(struct: Any, path: str) -> msgspec.inspect.Type:
    """The type of a parameter. Fails if the struct has no such parameter."""
    *around, last = path.split(".")
    for step in around:
        (struct,) = structs(msgspec.inspect.type_info(field(struct, step).type))
    return msgspec.inspect.type_info(field(struct, last).type)


@cases(("name", "path"), RULES)
def test_every_rule_names_parameters_and_possible_values(name: str, path: str) -> None:
    cls = registry.known()[name]
    deciding, values = cls.counts_with[path]
    at(cls.Params, path)
    kind = at(cls.Params, deciding)
    assert values
    for value in values:
        msgspec.convert(value, field_type(cls.Params, deciding))
    if isinstance(kind, msgspec.inspect.LiteralType):
        assert set(kind.values) - set(values), "with some value the parameter does not count"


def field_type(struct: Any, path: str) -> Any:
    *around, last = path.split(".")
    for step in around:
        (struct,) = structs(msgspec.inspect.type_info(field(struct, step).type))
    return field(struct, last).type


def test_session_ids_without_their_strategy_are_named_with_what_makes_them_count() -> None:
    text = """\
plugins:
- type: session-affinity-scorer
  parameters:
    profileName: p
    sessionIdConfig: {sources: [{header: x-chat}]}
schedulingProfiles: [{name: p, plugins: [{pluginRef: session-affinity-scorer, weight: 1}]}]
"""
    (warning,) = ignored(text)
    assert (warning.line, warning.column) == (5, 5)
    assert warning.message == (
        "plugin 'session-affinity-scorer': sessionIdConfig: has no effect with strategy 'encoded_endpoint_header', the default"
    )
    assert warning.hint == "set strategy to 'session_id', or remove it"
    assert ignored(text.replace("profileName: p", "strategy: session_id")) == []


@cases(
    ("plugin", "parameters", "named"),
    [
        ("session-affinity-filter", "{sessionIdConfig: {evictionTtlSeconds: 300}}", ["sessionIdConfig"]),
        ("session-affinity-filter", "{strategy: session_id, encodedEndpointHeaderConfig: {header: h}}",
         ["encodedEndpointHeaderConfig"]),
        ("session-affinity-scorer", "{strategy: encoded_endpoint_header, encodedEndpointHeaderConfig: {header: h}}", []),
        ("program-aware-fairness", "{lasHalfLifeSeconds: 1}", []),
        ("program-aware-fairness", "{strategy: turn-priority, lasHalfLifeSeconds: 1, lasWeightService: 2}",
         ["lasHalfLifeSeconds", "lasWeightService"]),
        ("program-aware-fairness", "{turnPriorityTimeWeight: 1}", ["turnPriorityTimeWeight"]),
        ("concurrency-detector", "{maxTokenConcurrency: 5000}", ["maxTokenConcurrency"]),
        ("concurrency-detector", "{concurrencyMode: tokens, maxConcurrency: 5}", ["maxConcurrency"]),
        ("concurrency-detector", "{concurrencyMode: hybrid, maxConcurrency: 5, maxTokenConcurrency: 5000}", []),
        ("prefix-cache-affinity-filter", "{ttftSource: latencyPredictor, peakPrefillThroughput: 5}",
         ["peakPrefillThroughput"]),
        ("disaggregatedset-rollout-screener",
         "{scope: {labelSelector: a=b}, revisionGating: {mode: disabled, requiredRoles: [prefill]}}",
         ["revisionGating.requiredRoles"]),
        ("metrics-data-source", "{insecureSkipVerify: true}", ["insecureSkipVerify"]),
        ("metrics-data-source", "{scheme: http, insecureSkipVerify: true, path: /metrics}", []),
        ("metrics-data-source", "{scheme: http, caCertPath: /ca.pem}", ["caCertPath"]),
        ("metrics-data-source", "{scheme: https, insecureSkipVerify: false}", []),
        ("inflight-load-producer", "{outputRatio: 2}", ["outputRatio"]),
        ("inflight-load-producer", "{addEstimatedOutputTokens: true, outputRatio: 2}", []),
        ("predicted-latency-producer", "{learnedLatencyProducerName: l}", ["learnedLatencyProducerName"]),
        ("precise-prefix-cache-producer", "{speculativeTTL: 5s}", ["speculativeTTL"]),
        ("precise-prefix-cache-producer",
         "{kvEventsConfig: {zmqEndpoint: 'tcp://*:1', podDiscoveryConfig: {socketPort: 9, replaySocketPort: 8}}}",
         ["kvEventsConfig.podDiscoveryConfig.socketPort", "kvEventsConfig.podDiscoveryConfig.replaySocketPort"]),
        ("token-producer", "{estimate: {image: {static: {staticToken: 5}}}}", ["estimate.image.static"]),
        ("token-producer", "{estimate: {image: {mode: static, static: {staticToken: 5}}}}", []),
        ("token-producer", "{estimate: {image: null, video: {frames: {mode: strided, sampled: {sampleFPS: 1}}}}}",
         ["estimate.video.frames.sampled"]),
    ],
)  # fmt: skip
def test_what_the_chosen_way_ignores_is_named(plugin: str, parameters: str, named: list[str]) -> None:
    text = f"plugins:\n- type: {plugin}\n  parameters: {parameters}\n"
    try:
        warnings = load(text, "c.yaml", allow_experimental=True).warnings
    except ConfigErrors as refused:  # the plugin may be of no use in a configuration this short
        warnings = refused.warnings
    messages = [w.message for w in warnings if w.rule == "without-effect"]
    prefix = f"plugin '{plugin}': "
    assert [m.removeprefix(prefix).partition(": has no effect with ")[0] for m in messages] == named


def test_the_effective_configuration_has_all_values_and_no_such_warning() -> None:
    text = "plugins: [{type: session-affinity-scorer}, {type: concurrency-detector}, {type: metrics-data-source}]"
    effective = load(text, "c.yaml", allow_experimental=True).as_yaml()
    assert "sessionIdConfig" in effective
    assert ignored(effective) == []


def test_a_null_around_a_parameter_is_no_fault() -> None:
    class Inner(msgspec.Struct):
        value: int = 7

    class Outer(msgspec.Struct):
        inner: Inner | None = None

    assert _value(Outer(), "inner.value") == (None, None)
    assert _value(Outer(Inner(8)), "inner.value") == (8, 7)
