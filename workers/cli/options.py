"""The flags of `epp serve`: those of the field's reference picker, and ours.

    command line, environment ─ click ─▶ values ─ collect ─▶ Options (frozen) and warnings

A reference flag that this version does not act on is accepted with one warning where what it was
set to changes nothing, and refused with exit code 78 where it would be ignored. All refusals are
told at once. What this does not do: read a file, or know plugins.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click
import msgspec

from epp.client_headers import GROUPS
from epp.plugins.extractors.metrics_source import INTERVAL_S_MAX
from workers.cli.flags import (
    BOOL,
    COUNT,
    DURATION,
    NAMES,
    PORT,
    PORTS,
    SIZE,
    VERBOSITY,
    BadConfiguration,
    Flag,
    flag,
    misspelt,
)  # fmt: skip
from workers.cpus import available
from workers.kube.pool import POOL_GROUP, PORTS_MAX
from workers.kube.selector import parse
from workers.tracing_settings import Settings, settings

SCRAPE_INTERVAL_MIN_S = 0.05
ENVELOPE_BYTES = 1 << 20  # what a message may have besides the body
SEND_BYTES_NEEDED = 1 << 16  # no message that is sent is longer
INDEX_ENTRIES_MIN = 256  # a smaller index has no room for the owners of one block
MESSAGE_BYTES_MIN = 1 << 14  # an HTTP/2 frame
VERBOSE = 4  # from here on -v means debug
POD_NAME = re.compile(r"(.+)-[a-z0-9]+-[a-z0-9]+")
LEVELS = ("debug", "info", "warning", "error")
ZAP_LEVELS = {
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "error": "error",
    "dpanic": "error",
    "panic": "error",
    "fatal": "error",
}
TLS_VERSIONS = ("VersionTLS12", "VersionTLS13")
TRUST = ("all", "none")
PLUGIN_PATH = "Folder whose Python files bring further plugin types."

R = TypeVar("R")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `epp serve` was asked for. Times are seconds, sizes bytes."""

    config_file: str = ""
    config_text: str = ""
    allow_experimental_plugins: bool = False
    plugin_path: str = ""
    endpoints: str = ""
    objects_dir: str = ""
    grpc_port: int = 9002
    grpc_health_port: int = 9003
    metrics_port: int = 9090
    transport: str = "native"
    secure_serving: bool = True
    cert_path: str = ""
    tls_min_version: str = ""
    tls_cipher_suites: tuple[str, ...] = ()
    enable_cert_reload: bool = False
    client_ca_file: str = ""
    metrics_cert_dir: str = ""
    metrics_client_ca_file: str = ""
    metrics_endpoint_auth: bool | None = None  # None: in Kubernetes
    health_checking: bool = False
    workers: int = 1
    workers_max: int = 0  # 0: twice `workers`
    worker_memory_limit: int | None = None  # bytes; None: a share of the cgroup's limit, 0: none
    drain_timeout_s: float = 30.0
    body_bytes_max: int = 32 << 20
    message_bytes_max: int = 33 << 20
    max_endpoints: int = 1024
    index_entries: int = 1 << 19
    prefix_secret_file: str = ""
    state_dir: str = ""
    run_dir: str = "/dev/shm/epp"
    instance: str = "epp-9002"
    scrape_interval_s: float = SCRAPE_INTERVAL_MIN_S
    enable_grpc_stream_metrics: bool = False
    metrics_legacy_names: bool = True
    plugin_metrics: bool = True
    emit_endpoint_scores: bool = False
    debug_remote: bool = False
    disable_endpoint_subset_filter: bool = False
    trust_client_headers: tuple[str, ...] = tuple(GROUPS)
    pool_name: str = "epp"
    pool_given: bool = False  # --pool-name was: without another place for endpoints, an InferencePool's
    pool_namespace: str = "default"
    pool_group: str = POOL_GROUP
    endpoint_selector: str = ""  # instead of a pool; endpoints are pods then, and each of these ports
    endpoint_target_ports: tuple[int, ...] = ()
    ha_enable_leader_election: bool = False
    log_level: str = "info"
    log_format: str = "auto"
    tracing: Settings | None = None  # None: no traces


class Unsupported(NamedTuple):
    """A reference flag without effect here. Set to something not in `harmless` it is refused."""

    name: str
    kind: Any
    harmless: tuple[Any, ...]
    why: str
    silent: tuple[Any, ...] = ()  # values that are fulfilled as they are: not even a warning


