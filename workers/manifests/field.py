"""Objects of the field's own kinds: the pool and its objectives, how a gateway reaches them, what the monitoring reads."""

from workers.kube.pool import POOL_GROUP
from workers.manifests.settled import Settled
from workers.manifests.values import Json
from workers.manifests.workload import metadata

GATEWAY_GROUP = "gateway.networking.k8s.io"
APP_PROTOCOLS = {"http": "http", "grpc": "kubernetes.io/h2c"}


def pools(found: Settled) -> list[Json]:
    if not found.makes_pool:
        return []
    router = found.values.router
    servers = router.model_servers
    spec = {
        "selector": {"matchLabels": servers.match_labels},
        "targetPorts": [{"number": port.number} for port in servers.target_ports],
        "appProtocol": APP_PROTOCOLS[servers.protocol],
        "endpointPickerRef": {
            "name": found.name,
            "port": {"number": router.epp.ext_proc_port},
            "failureMode": router.inference_pool.failure_mode,
        },
    }
    kind = {"apiVersion": f"{POOL_GROUP}/v1", "kind": "InferencePool"}
    return [kind | {"metadata": metadata(found, found.pool), "spec": spec}]


def objectives(found: Settled) -> list[Json]:
    pool = {"group": POOL_GROUP, "name": found.pool}
    return [
        {
            "apiVersion": "llm-d.ai/v1alpha2",
            "kind": "InferenceObjective",
            "metadata": metadata(found, objective.name),
            "spec": {"priority": objective.priority, "poolRef": pool},
        }
        for objective in found.values.router.inference_objectives
    ]


def routes(found: Settled) -> list[Json]:
    route = found.values.http_route
    if not route.create:
        return []
    parent = {"group": GATEWAY_GROUP, "kind": "Gateway", "name": route.inference_gateway_name}
    if route.inference_gateway_namespace:
        parent["namespace"] = route.inference_gateway_namespace
    match: Json = {"path": {"type": "PathPrefix", "value": "/"}}
    wanted = ({"X-Gateway-Base-Model-Name": route.base_model} if route.base_model else {}) | route.header_matches
    if wanted:
        match["headers"] = [{"type": "Exact", "name": name, "value": wanted[name]} for name in sorted(wanted)]
    rule = {
        "matches": [match],
        "backendRefs": [{"group": POOL_GROUP, "kind": "InferencePool", "name": found.pool}],
        "timeouts": {"request": route.request_timeout},
    }
    kind = {"apiVersion": f"{GATEWAY_GROUP}/v1", "kind": "HTTPRoute"}
    return [kind | {"metadata": metadata(found, found.pool), "spec": {"parentRefs": [parent], "rules": [rule]}}]


def destination_rules(found: Settled) -> list[Json]:
    """Istio's way to TLS for the picker, whose certificate is its own."""
    provider = found.values.provider
    if provider.name != "istio":
        return []
    given = provider.istio.destination_rule
    policy: Json = {"tls": {"mode": "SIMPLE", "insecureSkipVerify": True} if found.secure else {"mode": "DISABLE"}}
    host = given.host or f"{found.name}.{found.namespace}.svc.cluster.local"
    spec = {"host": host, "trafficPolicy": policy | given.traffic_policy}
    kind = {"apiVersion": "networking.istio.io/v1", "kind": "DestinationRule"}
    return [kind | {"metadata": metadata(found, found.name), "spec": spec}]


def monitors(found: Settled) -> list[Json]:
    """For the Prometheus operator."""
    monitoring = found.values.router.monitoring
    prometheus = monitoring.prometheus
    if not prometheus.enabled:
        return []
    endpoint: Json = {"port": "http-metrics", "path": "/metrics", "interval": monitoring.interval}
    if found.authenticates:
        endpoint["authorization"] = {"credentials": {"name": prometheus.auth.secret_name, "key": "token"}}
    spec = {
        "endpoints": [endpoint],
        "namespaceSelector": {"matchNames": [found.namespace]},
        "selector": {"matchLabels": found.selector},
    }
    kind = {"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor"}
    return [kind | {"metadata": metadata(found, f"{found.name}-monitor", labels=prometheus.extra_labels), "spec": spec}]
