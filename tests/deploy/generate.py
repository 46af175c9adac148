"""Writes what in deploy/ follows from `workers.manifests`: for whoever changes it.

python -m tests.deploy.generate

helm/endpoint-picker/values.schema.json  from the types of the values
helm/endpoint-picker/files/              as they are
kustomize/base                           what both modes have in common
kustomize/overlays/gateway, standalone   what each has besides: objects, and patches that only add
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.deploy.renderers import ROOT, keyed, ours
from workers.manifests.render import as_yaml
from workers.manifests.values import Values

Json = dict[str, Any]

DEPLOY = ROOT / "deploy"
FILES = ("default-plugins.yaml", "envoy.yaml")
POOL, NAMESPACE = "vllm", "default"
MODES = ("gateway", "standalone")
HEAD = "# Written by `python -m tests.deploy.generate`, from what `epp manifests` prints.\n"


def shown(mode: str) -> Json:
    """The values that an overlay has."""
    return {"router": {"mode": mode, "modelServers": {"matchLabels": {"app": POOL}}}}


def written() -> dict[Path, str]:
    """All files and their texts."""
    chart = DEPLOY / "helm" / "endpoint-picker"
    found = {chart / "values.schema.json": json.dumps(schema(), indent=2) + "\n"}
    for name in FILES:
        found[chart / "files" / name] = (ROOT / "workers" / "manifests" / name).read_text()
    return found | {DEPLOY / "kustomize" / name: HEAD + text for name, text in kustomized().items()}


def schema() -> Json:
    return msgspec.json.schema(Values)


def kustomized() -> dict[str, str]:
    """By path. The base's objects stand in one file each kind."""
    wanted = {mode: keyed(ours(shown(mode), pool=POOL, namespace=NAMESPACE)) for mode in MODES}
    both = [key for key in wanted["gateway"] if key in wanted["standalone"]]
    base = {key: common(wanted["gateway"][key], wanted["standalone"][key]) for key in both}
    found = resources("base", list(base.values()))
    for mode in MODES:
        own = [made for key, made in wanted[mode].items() if key not in base]
        found |= resources(f"overlays/{mode}", own, over="../../base", patches=list(patched(base, wanted[mode])))
    return found


def resources(folder: str, made: list[Json], *, over: str = "", patches: list[Json] | None = None) -> dict[str, str]:
    by_kind: dict[str, list[Json]] = {}
    for one in made:
        by_kind.setdefault(f"{one['kind'].lower()}.yaml", []).append(one)
    listed = ([over] if over else []) + sorted(by_kind)
    index: Json = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": listed}
    if patches:
        index["patches"] = patches
    found = {f"{folder}/{name}": as_yaml(objects) for name, objects in by_kind.items()}
    return found | {f"{folder}/kustomization.yaml": as_yaml([index])}


def common(one: Any, other: Any) -> Any:
    """What both have: keys with what is common under them, and of lists the items that both begin with."""
    if isinstance(one, dict):
        shared = {key: common(value, other[key]) for key, value in one.items() if key in other}
        return {key: value for key, value in shared.items() if value is not None}
    if isinstance(one, list):
        same = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if alike(a, b) is None),
            min(len(one), len(other)),
        )
        return [alike(a, b) for a, b in zip(one[:same], other[:same], strict=True)]
    return one if one == other else None


def alike(one: Any, other: Any) -> Any:
    """What two items of lists have in common, if they are the same thing: named mappings may differ, others may not."""
    if one == other:
        return one
    named = isinstance(one, dict) and isinstance(other, dict) and one.get("name") == other.get("name") is not None
    return common(one, other) if named else None


def patched(base: dict[Any, Json], wanted: dict[Any, Json]) -> Iterator[Json]:
    for key, made in base.items():
        if added := list(additions(made, wanted[key], "")):
            kind, name, _ = key
            yield {"target": {"kind": kind, "name": name}, "patch": as_yaml(added and [added])}  # type: ignore[list-item]


def additions(before: Any, after: Any, path: str) -> Iterator[Json]:
    """JSON patches that make one into the other; they only add."""
    if before == after:
        return
    if isinstance(before, dict):
        assert set(before) <= set(after), path
        for key, value in after.items():
            at = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            if key in before:
                yield from additions(before[key], value, at)
            else:
                yield {"op": "add", "path": at, "value": value}
    else:
        assert isinstance(before, list), path
        for i, value in enumerate(after):
            if i < len(before):
                yield from additions(before[i], value, f"{path}/{i}")
            else:
                yield {"op": "add", "path": f"{path}/-", "value": value}


def stale() -> list[Path]:
    """Files that are there and no longer written."""
    there = [path for path in (DEPLOY / "kustomize").rglob("*.yaml") if path.is_file()]
    return sorted(set(there) - set(written()))


def main() -> int:
    for path, text in written().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in stale():
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