UNSUPPORTED = (Unsupported("enable-pprof", BOOL, (True, False), "there is no pprof", silent=(False,)),)
ANYTHING = (  # of no consequence whatever they are set to
    Unsupported(
        "refresh-prometheus-metrics-interval",
        DURATION,
        (),
        "pool gauges are computed when they are read",
        silent=(5.0,),
    ),
    Unsupported("metrics-staleness-threshold", DURATION, (), "staleness follows the scrape interval", silent=(2.0,)),
    Unsupported("zap-devel", BOOL, (), "there is one log set-up", silent=(False,)),
    Unsupported("zap-stacktrace-level", str, (), "faults are logged with their stack traces"),
    Unsupported("zap-time-encoding", str, (), "log times are ISO 8601", silent=("iso8601", "rfc3339", "rfc3339nano")),
)
REPLACED = (
    "total-queued-requests-metric", "total-running-requests-metric", "kv-cache-usage-percentage-metric",
    "lora-info-metric", "cache-info-metric",
)  # fmt: skip

_FLAGS = (
    flag("config-file", str, "", "Configuration file; - for standard input.", short="-c"),
    flag("config-text", str, "", "Configuration as text, instead of a file."),
    flag("allow-experimental-plugins", BOOL, "false", "Accept experimental plugin types."),
    flag("plugin-path", str, "", PLUGIN_PATH),
    flag("endpoints", str, "", "Model servers as host:port,..., instead of a discovery plugin."),
    flag("objects-dir", str, "", "Folder with InferenceObjectives and model rewrites, watched. [default: none]"),
    flag("grpc-port", PORT, 9002, "Port for Envoy's ext_proc streams."),
    flag("grpc-health-port", PORT, 9003, "Port for gRPC health checks."),
    flag("metrics-port", PORT, 9090, "Port for Prometheus metrics."),
    flag("transport", click.Choice(["native", "grpcio"]), "native", "Implementation of gRPC."),
    flag("secure-serving", BOOL, "true", "TLS on the ext_proc port."),
    flag("cert-path", str, "", "Folder with tls.crt and tls.key; without it a self-signed certificate is made."),
    flag("tls-min-version", str, "", f"Lowest TLS version: {' or '.join(TLS_VERSIONS)}."),
    flag("tls-cipher-suites", NAMES, "", "TLS 1.2 cipher suites, by their IANA names."),
    flag("enable-cert-reload", BOOL, "false", "Follow --cert-path and --client-ca-file, use what is new."),
    flag("client-ca-file", str, "", "PEM file of the CAs of clients on the ext_proc port. [default: no check]"),
    flag("metrics-cert-dir", str, "", "Folder with tls.crt and tls.key of the metrics port. [default: no TLS]"),
    flag("metrics-client-ca-file", str, "", "PEM file of the CAs of clients on the metrics port."),
    flag(
        "metrics-endpoint-auth",
        BOOL,
        None,
        "In Kubernetes, whoever reads the metrics port's pages needs a token that may get them; probes do not. [default: true]",
    ),
    flag("health-checking", BOOL, "false", "Answer gRPC health checks on the ext_proc port too."),
    flag("workers", COUNT, None, "Worker processes. [default: CPUs by affinity and cgroup limit]", short="-w"),
    flag("workers-max", COUNT, None, "Most workers that SIGTTIN may add up to. [default: twice --workers]"),
    flag(
        "worker-memory-limit",
        SIZE,
        None,
        "A worker above it is replaced; 0 is no limit. [default: 80 % of the cgroup's limit / (workers + 1)]",
    ),
    flag("drain-timeout", DURATION, "30s", "How long open streams may take to end after SIGTERM."),
    flag("body-limit", SIZE, "32MiB", "Longest request body; a longer one is refused."),
    flag("grpc-max-recv-msg-size", SIZE, "", "Longest gRPC message received. [default: body limit + 1 MiB]"),
    flag("grpc-max-send-msg-size", SIZE, "", "Longest gRPC message sent; none here is longer than 64 KiB."),
    flag("max-endpoints", COUNT, 1024, "Places in the endpoint table."),
    flag(
        "index-entries",
        click.IntRange(min=INDEX_ENTRIES_MIN),
        1 << 19,
        "Places in the prefix index, 12 bytes each; one holds a block of one endpoint. `epp size` says how many.",
    ),
    flag("prefix-secret-file", str, "", "Secret of the deployment that block hashes start from. [default: random]"),
    flag("state-dir", str, "", "Folder that keeps the prefix index and its secret over restarts. [default: none]"),
    flag("run-dir", str, "/dev/shm/epp", "Folder for what names this instance."),
    flag("instance", str, "", "Name of this instance on this machine. [default: epp-<gRPC port>]"),
    flag("refresh-metrics-interval", DURATION, "50ms", "Period of metric scrapes, 50ms to 10m."),
    flag("enable-grpc-stream-metrics", BOOL, "false", "Count ext_proc streams by their end and their duration."),
    flag("metrics-legacy-names", BOOL, "true", "Show metrics under their older names too."),
    flag("debug-remote", BOOL, "false", "Serve /debug pages to peers other than loopback too."),
    flag("emit-endpoint-scores", BOOL, "false", "Tell the gateway every candidate's score, as dynamic metadata."),
    flag("plugin-metrics", BOOL, "true", "Time the plugins' calls; beyond 80 requests a second, of one in eight."),
    flag("disable-endpoint-subset-filter", BOOL, "false", "Ignore the gateway's subset of endpoints."),
    flag(
        "trust-client-headers",
        NAMES,
        "all",
        f"Headers of clients to honour: all, none, or some of {', '.join(GROUPS)}.",
    ),
    flag(
        "pool-name",
        str,
        "",
        "InferencePool in Kubernetes that endpoints come from, or else a name for metrics. "
        "[default: deployment in POD_NAME, else epp]",
    ),
    flag("pool-group", str, POOL_GROUP, "API group of the pool that objectives and model rewrites refer to."),
    flag("endpoint-selector", str, "", "Label selector of the pods that are endpoints, instead of a pool's."),
    flag(
        "ha-enable-leader-election",
        BOOL,
        "false",
        "Of several replicas only the one that holds the pool's Lease is ready. In Kubernetes only.",
    ),
    flag("endpoint-target-ports", PORTS, "", "Ports of these pods, one endpoint each; up to 8."),
    flag("pool-namespace", str, "", "Namespace of the pool. [default: NAMESPACE, else default]", env=("NAMESPACE",)),
    flag("log-level", click.Choice(LEVELS), None, "Lowest level that is logged. [default: info]"),
    flag(
        "log-format",
        click.Choice(["auto", "json", "console"]),
        None,
        "Log lines. [default: auto, console on a terminal]",
    ),
    flag("tracing", BOOL, None, "Export traces, if OTEL_TRACES_EXPORTER says where to. [default: true]"),
    flag("v", VERBOSITY, None, f"Verbosity; {VERBOSE} and more means debug.", short="-v"),
    flag("zap-log-level", str, "", "Level as in zap: debug, info, error, panic or a number; wins over -v."),
    flag("zap-encoder", click.Choice(["json", "console"], case_sensitive=False), None, "Log lines; as --log-format."),
    *(flag(u.name, u.kind, None, f"Accepted where it changes nothing: {u.why}.") for u in (*UNSUPPORTED, *ANYTHING)),
    *(flag(name, str, None, "Not accepted: use engineConfigs of core-metrics-extractor.") for name in REPLACED),
)


