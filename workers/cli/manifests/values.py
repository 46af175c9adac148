"""Defines the values of the Helm chart as types, with its defaults.

The reference is the chart of llm-d-router. A value that means the same as a value there has the same name. Values of the reference that
would have no effect here are accepted. `values.yaml` of this chart has the same defaults, and this chart's JSON Schema is generated from
these types. `layers` reads and checks values.
"""

from typing import Annotated, Any, Literal

import msgspec

Json = dict[str, Any]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Seconds = Annotated[int, msgspec.Meta(ge=0, le=86_400)]
Scalar = str | bool | int | float


class _Section(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """One level of the values."""


def _section(kind: type[msgspec.Struct]) -> Any:
    return msgspec.field(default_factory=kind)


def only(value: Any) -> Any:
    """Returns the metadata of a type that allows only `value`, because another value would have no effect."""
    return msgspec.Meta(extra_json_schema={"const": value})


Off = Annotated[bool, only(False)]


class Image(_Section, frozen=True, kw_only=True):
    registry: str = ""
    repository: str = "endpoint-picker"
    tag: str = ""  # empty: the version of this package
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"


class Resources(_Section, frozen=True, kw_only=True):
    requests: dict[str, str | int | float] = msgspec.field(default_factory=lambda: {"cpu": "2", "memory": "1Gi"})
    limits: dict[str, str | int | float] = msgspec.field(default_factory=lambda: {"memory": "2Gi"})


class MetricsDataSource(_Section, frozen=True, kw_only=True):
    scheme: Literal["http", "https"] = "http"
    path: str = "/metrics"
    insecure_skip_verify: bool = True


class Budget(_Section, frozen=True, kw_only=True):
    enabled: bool = True
    max_unavailable: int | str = 1


class SharedMemory(_Section, frozen=True, kw_only=True):
    size_limit: str = ""  # empty: computed


class StoreTls(_Section, frozen=True, kw_only=True):
    existing_secret: str = ""  # a Secret with ca.crt, and with tls.crt and tls.key if the store asks for a certificate
    client_certificate: bool = False


class ReplicaStore(_Section, frozen=True, kw_only=True):
    """The Redis or Valkey through which replicas act as one picker."""

    url: str = ""  # empty: replicas share nothing
    existing_secret: str = ""  # a Secret with the key `password`
    tls: StoreTls = _section(StoreTls)


class Epp(_Section, frozen=True, kw_only=True):
    replicas: Annotated[int, msgspec.Meta(ge=0, le=100)] = 1
    replica_store: ReplicaStore = _section(ReplicaStore)
    image: Image = _section(Image)
    ext_proc_port: Port = 9002
    grpc_health_port: Port = 9003
    parsers: list[str] = []
    metrics_data_source: MetricsDataSource = _section(MetricsDataSource)
    flags: dict[str, Scalar] = {}
    env: list[Json] = []
    plugins_config_file: str = "default-plugins.yaml"
    plugins_custom_config: dict[str, str] = {}
    extra_container_ports: list[Json] = []
    resources: Resources = _section(Resources)
    affinity: Json = {}
    tolerations: list[Json] = []
    node_selector: dict[str, str] = {}
    priority_class_name: str = ""
    pod_annotations: dict[str, str] = {}
    image_pull_secrets: list[Json] = []
    pod_security_context: Json = {}  # each given field replaces the default's
    security_context: Json = {}  # of the container
    deployment_strategy: Json = {}  # empty: by leader election
    volumes: list[Json] = []
    volume_mounts: list[Json] = []
    pre_stop_sleep_seconds: Seconds | None = None  # none: 10, and 0 with leader election
    drain_timeout_seconds: Seconds = 110
    termination_grace_period_seconds: Seconds = 130
    shared_memory: SharedMemory = _section(SharedMemory)
    pod_disruption_budget: Budget = _section(Budget)


class Proxy(_Section, frozen=True, kw_only=True):
    enabled: bool | None = None  # none: router.mode decides
    proxy_type: Literal["envoy"] = "envoy"
    mode: Literal["sidecar"] = "sidecar"
    name: str = "envoy-proxy"
    image: str = "docker.io/envoyproxy/envoy:distroless-v1.40.0"
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    port: Port = 8081
    metrics_port: Port = 19001
    resources: Resources = msgspec.field(
        default_factory=lambda: Resources(requests={"cpu": "2", "memory": "1Gi"}, limits={"memory": "4Gi"})
    )


def _any_pod() -> list[Json]:
    """Returns the peers of a network policy that admits all pods of the cluster."""
    return [{"namespaceSelector": {}}]


class NetworkPolicy(_Section, frozen=True, kw_only=True):
    enabled: bool = True
    gateway: list[Json] = msgspec.field(default_factory=_any_pod)  # peers of a network policy; empty: every client
    monitoring: list[Json] = msgspec.field(default_factory=_any_pod)
    extra_ingress: list[Json] = []
    restrict_egress: bool = False
    extra_egress: list[Json] = []


class MetricsAuth(_Section, frozen=True, kw_only=True):
    enabled: bool = True
    secret_name: str = "inference-gateway-sa-metrics-reader-secret"


class Rules(_Section, frozen=True, kw_only=True):
    enabled: bool = False


class Prometheus(_Section, frozen=True, kw_only=True):
    enabled: bool = False
    auth: MetricsAuth = _section(MetricsAuth)
    extra_labels: dict[str, str] = {}
    rules: Rules = _section(Rules)


class Gmp(_Section, frozen=True, kw_only=True):
    autopilot: Off = False


class MonitoringProvider(_Section, frozen=True, kw_only=True):
    name: Literal["", "prometheusoperator"] = ""
    gmp: Gmp = _section(Gmp)


class Monitoring(_Section, frozen=True, kw_only=True):
    interval: str = "10s"
    provider: MonitoringProvider = _section(MonitoringProvider)
    prometheus: Prometheus = _section(Prometheus)


class Sampling(_Section, frozen=True, kw_only=True):
    sampler: str = "parentbased_traceidratio"
    sampler_arg: str = "0.1"


class Tracing(_Section, frozen=True, kw_only=True):
    enabled: bool = False
    otel_exporter_endpoint: str = "http://localhost:4317"
    sampling: Sampling = _section(Sampling)


class InferencePool(_Section, frozen=True, kw_only=True):
    create: bool | None = None  # none: in gateway mode
    failure_mode: Literal["FailOpen", "FailClose"] = "FailOpen"


class Objective(_Section, frozen=True, kw_only=True):
    name: str
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class TargetPort(_Section, frozen=True, kw_only=True):
    number: Port


class ModelServers(_Section, frozen=True, kw_only=True):
    type: Literal["vllm", "sglang", "triton-tensorrt-llm", "trtllm-serve", "triton"] = "vllm"
    protocol: Literal["http", "grpc"] = "http"
    target_ports: Annotated[list[TargetPort], msgspec.Meta(min_length=1, max_length=8)] = msgspec.field(
        default_factory=lambda: [TargetPort(number=8000)]
    )
    match_labels: dict[str, str] = {}


class RenderImage(_Section, frozen=True, kw_only=True):
    registry: str = "docker.io"
    repository: str = "vllm/vllm-openai-cpu"
    tag: str = "v0.19.1"
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"


def _hub_token() -> list[Json]:
    reference = {"name": "llm-d-hf-token", "key": "HF_TOKEN", "optional": True}
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}]


