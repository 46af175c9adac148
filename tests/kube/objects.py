"""Objects for the tests, and the definitions (CRDs) of the kinds that are not part of Kubernetes.

The definitions contain only what the picker reads: field names and types, and the defaults of the original definitions.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from tests.kube.client import Kube, Object, Refused

POOLS = "inference.networking.k8s.io"
NEW = "llm-d.ai"
LEGACY = "inference.networking.x-k8s.io"
APP = {"app": "model-server"}
ESTABLISHED_S = 20.0
NODE = "node-1"  # a pod on a node is deleted in two steps

_STRING = {"type": "string"}
_STRINGS = {"type": "object", "additionalProperties": _STRING}
_POOL_REF = {
    "type": "object",
    "required": ["name"],
    "properties": {"group": {**_STRING, "default": POOLS}, "kind": {**_STRING, "default": "InferencePool"}, "name": _STRING},
}
_PORT = {"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535}
_POOL_SPEC = {
    "type": "object",
    "required": ["selector", "targetPorts"],
    "properties": {
        "selector": {"type": "object", "properties": {"matchLabels": _STRINGS}},
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": {"type": "object", "required": ["number"], "properties": {"number": _PORT}},
        },
        "appProtocol": {**_STRING, "enum": ["http", "kubernetes.io/h2c"], "default": "http"},
        "endpointPickerRef": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    },
}
_OBJECTIVE_SPEC = {
    "type": "object",
    "required": ["poolRef"],
    "properties": {"priority": {"type": "integer", "format": "int32"}, "poolRef": _POOL_REF},
}
_MODEL = {
    "type": "object",
    "required": ["value"],
    "properties": {"type": {**_STRING, "enum": ["Exact"], "default": "Exact"}, "value": _STRING},
}
_RULE = {
    "type": "object",
    "required": ["targets"],
    "properties": {
        "matches": {"type": "array", "items": {"type": "object", "properties": {"model": _MODEL}}},
        "targets": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["modelRewrite"],
                "properties": {"modelRewrite": _STRING, "weight": {"type": "integer", "format": "int32"}},
            },
        },
    },
}
_REWRITE_SPEC = {
    "type": "object",
    "required": ["poolRef", "rules"],
    "properties": {"poolRef": _POOL_REF, "rules": {"type": "array", "minItems": 1, "items": _RULE}},
}


def definition(group: str, version: str, kind: str, spec: Object) -> Object:
    plural = kind.lower() + "s"
    schema = {"type": "object", "properties": {"spec": spec, "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}
    meta: Object = {"name": f"{plural}.{group}"}
    if group.endswith(".k8s.io"):  # such groups need this annotation
        meta["annotations"] = {"api-approved.kubernetes.io": "unapproved, for tests"}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}, "subresources": {"status": {}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": meta,
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [served],
        },
    }


POOL_DEFINITION = definition(POOLS, "v1", "InferencePool", _POOL_SPEC)
NEW_DEFINITIONS = (
    definition(NEW, "v1alpha2", "InferenceObjective", _OBJECTIVE_SPEC),
    definition(NEW, "v1alpha2", "InferenceModelRewrite", _REWRITE_SPEC),
)
LEGACY_DEFINITIONS = (
    definition(LEGACY, "v1alpha2", "InferenceObjective", _OBJECTIVE_SPEC),
    definition(LEGACY, "v1alpha2", "InferenceModelRewrite", _REWRITE_SPEC),
)
DEFINITIONS = (POOL_DEFINITION, *NEW_DEFINITIONS, *LEGACY_DEFINITIONS)


def install(kube: Kube, definitions: Iterable[Object] = DEFINITIONS) -> None:
    """Creates the definitions that do not exist, and waits until all are served."""
    for one in (wanted := list(definitions)):
        try:
            kube.create(one)
        except Refused as refused:
            if refused.status != 409:
                raise
    deadline = time.monotonic() + ESTABLISHED_S
    for one in wanted:
        while not _served(kube, one):
            assert time.monotonic() < deadline, f"{one['metadata']['name']} is not served after {ESTABLISHED_S:.0f} s"
            time.sleep(0.02)


def uninstall(kube: Kube, definitions: Iterable[Object] = DEFINITIONS) -> None:
    """Deletes the definitions with all their objects, and waits until they are not served any more."""
    for one in (unwanted := list(definitions)):
        kube.delete(one)
    deadline = time.monotonic() + ESTABLISHED_S
    for one in unwanted:
        while _served(kube, one):
            assert time.monotonic() < deadline, f"{one['metadata']['name']} is still there"
            time.sleep(0.02)


def _served(kube: Kube, one: Object) -> bool:
    spec = one["spec"]
    path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}?limit=1"
    try:
        kube.request("GET", path)
    except Refused as refused:
        if refused.status in (404, 503):
            return False
        raise
    return True


def namespace(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def pod(space: str, name: str, labels: Mapping[str, str] = APP, *, node: str = NODE, **annotations: str) -> Object:
    """A pod that is not ready yet. Annotations are given without their group."""
    meta: Object = {"name": name, "namespace": space, "labels": dict(labels)}
    if annotations:
        meta["annotations"] = {f"{NEW}/{key.replace('_', '-')}": value for key, value in annotations.items()}
    spec: Object = {"containers": [{"name": "server", "image": "none"}], "terminationGracePeriodSeconds": 30}
    if node:
        spec["nodeName"] = node
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def status(ip: str | None, *, ready: bool = True) -> Object:
    """The status of a pod, as a kubelet would write it."""
    condition = "True" if ready else "False"
    fields: Object = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": condition}, {"type": "ContainersReady", "status": condition}],
    }
    if ip is not None:
        fields |= {"podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "192.0.2.1"}
    return {"status": fields}


def pool(space: str, name: str = "pool", labels: Mapping[str, str] = APP, ports: Iterable[int] = (8000,)) -> Object:
    return {
        "apiVersion": f"{POOLS}/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": space},
        "spec": {
            "selector": {"matchLabels": dict(labels)},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        },
    }


def objective(space: str, name: str, priority: int, *, of: str = "pool", group: str = NEW) -> Object:
    return {
        "apiVersion": f"{group}/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": name, "namespace": space},
        "spec": {"priority": priority, "poolRef": {"name": of}},
    }


def rewrite(space: str, name: str, model: str, targets: Mapping[str, int], *, of: str = "pool", group: str = NEW) -> Object:
    """A rewrite with one rule: `model` becomes one of the targets, by weight."""
    rule: Object = {
        "matches": [{"model": {"type": "Exact", "value": model}}],
        "targets": [{"modelRewrite": to, "weight": weight} for to, weight in targets.items()],
    }
    return {
        "apiVersion": f"{group}/v1alpha2",
        "kind": "InferenceModelRewrite",
        "metadata": {"name": name, "namespace": space},
        "spec": {"poolRef": {"name": of}, "rules": [rule]},
    }


Rule = tuple[str, str, tuple[str, ...]]  # API group, resource, verbs
READ = ("list", "watch")
NEEDED: tuple[Rule, ...] = (
    ("", "pods", READ),
    (POOLS, "inferencepools", READ),
    *((group, f"inference{kind}s", READ) for group in (NEW, LEGACY) for kind in ("objective", "modelrewrite")),
    ("coordination.k8s.io", "leases", ("get", "watch", "create", "update")),
    ("", "events", ("create",)),
)


def allow(kube: Kube, space: str, account: str, rules: Iterable[Rule] = NEEDED) -> None:
    """Creates a Role with these rules and binds it to a service account of the namespace."""
    meta = {"name": account, "namespace": space}
    api = "rbac.authorization.k8s.io"
    granted = [{"apiGroups": [group], "resources": [what], "verbs": list(verbs)} for group, what, verbs in rules]
    kube.apply({"apiVersion": f"{api}/v1", "kind": "Role", "metadata": meta, "rules": granted})
    bound: Any = {
        "apiVersion": f"{api}/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": api, "kind": "Role", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": space}],
    }
    kube.apply(bound)
