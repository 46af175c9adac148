"""Applies rendered objects to a real API server, and tries the rights of the picker's account with its token."""

import copy
import itertools
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.demo.children import python
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import envoy_path
from tests.deploy.cases import CASES, values
from tests.deploy.generate import MODES
from tests.deploy.renderers import CHART, KUSTOMIZE, POOL, ROOT, helm, kustomize, ours, parsed
from tests.e2e.cluster import COMPLETIONS, Cluster, completion
from tests.kube.client import Kube, Refused, collection
from tests.kube.control_plane import ControlPlane
from tests.kube.objects import namespace, pod, status
from tests.kube.world import page

Json = dict[str, Any]

_SPACES = itertools.count(1)
ACCOUNT = f"{POOL}-epp"
DRY = "?fieldManager=tests&force=true&dryRun=All&fieldValidation=Strict"
SERVER = "127.61.0.1"
ALWAYS = {  # the rights of every account: to ask for its rights
    ("authorization.k8s.io", "selfsubjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectrulesreviews"),
    ("authentication.k8s.io", "selfsubjectreviews"),
}


@pytest.fixture
def space(plane: ControlPlane) -> Iterator[str]:
    name = f"deploy-{next(_SPACES)}"
    plane.kube().create(namespace(name))
    yield name
    plane.close()


def strictly(kube: Kube, manifests: list[Json]) -> None:
    """Lets the API server validate each object: by its schema, without unknown fields, and by its rules. Nothing is stored."""
    for one in manifests:
        meta = one["metadata"]
        place = collection(one["apiVersion"], plural(one["kind"]), meta.get("namespace", ""))
        kube.request("PATCH", f"{place}/{meta['name']}{DRY}", one, "application/apply-patch+yaml")


def plural(kind: str) -> str:
    return {"NetworkPolicy": "networkpolicies"}.get(kind, f"{kind.lower()}s")


def apply(kube: Kube, manifests: list[Json]) -> None:
    for one in manifests:
        kube.apply(one)


@pytest.mark.parametrize("name", list(CASES))
def test_the_api_server_accepts_the_rendered_chart(name: str, plane: ControlPlane, space: str) -> None:
    strictly(plane.kube(), parsed(helm(CASES[name], namespace=space).stdout))


