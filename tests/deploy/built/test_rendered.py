"""kustomize builds what the chart renders, and the chart's schema is strict."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.cases import UNKNOWN
from tests.deploy.generate import MODES, overlay_values
from tests.deploy.renderers import KUSTOMIZE, helm, keyed, kustomize, ours, parsed

Json = dict[str, Any]


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_the_charts_schema_is_as_strict_as_the_types(name: str) -> None:
    done = helm(UNKNOWN[name])
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


@pytest.mark.parametrize("mode", MODES)
def test_an_overlay_builds_the_objects_that_the_chart_renders(mode: str) -> None:
    done = kustomize(KUSTOMIZE / "overlays" / mode)
    assert done.returncode == 0, done.stderr
    assert keyed(parsed(done.stdout)) == keyed(ours(overlay_values(mode), namespace="default"))


def test_an_overlay_can_get_another_namespace_another_pool_and_more_cpu(tmp_path: Path) -> None:
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
    manifests = keyed(parsed(done.stdout))
    assert {namespace for _, _, namespace in manifests} <= {"models", ""}
    (subject,) = manifests["RoleBinding", "vllm-epp", "models"]["subjects"]
    assert subject["namespace"] == "models"
    (container,) = manifests["Deployment", "vllm-epp", "models"]["spec"]["template"]["spec"]["containers"]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert values["EPP_ENDPOINT_SELECTOR"] == "app=llama"
    assert values["EPP_ENDPOINT_TARGET_PORTS"] == "8000"
    assert container["resources"]["requests"] == {"cpu": "4", "memory": "1Gi"}
    assert container["image"] == "registry.example/epp:9"
