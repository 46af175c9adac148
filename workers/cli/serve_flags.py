"""Defines the flags of `epp serve` under their headings: flags of the reference picker, and our own flags.

This module has names, types, defaults and help texts. `workers.cli.serve_options` checks the values.
"""

from typing import Any, NamedTuple

import click

from epp.request.client_headers import GATEWAY, GROUPS, TRUSTED_BY_DEFAULT
from workers.cli.flags import BOOL, COUNT, DURATION, NAMES, PORT, PORTS, RANGES, SIZE, VERBOSITY, Whole, flag, group
from workers.host.options import PASSWORD_VARIABLE, POOL_GROUP

INDEX_ENTRIES_MIN = 256  # a smaller index has no room for the owners of one block
VERBOSE = 4  # -v means debug from this number on
LEVELS = ("debug", "info", "warning", "error")
TLS_VERSIONS = ("VersionTLS12", "VersionTLS13")
NO_EFFECT = "Flags of the reference picker without effect"
REFUSED = "Flags of the reference picker that are refused"
COMMON = ("endpoints", "config-file", "pool-name", "workers", "cert-path", "state-dir")
EXPERIMENTAL = "Accept experimental plugin types."
PLUGIN_PATH = "Folder with Python files that register more plugin types."
TRUST = (
    f"Client headers to honour: all, none, or some of {', '.join(GROUPS)}. Model servers get none of the others. With {GATEWAY}, alone or "
    "besides groups: the gateway removes them from requests that come from outside, so those that arrive are its own."
)


class Unsupported(NamedTuple):
    """A flag of the reference picker that has no effect in this picker."""

    name: str
    kind: Any
    why: str
    silent: tuple[Any, ...] = ()  # values that ask for the behaviour of this picker, so they cause no warning


UNSUPPORTED = (
    Unsupported("refresh-prometheus-metrics-interval", DURATION, "pool gauges are computed when they are read", silent=(5.0,)),
    Unsupported("zap-devel", BOOL, "there is only one log set-up", silent=(False,)),
    Unsupported("zap-stacktrace-level", str, "faults are logged with their stack traces"),
    Unsupported("zap-time-encoding", str, "log times are ISO 8601", silent=("iso8601", "rfc3339", "rfc3339nano")),
)
REPLACED = (
    "total-queued-requests-metric", "total-running-requests-metric", "kv-cache-usage-percentage-metric",
    "lora-info-metric", "cache-info-metric",
)  # fmt: skip

