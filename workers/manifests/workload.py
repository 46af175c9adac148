"""What runs: Deployment, its ConfigMaps, the Service before it, and how many of its pods may be away at once.

- Replicas that share the work are replaced one after the other, the new one first. Of replicas that elect a leader only the leader is
  ready, so that "one after the other" would wait for ever: new ones come and old ones go at once, and the old leader gives
  its lease back; for the same reason they get no PodDisruptionBudget, which would keep the leader's node from being drained.
- Envoy in the picker's pod is an init container that stays (`restartPolicy: Always`): it ends after the picker, which ends after the
  last open request.
- Nothing is written but /dev/shm.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from workers.manifests import files
from workers.manifests.settled import Settled, cpus, text
from workers.manifests.values import Json, Resources

USER: Final = 65532
CONFIG_FOLDER: Final = "/config"
POD_SECURITY: Final = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def metadata(found: Settled, name: str, *, labels: Mapping[str, str] | None = None) -> Json:
    return {"name": name, "namespace": found.namespace, "labels": {**found.labels, **(labels or {})}}


def config_maps(found: Settled) -> list[Json]:
    """The picker's configuration; in standalone mode Envoy's too."""
    made = [_config_map(found, found.name, files.plugins(found))]
    if found.standalone:
        made.append(_config_map(found, f"{found.pool}-envoy", {"envoy.yaml": files.envoy(found)}))
    return made


def _config_map(found: Settled, name: str, data: Mapping[str, str]) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(found, name), "data": dict(data)}


def deployment(found: Settled) -> Json:
    epp = found.values.router.epp
    template = {
        "metadata": {
            "labels": found.labels,
            "annotations": {**epp.pod_annotations, "checksum/config": _checksum(found)},
        },
        "spec": _pod(found),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(found, found.name),
        "spec": {
            "replicas": epp.replicas,
            "revisionHistoryLimit": 3,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling(found)},
            "selector": {"matchLabels": found.selector},
            "template": template,
        },
    }


def _rolling(found: Settled) -> Json:
    return {"maxSurge": "100%", "maxUnavailable": "100%"} if found.elects else {"maxSurge": 1, "maxUnavailable": 0}


def _checksum(found: Settled) -> str:
    """New pods for new files."""
    told = [f"{name}\n{content}\n" for name, content in sorted(files.plugins(found).items())]
    if found.standalone:
        told.append(files.envoy(found))
    return hashlib.sha256("".join(told).encode()).hexdigest()


def _pod(found: Settled) -> Json:
    epp = found.values.router.epp
    spec: Json = {
        "serviceAccountName": found.name,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,  # a service named epp-... would set flags by its variables
        "terminationGracePeriodSeconds": epp.termination_grace_period_seconds,
        "securityContext": POD_SECURITY,
    }
    if found.standalone:
        spec["initContainers"] = [_envoy(found)]
    spec["containers"] = [_picker(found)]
    spec["volumes"] = _volumes(found)
    if epp.affinity:
        spec["affinity"] = epp.affinity
    elif epp.replicas > 1:
        spec["topologySpreadConstraints"] = [_spread(found)]
    optional = {
        "tolerations": epp.tolerations,
        "nodeSelector": epp.node_selector,
        "priorityClassName": epp.priority_class_name,
    }
    return spec | {key: value for key, value in optional.items() if value}


def _spread(found: Settled) -> Json:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": found.selector},
    }


def _volumes(found: Settled) -> list[Json]:
    volumes: list[Json] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": found.shared_memory}},
        {"name": "config", "configMap": {"name": found.name}},
    ]
    if found.standalone:
        volumes.append({"name": "envoy", "configMap": {"name": f"{found.pool}-envoy"}})
    return volumes + found.values.router.epp.volumes


def _picker(found: Settled) -> Json:
    router = found.values.router
    epp = router.epp
    ports = [("grpc", epp.ext_proc_port), ("grpc-health", epp.grpc_health_port), ("metrics", router.metrics_port)]
    container: Json = {
        "name": "epp",
        "image": found.image,
        "imagePullPolicy": epp.image.pull_policy,
        "args": arguments(found),
        "env": environment(found),
        "ports": [{"name": name, "containerPort": port} for name, port in ports] + epp.extra_container_ports,
        "livenessProbe": _probe(found, "liveness", period_s=10, failures=3),
        "readinessProbe": _probe(found, "readiness", period_s=2, failures=2),
        "resources": _resources(epp.resources),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            *epp.volume_mounts,
        ],
    }
    if found.pre_stop_s:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(found.pre_stop_s)]}}}
    return container


def _probe(found: Settled, service: str, *, period_s: int, failures: int) -> Json:
    return {
        "grpc": {"port": found.values.router.epp.grpc_health_port, "service": service},
        "initialDelaySeconds": 1,
        "periodSeconds": period_s,
        "timeoutSeconds": 2 if service == "readiness" else 5,
        "failureThreshold": failures,
    }


def _resources(resources: Resources) -> Json:
    return {"requests": resources.requests} | ({"limits": resources.limits} if resources.limits else {})


def arguments(found: Settled) -> list[str]:
    """What the manifests themselves say to `epp serve`, then what was asked for."""
    router = found.values.router
    epp = router.epp
    own: Json = {
        "config-file": f"{CONFIG_FOLDER}/{epp.plugins_config_file}",
        "grpc-port": epp.ext_proc_port,
        "grpc-health-port": epp.grpc_health_port,
        "metrics-port": router.metrics_port,
        "drain-timeout": f"{epp.drain_timeout_seconds}s",
        "metrics-endpoint-auth": found.authenticates,
        "tracing": router.tracing.enabled,
        "ha-enable-leader-election": found.elects,
        "secure-serving": found.secure,
    }
    asked = {name: value for name, value in sorted(epp.flags.items()) if name not in own}
    if not {"log-format", "zap-encoder"} & set(asked):
        own["log-format"] = "json"
    return [f"{'-' if len(name) == 1 else '--'}{name}={text(value)}" for name, value in (own | asked).items()]


def environment(found: Settled) -> list[Json]:
    """What differs by pod or pool stands here, where a patch finds it by its name."""
    servers = found.values.router.model_servers
    workers = {"resourceFieldRef": {"containerName": "epp", "resource": "requests.cpu", "divisor": "1"}}
    named: list[Json] = [
        {"name": "NAMESPACE", "valueFrom": _field("metadata.namespace")},
        {"name": "POD_NAME", "valueFrom": _field("metadata.name")},
        {"name": "EPP_WORKERS", "valueFrom": workers},
    ]
    if found.watches_pool:
        named.append({"name": "EPP_POOL_NAME", "value": found.pool})
    else:
        selector = ",".join(f"{key}={value}" for key, value in sorted(servers.match_labels.items()))
        ports = ",".join(str(port.number) for port in servers.target_ports)
        named.append({"name": "EPP_ENDPOINT_SELECTOR", "value": selector})
        named.append({"name": "EPP_ENDPOINT_TARGET_PORTS", "value": ports})
    return named + _traces(found) + found.values.router.epp.env


def _field(path: str) -> Json:
    return {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}


def _traces(found: Settled) -> list[Json]:
    tracing = found.values.router.tracing
    if not tracing.enabled:
        return []
    attributes = "k8s.namespace.name=$(NAMESPACE),k8s.node.name=$(NODE_NAME),k8s.pod.name=$(POD_NAME)"
    return [
        {"name": "NODE_NAME", "valueFrom": _field("spec.nodeName")},
        {"name": "OTEL_SERVICE_NAME", "value": found.name},
        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": tracing.otel_exporter_endpoint},
        {"name": "OTEL_TRACES_EXPORTER", "value": "otlp"},
        {"name": "OTEL_RESOURCE_ATTRIBUTES", "value": attributes},
        {"name": "OTEL_TRACES_SAMPLER", "value": tracing.sampling.sampler},
        {"name": "OTEL_TRACES_SAMPLER_ARG", "value": tracing.sampling.sampler_arg},
    ]


def _envoy(found: Settled) -> Json:
    proxy = found.values.router.proxy
    threads = cpus(proxy.resources.requests.get("cpu", 1))
    return {
        "name": proxy.name,
        "image": proxy.image,
        "imagePullPolicy": proxy.image_pull_policy,
        "restartPolicy": "Always",
        "command": ["envoy"],
        "args": [
            "-c",
            "/etc/envoy/envoy.yaml",
            "--concurrency",
            str(threads),
            "--disable-hot-restart",
            "--log-level",
            "warn",
        ],
        "ports": [
            {"name": "http", "containerPort": proxy.port},
            {"name": "proxy-metrics", "containerPort": proxy.metrics_port},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": "proxy-metrics"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "resources": _resources(proxy.resources),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "envoy", "mountPath": "/etc/envoy", "readOnly": True}],
    }


def service(found: Settled) -> Json:
    """Where the gateway finds the picker; in standalone mode, where clients find Envoy."""
    router = found.values.router
    metrics = {"name": "http-metrics", "port": router.metrics_port, "targetPort": "metrics", "appProtocol": "http"}
    ports: list[Json] = [metrics]
    if found.standalone:
        ports.append({"name": "http", "port": router.proxy.port, "targetPort": "http", "appProtocol": "http"})
    if not found.standalone or found.makes_pool:
        # As the field's gateways expect it, TLS or not: HTTP/2, whose TLS is a matter of its own.
        h2 = {"targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"}
        ports.append({"name": "grpc-ext-proc", "port": router.epp.ext_proc_port, **h2})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(found, found.name),
        "spec": {
            "type": "ClusterIP",
            "selector": found.selector,
            "ports": [{"protocol": "TCP", **port} for port in ports] + router.extra_service_ports,
        },
    }


def budgets(found: Settled) -> list[Json]:
    """How many replicas that share the work may be evicted at once."""
    epp = found.values.router.epp
    if found.elects or epp.replicas < 2 or not epp.pod_disruption_budget.enabled:
        return []
    spec: dict[str, Any] = {
        "maxUnavailable": epp.pod_disruption_budget.max_unavailable,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": found.selector},
    }
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(found, found.name),
            "spec": spec,
        }
    ]
