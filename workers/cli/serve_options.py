"""Turns the flags of `epp serve` (`workers.cli.serve_flags`) into options.

    command line, environment ─ click ─▶ values ─ collect ─▶ Options (frozen) and warnings

Some flags of the reference picker have no effect in this picker. If the missing effect does not change how the picker serves, such a flag
only causes a warning. Otherwise the flag is refused with exit code 78. All errors are reported at once. This module reads no files and
knows no plugins.
"""

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from epp.config.pools_file import POOLS_MAX
from epp.endpoints.label_selectors import parse
from epp.plugins.extractors.metrics_source import INTERVAL_S_MAX
from epp.request.client_headers import GATEWAY, GROUPS, TRUSTED_BY_DEFAULT
from workers.cli.flags import BadConfiguration, Flag, given, misspelt, with_variables
from workers.cli.output import echo
from workers.cli.serve_flags import FLAGS, REPLACED, TLS_VERSIONS, UNSUPPORTED, VERBOSE
from workers.host.cgroup import available, default_workers
from workers.host.options import PASSWORD_VARIABLE, SCRAPE_INTERVAL_MIN_S, Options, TracingOptions
from workers.shared.freshness import FRESH_S_MIN
from workers.supervisor.kube.pool import PORTS_MAX
from workers.worker.telemetry.tracing_settings import settings

ENVELOPE_BYTES = 1 << 20  # room in a message besides the body
RECORD_BYTES_MIN = 256 << 20  # four files
SEND_BYTES_NEEDED = 1 << 16  # the longest message that the picker sends
STALENESS_S_MAX = 3600.0
MESSAGE_BYTES_MIN = 1 << 14  # an HTTP/2 frame
POD_NAME = re.compile(r"(.+)-[a-z0-9]+-[a-z0-9]+")
ZAP_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "error": "error", "dpanic": "error", "panic": "error", "fatal": "error"}
TLS_FLAGS = ("cert-path", "tls-min-version", "tls-cipher-suites", "enable-cert-reload")  # for TLS of the ext_proc port
REPLICA_FLAGS = ("replica-store-password-file", "replica-store-prefix", "replica-name")
REPLICA_PREFIX = re.compile(r"[A-Za-z0-9._:/{}-]{1,200}")  # no wildcards: ACLs and subscriptions match names by it
REPLICA_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
STDIN = "-"
ALL, NONE = "all", "none"  # of --trust-client-headers
OF_ONE_POOL = (
    "config_file", "config_text", "endpoints", "max_endpoints", "pool_name", "endpoint_selector",
    "ha_enable_leader_election",
)  # fmt: skip
CONFIGURATION = ("config_file", "config_text", "config_dir", "pools_file")  # flags that say what to serve

OF_EACH_POOL = ("config_file", "config_text", "max_endpoints", "pool_name")  # also for pools that the picker finds

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def serve_options(callback: Callable[..., R]) -> Callable[..., R]:
    """Adds the flags of `epp serve` to a click command. `callback` gets the `Options`, and the command's own flags by name."""

    @functools.wraps(callback)
    def collected(**values: Any) -> R:
        command_values = {name: values.pop(name) for name in list(values) if name not in _NAMES}
        return callback(options_of(values), **command_values)

    return _with_flags(collected)


def flags_beside(*shown: str) -> Callable[[F], F]:
    """Adds the flags of `epp serve` to a command about one configuration file: all flags except flags that name a configuration.

    `shown`: the names of the flags that the command's help lists.
    """

    def added(function: F) -> F:
        function = _with_flags(function)
        params: list[click.Parameter] = function.__click_params__  # type: ignore[attr-defined]
        for option in params:
            if isinstance(option, click.Option) and option.name in _NAMES:
                option.hidden = option.name not in shown
        params[:] = [option for option in params if option.name not in CONFIGURATION]
        return function

    return added


def options_of(values: Mapping[str, Any], *, quiet: bool = False) -> Options:
    """Returns the options of the flags that the present command was given. Prints warnings, unless `quiet`. Raises BadConfiguration."""
    context = click.get_current_context()
    try:
        options, warnings = collect(values, os.environ, given(context))
    except BadConfiguration as wrong:
        lines = wrong.message.splitlines()
        raise BadConfiguration("\n".join(with_variables(line, context) for line in lines)) from wrong
    for warning in () if quiet else (with_variables(warning, context) for warning in warnings):
        echo(f"warning: {warning}", err=True)
    return options


