"""The finding about trusted client headers: for each group what a client can do, unless the gateway removes its headers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.config.control_headers import POWERS
from epp.request.client_headers import FAIRNESS_ID, GROUPS, MODEL_REWRITE, TRUSTED_BY_DEFAULT
from workers.cli.doctor.gateway import client_header_findings

SHIPPED = yaml.safe_load((Path(__file__).parents[4] / "deploy/envoy.yaml").read_text())
PORT = 9002
DEFAULT = ",".join(TRUSTED_BY_DEFAULT)


def manager(config: Any) -> Any:
    return config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]


def mutations(config: Any) -> list[dict[str, Any]]:
    (extension,) = manager(config)["early_header_mutation_extensions"]
    found: list[dict[str, Any]] = extension["typed_config"]["mutations"]
    return found


def without(*names: str) -> Any:
    """The shipped configuration, but it does not remove these headers."""
    config = copy.deepcopy(SHIPPED)
    mutations(config)[:] = [each for each in mutations(config) if each["remove"] not in names]
    return config


def powers(flag: str, config: Any = None, port: int = PORT) -> list[str]:
    """The groups that a finding names."""
    found = client_header_findings(flag, config, [port])
    assert len(found) <= 1
    text = found[0].evidence if found else ""
    return [group for group, power in POWERS.items() if f"a client can {power} ({group})" in text]


def test_without_word_about_the_gateway_each_trusted_group_is_named_with_what_a_client_can_do() -> None:
    assert powers(DEFAULT) == list(TRUSTED_BY_DEFAULT)
    assert powers(",".join(GROUPS)) == [*TRUSTED_BY_DEFAULT, "debug"]
    assert powers("model") == ["model"]
    assert powers("") == powers("none") == []
    (found,) = client_header_findings("model", None, [PORT])
    assert (found.rule, found.severity) == ("client-headers", "warning")
    assert "--trust-client-headers=gateway" in found.fix


@pytest.mark.parametrize("flag", ["gateway", f"gateway,{DEFAULT}"])
def test_nothing_is_found_if_the_flag_says_that_the_gateway_removes_the_headers(flag: str) -> None:
    assert powers(flag) == []


@pytest.mark.parametrize("flag", [DEFAULT, f"gateway,{DEFAULT}"])
def test_the_configuration_of_the_gateway_counts_more_than_the_flag(flag: str) -> None:
    assert powers(flag, SHIPPED) == []
    assert powers(flag, without(FAIRNESS_ID[1], *MODEL_REWRITE)) == ["fairness", "model"]
    (found,) = client_header_findings(flag, without(FAIRNESS_ID[1]), [PORT])
    assert f"lets through: {FAIRNESS_ID[1]}\n" in found.evidence


def test_the_strictest_of_two_listeners_does_not_cover_the_other() -> None:
    config = without(*MODEL_REWRITE)
    config["static_resources"]["listeners"] += SHIPPED["static_resources"]["listeners"]
    assert powers(DEFAULT, config) == ["model"]


def test_a_listener_that_calls_another_processor_does_not_count() -> None:
    config, other = copy.deepcopy(SHIPPED), without(*MODEL_REWRITE)["static_resources"]["listeners"][0]
    manager({"static_resources": {"listeners": [other]}})["http_filters"][0]["typed_config"]["grpc_service"] = {
        "envoy_grpc": {"cluster_name": "other"}
    }
    config["static_resources"]["listeners"].append(other)
    assert powers(DEFAULT, config) == []


def test_without_a_cluster_that_has_the_port_each_listener_with_a_processor_counts() -> None:
    assert powers(DEFAULT, without(*MODEL_REWRITE), port=1) == ["model"]


def test_a_configuration_that_calls_no_picker_says_nothing() -> None:
    config = {"static_resources": {"listeners": [], "clusters": []}}
    assert powers(DEFAULT, config) == list(TRUSTED_BY_DEFAULT)
    assert powers("gateway", config) == []


@pytest.mark.parametrize("matcher", [{"prefix": "X-LLM-D-"}, {"exact": "x-llm-d-model-name-rewrite"}])
def test_a_removal_by_match_counts(matcher: dict[str, str]) -> None:
    config = without("x-llm-d-model-name-rewrite")
    mutations(config).append({"remove_on_match": {"key_matcher": matcher}})
    assert powers(DEFAULT, config) == []


def test_with_tenants_no_client_names_its_fairness_id() -> None:
    (found,) = client_header_findings("fairness,model", None, [PORT])
    assert "(fairness)" in found.evidence
    (found,) = client_header_findings("fairness,model", None, [PORT], tenants=True)
    assert "(fairness)" not in found.evidence and "(model)" in found.evidence
    assert client_header_findings("fairness", None, [PORT], tenants=True) == []
