"""Loads a configuration: compiles its text into everything that runs, or raises all of its errors at once.

`load` is the entry point. Its result is immutable and can write itself as YAML (`epp.config.effective`).
"""

from epp.config import reader, yaml_nodes
from epp.config.assembler import assemble
from epp.config.effective import EffectiveConfig, as_document, places
from epp.config.findings import WHOLE, ConfigError, ConfigErrors, ConfigWarning, Findings
from epp.config.lint import DEFAULT_SURROUNDINGS, Surroundings, lint
from epp.config.schema import API_VERSION, KIND
from epp.decision.pipeline import Wiring, compile_pipeline

__all__ = ["ConfigError", "ConfigErrors", "ConfigWarning", "EffectiveConfig", "Surroundings", "load"]

DEFAULT_NAME = "built-in default configuration"
# docs/routing.md compares it with other policies.
DEFAULT_TEXT = f"""\
apiVersion: {API_VERSION}
kind: {KIND}
featureGates: [flowControl]
plugins:
- type: learned-latency-producer
- type: learned-latency-scorer
- type: token-weighted-fairness-policy
- {{type: utilization-detector, parameters: {{queueDepthThreshold: 32}}}}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: learned-latency-scorer
flowControl:
  maxRequests: 5k
  maxBytes: 1G
  noEndpointRequestTTL: 1s
  saturationDetector: {{pluginRef: utilization-detector}}
  defaultPriorityBand: {{fairnessPolicyRef: token-weighted-fairness-policy}}
"""


def load(
    text: str | None, source: str, *, allow_experimental: bool = False, surroundings: Surroundings = DEFAULT_SURROUNDINGS
) -> EffectiveConfig:
    """Loads a configuration from YAML or JSON text. `source` names it in messages. Raises ConfigErrors.

    If `text` is None, loads the built-in default configuration. A text without a document is an error, because a file that was cut off may
    be empty, and the picker must not start with the default configuration instead. `surroundings`: the settings and limits with which lint
    compares the configuration.
    """
    if text is None:
        return load(DEFAULT_TEXT, source or DEFAULT_NAME, surroundings=surroundings)
    findings = Findings(source)
    root = yaml_nodes.read(text, findings)
    if not findings.errors and (root is None or root.value is None):
        why = "there is no document: the text is empty or has only comments"
        hint = "a ConfigMap that was cut off looks like this; for the built-in configuration, name no file"
        findings.error(WHOLE, "no-document", why, hint)
    if root is None or root.value is None:
        findings.raise_errors()
    assert root is not None
    written = reader.read(root, findings)
    assembly = assemble(written, findings, allow_experimental=allow_experimental)
    lint(written, assembly, findings, surroundings)
    findings.raise_errors()
    assert assembly.handler is not None
    wiring = Wiring(
        tuple(assembly.plugins.values()), tuple(assembly.parsers), assembly.handler, tuple(assembly.profiles),
        assembly.producers, assembly.columns,
    )  # fmt: skip
    return EffectiveConfig(
        source=source,
        pipeline=compile_pipeline(wiring),
        sources=tuple(assembly.sources),
        discovery=assembly.discovery,
        parameters={name: plugin.params for name, plugin in assembly.plugins.items()},
        gates=written.gates,
        warnings=findings.sorted_warnings(),
        document=as_document(written, assembly),
        response_phase=written.response_phase,
        saturation=assembly.saturation,
        flow=assembly.flow,
        places=places(root),
        tenants=written.tenants,
    )
