"""Values of the charts of the Gateway API Inference Extension: what they mean here, and what is left out with a reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.deploy.renderers import keyed, ours, parsed
from workers.cli import main
from workers.cli.manifests.extension_values import _CONVERTED, DROPPED, MOVED, SECTIONS, are_values, translated
from workers.cli.manifests.layers import BadValues, Layer, _paths, checked, read
from workers.cli.manifests.values import Values

Json = dict[str, Any]
CONFIGURATION = """\
plugins:
- type: prefix-cache-scorer
  parameters: {blockSize: 256}
"""
POOL = {"modelServers": {"matchLabels": {"app": "vllm"}}}
SERVERS = {"modelServers": {"matchLabels": {"app": "vllm"}}}
IMAGE = "inferenceExtension.image is left out: names GIE's picker; name the image of this one with router.epp.image, or with --image"


def new(old: str | Json) -> tuple[Json, list[str]]:
    """The values of this chart for older ones. They are valid."""
    values, remarks = translated(yaml.safe_load(old) if isinstance(old, str) else old)
    checked([Layer("f", values)])
    return values, remarks


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


def test_every_value_moves_to_one_that_this_chart_has() -> None:
    known = _paths(Values)
    for path in MOVED.values():
        assert path in known or path.startswith("router.epp.flags."), path
    assert not set(MOVED) & (set(DROPPED) | set(_CONVERTED) | SECTIONS - set(DROPPED))


def test_values_of_this_chart_stay_as_they_are() -> None:
    values = {"router": {"epp": {"replicas": 2}}, "provider": {"name": "gke"}}
    assert translated(values) == (values, [])


def test_the_first_chart_had_its_own_names_for_flags_and_metrics_pages() -> None:
    values, remarks = new("""
inferenceExtension:
  image: {name: epp, hub: h, tag: t, pullPolicy: Always}
  enablePprof: false
  logVerbosity: "3"
  modelServerMetricsPath: /m
  modelServerMetricsScheme: https
  modelServerMetricsHttpsInsecureSkipVerify: false
inferencePool: {targetPortNumber: 9000, modelServerType: vllm, modelServers: {matchLabels: {app: vllm}}}
provider: {name: none}
gke: {monitoringSecret: {name: n}}
""")
    assert values["router"] == {
        "epp": {
            "image": {"pullPolicy": "Always"},
            "flags": {"enable-pprof": False, "v": "3"},
            "metricsDataSource": {"path": "/m", "scheme": "https", "insecureSkipVerify": False},
        },
        **SERVERS,
        "modelServers": {"targetPorts": [{"number": 9000}], "type": "vllm", "matchLabels": {"app": "vllm"}},
    }
    assert remarks == [IMAGE, "gke is left out: this chart has no objects for GKE; apply them beside it"]


def test_flags_may_be_a_list_and_a_list_of_ports_counts_before_one_port() -> None:
    for pool in ("targetPorts: [{number: 1}], targetPortNumber: 2", "targetPortNumber: 2, targetPorts: [{number: 1}]"):
        values, _ = new(f"inferenceExtension: {{flags: [{{name: v, value: 4}}]}}\ninferencePool: {{{pool}}}\n")
        assert values["router"]["epp"]["flags"] == {"v": 4}
        assert values["router"]["modelServers"]["targetPorts"] == [{"number": 1}]


def test_the_rest_of_the_later_charts_moves() -> None:
    values, remarks = new("""
inferenceExtension:
  replicas: 3
  failureMode: FailClose
  flags: {v: 1}
  env: [{name: A, value: b}]
  extraServicePorts: [{name: zmq, port: 5557, protocol: TCP, targetPort: 5557}]
  monitoring: {interval: 5s, prometheus: {enabled: true, auth: {enabled: false}}, gke: {enabled: false}}
  tracing: {enabled: true, sampling: {samplerArg: "0.5"}}
  latencyPredictor: {enabled: true}
  sidecar: {enabled: false}
  podLabels: {a: b}
inferencePool: {apiVersion: inference.networking.k8s.io/v1, modelServerProtocol: grpc, parser: vllmgrpc-parser}
inferenceObjectives: [{name: high, priority: 5}]
experimentalHttpRoute: {enabled: true, inferenceGatewayName: g, requestTimeout: 1s}
provider: {name: gke, gke: {autopilot: false}, istio: {destinationRule: {host: h}}}
""")
    router = values["router"]
    assert router["epp"] == {"replicas": 3, "flags": {"v": 1}, "env": [{"name": "A", "value": "b"}], "parsers": ["vllmgrpc-parser"]}
    assert router["inferencePool"] == {"failureMode": "FailClose"}
    assert router["extraServicePorts"][0]["port"] == 5557
    assert router["monitoring"] == {"interval": "5s", "prometheus": {"enabled": True, "auth": {"enabled": False}}}
    assert router["tracing"] == {"enabled": True, "sampling": {"samplerArg": "0.5"}}
    assert router["inferenceObjectives"] == [{"name": "high", "priority": 5}]
    assert router["modelServers"] == {"protocol": "grpc"}
    assert values["httpRoute"] == {"create": True, "inferenceGatewayName": "g", "requestTimeout": "1s"}
    assert values["provider"] == {"istio": {"destinationRule": {"host": "h"}}}
    assert [remark.partition(" ")[0] for remark in remarks] == [
        "inferenceExtension.latencyPredictor",
        "inferenceExtension.podLabels",
        "provider.name",
    ]


def test_the_standalone_chart_becomes_standalone_mode() -> None:
    values, remarks = new("""