FLAGS = (
    *group(
        "Configuration",
        flag("config-file", str, "", "Configuration file; - for standard input.", short="-c"),
        flag("pools-file", str, "", "File of several pools that this picker serves, instead of a configuration."),
        flag("config-dir", str, "", "Folder with <pool>.yaml for each of several InferencePools, and default.yaml for the others."),
        flag("config-text", str, "", "Configuration as text, instead of a file."),
        flag("allow-experimental-plugins", BOOL, "false", EXPERIMENTAL),
        flag("plugin-path", str, "", PLUGIN_PATH),
        flag(
            "config-watch",
            BOOL,
            "false",
            "Reload the configuration when its file, a plugin file, a CA file of a data source, or a file of API keys changes.",
        ),
    ),
    *group(
        "Endpoints and objects",
        flag("endpoints", str, "", "Model servers as host:port,..., instead of a discovery plugin."),
        flag("objects-dir", str, "", "Folder with InferenceObjectives and model rewrites; changes are followed. [default: none]"),
        flag("max-endpoints", COUNT, 1024, "Rows of the endpoint table."),
        flag(
            "refresh-metrics-interval",
            DURATION,
            "50ms",
            "Period of metric scrapes, 50ms to 10m. If it is not set, and no plugin reads what only pages "
            "tell, scrapes take at most 1 % of a server's time.",
        ),
        flag(
            "metrics-staleness-threshold",
            DURATION,
            "2s",
            "Age above which metrics are stale, up to 1h; never less than 2s or 4 periods of scrapes.",
        ),
    ),
    *group(
        "Kubernetes",
        flag(
            "pool-name",
            str,
            "",
            "InferencePool in Kubernetes that has the endpoints. With another source of endpoints: a name for metrics. "
            "Give it several times for several InferencePools. [default: deployment in POD_NAME, else epp]",
            repeated=True,
        ),
        flag("service-name", str, "", "Service that InferencePools name in endpointPickerRef, to serve all these pools."),
        flag("pool-ports", RANGES, "", "Ports that InferencePools may name, as 9002,9100-9131. [default: any 32, opened when named]"),
        flag("pool-namespace", str, "", "Namespace of the pool. [default: NAMESPACE, else default]", env=("NAMESPACE",)),
        flag("pool-group", str, POOL_GROUP, "API group of the pool that objectives and model rewrites refer to."),
        flag("endpoint-selector", str, "", "Label selector of the pods that are endpoints, instead of a pool's."),
        flag("endpoint-target-ports", PORTS, "", "Ports of the selected pods, one endpoint each; up to 8."),
        flag(
            "ha-enable-leader-election", BOOL, "false", "Only the replica that holds the pool's Lease is ready. Works only in Kubernetes."
        ),
        flag(
            "metrics-endpoint-auth",
            BOOL,
            None,
            "In Kubernetes, require a token with the right to read the metrics port's pages; probes need none. [default: true]",
        ),
    ),
    *group(
        "Ports and TLS",
        flag("grpc-port", PORT, 9002, "Port for Envoy's ext_proc streams."),
        flag("grpc-health-port", PORT, 9003, "Port for gRPC health checks."),
        flag("metrics-port", PORT, 9090, "Port for Prometheus metrics."),
        flag("transport", click.Choice(["native", "grpcio"]), "native", "Implementation of gRPC."),
        flag("health-checking", BOOL, "false", "Answer gRPC health checks on the ext_proc port, too."),
        flag("secure-serving", BOOL, "true", "Use TLS on the ext_proc port."),
        flag("cert-path", str, "", "Folder with tls.crt and tls.key; without it a self-signed certificate is made."),
        flag("tls-min-version", str, "", f"Lowest TLS version: {' or '.join(TLS_VERSIONS)}."),
        flag("tls-cipher-suites", NAMES, "", "TLS 1.2 cipher suites, by their IANA names."),
        flag("enable-cert-reload", BOOL, "false", "Reload the files of --cert-path and --client-ca-file when they change."),
        flag("client-ca-file", str, "", "PEM file with the CAs of client certificates on the ext_proc port. [default: no check]"),
        flag("metrics-cert-dir", str, "", "Folder with tls.crt and tls.key for the metrics port. [default: no TLS]"),
        flag("metrics-client-ca-file", str, "", "PEM file with the CAs of client certificates on the metrics port."),
    ),
    *group(
        "Processes and memory",
        flag("workers", COUNT, None, "Worker processes. [default: the CPUs by affinity and cgroup limit less one, at most 8]", short="-w"),
        flag("workers-max", COUNT, None, "Upper limit for the workers that SIGTTIN adds. [default: twice --workers]"),
        flag(
            "worker-memory-limit",
            SIZE,
            None,
            "Memory above which a worker is replaced; 0: no limit. [default: 80 % of the cgroup's limit / (workers + 1)]",
        ),
        flag("drain-timeout", DURATION, "30s", "How long open streams may take to end after SIGTERM."),
        flag("instance", str, "", "Name of this instance on this machine. [default: epp-<gRPC port>]"),
        flag("run-dir", str, "/dev/shm/epp", "Folder for the file that records this instance."),
    ),
    *group(
        "Prefix index",
        flag(
            "index-entries",
            Whole(min=INDEX_ENTRIES_MIN),
            1 << 19,
            "Entries of the prefix index, 12 bytes each: one block on one endpoint. `epp size` says how many you need.",
        ),
        flag(
            "kv-index-blocks",
            Whole(min=INDEX_ENTRIES_MIN),
            1 << 19,
            "Blocks of the index of held blocks, 68 bytes each; only with a precise prefix producer.",
        ),
        flag("prefix-secret-file", str, "", "File with the deployment's secret for block hashes. [default: a random secret]"),
        flag("state-dir", str, "", "Folder that keeps the prefix index and its secret across restarts. [default: none]"),
    ),
    *group(
        "Replicas",
        flag(
            "replica-store",
            str,
            "",
            "Redis or Valkey through which replicas act as one picker: redis://, rediss://, unix:// or redis+sentinel://; "
            "?cluster=true for a cluster. [default: each replica knows only its own requests]",
        ),
        flag(
            "replica-store-password-file",
            str,
            "",
            f"File with the store's password; it is read for every connection. [default: {PASSWORD_VARIABLE}, else from the URL]",
        ),
        flag(
            "replica-store-required",
            BOOL,
            "true",
            "Refuse to start if the store cannot be used. With false, the replica starts alone and connects later; "
            "then it shares prefixes only if the store has no other secret, or with --prefix-secret-file.",
        ),
        flag(
            "replica-store-prefix",
            str,
            "",
            "Beginning of all keys and channels in the store; the same for all replicas of a pool. "
            "[default: epp:<pool namespace>:<pool name>; of several pools: epp:<pool namespace>:<deployment>, else :pools]",
        ),
        flag("replica-name", str, "", "Name of this replica. [default: POD_NAME or host name, plus a random part]"),
        flag("replicas-max", Whole(1, 64), 8, "The largest number of other replicas; further ones are ignored."),
    ),
    *group(
        "Recording",
        flag(
            "record-dir",
            str,
            "",
            "Folder for a recording of all requests; no prompts in it. none: nothing is recorded. "
            "[default: a sample in 64 MiB, for epp explain]",
        ),
        flag("record-files-max", Whole(2), 144, "Files that a recording keeps, each of 10 minutes or 64 MiB."),
        flag("record-bytes-max", SIZE, "2GiB", "Bytes of all files that a recording keeps, at least 256MiB."),
    ),
    *group(
        "Requests",
        flag("body-limit", SIZE, "32MiB", "Longest request body; a longer one is refused."),
        flag("grpc-max-recv-msg-size", SIZE, "", "Longest gRPC message received. [default: body limit + 1 MiB]"),
        flag("grpc-max-send-msg-size", SIZE, "", "Longest gRPC message sent; the picker sends none above 64 KiB."),
        flag("trust-client-headers", NAMES, ",".join(TRUSTED_BY_DEFAULT), TRUST),
        flag("disable-endpoint-subset-filter", BOOL, "false", "Ignore the gateway's subset of endpoints."),
        flag("emit-endpoint-scores", BOOL, "false", "Send the scores of all candidates to the gateway, as dynamic metadata."),
    ),
    *group(
        "Metrics, logs and traces",
        flag("log-level", click.Choice(LEVELS), None, "Lowest level that is logged. [default: info]"),
        flag("access-log", click.FloatRange(0, 1), 0.0, "Share of the requests that get a line in the log: 1 logs each."),
        flag(
            "log-format",
            click.Choice(["auto", "json", "console"]),
            None,
            "Format of log lines. [default: auto, which means console on a terminal]",
        ),
        flag("v", VERBOSITY, None, f"Verbosity; {VERBOSE} and more means debug.", short="-v"),
        flag("zap-log-level", str, "", "Level as in zap: debug, info, error, panic or a number; wins over -v."),
        flag("zap-encoder", click.Choice(["json", "console"], case_sensitive=False), None, "Format of log lines, as --log-format."),
        flag("tracing", BOOL, None, "Export traces, if OTEL_TRACES_EXPORTER says where to. [default: true]"),
        flag("plugin-metrics", BOOL, "true", "Time the calls of plugins; above 80 requests per second, for one request in eight."),
        flag("enable-grpc-stream-metrics", BOOL, "false", "Export metrics of ext_proc streams: how they end and how long they last."),
        flag("metrics-legacy-names", BOOL, "true", "Show metrics under their older names, too."),
        flag("enable-pprof", BOOL, "true", "Serve CPU profiles of workers on the metrics port."),
        flag("ui", BOOL, "true", "Serve the page /ui on the metrics port."),
        flag("debug-remote", BOOL, "false", "Where /debug and /ui need no token, serve them to all clients, not only loopback."),
        flag(
            "debug-port-forward",
            BOOL,
            "false",
            "In Kubernetes: serve /debug and /ui to loopback without a token, for kubectl port-forward. A service mesh may show "
            "all its clients as loopback.",
        ),
    ),
    *group(NO_EFFECT, *(flag(u.name, u.kind, None, f"Accepted: {u.why}.") for u in UNSUPPORTED)),
    *group(REFUSED, *(flag(name, str, None, "Use engineConfigs of core-metrics-extractor.") for name in REPLACED)),
)
