"""What can be asked for: the values of the Helm chart as types, with its defaults.

Names are those of the field's reference chart where they mean the same. An unknown name or a wrong type is refused with its path.
`values.yaml` of the chart has the same defaults, and its JSON Schema is made of these types.

Values come from files and from `--set`, one over the other: mappings are merged, everything else is replaced.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import yaml

Json = dict[str, Any]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Seconds = Annotated[int, msgspec.Meta(ge=0, le=86_400)]
Scalar = str | bool | int | float

_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `(.*)`)?")
_STEP = re.compile(r"((?:\\.|[^.\[\]\\])+)|\[(\d+)\]")


class _Section(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """One level of the values."""


def _section(kind: type[msgspec.Struct]) -> Any:
    return msgspec.field(default_factory=kind)


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


class Epp(_Section, frozen=True, kw_only=True):
    replicas: Annotated[int, msgspec.Meta(ge=0, le=100)] = 1
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
    volumes: list[Json] = []
    volume_mounts: list[Json] = []
    pre_stop_sleep_seconds: Seconds | None = None  # none: 10, and 0 with leader election
    drain_timeout_seconds: Seconds = 110
    termination_grace_period_seconds: Seconds = 130
    shared_memory: SharedMemory = _section(SharedMemory)
    pod_disruption_budget: Budget = _section(Budget)


def _proxy_resources() -> Resources:
    return Resources(requests={"cpu": "2", "memory": "1Gi"}, limits={"memory": "4Gi"})


class Proxy(_Section, frozen=True, kw_only=True):
    name: str = "envoy-proxy"
    image: str = "docker.io/envoyproxy/envoy:distroless-v1.40.0"
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    port: Port = 8081
    metrics_port: Port = 19001
    resources: Resources = msgspec.field(default_factory=_proxy_resources)


class NetworkPolicy(_Section, frozen=True, kw_only=True):
    enabled: bool = True
    gateway: list[Json] = []  # peers; empty: everybody
    monitoring: list[Json] = []
    extra_ingress: list[Json] = []
    restrict_egress: bool = False
    extra_egress: list[Json] = []


class MetricsAuth(_Section, frozen=True, kw_only=True):
    enabled: bool = True
    secret_name: str = "inference-gateway-sa-metrics-reader-secret"


class Prometheus(_Section, frozen=True, kw_only=True):
    enabled: bool = False
    auth: MetricsAuth = _section(MetricsAuth)
    extra_labels: dict[str, str] = {}


class Monitoring(_Section, frozen=True, kw_only=True):
    interval: str = "10s"
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


class Router(_Section, frozen=True, kw_only=True):
    mode: Literal["gateway", "standalone"] = "gateway"
    epp: Epp = _section(Epp)
    metrics_port: Port = 9090
    extra_service_ports: list[Json] = []
    proxy: Proxy = _section(Proxy)
    network_policy: NetworkPolicy = _section(NetworkPolicy)
    monitoring: Monitoring = _section(Monitoring)
    tracing: Tracing = _section(Tracing)
    inference_pool: InferencePool = _section(InferencePool)
    inference_objectives: list[Objective] = []
    model_servers: ModelServers = _section(ModelServers)


class DestinationRule(_Section, frozen=True, kw_only=True):
    host: str = ""  # empty: that of the picker's Service
    traffic_policy: Json = {}


class Istio(_Section, frozen=True, kw_only=True):
    destination_rule: DestinationRule = _section(DestinationRule)


class Provider(_Section, frozen=True, kw_only=True):
    name: Literal["none", "istio"] = "none"
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


class BadValues(ValueError):
    """What was asked for cannot be; the text names the value, the rule and the fix."""


def decoded(layers: Iterable[Mapping[str, Any]]) -> Values:
    """Over the defaults, later ones over earlier ones; strict. Raises BadValues."""
    try:
        return msgspec.convert(merged((msgspec.to_builtins(Values()), *layers)), Values)
    except msgspec.ValidationError as wrong:
        raise BadValues(_told(str(wrong))) from wrong


def read(text: str, source: str) -> Json:
    """A values file. Raises BadValues."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as wrong:
        raise BadValues(f"{source}: not YAML: {wrong}") from wrong
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadValues(
            f"{source}: values are a mapping with router, provider or httpRoute; this is a {type(found).__name__}"
        )
    return found


def merged(layers: Iterable[Mapping[str, Any]]) -> Json:
    """Later ones win; mappings are merged."""
    result: Json = {}
    for layer in layers:
        for key, value in layer.items():
            under = result.get(key)
            both = isinstance(under, dict) and isinstance(value, dict)
            result[key] = merged((under, value)) if both else value  # type: ignore[arg-type]
    return result


def assigned(text: str) -> Json:
    """`--set a.b[0].c=value` as helm reads it, but for its lists in braces and commas. Raises BadValues."""
    path, equals, value = text.partition("=")
    steps = [(name, index) for name, index in _STEP.findall(path)]
    if not equals or not path or not steps or steps[0][1]:
        raise BadValues(f"--set {text}: write name.name=value, for example router.epp.replicas=2")
    result: Any = _scalar(value)
    for name, index in reversed(steps):
        result = {re.sub(r"\\(.)", r"\1", name): result} if name else _at(int(index), result, text)
    assert isinstance(result, dict)
    return result


def _at(index: int, value: Any, text: str) -> list[Any]:
    if index:
        raise BadValues(f"--set {text}: lists are set as a whole or by [0]; use a file with --values for longer ones")
    return [value]


def _scalar(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text == "null":
        return None
    return int(text) if re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) else text


def _told(wrong: str) -> str:
    """What msgspec found, with the nearest name."""
    match = _UNKNOWN.fullmatch(wrong)
    if match is None:
        return f"values: {wrong}"
    name, at = match[1], (match[2] or "$").removeprefix("$").strip(".")
    path = f"{at}.{name}" if at else name
    near = difflib.get_close_matches(path, _paths(Values), n=1, cutoff=0.6)
    return f"values: there is no {path}" + (f"; did you mean {near[0]}?" if near else "; see values.yaml of the chart")


def _paths(kind: type[msgspec.Struct], at: str = "") -> list[str]:
    """All names, dotted."""
    found = []
    for field in msgspec.structs.fields(kind):
        path = f"{at}.{field.encode_name}" if at else field.encode_name
        found.append(path)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found += _paths(field.type, path)
    return found
