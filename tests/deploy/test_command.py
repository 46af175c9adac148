"""`epp manifests`: options, values, and refusals."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from tests.deploy.cases import values
from tests.deploy.renderers import ROOT, keyed, ours, parsed
from workers.cli import main
from workers.cli.manifests.layers import BadValues, assigned
from workers.cli.manifests.values import Values

Json = dict[str, Any]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["manifests", *arguments])


def printed(*arguments: str) -> list[Json]:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return parsed(result.stdout)


def same(manifests: list[Json], expected: list[Json]) -> bool:
    return keyed(manifests) == keyed(expected)


def test_a_selector_is_enough() -> None:
    expected = ours({"router": {"modelServers": {"matchLabels": {"app": "vllm"}}}}, namespace="default")
    assert same(printed("--selector", "app=vllm"), expected)


def test_options_are_short_forms_of_values() -> None:
    manifests = printed(
        *("--mode", "standalone", "--pool-name", "llama", "-n", "models", "--selector", "app=llama,tier=gpu"),
        *("--target-ports", "8000,8001", "--replicas", "2", "--cpu", "3500m", "--workers", "3"),
        *("--image", "registry.example:5000/team/epp:1.2"),
    )
    router = {
        "mode": "standalone",
        "epp": {
            "replicas": 2,
            "resources": {"requests": {"cpu": "3500m"}},
            "flags": {"workers": 3},
            "image": {"repository": "registry.example:5000/team/epp", "tag": "1.2"},
        },
        "modelServers": {"matchLabels": {"app": "llama", "tier": "gpu"}, "targetPorts": [{"number": 8000}, {"number": 8001}]},
    }
    assert same(manifests, ours({"router": router}, pool="llama", namespace="models"))


def test_an_image_may_have_a_digest() -> None:
    (container,) = _deployment(printed("--selector", "a=b", "--image", "r/epp@sha256:abc"))["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "r/epp@sha256:abc"


def test_values_come_from_files_and_options_and_the_last_one_wins(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values(epp={"replicas": 2, "nodeSelector": {"disk": "fast"}})))
    manifests = printed("--values", str(file), "--set", "router.epp.replicas=3", "--set", r"router.epp.nodeSelector.a\.b/c=d")
    expected = values(epp={"replicas": 3, "nodeSelector": {"disk": "fast", "a.b/c": "d"}})
    assert same(manifests, ours(expected, namespace="default"))


def test_flags_of_serve_follow_after_two_dashes() -> None:
    (container,) = _deployment(printed("--selector", "a=b", "--", "--max-endpoints=4096", "--emit-endpoint-scores", "-v=4"))["spec"][
        "template"
    ]["spec"]["containers"]
    assert container["args"][-3:] == ["--emit-endpoint-scores=true", "--max-endpoints=4096", "-v=4"]


@pytest.mark.parametrize(("module", "value"), [("redis", "replicaStore.url=redis://c"), ("grpc", "flags.transport=grpcio")])
def test_packages_that_the_pod_needs_need_not_be_installed_here(module: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert printed("--selector", "app=vllm", "--set", f"router.epp.{value}")


def test_a_configuration_is_checked_and_included(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("plugins:\n- type: queue-scorer\n")
    (config,) = [one for one in printed("--selector", "a=b", "--config-file", str(file)) if one["kind"] == "ConfigMap"]
    assert config["data"] == {"config.yaml": file.read_text()}
    file.write_text("plugins:\n- type: queue-scorrer\n")
    refused = invoke("--selector", "a=b", "--config-file", str(file))
    assert refused.exit_code == 78
    assert "queue-scorer" in refused.stderr


def test_a_missing_helm_is_one_line_with_the_ways_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.cli.manifests.helm.shutil.which", lambda *_, **__: None)
    refused = invoke("--selector", "a=b")
    assert refused.exit_code == 1
    (line,) = refused.stderr.splitlines()
    assert "pip install 'endpoint-picker[manifests]'" in line


def test_a_helm_that_does_not_run_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("workers.cli.manifests.helm.program", lambda: str(tmp_path / "helm"))
    refused = invoke("--selector", "a=b")
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (1, 1)
    assert "does not work" in refused.stderr


@pytest.mark.parametrize(
    ("image", "named"),
    [("epp:1", False), ("team/epp:1", False), ("r.example/epp:1", True), ("localhost/epp:1", True), ("r:5000/epp:1", True)],
)
def test_an_image_without_a_registry_gets_a_warning(image: str, named: bool) -> None:
    printed_warnings = invoke("--selector", "a=b", "--image", image).stderr
    assert ("names no registry" in printed_warnings) != named
    assert named or f"image '{image}'" in printed_warnings


def test_a_memory_limit_below_what_may_wait_gets_the_warning_of_serve() -> None:
    warning = invoke("--selector", "a=b", "--set", "router.epp.resources.limits.memory=512Mi").stderr
    assert "warning[limit-above-memory]" in warning
    assert "limit-above-memory" not in invoke("--selector", "a=b").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--selector", "a=b", "--replicas", "-1"), 78, "router.epp.replicas: expected 'int' >= 0 (given by --replicas -1)"),
        (("--cpu", "many"), 78, "write 2, 0.5 or 500m (given by --cpu many)"),
        ((), 78, "router.modelServers.matchLabels: say which pods are model servers"),
        (("--selector", "app"), 78, "--selector 'app': write label=value"),
        (("--selector", "app=a,app=b"), 78, "--selector 'app=a,app=b': a pod has one value for a label"),
        (("--selector", "a=b", "--target-ports", "http"), 78, "--target-ports 'http': write numbers"),
        (("--selector", "a=b", "--image", "epp"), 78, "--image 'epp': write name:tag"),
        (("--selector", "a=b", "--set", "router.epp.replica=1"), 78, "did you mean router.epp.replicas?"),
        (("--selector", "a=b", "--set", "router"), 78, "--set router: write name.name=value"),
        (("--selector", "a=b", "--values", "/nonexistent"), 78, "/nonexistent"),
        (("--selector", "a=b", "--", "--grpc-prt=1"), 2, "No such option '--grpc-prt'"),
        (("--selector", "a=b", "--", "--grpc-port=1"), 78, "set router.epp.extProcPort instead"),
        (("--selector", "a=b", "--", "--transport=carrier-pigeon"), 2, "carrier-pigeon"),
        (("--selector", "a=b", "--", "workers=2"), 78, "'workers=2' behind --: write flags"),
        (("--selector", "a=b", "--", "--tls-min-version=1.2"), 78, "--tls-min-version '1.2' is not supported"),
        (("--selector", "a=b", "--cpu", "many"), 78, "'many' is no quantity of CPUs"),
        (("--mode", "sidecar"), 2, "sidecar"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_with_the_fix(arguments: tuple[str, ...], code: int, message: str) -> None:
    refused = invoke(*arguments)
    assert (refused.exit_code, refused.stdout) == (code, "")
    assert message in refused.stderr


def test_a_file_without_a_mapping_or_without_yaml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    for text, message in (("- a\n", "this is a list"), ("a: [", "values.yaml:2: did not find")):
        file.write_text(text)
        assert message in invoke("--values", str(file)).stderr


def test_an_empty_file_of_values_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("# nothing\n")
    assert printed("--selector", "app=vllm", "--values", str(tmp_path / "values.yaml"))


def test_environment_variables_of_the_caller_do_not_reach_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPP_ENDPOINTS", "nowhere:1")
    monkeypatch.setenv("EPP_WORKERS", "none")
    assert invoke("--selector", "app=vllm").exit_code == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", {"a": {"b": 1}}),
        ("a=true", {"a": True}),
        ("a=01", {"a": "01"}),
        ("a=null", {"a": None}),
        ("a=b=c", {"a": "b=c"}),
        ("a[0].b=x", {"a": [{"b": "x"}]}),
    ],
)
def test_a_value_is_parsed_as_in_helm(text: str, value: Json) -> None:
    assert assigned(text) == value


def test_a_second_item_of_a_list_needs_a_file() -> None:
    with pytest.raises(BadValues, match="use a file"):
        assigned("a[1]=x")


def test_the_defaults_equal_the_values_of_the_chart() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/endpoint-picker/values.yaml").read_text())
    assert chart == msgspec.to_builtins(Values())


def _deployment(manifests: list[Json]) -> Json:
    (deployment,) = [one for one in manifests if one["kind"] == "Deployment"]
    return deployment
