"""Values of the chart: impossible and unknown ones are refused at once with the rule, and those of the reference chart are accepted."""

import pytest

from tests.deploy.cases import CASES, REFUSED, UNKNOWN, values
from tests.deploy.objects import Json, one, picker, pod, refused, variables
from tests.deploy.renderers import POOL, ours
from workers.cli.manifests.layers import BadValues, Layer, checked


@pytest.mark.parametrize("name", list(REFUSED))
def test_impossible_values_are_refused_with_the_rule(name: str) -> None:
    case, message = REFUSED[name]
    with pytest.raises(BadValues) as error:
        refused(case)
    assert message in str(error.value)
    assert "execution error" not in str(error.value)


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_names_and_types_are_strict(name: str) -> None:
    with pytest.raises(BadValues, match=r"^router"):
        checked([Layer("f.yaml", UNKNOWN[name])])


def test_all_impossible_values_are_reported_at_once() -> None:
    with pytest.raises(BadValues) as error:
        refused({"router": {"epp": {"terminationGracePeriodSeconds": 5, "flags": {"tracing": True}}}})
    assert len(str(error.value).splitlines()) == 3


def test_all_unknown_names_and_wrong_types_are_reported_at_once_with_their_source() -> None:
    router = {"epp": {"replica": 1, "replicas": "x"}, "latencyPredictor": {"enabled": True}}
    case = {"router": router, "provider": {"gke": {"x": 1}}}
    with pytest.raises(BadValues) as error:
        checked([Layer("f.yaml", case), Layer("--set router.epp.replica=2", {"router": {"epp": {"replica": 2}}})])
    assert str(error.value).splitlines() == [
        "router.epp.replica: there is no such value; did you mean router.epp.replicas? (given by --set router.epp.replica=2)",
        "router.epp.replicas: expected 'int', got 'str' (given by f.yaml)",
        "router.latencyPredictor.enabled: only false is supported; remove it (given by f.yaml)",
        "provider.gke.x: not supported: this chart has no objects for GKE; remove it, and apply them beside it (given by f.yaml)",
    ]


@pytest.mark.parametrize("pool", ["Vllm", "1a", "a" * 41, "a_b", "-a", ""])
def test_the_pool_name_must_be_valid_for_services(pool: str) -> None:
    with pytest.raises(BadValues, match="pool name"):
        refused(CASES["gateway"], pool)


def test_values_of_the_reference_chart_that_change_nothing_are_accepted() -> None:
    same = values(
        clusterDomain="cluster.local", tokenizer={"enabled": False}, latencyPredictor={"enabled": False},
        monitoring={"provider": {"name": "", "gmp": {"autopilot": False}}},
        proxy={"enabled": False, "proxyType": "envoy", "mode": "sidecar"},
    ) | {"provider": {"name": "none", "gke": {"preferredBackends": {"enabled": False}}}}  # fmt: skip
    assert ours(same) == ours(CASES["gateway"])
    checked([Layer("f.yaml", same)])


def test_pods_have_the_label_that_selectors_for_the_reference_chart_use() -> None:
    def labels(name: str) -> Json:
        found: Json = one(ours(CASES[name]), "Deployment")["spec"]["template"]["metadata"]["labels"]
        return found

    assert labels("gateway")["llm-d-router-gateway"] == f"{POOL}-epp"
    assert labels("standalone")["llm-d-router-standalone"] == f"{POOL}-epp"
    assert "llm-d-router-gateway" not in one(ours(CASES["gateway"]), "Deployment")["spec"]["selector"]["matchLabels"]


def test_security_contexts_strategy_and_pull_secrets_are_those_of_the_values() -> None:
    manifests = ours(CASES["own security"])
    spec = pod(manifests)
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (1000, True)
    security = picker(manifests)["securityContext"]
    assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (False, False)
    assert one(manifests, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}


def test_by_default_only_pods_of_the_cluster_reach_ext_proc_health_and_metrics() -> None:
    gateway, monitoring = one(ours(CASES["gateway"]), "NetworkPolicy")["spec"]["ingress"]
    assert gateway["from"] == monitoring["from"] == [{"namespaceSelector": {}}]


def test_labels_of_model_servers_are_sorted() -> None:
    environment = variables(ours(values(mode="standalone", modelServers={"matchLabels": {"b": "2", "a": "1"}})))
    assert environment["EPP_ENDPOINT_SELECTOR"]["value"] == "a=1,b=2"
