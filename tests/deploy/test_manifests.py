"""What the objects say: the least rights, times that add up, enough shared memory, workers from the CPU request."""

import itertools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.config import DEFAULT_TEXT, load
from tests.deploy.cases import CASES, REFUSED, UNKNOWN, values
from tests.deploy.renderers import NAMESPACE, POOL, ours
from tests.workers.instances import options
from workers.cli.manifests import check, version
from workers.demo import envoy_config
from workers.demo.stack import envoy_path
from workers.instance import shared_bytes
from workers.kube.lease import lease_name
from workers.manifests import settled as rules
from workers.manifests.render import as_yaml, objects
from workers.manifests.settled import cpus, memory_mib, settled, shared_memory_mib
from workers.manifests.values import BadValues, decoded

Json = dict[str, Any]

CONFIGS = sorted((Path(__file__).parents[2] / "deploy" / "config").glob("*.yaml"))
NAMES = list(CASES)


def one(made: list[Json], kind: str, name: str = "") -> Json:
    (found,) = [o for o in made if o["kind"] == kind and name in ("", o["metadata"]["name"])]
    return found


def pod(made: list[Json]) -> Json:
    return one(made, "Deployment")["spec"]["template"]["spec"]


def picker(made: list[Json]) -> Json:
    (found,) = pod(made)["containers"]
    return found


def variables(made: list[Json]) -> dict[str, Json]:
    return {variable["name"]: variable for variable in picker(made)["env"]}


def granted(made: list[Json], kind: str = "Role") -> set[tuple[str, str, str, str]]:
    """Group, resource, verb, name of one object or ""."""
    found = set()
    for role in (o for o in made if o["kind"] == kind):
        for rule in role["rules"]:
            names = rule.get("resourceNames", [""])
            places = itertools.product(rule.get("apiGroups", [""]), rule.get("resources", [""]), rule["verbs"], names)
            found |= set(places)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_picker_accepts_the_flags_and_the_configuration_that_it_is_given(name: str) -> None:
    check(settled(decoded([CASES[name]]), POOL, NAMESPACE, version()))


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_may_do_nothing_that_it_needs_not(name: str) -> None:
    spec = pod(ours(CASES[name]))
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(spec)
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert all("hostPort" not in port for port in container["ports"])


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_has_time_to_end(name: str) -> None:
    made = ours(CASES[name])
    container = picker(made)
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    (drain,) = [
        a.removeprefix("--drain-timeout=").rstrip("s") for a in container["args"] if a.startswith("--drain-timeout=")
    ]
    assert int(sleep[1]) + int(drain) < pod(made)["terminationGracePeriodSeconds"]


def test_the_end_of_a_pod_is_longer_than_what_comes_behind_the_drain() -> None:
    from workers import drain, parent

    behind = drain.REFUSED_S + drain.CLOSED_S + parent.GRACE_S + parent.SUPERVISOR_END_S
    assert behind <= rules.END_S


