"""Loads a configuration for a test, and returns what is in force, or the errors or warnings."""

from textwrap import dedent

import pytest

from epp.config.load import ConfigErrors, EffectiveConfig, load

BENCH = """\
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- name: endpoints
  type: file-discovery
  parameters: {path: endpoints.yaml, watchFile: true}
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
dataLayer:
  discovery: {pluginRef: endpoints}
"""


def ok(text: str, **flags: bool) -> EffectiveConfig:
    return load(dedent(text), "c.yaml", **flags)


def errors(text: str, **flags: bool) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        ok(text, **flags)
    return [str(error) for error in caught.value.errors]


def warnings(text: str) -> list[str]:
    return [str(warning) for warning in ok(text).warnings]


def rules(text: str) -> set[str]:
    return {warning.rule for warning in ok(text).warnings}
