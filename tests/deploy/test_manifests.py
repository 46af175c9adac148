"""The rendered objects: least privileges, consistent times and ports, and references that exist."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.config.load import DEFAULT_TEXT, load
from loadtest.demo import envoy_config
from loadtest.demo.stack import envoy_path
from loadtest.sizing.model import CHART as SIZES
from tests.cases import cases
from tests.deploy.cases import CASES, SERVERS, values
from tests.deploy.objects import EXAMPLE, NAMES, Json, granted, one, picker, pod, variables
from tests.deploy.renderers import CHART, NAMESPACE, POOL, ours
from workers.cli.manifests.command import check
from workers.cli.manifests.layers import Layer, checked
from workers.supervisor.kube.lease import lease_name


@pytest.mark.parametrize("name", NAMES)
def test_the_picker_accepts_its_flags_and_its_configuration(name: str) -> None:
    check(ours(CASES[name]))


@cases("name", NAMES)
def test_a_pod_has_the_least_privileges(name: str) -> None:
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


@cases("name", NAMES)
def test_a_pod_has_time_to_end(name: str) -> None:
    manifests = ours(CASES[name])
    container = picker(manifests)
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    (drain,) = [a.removeprefix("--drain-timeout=").rstrip("s") for a in container["args"] if a.startswith("--drain-timeout=")]
    assert int(sleep[1]) + int(drain) < pod(manifests)["terminationGracePeriodSeconds"]


def test_the_reserve_after_the_drain_is_long_enough_for_the_rest_of_the_shutdown() -> None:
    from workers.process import parent
    from workers.worker import leaving

    after_drain = leaving.REFUSED_S + leaving.CLOSED_S + parent.GRACE_S + parent.SUPERVISOR_END_S
    assert after_drain <= SIZES["endSeconds"]


@cases("name", NAMES)
def test_every_reference_names_an_existing_object(name: str) -> None:
    manifests = ours(CASES[name])
    names = {(o["kind"], o["metadata"]["name"]) for o in manifests}
    spec = pod(manifests)
    assert ("ServiceAccount", spec["serviceAccountName"]) in names
    for volume in spec["volumes"]:
        assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in names
    mounted = {m["name"] for c in (*spec["containers"], *spec.get("initContainers", [])) for m in c["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    for binding in (o for o in manifests if o["kind"].endswith("Binding")):
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in names
        assert all(("ServiceAccount", subject["name"]) in names for subject in binding["subjects"])
    labels = one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
        for item in (o for o in manifests if o["kind"] == kind):
            selector = item["spec"].get("podSelector", item["spec"].get("selector"))
            assert selector.get("matchLabels", selector).items() <= labels.items()


@cases("name", NAMES)
def test_probes_and_services_use_ports_that_the_picker_listens_on(name: str) -> None:
    manifests = ours(CASES[name])
    container = picker(manifests)
    ports = {port["name"]: port["containerPort"] for c in (container, *pod(manifests).get("initContainers", [])) for port in c["ports"]}
    for flag, port in (("--grpc-port", "grpc"), ("--grpc-health-port", "grpc-health"), ("--metrics-port", "metrics")):
        assert f"{flag}={ports[port]}" in container["args"]
    for probe, service in (("livenessProbe", "liveness"), ("readinessProbe", "readiness")):
        assert container[probe]["grpc"] == {"port": ports["grpc-health"], "service": service}
    for port in one(manifests, "Service")["spec"]["ports"]:
        if isinstance(target := port.get("targetPort"), str):
            assert ports[target] == port["port"]


def test_in_gateway_mode_the_picker_may_read_only_its_pool_and_the_objects_of_the_pool() -> None:
    read = {"list", "watch"}
    groups = ("llm-d.ai", "inference.networking.x-k8s.io")
    kinds = ("inferenceobjectives", "inferencemodelrewrites")
    expected = {("", "pods", verb, "") for verb in read}
    expected |= {("inference.networking.k8s.io", "inferencepools", verb, POOL) for verb in read}
    expected |= {(group, kind, verb, "") for group in groups for kind in kinds for verb in read}
    expected.add(("", "events", "create", ""))
    assert granted(ours(CASES["gateway"])) == expected


def test_without_a_pool_the_picker_may_read_only_pods() -> None:
    assert {resource for _, resource, _, _ in granted(ours(CASES["standalone"]))} == {"pods"}


@pytest.mark.parametrize(("name", "pool"), [("leader election", POOL), ("a single replica with leader election", f"{POOL}-epp")])
def test_only_leader_election_may_write_and_only_one_lease(name: str, pool: str) -> None:
    leases = {(verb, lease) for _, resource, verb, lease in granted(ours(CASES[name])) if resource == "leases"}
    expected = lease_name(NAMESPACE, pool)
    assert leases == {("create", "")} | {(verb, expected) for verb in ("get", "watch", "update")}
    assert not any(resource == "leases" for _, resource, _, _ in granted(ours(CASES["active-active"])))


def test_cluster_wide_rights_are_only_for_the_authentication_of_metrics_readers() -> None:
    reviews = {("authentication.k8s.io", "tokenreviews", "create", ""), ("authorization.k8s.io", "subjectaccessreviews", "create", "")}
    assert granted(ours(CASES["gateway"]), "ClusterRole") == reviews
    assert granted(ours(CASES["monitoring without tokens"]), "ClusterRole") == set()


def test_monitoring_reads_with_a_separate_account() -> None:
    manifests = ours(CASES["monitoring"])
    secret, account = one(manifests, "Secret"), f"{POOL}-epp-metrics-reader"
    assert secret["metadata"]["annotations"]["kubernetes.io/service-account.name"] == account
    role = one(manifests, "ClusterRole", f"{POOL}-{NAMESPACE}-epp-metrics-reader")
    assert role["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    (endpoint,) = one(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": secret["metadata"]["name"], "key": "token"}
    rules = one(manifests, "PrometheusRule")
    assert rules["metadata"]["labels"]["team"] == "x"
    assert rules["spec"] == yaml.safe_load((CHART / "files/rules.yaml").read_text())


def test_a_render_sidecar_runs_before_and_after_the_picker_and_has_its_own_writable_home() -> None:
    spec = pod(ours(CASES["a render sidecar"]))
    (render,) = spec["initContainers"]
    assert (render["name"], render["restartPolicy"]) == ("vllm-render", "Always")
    assert render["command"] == ["vllm", "launch", "render"]
    assert render["args"] == ["Qwen/Qwen3-32B", "--port=8000"]
    assert {"name": "HOME", "value": "/model-cache"} in render["env"]
    (token,) = [variable for variable in render["env"] if variable["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["optional"] is True
    assert {mount["mountPath"] for mount in render["volumeMounts"]} == {"/model-cache", "/tmp"}
    assert render["readinessProbe"]["httpGet"] == {"path": "/health", "port": "render-http"}


def test_a_render_sidecar_has_what_the_values_give() -> None:
    manifests = ours(CASES["a render sidecar in every detail, and servers that connect"])
    render, proxy = pod(manifests)["initContainers"]
    assert (render["name"], proxy["name"]) == ("vllm-render", "envoy-proxy")
    assert (render["image"], render["imagePullPolicy"]) == ("registry.example/team/render:1", "Always")
    assert (render["command"], render["args"]) == (["serve"], ["m", "--port=8009", "--max-model-len=4096"])
    assert render["env"] == [{"name": "HOME", "value": "/models"}]
    assert render["ports"] == [{"name": "render-http", "containerPort": 8009}]
    assert "/models" in {mount["mountPath"] for mount in render["volumeMounts"]}
    loads = {"name": "load", "image": "loader"}
    first, second = pod(ours(values(tokenizer={"enabled": True, "modelName": "m", "args": ["x"], "initContainers": [loads]})))[
        "initContainers"
    ]
    assert (first, second["args"]) == (loads, ["x"])


def test_ports_of_kv_events_are_open_where_they_are_needed_and_nowhere_else() -> None:
    servers = {"podSelector": {"matchLabels": SERVERS["router"]["modelServers"]["matchLabels"]}}
    policy = one(ours(CASES["a render sidecar"]), "NetworkPolicy")["spec"]
    (egress,) = [rule for rule in policy["egress"] if rule.get("to") == [servers]]
    assert {port["port"] for port in egress["ports"]} == {5556, 5559, 8000}
    assert 5556 not in {port["port"] for rule in policy["ingress"] for port in rule["ports"]}

    manifests = ours(CASES["a render sidecar in every detail, and servers that connect"])
    (ingress,) = [rule for rule in one(manifests, "NetworkPolicy")["spec"]["ingress"] if rule.get("from") == [servers]]
    assert ingress["ports"] == [{"protocol": "TCP", "port": 5557}]
    assert {"name": "kv-events", "containerPort": 5557} in picker(manifests)["ports"]
    (port,) = [port for port in one(manifests, "Service")["spec"]["ports"] if port["name"] == "kv-events"]
    assert (port["port"], port["targetPort"]) == (5557, "kv-events")


def test_the_example_of_a_precise_prefix_cache_agrees_with_itself() -> None:
    example = checked([Layer("example", yaml.safe_load(EXAMPLE.read_text()))])
    manifests = ours(example)
    warnings = check(manifests)
    assert len(warnings) == 1 and "names no registry" in warnings[0]
    router = example["router"]
    (text,) = router["epp"]["pluginsCustomConfig"].values()
    plugins = load(text, "example").pipeline.plugins
    settings: Any = plugins["precise-prefix-cache-producer"]
    assert [settings.settings.port, settings.settings.replay_port] == router["kvEvents"]["serverPorts"]
    tokens: Any = plugins["token-producer"]
    (render,) = pod(manifests)["initContainers"]
    assert tokens.params.vllm.url == f"http://127.0.0.1:{render['ports'][0]['containerPort']}"
    assert tokens.params.model_name == render["args"][0]


def test_with_leader_election_rollouts_and_node_drains_do_not_wait_for_standbys() -> None:
    manifests = ours(CASES["leader election"])
    assert one(manifests, "Deployment")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == "100%"
    assert "PodDisruptionBudget" not in {o["kind"] for o in manifests}
    assert "lifecycle" not in picker(manifests)


def test_active_replicas_are_replaced_one_by_one() -> None:
    manifests = ours(CASES["active-active"])
    assert one(manifests, "Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert one(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] == "50%"
    assert picker(manifests)["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "10"]


def test_replicas_with_a_store_all_work_and_spread_over_nodes() -> None:
    manifests = ours(CASES["replicas that act as one"])
    arguments = picker(manifests)["args"]
    assert "--replica-store=redis://valkey:6379/0" in arguments
    assert "--ha-enable-leader-election=false" in arguments
    assert one(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    (spread,) = pod(manifests)["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert not [volume for volume in pod(manifests)["volumes"] if volume["name"].startswith("replica-store")]


def test_password_and_certificates_of_the_replica_store_come_from_secrets() -> None:
    manifests = ours(CASES["a replica store with password and TLS"])
    arguments, files = picker(manifests)["args"], "/replica-store-tls"
    url = f"rediss://picker@valkey.example:6380?cluster=true&ca={files}/ca.crt&cert={files}/tls.crt&key={files}/tls.key"
    assert f"--replica-store={url}" in arguments
    assert "--replica-store-password-file=/replica-store/password" in arguments
    mounted = {mount["name"]: mount for mount in picker(manifests)["volumeMounts"]}
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod(manifests)["volumes"] if "secret" in volume}
    assert secrets == {"replica-store": "store", "replica-store-tls": "store-tls"}
    for name in secrets:
        assert mounted[name]["readOnly"] and "subPath" not in mounted[name]  # kubelet updates only whole volumes


def test_leader_election_stays_an_option_with_a_store() -> None:
    manifests = ours(CASES["a replica store behind Sentinel"])
    arguments = picker(manifests)["args"]
    assert "--ha-enable-leader-election=true" in arguments
    assert "--replica-store=redis+sentinel://a:26379,b:26380/main?tls=true&ca=/replica-store-tls/ca.crt" in arguments
    assert "PodDisruptionBudget" not in {o["kind"] for o in manifests}


@pytest.mark.parametrize(
    ("name", "ports"),
    [
        ("a replica store with password and TLS", {6380}),
        ("a replica store behind Sentinel", {26379, 26380, 6379}),
        ("a replica store behind Sentinel without ports", {26379, 26380, 6379}),
    ],
)
def test_restricted_egress_lets_the_picker_reach_its_store(name: str, ports: set[int]) -> None:
    egress = one(ours(CASES[name]), "NetworkPolicy")["spec"]["egress"]
    assert ports in [{port["port"] for port in rule["ports"]} for rule in egress]


def test_the_picker_follows_its_mounted_configuration_and_a_changed_envoy_file_replaces_the_pods() -> None:
    def stamp(case: Json) -> str:
        template = one(ours(case), "Deployment")["spec"]["template"]
        checksum: str = template["metadata"]["annotations"]["checksum/config"]
        return checksum

    assert stamp(CASES["gateway"]) == stamp(CASES["a custom configuration"]) != stamp(CASES["standalone"])
    container = picker(ours(CASES["gateway"]))
    assert "--config-watch=true" in container["args"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "config"]
    assert "subPath" not in mount  # kubelet updates only whole volumes


def test_the_default_configuration_is_the_built_in_one_with_explicit_sources() -> None:
    (text,) = one(ours(CASES["gateway"]), "ConfigMap")["data"].values()
    shipped, built_in = load(text, "shipped").document, load(DEFAULT_TEXT, "built in").document
    explicit = {"metrics-data-source", "core-metrics-extractor"}

    def implicit(document: Any) -> list[Json]:
        return [plugin for plugin in document["plugins"] if plugin["name"] not in explicit]

    assert sorted(implicit(shipped), key=str) == sorted(implicit(built_in), key=str)
    for part in ("schedulingProfiles", "flowControl", "featureGates", "requestHandler"):
        assert shipped[part] == built_in[part]


@pytest.mark.parametrize(("name", "secure"), [("standalone", False), ("TLS beside Envoy", True)])
def test_the_envoy_beside_the_picker_has_the_tested_configuration(name: str, secure: bool) -> None:
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


def test_in_standalone_mode_only_envoy_is_reachable_and_its_admin_port_is_not() -> None:
    manifests = ours(CASES["standalone"])
    open_to_all = {port["port"] for rule in one(manifests, "NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]}
    assert open_to_all == {8081, 9090, 19001}
    assert {port["port"] for port in one(manifests, "Service")["spec"]["ports"]} == {8081, 9090}


def test_the_network_policy_has_the_configured_peers_and_ports() -> None:
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


def test_several_pools_name_the_service_each_with_its_port() -> None:
    manifests = ours(CASES["several pools"])
    service = one(manifests, "Service")
    served = {port["port"]: port["targetPort"] for port in service["spec"]["ports"]}
    assert served == {9090: "metrics", 9002: "grpc", 9102: 9102, 9103: 9103}
    pools = {each["metadata"]["name"]: each["spec"]["endpointPickerRef"] for each in manifests if each["kind"] == "InferencePool"}
    name = service["metadata"]["name"]
    assert {pool: (reference["name"], reference["port"]["number"]) for pool, reference in pools.items()} == {
        "llama": (name, 9102),
        "qwen": (name, 9103),
    }
    flags = set(picker(manifests)["args"])
    assert {f"--service-name={name}", "--pool-ports=9002,9102,9103", "--config-dir=/config"} < flags
    assert "EPP_POOL_NAME" not in variables(manifests) and "--ha-enable-leader-election=false" in flags
    assert {right for right in granted(manifests) if right[1] == "inferencepools"} == {
        ("inference.networking.k8s.io", "inferencepools", verb, "") for verb in ("list", "watch")
    }
