"""Who may do what: the picker in the cluster, others on its ports.

Role         pods: list, watch. With a pool: that pool; objectives and rewrites of the namespace. With leader election: one lease
ClusterRole  asks who the reader of /metrics is, and whether it may read; only with authentication there
reader       an account for the monitoring, with a token in a Secret; only when that is switched on here
network      ext_proc and health for gateways, /metrics for the monitoring, Envoy for everybody
"""

from typing import Final

from workers.kube.pool import POOL_GROUP
from workers.manifests.settled import Settled
from workers.manifests.values import Json
from workers.manifests.workload import metadata
from workers.object_kinds import GROUPS

READ: Final = ["list", "watch"]
RBAC: Final = "rbac.authorization.k8s.io"
API_SERVER_PORTS: Final = (443, 6443)


def service_account(found: Settled) -> Json:
    return _account(found, found.name)


def roles(found: Settled) -> list[Json]:
    """What the picker may do in its namespace."""
    role = {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": metadata(found, found.name), "rules": _rules(found)}
    return [role, _binding(found, "Role", found.name, found.name)]


def _rules(found: Settled) -> list[Json]:
    rules: list[Json] = [{"apiGroups": [""], "resources": ["pods"], "verbs": READ}]
    if found.watches_pool:
        rules.append(
            {"apiGroups": [POOL_GROUP], "resources": ["inferencepools"], "resourceNames": [found.pool], "verbs": READ}
        )
        objects = ["inferenceobjectives", "inferencemodelrewrites"]
        rules.append({"apiGroups": list(GROUPS), "resources": objects, "verbs": READ})
    if found.elects:
        leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
        rules.append({**leases, "verbs": ["create"]})  # by name nothing can be created
        rules.append({**leases, "resourceNames": [lease(found)], "verbs": ["get", "watch", "update"]})
    return rules


def lease(found: Settled) -> str:
    """Of the pool; of pods without one, the picker's Deployment gives the name."""
    return f"epp-{found.namespace}-{found.pool if found.watches_pool else found.name}.llm-d.ai"


def reviewers(found: Settled) -> list[Json]:
    """What it may ask about readers of /metrics."""
    if not found.authenticates:
        return []
    name = f"{found.cluster_name}-metrics-auth"
    rules = [
        {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
        {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]},
    ]
    return [_cluster_role(found, name, rules), _cluster_binding(found, name, found.name)]


def readers(found: Settled) -> list[Json]:
    """The monitoring's account, which may read /metrics and nothing else."""
    prometheus = found.values.router.monitoring.prometheus
    if not (prometheus.enabled and found.authenticates):
        return []
    account, name = f"{found.name}-metrics-reader", f"{found.cluster_name}-metrics-reader"
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(found, prometheus.auth.secret_name)
        | {"annotations": {"kubernetes.io/service-account.name": account}},
        "type": "kubernetes.io/service-account-token",
    }
    rules = [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    return [
        _account(found, account),
        secret,
        _cluster_role(found, name, rules),
        _cluster_binding(found, name, account),
    ]


def network_policies(found: Settled) -> list[Json]:
    router = found.values.router
    policy = router.network_policy
    if not policy.enabled:
        return []
    ingress = []
    if found.standalone:
        ingress.append(_allowed("from", [], [router.proxy.port]))
    if not found.standalone or found.makes_pool:
        ingress.append(_allowed("from", policy.gateway, [router.epp.ext_proc_port, router.epp.grpc_health_port]))
    watched = [router.metrics_port, *([router.proxy.metrics_port] if found.standalone else [])]
    ingress.append(_allowed("from", policy.monitoring, watched))
    spec: Json = {
        "podSelector": {"matchLabels": found.selector},
        "policyTypes": ["Ingress"],
        "ingress": ingress + policy.extra_ingress,
    }
    if policy.restrict_egress:
        spec["policyTypes"] = ["Ingress", "Egress"]
        spec["egress"] = _egress(found) + policy.extra_egress
    kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    return [kind | {"metadata": metadata(found, found.name), "spec": spec}]


def _egress(found: Settled) -> list[Json]:
    """Names, the API server, model servers."""
    servers = found.values.router.model_servers
    names = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    pods = {"podSelector": {"matchLabels": servers.match_labels}}
    return [
        names,
        _allowed("to", [], API_SERVER_PORTS),
        _allowed("to", [pods], [port.number for port in servers.target_ports]),
    ]


def _allowed(direction: str, peers: list[Json], ports: list[int] | tuple[int, ...]) -> Json:
    rule: Json = {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
    return rule | ({direction: peers} if peers else {})


def _account(found: Settled, name: str) -> Json:
    kind = {"apiVersion": "v1", "kind": "ServiceAccount"}
    return kind | {"metadata": metadata(found, name), "automountServiceAccountToken": False}


def _binding(found: Settled, kind: str, role: str, account: str) -> Json:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": f"{kind}Binding",
        "metadata": metadata(found, role) if kind == "Role" else {"name": role, "labels": found.labels},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": found.namespace}],
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": role},
    }


def _cluster_role(found: Settled, name: str, rules: list[Json]) -> Json:
    kind = {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole"}
    return kind | {"metadata": {"name": name, "labels": found.labels}, "rules": rules}


def _cluster_binding(found: Settled, name: str, account: str) -> Json:
    return _binding(found, "ClusterRole", name, account)
