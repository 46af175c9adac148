"""Each shipped file that configures a gateway removes all control headers from requests that come from outside."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.config.control_headers import CONTROL_HEADERS

DEPLOY = Path(__file__).parents[2] / "deploy"
NAMES_MAX = 16  # of a transformation of agentgateway
FILES = (
    "envoy.yaml",
    "envoy-retry.yaml",
    "helm/endpoint-picker/files/envoy.yaml",
    "kustomize/overlays/standalone/configmap.yaml",
    "gateways/agentgateway.yaml",
    "gateways/envoy-gateway.yaml",
    "gateways/istio.yaml",
)


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yields all mappings in a document, also in texts of YAML."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from mappings(each)
    elif isinstance(value, list):
        for each in value:
            yield from mappings(each)
    elif isinstance(value, str) and "\n" in value:
        yield from mappings(yaml.safe_load(value))


def removed(file: str) -> list[str]:
    text = (DEPLOY / file).read_text().replace("@", "")  # placeholders of the chart are no YAML
    found: list[str] = []
    for each in mappings(list(yaml.safe_load_all(text))):
        if isinstance(names := each.get("remove"), list):
            found += names
        elif isinstance(names, str):
            found.append(names)
    return found


@pytest.mark.parametrize("file", FILES)
def test_a_shipped_file_removes_each_control_header_once(file: str) -> None:
    assert sorted(removed(file)) == sorted(CONTROL_HEADERS)


def test_all_files_for_gateways_are_in_the_list() -> None:
    """A file that calls an external processor, or that is for a gateway, is among those above."""
    calling = {
        str(file.relative_to(DEPLOY))
        for file in DEPLOY.rglob("*.yaml")
        if "ext_proc.v3.ExternalProcessor" in file.read_text() or file.parent.name == "gateways"
    }
    assert calling == set(FILES)


def test_agentgateway_takes_as_many_names_per_policy_and_each_phase_once() -> None:
    policies = list(yaml.safe_load_all((DEPLOY / "gateways/agentgateway.yaml").read_text()))
    assert [policy["spec"]["traffic"]["phase"] for policy in policies] == ["PreRouting", "PostRouting"]
    for policy in policies:
        assert len(policy["spec"]["traffic"]["transformation"]["request"]["remove"]) <= NAMES_MAX
