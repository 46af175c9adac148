"""The options of `epp serve`: one frozen value that every process of the picker reads.

`workers.cli.serve_options` creates it from flags and environment variables. Every package may import this module, so it
imports no other module of `workers`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from epp.request.client_headers import TRUSTED_BY_DEFAULT

PASSWORD_VARIABLE = "EPP_REPLICA_STORE_PASSWORD"
POOL_GROUP = "inference.networking.k8s.io"  # the default API group of an InferencePool
SCRAPE_INTERVAL_MIN_S = 0.05
OTHER_FLAGS = {  # options whose flags have other names
    "drain_timeout_s": "drain_timeout",
    "body_bytes_max": "body_limit",
    "message_bytes_max": "grpc_max_recv_msg_size",
    "scrape_interval_s": "refresh_metrics_interval",
    "metrics_staleness_threshold_s": "metrics_staleness_threshold",
}
SECRET_OPTIONS = frozenset({"replica_store"})  # values that may have a password


class ReplicaStore(NamedTuple):
    """The replica store of the options. The URL may have a password: never log it."""

    url: str
    password_file: str = ""
    prefix: str = ""
    required: bool = True


class TracingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the standard OTEL_* variables (`workers.worker.telemetry.tracing_settings`)."""

    exporter: str
    ratio: float = 0.1
    parent_based: bool = True  # if the client sends a traceparent header, its sampled flag decides
    timeout_s: float = 10.0
    compression: str = "none"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `epp serve`. Times are in seconds, sizes in bytes."""

    config_file: str = ""
    config_text: str = ""
    pools_file: str = ""
    config_dir: str = ""
    service_name: str = ""
    pool_ports: tuple[int, ...] = ()
    allow_experimental_plugins: bool = False
    plugin_path: str = ""
    config_watch: bool = False
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
    # Whether clients of the metrics port need a token; None means only in Kubernetes.
    metrics_endpoint_auth: bool | None = None
    health_checking: bool = False
    workers: int = 1
    workers_max: int = 0  # 0: twice `workers`
    worker_memory_limit: int | None = None  # bytes; None means a share of the cgroup's limit, 0 no limit
    drain_timeout_s: float = 30.0
    body_bytes_max: int = 32 << 20
    message_bytes_max: int = 33 << 20
    max_endpoints: int = 1024
    index_entries: int = 1 << 19
    kv_index_blocks: int = 1 << 19
    prefix_secret_file: str = ""
    state_dir: str = ""
    record_dir: str = ""  # empty: only a sample is recorded
    record_files_max: int = 144
    record_bytes_max: int = 2 << 30
    replica_store: str = ""  # URL, perhaps with a password: never log it. Empty: replicas share nothing
    replica_store_password_file: str = ""
    replica_store_required: bool = True
    replica_store_prefix: str = ""  # begins all keys and channels; empty only without a store
    replica_name: str = ""  # empty: the instance's identity
    replicas_max: int = 8  # the largest number of other replicas to consider
    run_dir: str = "/dev/shm/epp"
    instance: str = "epp-9002"
    scrape_interval_s: float = SCRAPE_INTERVAL_MIN_S
    metrics_staleness_threshold_s: float = 2.0
    enable_grpc_stream_metrics: bool = False
    metrics_legacy_names: bool = True
    plugin_metrics: bool = True
    emit_endpoint_scores: bool = False
    debug_remote: bool = False
    debug_port_forward: bool = False
    enable_pprof: bool = True
    ui: bool = True
    disable_endpoint_subset_filter: bool = False
    # Groups of `epp.request.client_headers`; with GATEWAY among them, the gateway removes these headers from client requests.
    trust_client_headers: tuple[str, ...] = TRUSTED_BY_DEFAULT
    pool_name: str = "epp"
    # Whether --pool-name is set. If so, the pool is the source of endpoints, unless another source is set.
    pool_given: bool = False
    pool_namespace: str = "default"
    pool_group: str = POOL_GROUP
    endpoint_selector: str = ""  # selects pods instead of a pool. Each selected pod has one endpoint per target port
    endpoint_target_ports: tuple[int, ...] = ()
    ha_enable_leader_election: bool = False
    given: Mapping[str, str] = {}  # name of an option -> the source of its value; all other options have their defaults
    log_level: str = "info"
    access_log: float = 0.0  # the share of the requests that get a line in the log
    log_format: str = "auto"
    tracing: TracingOptions | None = None  # None without traces

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Returns the names of several InferencePools; none if --pool-name is given at most once."""
        return tuple(self.pool_name.split(",")) if self.pool_given and "," in self.pool_name else ()

    @property
    def finds_pools(self) -> bool:
        """Returns whether the picker finds its pools while it runs."""
        return bool(self.pool_names or self.service_name)

    @property
    def store(self) -> ReplicaStore:
        file, required = self.replica_store_password_file, self.replica_store_required
        return ReplicaStore(self.replica_store, file, self.replica_store_prefix, required)
