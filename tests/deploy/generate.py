"""Generates the files in deploy/ that follow from the types of the values, the sizes, and the chart. Run it after a change there.

python -m tests.deploy.generate            writes them
python -m tests.deploy.generate --check    prints the names of those that are not up to date

helm/endpoint-picker/Chart.yaml          its version is that of the package
helm/endpoint-picker/values.schema.json  from the types of the values
helm/endpoint-picker/files/sizes.json    from `loadtest.sizing.model`
man/epp.1                                from the commands and their options
config/epp.schema.json                   what `epp config schema` prints
pools.schema.json                        what `epp config schema --pools` prints
kustomize/base                           what both modes share
kustomize/overlays/gateway, standalone   what each mode adds: objects, and patches that only add
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from epp.config import registry
from epp.config.pools_file import pools_schema
from epp.config.schema import schema as config_schema
from loadtest.sizing.model import CHART as SIZES
from release.source import version
from tests.deploy import man
from tests.deploy.renderers import CHART, ROOT, keyed, ours
from workers.cli.manifests.values import Values

Json = dict[str, Any]

DEPLOY = ROOT / "deploy"
POOL, NAMESPACE = "vllm", "default"
MODES = ("gateway", "standalone")
HEAD = "# Written by `python -m tests.deploy.generate`, from what the Helm chart renders.\n"


def overlay_values(mode: str) -> Json:
    """The values of an overlay."""
    return {"router": {"mode": mode, "modelServers": {"matchLabels": {"app": POOL}}}}


def of_the_chart() -> dict[Path, str]:
    """The files that the chart needs for rendering."""
    return {
        CHART / "Chart.yaml": _versioned((CHART / "Chart.yaml").read_text()),
        CHART / "values.schema.json": json.dumps(schema(), indent=2) + "\n",
        CHART / "files" / "sizes.json": json.dumps(SIZES, indent=2) + "\n",
    }


def _versioned(chart: str) -> str:
    """Returns the text of Chart.yaml with the version of pyproject.toml."""
    number = version(ROOT)
    return re.sub(r"^(version|appVersion): .*$", lambda line: f'{line[1]}: "{number}"', chart, flags=re.MULTILINE)


def generated() -> dict[Path, str]:
    """All generated files and their texts."""
    configuration = json.dumps(config_schema(registry.known()), indent=2, ensure_ascii=False) + "\n"
    pools = json.dumps(pools_schema(), indent=2, ensure_ascii=False) + "\n"
    texts = {
        DEPLOY / "config" / "epp.schema.json": configuration,
        DEPLOY / "pools.schema.json": pools,
        DEPLOY / "man" / "epp.1": man.page(),
        **of_the_chart(),
    }
    return texts | {DEPLOY / "kustomize" / name: HEAD + text for name, text in kustomized().items()}


def schema() -> Json:
    return msgspec.json.schema(Values)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def as_yaml(made: list[Json]) -> str:
    """One document each."""
    dumped = (yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True) for one in made)
    return "---\n".join(dumped)


def kustomized() -> dict[str, str]:
    """Texts by path. The base has one file per kind."""
    wanted = {mode: keyed(ours(overlay_values(mode), pool=POOL, namespace=NAMESPACE)) for mode in MODES}
    both = [key for key in wanted["gateway"] if key in wanted["standalone"]]
    base = {key: common(wanted["gateway"][key], wanted["standalone"][key]) for key in both}
    texts = resources("base", list(base.values()))
    for mode in MODES:
        added = [item for key, item in wanted[mode].items() if key not in base]
        texts |= resources(f"overlays/{mode}", added, over="../../base", patches=list(patched(base, wanted[mode])))
    return texts


def resources(folder: str, items: list[Json], *, over: str = "", patches: list[Json] | None = None) -> dict[str, str]:
    by_kind: dict[str, list[Json]] = {}
    for one in items:
        by_kind.setdefault(f"{one['kind'].lower()}.yaml", []).append(one)
    listed = ([over] if over else []) + sorted(by_kind)
    index: Json = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": listed}
    if patches:
        index["patches"] = patches
    texts = {f"{folder}/{name}": as_yaml(objects) for name, objects in by_kind.items()}
    return texts | {f"{folder}/kustomization.yaml": as_yaml([index])}


def common(one: Any, other: Any) -> Any:
    """The parts that both have: their common keys, recursively; of lists the items at the beginning that match."""
    if isinstance(one, dict):
        shared = {key: common(value, other[key]) for key, value in one.items() if key in other}
        return {key: value for key, value in shared.items() if value is not None}
    if isinstance(one, list):
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if alike(a, b) is None), min(len(one), len(other)))
        return [alike(a, b) for a, b in zip(one[:same], other[:same], strict=True)]
    return one if one == other else None


def alike(one: Any, other: Any) -> Any:
    """The common part of two list items, if they are the same thing: mappings with the same name may differ, others must be equal."""
    if one == other:
        return one
    named = isinstance(one, dict) and isinstance(other, dict) and one.get("name") == other.get("name") is not None
    return common(one, other) if named else None


def patched(base: dict[Any, Json], wanted: dict[Any, Json]) -> Iterator[Json]:
    for key, item in base.items():
        if added := list(additions(item, wanted[key], "")):
            kind, name, _ = key
            yield {"target": {"kind": kind, "name": name}, "patch": as_yaml(added and [added])}  # type: ignore[list-item]


def additions(before: Any, after: Any, path: str) -> Iterator[Json]:
    """JSON patches that turn `before` into `after`. They only add."""
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
    """Files of kustomize that exist but are not generated any more."""
    existing = [path for path in (DEPLOY / "kustomize").rglob("*.yaml") if path.is_file()]
    return sorted(set(existing) - set(generated()))


def outdated() -> list[Path]:
    """Files that are not as they would be generated, or that are not generated any more."""
    return [path for path, text in generated().items() if path.read_text() != text] + stale()


def main(*arguments: str) -> int:
    if arguments == ("--check",):
        print(*(path.relative_to(ROOT) for path in outdated()), sep="\n", end="")
        return 0
    for path, text in of_the_chart().items():
        path.write_text(text)
    for path, text in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in stale():
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
