"""What of a configuration cannot work behind a gateway."""

import pytest

from epp.config.gateways import GATEWAYS, gateway_findings
from epp.config.load import load

LISTS = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: max-score-picker, name: best, parameters: {maxNumOfEndpoints: 3}}
- {type: queue-scorer}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer}, {pluginRef: best}]
"""
SESSIONS = (
    LISTS.replace("maxNumOfEndpoints: 3", "maxNumOfEndpoints: 1")
    .replace("- {type: queue-scorer}", "- {type: queue-scorer}\n- {type: session-affinity-scorer, name: sticky}")
    .replace("plugins: [{", "plugins: [{pluginRef: sticky}, {")
)


def rules(text: str, gateway: str) -> list[str]:
    return [finding.rule for finding in gateway_findings(load(text, "f", allow_experimental=True), gateway, "f")]


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_a_list_of_endpoints_is_for_gateways_that_take_one(gateway: str) -> None:
    warned = "gateway-list" in rules(LISTS, gateway)
    assert warned == (gateway in ("envoy-ai", "agentgateway", "nginx"))
    assert "gateway-list" not in rules(LISTS.replace("Endpoints: 3", "Endpoints: 1"), gateway)


def test_a_plugin_that_reads_responses_cannot_work_where_the_picker_sees_none() -> None:
    assert rules(SESSIONS, "nginx") == ["gateway-response"]
    assert rules(SESSIONS, "envoy") == []


def test_a_gateway_that_ignores_removals_of_headers_passes_on_keys() -> None:
    tenants = SESSIONS + "tenants: {from: [{header: x-tenant, trusted: true}]}\n"
    assert "gateway-headers" in rules(tenants, "nginx")
    assert "gateway-headers" not in rules(tenants, "agentgateway")


def test_a_warning_names_the_plugin_the_gateway_and_the_fix() -> None:
    (warning,) = gateway_findings(load(LISTS, "f"), "agentgateway", "f")
    assert str(warning) == (
        "f: warning[gateway-list]: plugin 'best': maxNumOfEndpoints 3: agentgateway takes one endpoint (omit maxNumOfEndpoints)"
    )