@pytest.mark.parametrize("mode", MODES)
def test_the_api_server_accepts_the_kustomize_overlays(mode: str, plane: ControlPlane, space: str, tmp_path: Path) -> None:
    (tmp_path / "shipped").symlink_to(KUSTOMIZE)
    index = {"namespace": space, "resources": [f"shipped/overlays/{mode}"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(index))
    manifests = parsed(kustomize(tmp_path).stdout)
    assert manifests
    strictly(plane.kube(), manifests)


def test_the_api_server_accepts_the_examples(plane: ControlPlane, space: str) -> None:
    for path in sorted((ROOT / "deploy" / "examples").glob("*.yaml")):
        for one in parsed(path.read_text()):
            one["metadata"]["namespace"] = space
            strictly(plane.kube(), [one])


@pytest.mark.parametrize("name", ["gateway", "standalone", "leader election"])
def test_the_strictest_pod_security_admits_the_pods(name: str, plane: ControlPlane, space: str) -> None:
    kube = plane.kube()
    restricted = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    kube.patch(namespace(space), restricted)
    (deployment,) = [one for one in ours(CASES[name], namespace=space) if one["kind"] == "Deployment"]
    template = copy.deepcopy(deployment["spec"]["template"])
    wanted = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tried", "namespace": space}, "spec": template["spec"]}
    kube.create(wanted)
    del template["spec"]["securityContext"]["seccompProfile"]
    wanted["metadata"]["name"] = "not-admitted"
    with pytest.raises(Refused, match="violates PodSecurity"):
        kube.create(wanted)


def test_an_unknown_field_would_be_refused(plane: ControlPlane, space: str) -> None:
    manifests = ours(CASES["gateway"], namespace=space)
    (deployment,) = [one for one in manifests if one["kind"] == "Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(Refused, match="livenessProb"):
        strictly(plane.kube(), manifests)


def test_an_installation_can_be_updated_with_other_values(plane: ControlPlane, space: str) -> None:
    for name in ("gateway", "leader election", "monitoring", "standalone"):
        apply(plane.kube(), parsed(helm(CASES[name], namespace=space).stdout))


@pytest.mark.parametrize("name", ["gateway", "standalone", "leader election", "monitoring without tokens"])
def test_the_account_has_the_rights_that_the_picker_needs_and_no_others(name: str, plane: ControlPlane, space: str) -> None:
    manifests = ours(CASES[name], namespace=space)
    apply(plane.kube(), manifests)
    kube = plane.kube(plane.kube().token(space, ACCOUNT))
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": space}}
    review = kube.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body)["status"]
    assert not review["incomplete"]
    assert rights(review["resourceRules"]) == rights(
        rule for one in manifests if one["kind"] in ("Role", "ClusterRole") for rule in one["rules"] if "resources" in rule
    )
    plane.close()


def rights(rules: Any) -> set[tuple[str, str, str, str]]:
    """The rights: group, resource, verb, and the name of one object or "". Without the rights of every account."""
    result = set()
    for rule in rules:
        names = rule.get("resourceNames") or [""]
        result |= set(itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"], names))
    return {right for right in result if right[:2] not in ALWAYS}


def test_the_token_can_read_the_pickers_objects_and_no_others(plane: ControlPlane, space: str) -> None:
    apply(plane.kube(), ours(CASES["leader election"], namespace=space))
    kube = plane.kube(plane.kube().token(space, ACCOUNT))
    pools, selector = f"/apis/inference.networking.k8s.io/v1/namespaces/{space}/inferencepools", f"metadata.name={POOL}"
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases"
    for path in (
        f"/api/v1/namespaces/{space}/pods",
        f"{pools}?fieldSelector={selector}",
        f"/apis/llm-d.ai/v1alpha2/namespaces/{space}/inferenceobjectives",
        f"/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{space}/inferencemodelrewrites",
    ):
        kube.request("GET", path)
    for path in (
        pools,
        f"{pools}/{POOL}",
        f"{pools}/other",
        lease,
        f"/api/v1/namespaces/{space}/secrets",
        f"/api/v1/namespaces/{space}/configmaps",
        "/api/v1/namespaces/default/pods",
        "/api/v1/nodes",
        f"/api/v1/namespaces/{space}/pods/x/log",
    ):
        with pytest.raises(Refused, match="403"):
            kube.request("GET", path)
    for verb, path in (("DELETE", f"/api/v1/namespaces/{space}/pods/x"), ("POST", f"/api/v1/namespaces/{space}/pods")):
        with pytest.raises(Refused, match="403"):
            kube.request(verb, path, {} if verb == "POST" else None)
    plane.close()


def test_the_token_of_monitoring_can_read_metrics_and_no_objects(plane: ControlPlane, space: str) -> None:
    apply(plane.kube(), ours(CASES["monitoring"], namespace=space))
    kube = plane.kube(plane.kube().token(space, f"{ACCOUNT}-metrics-reader"))
    assert kube.request("GET", "/metrics")
    for path in (f"/api/v1/namespaces/{space}/pods", f"/api/v1/namespaces/{space}/secrets"):
        with pytest.raises(Refused, match="403"):
            kube.request("GET", path)
    plane.close()


@pytest.mark.parametrize("name", ["gateway", "standalone", "leader election"])
def test_the_picker_becomes_ready_with_the_rendered_account_flags_and_configuration(name: str, plane: ControlPlane, space: str) -> None:
    kube = plane.kube()
    manifests = parsed(helm(CASES[name], namespace=space).stdout)
    apply(kube, manifests)
    labels = CASES[name]["router"]["modelServers"]["matchLabels"]
    kube.patch(kube.create(pod(space, "server-0", labels)), status("127.0.0.9"), status=True)
    with Cluster() as cluster:
        grpc, health, metrics = free_ports(3)
        local_flags = {"--grpc-port": grpc, "--grpc-health-port": health, "--metrics-port": metrics, "--run-dir": cluster.directory}
        flags, environ = started(manifests, cluster.directory, local_flags)
        environ["KUBECONFIG"] = str(plane.kubeconfig(cluster.directory / "kubeconfig", kube.token(space, ACCOUNT)))
        variables = [f"{key}={value}" for key, value in environ.items()]
        child = cluster.children.start("picker", ["env", *variables, *python("workers", "serve", *flags)])
        cluster.wait(child, lambda: ready(metrics))
        with pytest.raises(urllib.request.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=5)
        assert refused.value.code == 401
        refused.value.close()
        reader = kube.token(space, "reader")
        allow_metrics(kube, space, "reader")
        page = urllib.request.Request(f"http://127.0.0.1:{metrics}/metrics", headers={"Authorization": f"Bearer {reader}"})
        with urllib.request.urlopen(page, timeout=5) as answer:
            text = answer.read().decode()
        assert "server-0" in text
    requests = [one for one in plane.requests() if one.user == f"system:serviceaccount:{space}:{ACCOUNT}"]
    assert requests
    assert not [one for one in requests if one.code == 403]
    plane.close()


def test_a_request_reaches_the_picked_pod_through_the_envoy_of_the_chart(plane: ControlPlane, space: str) -> None:
    kube = plane.kube()
    grpc, health, metrics, port, status_port, admin, target = free_ports(7)
    case = values(
        mode="standalone",
        metricsPort=metrics,
        epp={"extProcPort": grpc, "grpcHealthPort": health},
        proxy={"port": port, "metricsPort": status_port},
        modelServers={"targetPorts": [{"number": target}]},
    )
    manifests = parsed(helm(case, namespace=space).stdout)
    apply(kube, manifests)
    labels = case["router"]["modelServers"]["matchLabels"]
    kube.patch(kube.create(pod(space, "server-0", labels)), status(SERVER), status=True)
    (config,) = [one["data"]["envoy.yaml"] for one in manifests if one["metadata"]["name"] == f"{POOL}-envoy"]
    with Cluster() as cluster:
        server = cluster.children.start("server", python("loadtest.sim.main", "--addresses", f"{SERVER}:{target}"))
        cluster.wait(server, lambda: "ready" in server.text())
        flags, environ = started(manifests, cluster.directory, {"--run-dir": cluster.directory})
        environ["KUBECONFIG"] = str(plane.kubeconfig(cluster.directory / "kubeconfig", kube.token(space, ACCOUNT)))
        variables = [f"{key}={value}" for key, value in environ.items()]
        picker = cluster.children.start("picker", ["env", *variables, *python("workers", "serve", *flags)])
        cluster.wait(picker, lambda: ready(metrics))
        (cluster.directory / "envoy.yaml").write_text(config.replace("9901", str(admin)))
        argv = [envoy_path(), "-c", str(cluster.directory / "envoy.yaml"), "--concurrency", "1", "--disable-hot-restart"]
        envoy = cluster.children.start("envoy", argv)
        cluster.wait(envoy, lambda: page(status_port, "/ready")[0] == 200)
        request = urllib.request.Request(f"http://127.0.0.1:{port}{COMPLETIONS}", completion("a prompt", max_tokens=2))
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
        assert json.loads(page(target, "/sim/stats", host=SERVER)[1])["requests"] == 1
        assert page(status_port, "/stats/prometheus")[0] == 200
        assert page(status_port, "/quitquitquit")[0] == 404  # the other functions of Envoy's admin port are not exposed
    plane.close()


def started(manifests: list[Json], folder: Path, local_flags: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The container's flags and variables, changed to ports of this machine; writes its files into a folder."""
    (deployment,) = [one for one in manifests if one["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (config,) = [one for one in manifests if one["kind"] == "ConfigMap" and one["metadata"]["name"] == ACCOUNT]
    for name, text in config["data"].items():
        (folder / name).write_text(text)
    flags = [flag.replace("=/config/", f"={folder}/") for flag in container["args"] if flag.partition("=")[0] not in local_flags]
    known = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    space = deployment["metadata"]["namespace"]
    more = {"NAMESPACE": space, "POD_NAME": f"{ACCOUNT}-abc-xyz", "EPP_WORKERS": "2"}
    return [*flags, *(f"{flag}={value}" for flag, value in local_flags.items())], known | more


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def allow_metrics(kube: Kube, space: str, account: str) -> None:
    rbac, name = "rbac.authorization.k8s.io", f"reads-metrics-{space}"
    kube.apply(
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": name},
            "rules": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}],
        }
    )
    kube.apply(
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": space}],
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": name},
        }
    )


def test_the_schema_of_the_values_is_in_the_chart() -> None:
    assert json.loads((CHART / "values.schema.json").read_text())["$ref"].endswith("/Values")
