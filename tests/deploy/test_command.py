"""`epp manifests`: what is asked for in few words, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.deploy.cases import values
from tests.deploy.renderers import ROOT, keyed, ours, parsed
from workers.cli import main
from workers.manifests.values import BadValues, assigned, decoded

Json = dict[str, Any]


def said(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["manifests", *arguments])


def printed(*arguments: str) -> list[Json]:
    result = said(*arguments)
    assert result.exit_code == 0, result.output
    return parsed(result.stdout)


def same(made: list[Json], expected: list[Json]) -> bool:
    return keyed(made) == keyed(expected)


def test_a_selector_is_enough() -> None:
    expected = ours({"router": {"modelServers": {"matchLabels": {"app": "vllm"}}}}, namespace="default")
    assert same(printed("--selector", "app=vllm"), expected)


def test_the_options_are_short_for_values() -> None:
    made = printed(
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
        "modelServers": {
            "matchLabels": {"app": "llama", "tier": "gpu"},
            "targetPorts": [{"number": 8000}, {"number": 8001}],
        },
    }
    assert same(made, ours({"router": router}, pool="llama", namespace="models"))


def test_a_digest_is_an_image_too() -> None:
    (container,) = _deployment(printed("--selector", "a=b", "--image", "r/epp@sha256:abc"))["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["image"] == "r/epp@sha256:abc"


def test_values_come_from_files_and_one_by_one_the_later_ones_win(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values(epp={"replicas": 2, "nodeSelector": {"disk": "fast"}})))
    made = printed(
        "--values", str(file), "--set", "router.epp.replicas=3", "--set", r"router.epp.nodeSelector.a\.b/c=d"
    )
    expected = values(epp={"replicas": 3, "nodeSelector": {"disk": "fast", "a.b/c": "d"}})
    assert same(made, ours(expected, namespace="default"))


def test_flags_of_serve_stand_behind_two_dashes() -> None:
    (container,) = _deployment(
        printed("--selector", "a=b", "--", "--max-endpoints=4096", "--emit-endpoint-scores", "-v=4")
    )["spec"]["template"]["spec"]["containers"]
    assert container["args"][-3:] == ["--emit-endpoint-scores=true", "--max-endpoints=4096", "-v=4"]


def test_a_configuration_is_checked_and_brought_along(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("plugins:\n- type: queue-scorer\n")
    (config,) = [one for one in printed("--selector", "a=b", "--config-file", str(file)) if one["kind"] == "ConfigMap"]
    assert config["data"] == {"config.yaml": file.read_text()}
    file.write_text("plugins:\n- type: queue-scorrer\n")
    refused = said("--selector", "a=b", "--config-file", str(file))
    assert refused.exit_code == 78
    assert "queue-scorer" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
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
def test_what_cannot_be_is_refused_with_the_fix(arguments: tuple[str, ...], code: int, told: str) -> None:
    refused = said(*arguments)
    assert (refused.exit_code, refused.stdout) == (code, "")
    assert told in refused.stderr


def test_a_file_that_holds_no_mapping_or_no_yaml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    for text, told in (("- a\n", "this is a list"), ("a: [", "not YAML")):
        file.write_text(text)
        assert told in said("--values", str(file)).stderr


def test_an_empty_file_of_values_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("# nothing\n")
    assert printed("--selector", "app=vllm", "--values", str(tmp_path / "values.yaml"))


def test_variables_of_whoever_runs_it_are_not_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPP_ENDPOINTS", "nowhere:1")
    monkeypatch.setenv("EPP_WORKERS", "none")
    assert said("--selector", "app=vllm").exit_code == 0


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
def test_one_value_is_read_as_helm_reads_it(text: str, value: Json) -> None:
    assert assigned(text) == value


def test_a_second_item_of_a_list_needs_a_file() -> None:
    with pytest.raises(BadValues, match="use a file"):
        assigned("a[1]=x")


def test_the_defaults_are_those_of_the_charts_values() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/endpoint-picker/values.yaml").read_text())
    assert decoded([chart]) == decoded([])


def _deployment(made: list[Json]) -> Json:
    (found,) = [one for one in made if one["kind"] == "Deployment"]
    return found
