"""helm, kustomize and `epp manifests` render the same objects for the same values, and refuse the same."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.cases import CASES, REFUSED, UNKNOWN
from tests.deploy.generate import MODES, shown
from tests.deploy.renderers import KUSTOMIZE, helm, keyed, kustomize, ours, parsed

Json = dict[str, Any]


@pytest.mark.parametrize("name", list(CASES))
def test_the_chart_renders_what_the_package_does(name: str) -> None:
    done = helm(CASES[name])
    assert done.returncode == 0, done.stderr
    assert keyed(parsed(done.stdout)) == keyed(ours(CASES[name]))


@pytest.mark.parametrize("name", list(REFUSED))
def test_the_chart_refuses_what_the_package_does_in_the_same_words(name: str) -> None:
    case, told = REFUSED[name]
    done = helm(case)
    assert done.returncode != 0
    assert told in done.stderr


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_the_charts_schema_is_as_strict_as_the_package(name: str) -> None:
    done = helm(UNKNOWN[name])
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def test_a_name_that_no_service_can_have_is_refused_by_the_chart_too() -> None:
    done = helm(CASES["gateway"], pool="a" * 41)
    assert done.returncode != 0
    assert "at most 40 lower-case letters" in done.stderr


@pytest.mark.parametrize("mode", MODES)
def test_an_overlay_builds_what_the_package_renders(mode: str) -> None:
    done = kustomize(KUSTOMIZE / "overlays" / mode)
    assert done.returncode == 0, done.stderr
    assert keyed(parsed(done.stdout)) == keyed(ours(shown(mode), namespace="default"))


def test_an_overlay_can_be_put_into_another_namespace_and_be_given_another_pool_and_more_cpu(tmp_path: Path) -> None:
    (tmp_path / "overlay").symlink_to(KUSTOMIZE)
    patch: Json = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm-epp"},
        "spec": {
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "epp",
                            "env": [{"name": "EPP_ENDPOINT_SELECTOR", "value": "app=llama"}],
                            "resources": {"requests": {"cpu": "4"}},
                        }
                    ]
                }
            }
        },
    }
    index = {
        "namespace": "models",
        "resources": ["overlay/overlays/standalone"],
        "patches": [{"patch": yaml.safe_dump(patch)}],
        "images": [{"name": "endpoint-picker", "newName": "registry.example/epp", "newTag": "9"}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(index))
    done = kustomize(tmp_path)
    assert done.returncode == 0, done.stderr
    made = keyed(parsed(done.stdout))
    assert {namespace for _, _, namespace in made} <= {"models", ""}
    (subject,) = made["RoleBinding", "vllm-epp", "models"]["subjects"]
    assert subject["namespace"] == "models"
    (container,) = made["Deployment", "vllm-epp", "models"]["spec"]["template"]["spec"]["containers"]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert values["EPP_ENDPOINT_SELECTOR"] == "app=llama"
    assert values["EPP_ENDPOINT_TARGET_PORTS"] == "8000"
    assert container["resources"]["requests"] == {"cpu": "4", "memory": "1Gi"}
    assert container["image"] == "registry.example/epp:9"