inferenceExtension:
  endpointsServer: {createInferencePool: false, endpointSelector: "app=vllm,tier=gpu", targetPorts: "8000,8001", modelServerType: sglang}
  extraServicePorts: [{name: http, port: 8081, protocol: TCP, targetPort: 8081}, {name: zmq, port: 5557}]
  sidecar: {enabled: true, image: x}
""")
    assert values["router"] == {
        "inferencePool": {"create": False},
        "modelServers": {
            "matchLabels": {"app": "vllm", "tier": "gpu"},
            "targetPorts": [{"number": 8000}, {"number": 8001}],
            "type": "sglang",
        },
        "extraServicePorts": [{"name": "zmq", "port": 5557}],
        "mode": "standalone",
    }
    assert remarks[0].startswith("inferenceExtension.sidecar is left out: standalone mode brings an Envoy")


def test_a_configuration_among_the_values_is_migrated() -> None:
    values, remarks = new({"inferenceExtension": {"pluginsCustomConfig": {"c.yaml": CONFIGURATION, "d.yaml": "a: ["}}})
    configurations = values["router"]["epp"]["pluginsCustomConfig"]
    assert "blockSizeTokens: 64" in configurations["c.yaml"]
    assert configurations["d.yaml"] == "a: ["
    assert remarks[0].startswith("c.yaml: changed: the block size of 'prefix-cache-scorer' was 256 characters")
    assert remarks[1].startswith("d.yaml: not migrated: ")


def test_another_version_of_the_pool_is_left_out_with_a_reason() -> None:
    _, remarks = new("inferencePool: {apiVersion: inference.networking.x-k8s.io/v1alpha2}\n")
    assert remarks == ["inferencePool.apiVersion is left out: only inference.networking.k8s.io/v1 is supported; install that CRD"]


def test_manifests_take_the_older_values(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump({"inferenceExtension": {"replicas": 2, "image": {"tag": "t"}}, "inferencePool": POOL}))
    result = invoke("manifests", "--values", str(file), "--set", "inferenceExtension.flags.v=4")
    assert result.exit_code == 0, result.output
    expected = ours({"router": {"epp": {"replicas": 2, "flags": {"v": 4}}, **SERVERS}}, namespace="default")
    assert keyed(parsed(result.stdout)) == keyed(expected)
    assert result.stderr.splitlines()[0] == f"warning: {file}: {IMAGE}"


def test_check_names_a_file_of_values_and_migrates_it(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump({"inferenceExtension": {"replicas": 2, "x": 1}, "inferencePool": POOL}))
    plain = invoke("check", str(file))
    assert (plain.exit_code, plain.stdout) == (78, "")
    assert plain.stderr.startswith(f"error: {file}: these are values of a Helm chart of the Gateway API")
    migrated = invoke("check", "--migrate", str(file))
    assert migrated.exit_code == 0
    assert yaml.safe_load(migrated.stdout) == {"router": {"epp": {"replicas": 2}, **SERVERS}}
    assert migrated.stderr == f"{file}: inferenceExtension.x is left out: has no counterpart here\n"
    wrong = invoke("check", "--migrate", "-", stdin="inferenceExtension: {replicas: many}\n")
    assert (wrong.exit_code, wrong.stdout) == (78, "")
    assert wrong.stderr == "error: router.epp.replicas: expected 'int', got 'str' (given by <stdin>)\n"


@pytest.mark.parametrize(("text", "values"), [
    ("inferenceExtension:\n  replicas: 1\n", True),
    ('"inferencePool": {}\n', True),
    ("plugins: []\n# inferencePool: x\n", False),
    ("plugins:\n- name: x\n  inferencePool: y\n", False),
])  # fmt: skip
def test_values_are_known_by_their_keys(text: str, values: bool) -> None:
    assert are_values(text) is values


def test_scalars_of_a_values_file_mean_what_they_mean_to_helm() -> None:
    text = "tag: 2024-01-02\nnever: 2024-13-40\ntime: 1:30\non: yes\noctal: 0777\nnothing: ~\n1: x\n"
    expected = {"tag": "2024-01-02", "never": "2024-13-40", "time": "1:30", "on": True, "octal": 511, "nothing": None, "1": "x"}
    assert read(text, "f") == expected


@pytest.mark.parametrize(("text", "why"), [
    ("a: 1\nb: !!int x\n", "f:2: 'x' does not fit its tag !!int"),
    ("a:\n  b: 1\n  b: 2\n", "f:3: 'b' is given twice; first in line 2"),
    ("a: " + "[" * 3000, "f:1: the text has more than 64 levels"),
    ("? [a]\n: b\n", "f:1: a key must be a single word or text"),
    ("- a\n", "f: values are a mapping"),
])  # fmt: skip
def test_an_unreadable_values_file_is_refused_with_its_line(text: str, why: str) -> None:
    with pytest.raises(BadValues) as refused:
        read(text, "f")
    assert str(refused.value).startswith(why)
