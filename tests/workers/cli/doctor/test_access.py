"""What a picker may do in Kubernetes: which verbs it needs by its flags, and what the API server's answers mean."""

from typing import Any

import msgspec
import pytest

from tests.deploy.cases import CASES
from tests.deploy.renderers import NAMESPACE, POOL, ours
from workers.cli.doctor import access
from workers.cli.doctor.access import Answer, access_findings, needed, uses_kubernetes, verdict
from workers.cli.doctor.running import Running
from workers.supervisor.kube.errors import Access


def picker(**flags: str) -> Running:
    shown = {name.replace("_", "-"): {"value": value, "origin": f"--{name}"} for name, value in flags.items()}
    return Running(None, "", {"settings": {"flags": shown}}, [])


def rules(of: Running) -> set[str]:
    return {f"{each.verb} {each.resource}" for each in needed(of)}


def test_a_picker_of_a_pool_needs_the_pool_its_objects_and_events() -> None:
    wanted = rules(picker(pool_name="pool", pool_namespace="ns", metrics_endpoint_auth="false"))
    assert "list inferencepools" in wanted
    assert {"watch inferenceobjectives", "watch inferencemodelrewrites", "create events", "watch pods"} <= wanted
    assert not {each for each in wanted if "leases" in each or "reviews" in each}


def test_election_and_tokens_need_more_and_a_selector_needs_less() -> None:
    assert {"update leases", "create tokenreviews"} <= rules(picker(ha_enable_leader_election="true"))
    assert rules(picker(endpoint_selector="app=x", metrics_endpoint_auth="false")) == {"list pods", "watch pods"}


@pytest.mark.parametrize("case", ["gateway", "leader election"])
def test_the_role_of_the_chart_allows_all_that_a_picker_of_the_chart_needs(case: str) -> None:
    manifests = ours(CASES[case])
    rules = [rule for each in manifests if each["kind"] in ("Role", "ClusterRole") for rule in each["rules"]]
    flags = {"pool_name": POOL, "pool_namespace": NAMESPACE, "pool_group": "inference.networking.k8s.io"}
    elects = "true" if case == "leader election" else "false"
    for each in needed(picker(**flags, ha_enable_leader_election=elects)):
        assert any(
            each.verb in rule["verbs"]
            and each.resource in rule.get("resources", ())
            and each.group in rule.get("apiGroups", ())
            and ("resourceNames" not in rule or each.name in rule["resourceNames"])
            for rule in rules
        ), each


def test_a_picker_of_several_pools_follows_all_inference_pools_and_creates_no_events() -> None:
    several = picker(service_name="epp", pool_namespace="ns", metrics_endpoint_auth="false")
    several = several._replace(state={**several.state, "pools": {}})
    assert {each.name for each in needed(several)} == {""} and "list inferencepools" in rules(several)
    assert "create events" not in rules(several) and uses_kubernetes(several)


def test_a_picker_with_endpoints_of_its_own_does_not_ask_kubernetes() -> None:
    assert uses_kubernetes(picker(pool_name="pool"))
    assert uses_kubernetes(picker(endpoint_selector="app=x"))
    assert not uses_kubernetes(picker(pool_name="pool", endpoints="127.0.0.1:80"))
    assert not uses_kubernetes(picker())


def answered(**status: Any) -> Answer:
    return msgspec.convert({"status": status}, Answer)


@pytest.mark.parametrize("answer", [b"<html>", b"null", b"{}", b'{"status":null}', b"[]", b'{"status":{"reason":"\xff"}}'])
def test_an_answer_that_is_not_an_api_servers_is_one_finding(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        host = "https://proxy"

        async def request(self, *_: Any, **__: Any) -> bytes:
            return answer

        async def close(self) -> None:
            pass

    async def connect(_environ: Any) -> Odd:
        return Odd()

    monkeypatch.setattr(access.Api, "connect", connect)
    (found,) = access_findings(picker(pool_name="pool", pool_namespace="ns"))
    assert found.rule == "kubernetes-api"
    assert "https://proxy" in found.evidence


@pytest.mark.parametrize("answer", [answered(allowed=False), answered()])
def test_what_is_not_allowed_is_named_with_the_rule_that_allows_it(answer: Answer) -> None:
    found = verdict(Access("watch", "", "pods", "ns"), answer)
    assert found is not None
    assert (found.rule, found.severity) == ("rbac-verb", "error")
    assert 'resources: ["pods"], verbs: ["watch"]' in found.fix
    assert "Role in namespace ns" in found.fix


def test_what_is_allowed_is_no_finding_and_events_are_a_warning() -> None:
    assert verdict(Access("watch", "", "pods", "ns"), answered(allowed=True)) is None
    events = verdict(Access("create", "", "events", "ns"), answered(allowed=False, reason="no"))
    assert events is not None
    assert (events.severity, events.evidence) == ("warning", "the API server says no: no")