def serve_options(callback: Callable[..., R]) -> Callable[..., R]:
    """Gives a click command the flags of `epp serve`; its function gets `Options` first, its own values by name."""

    @functools.wraps(callback)
    def collected(**values: Any) -> R:
        own = {name: values.pop(name) for name in list(values) if name not in _NAMES}
        options, warnings = collect(values, os.environ)
        for warning in warnings:
            click.echo(f"warning: {warning}", err=True)
        return callback(options, **own)

    for decorate in reversed(_FLAGS):
        collected = decorate(collected)
    return collected


_PARAMS = click.command("serve")(functools.reduce(lambda f, decorate: decorate(f), _FLAGS, lambda: None)).params
_NAMES = frozenset(option.name for option in _PARAMS)
_VARIABLES = frozenset(name for option in _PARAMS if isinstance(option, Flag) for name in option.variables)


def collect(values: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Options, list[str]]:
    """Values of all flags by name -> options and warnings. Raises `BadConfiguration` with all that is refused."""
    errors: list[str] = []
    warnings = misspelt(environ, _VARIABLES)
    _unsupported(values, errors, warnings)
    _checked(values, errors)
    _kubernetes(values, environ, errors)
    _transport(values, errors, warnings)
    _tls(values, errors, warnings)
    interval_s = values["refresh_metrics_interval"]
    if interval_s < SCRAPE_INTERVAL_MIN_S:
        warnings.append(
            f"--refresh-metrics-interval {interval_s:g}s is below the minimum; it is {SCRAPE_INTERVAL_MIN_S:g}s"
        )
        interval_s = SCRAPE_INTERVAL_MIN_S
    if interval_s > INTERVAL_S_MAX:
        errors.append(f"--refresh-metrics-interval {interval_s:g}s is above the maximum, {INTERVAL_S_MAX:g}s")
    level = _level(values, errors)
    tracing = _tracing(values, environ, errors, warnings)
    if errors:
        raise BadConfiguration("\n".join(f"error: {error}" for error in errors))
    port, body_bytes_max = values["grpc_port"], values["body_limit"]
    taken = {name: values[name] for name in Options.__struct_fields__ if name in values}
    taken |= {
        "workers": values["workers"] or available(),
        "workers_max": values["workers_max"] or 0,
        "drain_timeout_s": values["drain_timeout"],
        "body_bytes_max": body_bytes_max,
        "message_bytes_max": values["grpc_max_recv_msg_size"] or body_bytes_max + ENVELOPE_BYTES,
        "instance": values["instance"] or f"epp-{port or f'pid{os.getpid()}'}",
        "scrape_interval_s": interval_s,
        "pool_name": values["pool_name"] or _deployment(environ) or "epp",
        "pool_given": bool(values["pool_name"]),
        "endpoint_target_ports": tuple(dict.fromkeys(values["endpoint_target_ports"])),
        "pool_namespace": values["pool_namespace"] or "default",
        "trust_client_headers": _trusted(values["trust_client_headers"]),
        "log_level": level,
        "log_format": values["log_format"] or values["zap_encoder"] or "auto",
        "tracing": tracing,
    }
    return Options(**taken), warnings