@pytest.mark.parametrize("name", NAMES)
def test_every_name_that_is_referred_to_is_there(name: str) -> None:
    made = ours(CASES[name])
    there = {(o["kind"], o["metadata"]["name"]) for o in made}
    spec = pod(made)
    assert ("ServiceAccount", spec["serviceAccountName"]) in there
    for volume in spec["volumes"]:
        assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in there
    mounted = {m["name"] for c in (*spec["containers"], *spec.get("initContainers", [])) for m in c["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    for binding in (o for o in made if o["kind"].endswith("Binding")):
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in there
        assert all(("ServiceAccount", subject["name"]) in there for subject in binding["subjects"])
    labels = one(made, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
        for found in (o for o in made if o["kind"] == kind):
            selector = found["spec"].get("podSelector", found["spec"].get("selector"))
            assert selector.get("matchLabels", selector).items() <= labels.items()


@pytest.mark.parametrize("name", NAMES)
def test_probes_and_services_ask_ports_that_the_picker_listens_on(name: str) -> None:
    made = ours(CASES[name])
    container = picker(made)
    ports = {
        port["name"]: port["containerPort"]
        for c in (container, *pod(made).get("initContainers", []))
        for port in c["ports"]
    }
    for flag, port in (("--grpc-port", "grpc"), ("--grpc-health-port", "grpc-health"), ("--metrics-port", "metrics")):
        assert f"{flag}={ports[port]}" in container["args"]
    for probe, service in (("livenessProbe", "liveness"), ("readinessProbe", "readiness")):
        assert container[probe]["grpc"] == {"port": ports["grpc-health"], "service": service}
    for port in one(made, "Service")["spec"]["ports"]:
        if isinstance(target := port.get("targetPort"), str):
            assert ports[target] == port["port"]


def test_in_gateway_mode_the_picker_reads_its_pool_and_what_belongs_to_it_and_no_more() -> None:
    read = {"list", "watch"}
    groups = ("llm-d.ai", "inference.networking.x-k8s.io")
    kinds = ("inferenceobjectives", "inferencemodelrewrites")
    expected = {("", "pods", verb, "") for verb in read}
    expected |= {("inference.networking.k8s.io", "inferencepools", verb, POOL) for verb in read}
    expected |= {(group, kind, verb, "") for group in groups for kind in kinds for verb in read}
    assert granted(ours(CASES["gateway"])) == expected


def test_without_a_pool_it_reads_pods_alone() -> None:
    assert {resource for _, resource, _, _ in granted(ours(CASES["standalone"]))} == {"pods"}


@pytest.mark.parametrize(("name", "pool"), [("leader election", POOL), ("one that elects itself", f"{POOL}-epp")])
def test_one_lease_may_be_written_and_only_with_leader_election(name: str, pool: str) -> None:
    leases = {(verb, lease) for _, resource, verb, lease in granted(ours(CASES[name])) if resource == "leases"}
    its = lease_name(NAMESPACE, pool)
    assert leases == {("create", "")} | {(verb, its) for verb in ("get", "watch", "update")}
    assert not any(resource == "leases" for _, resource, _, _ in granted(ours(CASES["active-active"])))


def test_rights_on_the_whole_cluster_are_for_authentication_of_readers_of_metrics_alone() -> None:
    reviews = {
        ("authentication.k8s.io", "tokenreviews", "create", ""),
        ("authorization.k8s.io", "subjectaccessreviews", "create", ""),
    }
    assert granted(ours(CASES["gateway"]), "ClusterRole") == reviews
    assert granted(ours(CASES["monitoring without tokens"]), "ClusterRole") == set()


def test_the_monitoring_reads_with_an_account_of_its_own() -> None:
    made = ours(CASES["monitoring"])
    secret, account = one(made, "Secret"), f"{POOL}-epp-metrics-reader"
    assert secret["metadata"]["annotations"]["kubernetes.io/service-account.name"] == account
    role = one(made, "ClusterRole", f"{POOL}-{NAMESPACE}-epp-metrics-reader")
    assert role["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    (endpoint,) = one(made, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": secret["metadata"]["name"], "key": "token"}


@pytest.mark.parametrize(
    ("quantity", "workers"),
    [("2", 2), (8, 8), ("0.5", 1), ("500m", 1), ("2500m", 3), (1.1, 2), ("1000m", 1), ("2.0", 2)],
)
def test_a_worker_for_each_cpu_that_is_requested_begun_ones_included(quantity: Any, workers: int) -> None:
    assert cpus(quantity) == workers


def test_the_pod_reads_its_workers_from_its_cpu_request_so_that_a_patch_of_that_is_enough() -> None:
    source = variables(ours(CASES["gateway"]))["EPP_WORKERS"]["valueFrom"]["resourceFieldRef"]
    assert source == {"containerName": "epp", "resource": "requests.cpu", "divisor": "1"}


@pytest.mark.parametrize(
    "flags",
    [
        {"workers": 1},
        {"workers": 4},
        {"workers": 2, "workers-max": 12},
        {"workers": 2, "max-endpoints": 8192},
        {"workers": 3, "max-endpoints": 64, "index-entries": 1 << 16},
        {"workers": 1, "index-entries": 1 << 22},
    ],
    ids=str,
)
def test_dev_shm_holds_what_the_picker_makes_and_not_much_more(tmp_path: Path, flags: dict[str, int]) -> None:
    changes = {"max_endpoints": 1024, "index_entries": 1 << 19} | {k.replace("-", "_"): v for k, v in flags.items()}
    needed = _needed_mib(tmp_path, DEFAULT_TEXT, objects_dir=str(tmp_path), **changes)
    given = shared_memory_mib(flags["workers"], flags)
    assert needed * 1.1 <= given <= needed * 1.3 + 20


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_dev_shm_is_enough_for_every_configuration_that_is_shipped(tmp_path: Path, config: Path) -> None:
    needed = _needed_mib(tmp_path, config.read_text(), workers=4, max_endpoints=1024, index_entries=1 << 19)
    assert needed * 1.1 <= shared_memory_mib(4, {})


@pytest.mark.parametrize(
    ("quantity", "mib"),
    [
        ("2Gi", 2048),
        ("1.5Gi", 1536),
        (1 << 30, 1024),
        ("1G", 953),
        ("500M", 476),
        ("262144Ki", 256),
        ("1e9", None),
        ("1Pi", None),
    ],
)
def test_memory_is_read_in_its_usual_forms(quantity: Any, mib: int | None) -> None:
    assert memory_mib(quantity) == mib


def _needed_mib(tmp_path: Path, config_text: str, **changes: Any) -> float:
    """By the picker itself."""
    config = load(config_text, "test", allow_experimental=True)
    return sum(shared_bytes(options(tmp_path, **changes), config).values()) / (1 << 20)


def test_standbys_are_not_ready_so_a_rollout_does_not_wait_for_them_and_the_leaders_node_can_be_drained() -> None:
    made = ours(CASES["leader election"])
    assert one(made, "Deployment")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == "100%"
    assert "PodDisruptionBudget" not in {o["kind"] for o in made}
    assert "lifecycle" not in picker(made)


def test_replicas_that_share_the_work_are_replaced_one_by_one() -> None:
    made = ours(CASES["active-active"])
    assert one(made, "Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert one(made, "PodDisruptionBudget")["spec"]["maxUnavailable"] == "50%"
    assert picker(made)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "10"]


def test_new_files_make_new_pods() -> None:
    def stamp(case: Json) -> str:
        template = one(ours(case), "Deployment")["spec"]["template"]
        checksum: str = template["metadata"]["annotations"]["checksum/config"]
        return checksum

    assert stamp(CASES["gateway"]) != stamp(CASES["triton"]) != stamp(CASES["standalone"])
    assert stamp(CASES["gateway"]) == stamp(CASES["leader election"])


def test_the_default_configuration_is_the_built_in_one_with_its_sources_named() -> None:
    (text,) = one(ours(CASES["gateway"]), "ConfigMap")["data"].values()
    said, built_in = load(text, "said").document, load(DEFAULT_TEXT, "built in").document
    explicit = {"metrics-data-source", "core-metrics-extractor"}

    def others(document: Any) -> list[Json]:
        return [plugin for plugin in document["plugins"] if plugin["name"] not in explicit]

    assert sorted(others(said), key=str) == sorted(others(built_in), key=str)
    for part in ("schedulingProfiles", "flowControl", "featureGates", "requestHandler"):
        assert said[part] == built_in[part]


@pytest.mark.parametrize(("name", "secure"), [("standalone", False), ("TLS beside Envoy", True)])
def test_the_envoy_beside_the_picker_is_the_one_that_is_tested(name: str, secure: bool) -> None:
    config = yaml.safe_load(one(ours(CASES[name]), "ConfigMap", f"{POOL}-envoy")["data"]["envoy.yaml"])
    tls = envoy_config.PickerTls() if secure else None
    expected = envoy_config.bootstrap(listen=("0.0.0.0", 8081), picker=("127.0.0.1", 9002), tls=tls)
    status = config["static_resources"]["listeners"].pop()
    assert (status["name"], config["static_resources"]["clusters"].pop()["name"]) == ("status", "status")
    if not secure:
        (picker,) = [c for c in config["static_resources"]["clusters"] if c["name"] == envoy_config.PICKER_CLUSTER]
        assert picker.pop("transport_socket")["name"] == "plain"
    assert config == expected


@pytest.mark.parametrize("name", ["standalone", "TLS beside Envoy", "triton"])
def test_envoy_accepts_its_configuration(name: str, tmp_path: Path) -> None:
    file = tmp_path / "envoy.yaml"
    file.write_text(one(ours(CASES[name]), "ConfigMap", f"{POOL}-envoy")["data"]["envoy.yaml"])
    command = [envoy_path(), "--mode", "validate", "-c", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_envoy_is_reached_from_outside_in_standalone_mode_and_its_admin_port_by_nobody() -> None:
    made = ours(CASES["standalone"])
    open_to_all = {port["port"] for rule in one(made, "NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]}
    assert open_to_all == {8081, 9090, 19001}
    assert {port["port"] for port in one(made, "Service")["spec"]["ports"]} == {8081, 9090}


def test_peers_and_ports_of_the_network_policy_are_those_that_are_given() -> None:
    spec = one(ours(CASES["network"]), "NetworkPolicy")["spec"]
    gateway, monitoring, extra = spec["ingress"]
    assert [port["port"] for port in gateway["ports"]] == [9002, 9003]
    assert gateway["from"] == [{"namespaceSelector": {"matchLabels": {"gateway": "yes"}}}]
    assert monitoring["from"] == [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    assert extra["ports"][0]["port"] == 5557
    names, api, servers, traces = spec["egress"]
    assert [port["port"] for port in names["ports"]] == [53, 53]
    assert [port["port"] for port in api["ports"]] == [443, 6443]
    assert servers["to"][0]["podSelector"]["matchLabels"]["app"] == "vllm"
    assert traces["ports"][0]["port"] == 4317


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_is_refused_with_the_rule(name: str) -> None:
    case, told = REFUSED[name]
    with pytest.raises(BadValues) as refused:
        ours(case)
    assert told in str(refused.value)


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_names_and_types_are_strict(name: str) -> None:
    with pytest.raises(BadValues, match="router"):
        ours(UNKNOWN[name])


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(BadValues) as refused:
        ours({"router": {"epp": {"terminationGracePeriodSeconds": 5, "flags": {"tracing": True}}}})
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("pool", ["Vllm", "1a", "a" * 41, "a_b", "-a", ""])
def test_a_pool_has_a_name_that_services_can_have(pool: str) -> None:
    with pytest.raises(BadValues, match="pool name"):
        ours(CASES["gateway"], pool=pool)


def test_what_is_printed_is_what_was_made_and_has_no_anchors() -> None:
    made = objects(settled(decoded([CASES["placed"]]), POOL, NAMESPACE, version()))
    text = as_yaml(made)
    assert list(yaml.safe_load_all(text)) == made
    assert "&id" not in text


def test_labels_of_model_servers_stand_in_order() -> None:
    found = variables(ours(values(mode="standalone", modelServers={"matchLabels": {"b": "2", "a": "1"}})))
    assert found["EPP_ENDPOINT_SELECTOR"]["value"] == "a=1,b=2"
