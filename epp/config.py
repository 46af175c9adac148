"""Configuration text -> everything that runs, compiled; or all that is wrong with it, at once.

`load` is the way in. What it returns is immutable and knows how to write itself down: `as_yaml` is
the configuration with every default in it, and loading that gives the same again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from epp import document, flow_assembly, schema, yaml_nodes
from epp.advice import DEFAULT_SURROUNDINGS, Surroundings, advise
from epp.assembly import Assembly, Scraped, assemble
from epp.findings import ConfigError, ConfigErrors, ConfigWarning, Findings
from epp.flow.plan import FlowPlan
from epp.pipeline import Pipeline, Recipe, compile_pipeline
from epp.plugin import Discovery, Extractor, SaturationDetector, Scorer
from epp.response_phase import FULL

__all__ = [
    "ConfigError",
    "ConfigErrors",
    "ConfigWarning",
    "EffectiveConfig",
    "Surroundings",
    "load",
]

DEFAULT_NAME = "built-in default configuration"
# A point is 1,024 tokens to prefill. `python -m tests.bench.routing` has the figures.
DEFAULT_TEXT = f"""\
apiVersion: {schema.API_VERSION}
kind: {schema.KIND}
featureGates: [flowControl]
plugins:
- {{type: token-load-scorer, parameters: {{queueThresholdTokens: 262144}}}}
- type: queue-scorer
- type: running-requests-size-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
- type: token-weighted-fairness-policy
- {{type: utilization-detector, parameters: {{queueDepthThreshold: 32}}}}
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: token-load-scorer, weight: 256}}
  - {{pluginRef: queue-scorer, weight: 1}}
  - {{pluginRef: running-requests-size-scorer, weight: 1}}
  - {{pluginRef: kv-cache-utilization-scorer, weight: 1}}
  - {{pluginRef: prefix-cache-scorer, weight: 1}}
flowControl:
  maxRequests: 5k
  maxBytes: 1G
  noEndpointRequestTTL: 1s
  saturationDetector: {{pluginRef: utilization-detector}}
  defaultPriorityBand: {{fairnessPolicyRef: token-weighted-fairness-policy}}
"""


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """A checked configuration with its defaults.

    `sources` (exactly one) and `discovery` are for the supervisor; their instances are in `pipeline.plugins` too.
    `document` is the effective configuration as plain values.
    """

    source: str
    pipeline: Pipeline
    sources: tuple[Scraped, ...]
    discovery: Discovery | None
    parameters: Mapping[str, msgspec.Struct]
    gates: Mapping[str, bool]
    warnings: tuple[ConfigWarning, ...]
    document: Mapping[str, Any]
    response_phase: str = FULL
    saturation: SaturationDetector | None = None  # one is always there; None only in tests that make their own
    flow: FlowPlan | None = None  # None: flow control is off

    @property
    def extractor(self) -> Extractor:
        """What reads the pages that are scraped."""
        return self.sources[0].extractors[0]

    def as_yaml(self) -> str:
        """The configuration with all defaults written out."""
        return yaml_nodes.dump(self.document)


def load(
    text: str, source: str, *, allow_experimental: bool = False, around: Surroundings = DEFAULT_SURROUNDINGS
) -> EffectiveConfig:
    """The configuration of a YAML or JSON text; `source` names it in messages. Raises `ConfigErrors`.

    A text with nothing in it is the built-in default configuration. `around` is what its figures are measured against.
    """
    findings = Findings(source)
    root = yaml_nodes.read(text, findings)
    if not findings.errors and (root is None or root.value is None):
        return load(DEFAULT_TEXT, f"{source} ({DEFAULT_NAME})" if source else DEFAULT_NAME, around=around)
    if root is None:
        findings.raise_errors()
    assert root is not None
    read = document.read(root, findings)
    assembly = assemble(read, findings, allow_experimental=allow_experimental)
    advise(read, assembly, findings, around)
    findings.raise_errors()
    return EffectiveConfig(
        source=source,
        pipeline=_compiled(assembly),
        sources=tuple(assembly.sources),
        discovery=assembly.discovery,
        parameters={name: plugin.params for name, plugin in assembly.plugins.items()},
        gates=read.gates,
        warnings=findings.sorted_warnings(),
        document=_effective(read, assembly),
        response_phase=read.response_phase,
        saturation=assembly.saturation,
        flow=assembly.flow,
    )


def _compiled(assembly: Assembly) -> Pipeline:
    assert assembly.handler is not None
    return compile_pipeline(
        Recipe(
            plugins=tuple(assembly.plugins.values()),
            parsers=tuple(assembly.parsers),
            handler=assembly.handler,
            profiles=tuple(assembly.profiles),
            producers=tuple(assembly.producers),
            columns=tuple(assembly.columns),
        )
    )


def _effective(read: document.Document, assembly: Assembly) -> dict[str, Any]:
    data_layer: dict[str, Any] = {
        "injectDefaults": read.inject_defaults,
        "sources": [
            {"pluginRef": scraped.source.name, "extractors": [_ref(e.name) for e in scraped.extractors]}
            for scraped in assembly.sources
        ],
    }
    if assembly.discovery is not None:
        data_layer["discovery"] = _ref(assembly.discovery.name)
    effective: dict[str, Any] = {
        "apiVersion": schema.API_VERSION,
        "kind": schema.KIND,
        "featureGates": [f"{name}={str(value).lower()}" for name, value in read.gates.items()],
        "plugins": [_plugin(name, assembly) for name in assembly.plugins if name not in flow_assembly.IMPLIED],
        "schedulingProfiles": [
            {"name": wired.name, "plugins": [_member(plugin, weight) for plugin, weight in wired.members]}
            | ({"shadow": True} if wired.shadow else {})
            for wired in assembly.profiles
        ],
        "dataLayer": data_layer,
        "requestHandler": {
            "parsers": [_ref(parser.name) for parser in assembly.parsers],
            "responsePhase": read.response_phase,
        },
    }
    if assembly.saturation is not None:
        effective["flowControl"] = {"saturationDetector": _ref(assembly.saturation.name)}
    if assembly.flow is not None:
        effective["flowControl"] |= flow_assembly.as_document(assembly.flow)
    return effective


def _ref(name: str) -> dict[str, Any]:
    return {"pluginRef": name}


def _member(plugin: Any, weight: float) -> dict[str, Any]:
    if not isinstance(plugin, Scorer):
        return _ref(plugin.name)
    return _ref(plugin.name) | {"weight": int(weight) if weight.is_integer() else weight}


def _plugin(name: str, assembly: Assembly) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "type": assembly.types[name]}
    if parameters := msgspec.to_builtins(assembly.plugins[name].params):
        entry["parameters"] = parameters
    return entry
