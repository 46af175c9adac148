"""helm and kustomize, built from Go modules; what they and this package render, as objects that can be compared.

python -m tests.deploy.renderers    builds what is missing
"""

import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.tools import GO, provide
from workers.cli.manifests import version
from workers.manifests.render import objects
from workers.manifests.settled import settled
from workers.manifests.values import decoded

Json = dict[str, Any]
Key = tuple[str, str, str]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BINARIES = ROOT / ".cache" / "go-bin"
CHART = ROOT / "deploy" / "helm" / "endpoint-picker"
KUSTOMIZE = ROOT / "deploy" / "kustomize"
PROGRAMS = ("helm.sh/helm/v3/cmd/helm", "sigs.k8s.io/kustomize/kustomize/v5")
MADE_OF = BINARIES / "renderers-made-of"
KUBE_VERSION = "1.34"
POOL, NAMESPACE = "vllm", "deploy"


def built() -> bool:
    """From the modules that are named now."""
    there = all((BINARIES / name).exists() for name in ("helm", "kustomize"))
    return there and MADE_OF.exists() and MADE_OF.read_text() == _modules()


def build() -> None:
    """Into `.cache/go-bin`; about four minutes, once. Exits with what to do when it can't be done."""
    if built():
        return
    provide(GO)
    print("building helm and kustomize: about 4 minutes, once", flush=True)
    BINARIES.mkdir(parents=True, exist_ok=True)
    command = ["go", "build", "-buildvcs=false", "-o", f"{BINARIES}{os.sep}", *PROGRAMS]
    if subprocess.run(command, cwd=HERE / "go", check=False).returncode:
        raise SystemExit(f"go build failed in {HERE / 'go'}: see above (it fetches the modules that go.sum names)")
    MADE_OF.write_text(_modules())


def _modules() -> str:
    return hashlib.sha256((HERE / "go" / "go.mod").read_bytes() + (HERE / "go" / "go.sum").read_bytes()).hexdigest()


def helm(values: Json, *, pool: str = POOL, namespace: str = NAMESPACE) -> "subprocess.CompletedProcess[str]":
    command = [BINARIES / "helm", "template", pool, CHART, "--namespace", namespace, "--kube-version", KUBE_VERSION]
    return subprocess.run(
        [*command, "--values", "-"],
        input=yaml.safe_dump(values),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def kustomize(folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [BINARIES / "kustomize", "build", folder], capture_output=True, text=True, check=False, timeout=60
    )


def ours(values: Json, *, pool: str = POOL, namespace: str = NAMESPACE) -> list[Json]:
    return objects(settled(decoded([values]), pool, namespace, version()))


def parsed(text: str) -> list[Json]:
    return [one for one in yaml.safe_load_all(text) if one]


def keyed(made: Iterable[Json]) -> dict[Key, Json]:
    """By kind, name and namespace, none twice."""
    found: dict[Key, Json] = {}
    for one in made:
        meta = one["metadata"]
        key = (one["kind"], meta["name"], meta.get("namespace", ""))
        assert key not in found, key
        found[key] = one
    return found


if __name__ == "__main__":
    build()