def _with_flags(function: F) -> F:
    for decorate in reversed(FLAGS):
        function = decorate(function)
    return function


_PARAMS = click.command("serve")(_with_flags(lambda: None)).params
_NAMES = frozenset(option.name for option in _PARAMS)
_VARIABLES = frozenset(name for option in _PARAMS if isinstance(option, Flag) for name in option.variables)


def collect(values: Mapping[str, Any], environ: Mapping[str, str], origins: Mapping[str, str]) -> tuple[Options, list[str]]:
    """Turns the values of all flags into options and warnings. Raises BadConfiguration with all errors. `origins`: see `given`."""
    errors: list[str] = []
    warnings = misspelt(environ, _VARIABLES | {PASSWORD_VARIABLE})
    _unsupported(values, errors, warnings)
    _checked(values, errors)
    _kubernetes(values, environ, errors)
    _ports(values, errors)
    _transport(values, errors, warnings)
    _pools(values, errors, origins)
    _found_pools(values, errors, origins)
    _tls(values, errors, warnings)
    _replicas(values, environ, errors, warnings)
    interval_s = values["refresh_metrics_interval"]
    if interval_s < SCRAPE_INTERVAL_MIN_S:
        warnings.append(f"--refresh-metrics-interval {interval_s:g}s is below the minimum; {SCRAPE_INTERVAL_MIN_S:g}s is used")
        interval_s = SCRAPE_INTERVAL_MIN_S
    if interval_s > INTERVAL_S_MAX:
        errors.append(f"--refresh-metrics-interval {interval_s:g}s is above the maximum, {INTERVAL_S_MAX:g}s")
    staleness_s = values["metrics_staleness_threshold"]
    if not staleness_s <= STALENESS_S_MAX:
        errors.append(f"--metrics-staleness-threshold {staleness_s:g}s is above the maximum, {STALENESS_S_MAX:g}s")
    elif staleness_s < FRESH_S_MIN:
        warnings.append(f"--metrics-staleness-threshold {staleness_s:g}s is below the minimum; {FRESH_S_MIN:g}s is used")
    level = _level(values, errors)
    tracing = _tracing(values, environ, errors, warnings)
    if errors:
        raise BadConfiguration("\n".join(f"error: {error}" for error in errors))
    port, body_bytes_max = values["grpc_port"], values["body_limit"]
    fields = {name: values[name] for name in Options.__struct_fields__ if name in values}
    fields |= {
        "workers": values["workers"] or default_workers(available()),
        "workers_max": values["workers_max"] or 0,
        "drain_timeout_s": values["drain_timeout"],
        "body_bytes_max": body_bytes_max,
        "message_bytes_max": values["grpc_max_recv_msg_size"] or body_bytes_max + ENVELOPE_BYTES,
        "instance": values["instance"] or f"epp-{port or f'pid{os.getpid()}'}",
        "scrape_interval_s": interval_s,
        "metrics_staleness_threshold_s": staleness_s,
        "pool_name": values["pool_name"] or _deployment(environ) or "epp",
        "pool_given": bool(values["pool_name"]),
        "endpoint_target_ports": tuple(dict.fromkeys(values["endpoint_target_ports"])),
        "pool_namespace": values["pool_namespace"] or "default",
        "trust_client_headers": _trusted(values["trust_client_headers"]),
        "replica_store_prefix": _replica_prefix(values, environ),
        "given": origins,
        "log_level": level,
        "log_format": values["log_format"] or values["zap_encoder"] or "auto",
        "tracing": tracing,
    }
    return Options(**fields), warnings


def _unsupported(values: Mapping[str, Any], errors: list[str], warnings: list[str]) -> None:
    for unsupported in UNSUPPORTED:
        value = values[unsupported.name.replace("-", "_")]
        if value is not None and value not in unsupported.silent:
            warnings.append(f"--{unsupported.name} has no effect: {unsupported.why}")
    errors.extend(
        f"--{name} is deprecated and cannot be used; use engineConfigs of core-metrics-extractor"
        for name in REPLACED
        if values[name.replace("-", "_")] is not None
    )


