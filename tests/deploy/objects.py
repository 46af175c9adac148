"""Finds the objects that tests of manifests look at, and the rights that they grant."""

import itertools
from pathlib import Path
from typing import Any

from tests.deploy.cases import CASES
from tests.deploy.renderers import NAMESPACE, POOL
from workers.cli.manifests import helm
from workers.cli.manifests.layers import Layer, checked

Json = dict[str, Any]
CONFIGS = sorted((Path(__file__).parents[2] / "deploy" / "config").glob("*.yaml"))
EXAMPLE = Path(__file__).parents[2] / "deploy" / "helm" / "examples" / "precise-prefix.yaml"
NAMES = [name for name in CASES if name != "own security"]


def one(manifests: list[Json], kind: str, name: str = "") -> Json:
    (match,) = [o for o in manifests if o["kind"] == kind and name in ("", o["metadata"]["name"])]
    return match


def pod(manifests: list[Json]) -> Json:
    return one(manifests, "Deployment")["spec"]["template"]["spec"]


def picker(manifests: list[Json]) -> Json:
    (container,) = pod(manifests)["containers"]
    return container


def variables(manifests: list[Json]) -> dict[str, Json]:
    return {variable["name"]: variable for variable in picker(manifests)["env"]}


def granted(manifests: list[Json], kind: str = "Role") -> set[tuple[str, str, str, str]]:
    """The granted rights: group, resource, verb, and the name of one object or ""."""
    rights = set()
    for role in (o for o in manifests if o["kind"] == kind):
        for rule in role["rules"]:
            names = rule.get("resourceNames", [""])
            places = itertools.product(rule.get("apiGroups", [""]), rule.get("resources", [""]), rule["verbs"], names)
            rights |= set(places)
    return rights


def refused(case: Json, pool: str = POOL) -> str:
    """Renders values as `epp manifests` does."""
    return helm.rendered(checked([Layer("f.yaml", case)]), pool, NAMESPACE)
