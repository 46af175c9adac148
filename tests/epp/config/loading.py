"""Loads a configuration for a test, and returns what is in force, or the errors or warnings."""

from pathlib import Path
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


def invalid(name: str) -> list[tuple[str, list[str]]]:
    """Returns the documents of a file in this folder, each with its errors.

    A block is a document and its errors (`-> line:column: error[rule]: message (hint)`).
    """
    blocks = (Path(__file__).parent / name).read_text(encoding="utf-8").removeprefix("==\n").split("\n==\n")
    return [(document, errors) for document, *errors in (block.strip("\n").split("\n-> ") for block in blocks)]


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