def _checked(values: Mapping[str, Any], errors: list[str]) -> None:
    """Checks rules about values and pairs of flags that click's types cannot check."""
    errors.extend(
        f"--{name.replace('_', '-')} '{value}' is not UTF-8; the picker records the value as text: rename the file or folder"
        for name, value in values.items()
        if isinstance(value, str) and value.encode(errors="ignore").decode() != value
    )
    if values["config_file"] and values["config_text"]:
        errors.append("--config-file and --config-text cannot be set at the same time; give only one of them")
    if values["tls_min_version"] and values["tls_min_version"] not in TLS_VERSIONS:
        errors.append(f"--tls-min-version '{values['tls_min_version']}' is not supported; use {' or '.join(TLS_VERSIONS)}")
    if values["config_watch"] and values["config_file"] in ("", STDIN) and not (values["pools_file"] or values["config_dir"]):
        errors.append("--config-watch needs a file to follow; give --config-file")
    workers, most = values["workers"] or default_workers(available()), values["workers_max"]
    if most is not None and most < workers:
        errors.append(f"--workers-max {most} is below --workers {workers}; give at least {workers}, or fewer workers")
    received, sent = values["grpc_max_recv_msg_size"], values["grpc_max_send_msg_size"]
    if received and received < MESSAGE_BYTES_MIN:
        errors.append(
            f"--grpc-max-recv-msg-size {received} is too small: Envoy sends frames of up to {MESSAGE_BYTES_MIN} bytes; give at least that"
        )
    if sent and sent < SEND_BYTES_NEEDED:
        errors.append(f"--grpc-max-send-msg-size {sent} is too small: the picker sends up to {SEND_BYTES_NEEDED} bytes; give at least that")
    errors.extend(_untrustable(values["trust_client_headers"]))
    if values["record_bytes_max"] < RECORD_BYTES_MIN:
        errors.append(f"--record-bytes-max is below {RECORD_BYTES_MIN >> 20}MiB; give at least that")
    if "/" in values["instance"]:
        errors.append(f"--instance '{values['instance']}' has a slash; give a plain file name")


def _untrustable(names: Sequence[str]) -> list[str]:
    """Returns the errors in the names of --trust-client-headers."""
    words = (ALL, NONE)
    known = (*words, GATEWAY, *GROUPS)
    found = [
        f"--trust-client-headers: '{name[:128]}' is not known; write all, none, {GATEWAY}, or some of {', '.join(GROUPS)}"
        for name in names
        if name not in known
    ]
    if len(names) > 1 and set(words) & set(names):
        found.append("--trust-client-headers: all and none cannot be combined with other values")
    return found