def _unsupported(values: Mapping[str, Any], errors: list[str], warnings: list[str]) -> None:
    for unsupported in (*UNSUPPORTED, *ANYTHING):
        value = values[unsupported.name.replace("-", "_")]
        if value is None or value in unsupported.silent:
            continue
        if unsupported in ANYTHING or value in unsupported.harmless:
            warnings.append(f"--{unsupported.name} has no effect: {unsupported.why}")
        else:
            errors.append(f"--{unsupported.name} is not supported by this version: {unsupported.why}; remove it")
    errors.extend(
        f"--{name} is deprecated and cannot be used; use engineConfigs of core-metrics-extractor"
        for name in REPLACED
        if values[name.replace("-", "_")] is not None
    )


def _checked(values: Mapping[str, Any], errors: list[str]) -> None:
    """What a single flag's kind cannot say."""
    if values["config_file"] and values["config_text"]:
        errors.append("--config-file and --config-text cannot be set at the same time; give one of them")
    if values["tls_min_version"] and values["tls_min_version"] not in TLS_VERSIONS:
        errors.append(
            f"--tls-min-version '{values['tls_min_version']}' is not supported; use {' or '.join(TLS_VERSIONS)}"
        )
    workers, most = values["workers"] or available(), values["workers_max"]
    if most is not None and most < workers:
        errors.append(f"--workers-max {most} is below --workers {workers}; give at least {workers}, or fewer workers")
    received, sent = values["grpc_max_recv_msg_size"], values["grpc_max_send_msg_size"]
    if received and received < MESSAGE_BYTES_MIN:
        errors.append(
            f"--grpc-max-recv-msg-size {received} is too small: Envoy sends frames of up to {MESSAGE_BYTES_MIN} bytes"
        )
    if sent and sent < SEND_BYTES_NEEDED:
        errors.append(
            f"--grpc-max-send-msg-size {sent} is too small: messages of up to {SEND_BYTES_NEEDED} bytes are sent"
        )
    unknown = [name for name in values["trust_client_headers"] if name not in (*GROUPS, *TRUST)]
    errors.extend(
        f"--trust-client-headers: '{name[:128]}' is not known; write all, none, or some of {', '.join(GROUPS)}"
        for name in unknown
    )
    if len(values["trust_client_headers"]) > 1 and set(TRUST) & set(values["trust_client_headers"]):
        errors.append("--trust-client-headers: all and none stand alone")
    if "/" in values["instance"]:
        errors.append(f"--instance '{values['instance']}' has a slash; it is a plain file name")