def _render_probe() -> Json:
    asked = {"httpGet": {"path": "/health", "port": "render-http"}}
    return asked | {"initialDelaySeconds": 30, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 60}


class Tokenizer(_Section, frozen=True, kw_only=True):
    """The render sidecar."""

    enabled: bool = False
    model_name: str = ""
    image: RenderImage = _section(RenderImage)
    port: Port = 8000
    command: list[str] = []  # empty: vllm launch render
    args: list[str] = []  # empty: the model's name and the port
    extra_args: list[str] = []
    init_containers: list[Json] = []
    env: list[Json] = msgspec.field(default_factory=_hub_token)
    resources: Resources = msgspec.field(default_factory=lambda: Resources(requests={"cpu": "4", "memory": "8Gi"}, limits={}))
    volumes: list[Json] = []
    volume_mounts: list[Json] = []
    readiness_probe: Json = msgspec.field(default_factory=_render_probe)


class KvEvents(_Section, frozen=True, kw_only=True):
    """Ports of the model servers' KV events, as the configuration of the picker has them."""

    server_ports: Annotated[list[Port], msgspec.Meta(max_length=32)] = []
    bind_port: Port | None = None


class Disabled(_Section, frozen=True, kw_only=True):
    """A part of the reference's chart that this one does not have."""

    enabled: Off = False


class Pool(_Section, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
    port: Port
    match_labels: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    target_ports: Annotated[list[TargetPort], msgspec.Meta(min_length=1, max_length=8)] = msgspec.field(
        default_factory=lambda: [TargetPort(number=8000)]
    )


class Pools(_Section, frozen=True, kw_only=True):
    ports: Annotated[list[Port], msgspec.Meta(max_length=1000)] = []  # none: a single pool
    create: list[Pool] = []


class Router(_Section, frozen=True, kw_only=True):
    mode: Literal["gateway", "standalone"] = "gateway"
    cluster_domain: str = "cluster.local"
    tokenizer: Tokenizer = _section(Tokenizer)
    kv_events: KvEvents = _section(KvEvents)
    latency_predictor: Disabled = _section(Disabled)
    epp: Epp = _section(Epp)
    metrics_port: Port = 9090
    extra_service_ports: list[Json] = []
    proxy: Proxy = _section(Proxy)
    network_policy: NetworkPolicy = _section(NetworkPolicy)
    monitoring: Monitoring = _section(Monitoring)
    tracing: Tracing = _section(Tracing)
    inference_pool: InferencePool = _section(InferencePool)
    pools: Pools = _section(Pools)
    inference_objectives: list[Objective] = []
    model_servers: ModelServers = _section(ModelServers)


class DestinationRule(_Section, frozen=True, kw_only=True):
    host: str = ""  # empty: that of the picker's Service
    traffic_policy: Json = {}


class Istio(_Section, frozen=True, kw_only=True):
    destination_rule: DestinationRule = _section(DestinationRule)


class Gke(_Section, frozen=True, kw_only=True):
    preferred_backends: Disabled = _section(Disabled)


class Provider(_Section, frozen=True, kw_only=True):
    name: Literal["none", "istio"] = "none"
    gke: Gke = _section(Gke)
    istio: Istio = _section(Istio)


class HttpRoute(_Section, frozen=True, kw_only=True):
    create: bool = False
    inference_gateway_name: str = "inference-gateway"
    inference_gateway_namespace: str = ""
    base_model: str = ""
    request_timeout: str = "300s"
    header_matches: dict[str, str] = {}


class Values(_Section, frozen=True, kw_only=True):
    router: Router = _section(Router)
    provider: Provider = _section(Provider)
    http_route: HttpRoute = _section(HttpRoute)