def _trusted(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the groups of client headers that the picker reads, after GATEWAY if the gateway removes these headers from client requests.

    `names`: checked names. Without a group, GATEWAY stands for the groups that are trusted by default.
    """
    if ALL in names:
        return tuple(GROUPS)
    groups = tuple(name for name in GROUPS if name in names)
    return (GATEWAY, *(groups or TRUSTED_BY_DEFAULT)) if GATEWAY in names else groups


def _kubernetes(values: Mapping[str, Any], environ: Mapping[str, str], errors: list[str]) -> None:
    """Checks the flags for endpoints in Kubernetes: a pool, or a selector with ports and a POD_NAME that names the pool."""
    selector, ports = values["endpoint_selector"], tuple(dict.fromkeys(values["endpoint_target_ports"]))
    if not selector:
        if ports:
            errors.append("--endpoint-target-ports has no effect without --endpoint-selector; a pool has its own ports")
        return
    if values["pool_name"]:
        errors.append("--pool-name and --endpoint-selector cannot be set at the same time; give only one of them")
    try:
        parse(selector)
    except ValueError as error:
        errors.append(f"--endpoint-selector: {error}")
    if not 1 <= len(ports) <= PORTS_MAX:
        errors.append(f"--endpoint-selector needs --endpoint-target-ports with 1 to {PORTS_MAX} ports, not {len(ports)}")
    errors.extend(f"--endpoint-target-ports: {port} is out of range; give 1 to 65535" for port in ports if not 1 <= port <= 65535)
    if not _deployment(environ):
        errors.append(
            f"--endpoint-selector needs the environment variable POD_NAME in the form <deployment>-<replica set>-<id>, which names "
            f"the pool; it is '{environ.get('POD_NAME', '')}'"
        )


def _ports(values: Mapping[str, Any], errors: list[str]) -> None:
    """Refuses two flags with the same port. Several flags may have port 0, which means any free port."""
    flags: dict[int, list[str]] = {}
    for name in ("grpc-port", "grpc-health-port", "metrics-port"):
        flags.setdefault(values[name.replace("-", "_")], []).append(f"--{name}")
    errors.extend(
        f"{' and '.join(names)} have the same port {port}; give each of them its own"
        for port, names in flags.items()
        if port and len(names) > 1
    )


def _transport(values: Mapping[str, Any], errors: list[str], warnings: list[str]) -> None:
    """Warns of the differences of --transport grpcio, and refuses flags that this transport would ignore."""
    if values["transport"] != "grpcio":
        return
    warnings.append(
        "--transport grpcio: connections are spread over workers at random; grpc has its own limits for floods and slow clients; "
        "connections are counted only while they have streams; a draining worker refuses new streams"
    )
    errors.extend(
        f"--{name} cannot be set for --transport grpcio, which has its own settings; remove it, or use --transport native"
        for name in ("tls-min-version", "tls-cipher-suites")
        if values[name.replace("-", "_")] and values[name.replace("-", "_")] != "VersionTLS12"
    )


def _requires_tokens(values: Mapping[str, Any]) -> bool:
    """Returns whether the metrics port requires tokens. Assumes that the configuration, which is not read yet, has no discovery plugin."""
    in_kubernetes = (values["pool_name"] or values["endpoint_selector"]) and not values["endpoints"]
    return bool(in_kubernetes) and values["metrics_endpoint_auth"] is not False


def _pools(values: Mapping[str, Any], errors: list[str], origins: Mapping[str, str]) -> None:
    """Refuses flags that only a picker of one pool has."""
    if not values.get("pools_file"):
        return
    given = [name for name in OF_ONE_POOL if name in origins and values[name]]
    errors.extend(f"--pools-file and --{name.replace('_', '-')} cannot be set at the same time; give only one of them" for name in given)
    if values["transport"] == "grpcio":
        errors.append("--pools-file and --transport grpcio cannot be set at the same time: grpc tells neither the authority nor the port")


def _found_pools(values: Mapping[str, Any], errors: list[str], origins: Mapping[str, str]) -> None:
    """Checks flags about InferencePools that the picker finds while it runs."""
    service, several = values["service_name"], "," in values["pool_name"]
    if not service and not several:
        errors.extend(
            f"--{name.replace('_', '-')} has no effect without --service-name or several --pool-name; remove it"
            for name in ("config_dir", "pool_ports")
            if values.get(name)
        )
        return
    flag = "--service-name" if service else "several --pool-name"
    if service and values["pool_name"]:
        errors.append("--service-name and --pool-name cannot be set at the same time; give only one of them")
    twice = [name for name, count in Counter(values["pool_name"].split(",")).items() if count > 1]
    if twice:
        errors.append(f"--pool-name '{twice[0][:128]}' is given twice; remove one of them")
    alone = [name for name in ("pools_file", *OF_ONE_POOL) if name not in OF_EACH_POOL and name in origins and values.get(name)]
    errors.extend(f"{flag} and --{name.replace('_', '-')} cannot be set at the same time; give only one of them" for name in alone)
    if values["transport"] == "grpcio":
        errors.append(f"{flag} and --transport grpcio cannot be set at the same time: grpc does not tell the port")
    ports = values["pool_ports"]
    if len(ports) > POOLS_MAX:
        errors.append(f"--pool-ports has {len(ports)} ports; give at most {POOLS_MAX}")
    taken = [f"--{name}" for name in ("grpc-health-port", "metrics-port") if values[name.replace("-", "_")] in ports]
    errors.extend(f"--pool-ports has the port of {name}; give one of them another port" for name in taken)


def _tls(values: Mapping[str, Any], errors: list[str], warnings: list[str]) -> None:
    if values["client_ca_file"] and not values["secure_serving"]:
        errors.append("--client-ca-file needs TLS, but --secure-serving is false; remove one of them")
    if values["metrics_client_ca_file"] and not values["metrics_cert_dir"]:
        errors.append("--metrics-client-ca-file needs TLS on the metrics port; give --metrics-cert-dir too")
    if values["metrics_cert_dir"] and not values["metrics_client_ca_file"] and not _requires_tokens(values):
        warnings.append("--metrics-cert-dir without --metrics-client-ca-file: any client can read the port's pages")
    if not values["secure_serving"]:
        unused = [name for name in TLS_FLAGS if values[name.replace("-", "_")]]
        if unused:
            listed = " and ".join(f"--{name}" for name in unused)
            have = "has" if len(unused) == 1 else "have"
            warnings.append(f"{listed} {have} no effect: --secure-serving is false, so the ext_proc port uses no TLS")
        return
    if values["enable_cert_reload"] and not (values["cert_path"] or values["client_ca_file"]):
        warnings.append("--enable-cert-reload has no effect: there is no certificate file to reload; give --cert-path")


def _replicas(values: Mapping[str, Any], environ: Mapping[str, str], errors: list[str], warnings: list[str]) -> None:
    url, prefix, name = values["replica_store"], values["replica_store_prefix"], values["replica_name"]
    if not url:
        unused = [f"--{flag}" for flag in REPLICA_FLAGS if values[flag.replace("-", "_")]]
        if unused:
            warnings.append(f"{' and '.join(unused)}: no effect without --replica-store")
        return
    from workers.replicas.address import parse_address  # a late import, because pickers without a store do not need this module

    try:
        address = parse_address(url)
    except ValueError as wrong:
        errors.append(f"--replica-store: {wrong}")
    else:
        if values["replica_store_password_file"] and (address.password or environ.get(PASSWORD_VARIABLE)):
            errors.append("--replica-store-password-file: the password is given in two places; give only one of them")
    if prefix and not REPLICA_PREFIX.fullmatch(prefix):
        errors.append(f"--replica-store-prefix '{prefix[:128]}': give up to 200 letters, digits and . _ : / {{ }} -")
    if name and not REPLICA_NAME.fullmatch(name):
        errors.append(f"--replica-name '{name[:128]}': give up to 128 letters, digits and . _ -")


def _replica_prefix(values: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Returns the beginning of all names in the store, or "" without a store."""
    if not values["replica_store"]:
        return ""
    several = values.get("pools_file") or values["service_name"] or "," in values["pool_name"]
    pool = _deployment(environ) or "pools" if several else values["pool_name"] or _deployment(environ) or "epp"
    return values["replica_store_prefix"] or f"epp:{values['pool_namespace'] or 'default'}:{pool}"


def _tracing(values: Mapping[str, Any], environ: Mapping[str, str], errors: list[str], warnings: list[str]) -> TracingOptions | None:
    """Returns the tracing options of the OTEL_* variables. Returns None for --tracing=false, or if these variables are not set."""
    if values["tracing"] is False:
        return None
    options, faults = settings(environ)
    errors += faults
    if values["tracing"] and not options and not faults:
        warnings.append("--tracing has no effect: OTEL_TRACES_EXPORTER is not set; set it to otlp or console")
    return options


def _level(values: Mapping[str, Any], errors: list[str]) -> str:
    """Returns the log level: from --log-level, else from --zap-log-level, else from -v."""
    zap = values["zap_log_level"].lower()
    if values["log_level"]:
        return str(values["log_level"])
    if zap in ZAP_LEVELS:
        return ZAP_LEVELS[zap]
    if zap.isdigit() and int(zap) > 0:
        return "debug"
    if zap:
        errors.append(f"--zap-log-level '{values['zap_log_level']}' is not known; give {', '.join(ZAP_LEVELS)} or a number above 0")
    return "debug" if (values["v"] or 0) >= VERBOSE else "info"


def _deployment(environ: Mapping[str, str]) -> str:
    """Returns the `<deployment>` of a POD_NAME `<deployment>-<replica set>-<id>`. Returns "" for a name of another form."""
    match = POD_NAME.fullmatch(environ.get("POD_NAME", ""))
    return match[1] if match else ""