def _kubernetes(values: Mapping[str, Any], environ: Mapping[str, str], errors: list[str]) -> None:
    """A pool, or a selector with its ports and a pod's name to call the pool by."""
    selector, ports = values["endpoint_selector"], tuple(dict.fromkeys(values["endpoint_target_ports"]))
    if not selector:
        if ports:
            errors.append("--endpoint-target-ports has no effect without --endpoint-selector; a pool has its own ports")
        return
    if values["pool_name"]:
        errors.append("--pool-name and --endpoint-selector cannot be set at the same time; give one of them")
    try:
        parse(selector)
    except ValueError as wrong:
        errors.append(f"--endpoint-selector: {wrong}")
    if not 1 <= len(ports) <= PORTS_MAX:
        errors.append(
            f"--endpoint-selector needs --endpoint-target-ports with 1 to {PORTS_MAX} ports, not {len(ports)}"
        )
    errors.extend(f"--endpoint-target-ports: {port} is not from 1 to 65535" for port in ports if not 1 <= port <= 65535)
    if not _deployment(environ):
        errors.append(
            f"--endpoint-selector needs the environment variable POD_NAME in the form <deployment>-<replica set>-<id>, which names "
            f"the pool; it is '{environ.get('POD_NAME', '')}'"
        )


def _trusted(names: tuple[str, ...]) -> tuple[str, ...]:
    """Which groups of headers; an empty list is none."""
    if names == TRUST[:1]:
        return tuple(GROUPS)
    return tuple(name for name in GROUPS if name in names)


def _transport(values: Mapping[str, Any], errors: list[str], warnings: list[str]) -> None:
    """What grpc does not do, or not as the native transport does it."""
    if values["transport"] != "grpcio":
        return
    warnings.append(
        "--transport grpcio: connections are spread over workers by chance; floods and slow clients are limited as grpc does it; "
        "connections are counted only while they have streams; a worker that drains refuses new streams"
    )
    errors.extend(
        f"--{name} cannot be set for --transport grpcio: grpc has its own; remove it, or use native"
        for name in ("tls-min-version", "tls-cipher-suites")
        if values[name.replace("-", "_")] and values[name.replace("-", "_")] != "VersionTLS12"
    )


def _asks_tokens(values: Mapping[str, Any]) -> bool:
    """Whether the metrics port does, unless a discovery plugin says that this is not Kubernetes."""
    in_kubernetes = (values["pool_name"] or values["endpoint_selector"]) and not values["endpoints"]
    return bool(in_kubernetes) and values["metrics_endpoint_auth"] is not False


def _tls(values: Mapping[str, Any], errors: list[str], warnings: list[str]) -> None:
    """What certificates need of each other."""
    if values["client_ca_file"] and not values["secure_serving"]:
        errors.append("--client-ca-file needs TLS, but --secure-serving is false; remove one of them")
    if values["metrics_client_ca_file"] and not values["metrics_cert_dir"]:
        errors.append("--metrics-client-ca-file needs TLS on the metrics port; give --metrics-cert-dir too")
    if values["metrics_cert_dir"] and not values["metrics_client_ca_file"] and not _asks_tokens(values):
        warnings.append("--metrics-cert-dir without --metrics-client-ca-file: anyone can read the port's pages")
    files = values["cert_path"] or values["client_ca_file"]
    if values["enable_cert_reload"] and not (values["secure_serving"] and files):
        warnings.append("--enable-cert-reload has no effect: there is no certificate file to follow; give --cert-path")


def _tracing(
    values: Mapping[str, Any], environ: Mapping[str, str], errors: list[str], warnings: list[str]
) -> Settings | None:
    """What OTEL_* variables ask for, unless --tracing=false."""
    if values["tracing"] is False:
        return None
    asked, wrong = settings(environ)
    errors += wrong
    if values["tracing"] and not asked and not wrong:
        warnings.append("--tracing has no effect: OTEL_TRACES_EXPORTER is not set; set it to otlp or console")
    return asked


def _level(values: Mapping[str, Any], errors: list[str]) -> str:
    """--log-level, else --zap-log-level, else -v."""
    zap = values["zap_log_level"].lower()
    if values["log_level"]:
        return str(values["log_level"])
    if zap in ZAP_LEVELS:
        return ZAP_LEVELS[zap]
    if zap.isdigit() and int(zap) > 0:
        return "debug"
    if zap:
        errors.append(
            f"--zap-log-level '{values['zap_log_level']}' is none of {', '.join(ZAP_LEVELS)} or a number above 0"
        )
    return "debug" if (values["v"] or 0) >= VERBOSE else "info"


def _deployment(environ: Mapping[str, str]) -> str:
    """`<deployment>` of a POD_NAME `<deployment>-<replica set>-<id>`."""
    match = POD_NAME.fullmatch(environ.get("POD_NAME", ""))
    return match[1] if match else ""
