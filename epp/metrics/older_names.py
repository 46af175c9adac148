"""Lists older names of metrics, for existing dashboards. Each older name (*twin*) appears on the page beside its family."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from epp.metrics import PREFIX, Metric


class Twin(NamedTuple):
    """Describes the older form of a metric family: full name and labels. Its values are sums over the labels that only the family has."""

    name: str
    labels: tuple[str, ...] = ()
    renamed: Mapping[str, str] = {}  # the twin's label -> the family's label

    def places(self, labels: Sequence[str]) -> tuple[int, ...]:
        """Returns the positions of the twin's labels among `labels`, the family's labels."""
        return tuple(labels.index(self.renamed.get(label, label)) for label in self.labels)


_M = ("model_name", "target_model_name")
_OBJECTIVE, _POOL, _EXTENSION, _SCHEDULER = (
    "inference_objective_", "inference_pool_", "inference_extension_", "llm_d_inference_scheduler_",
)  # fmt: skip
TWINS: Final[Mapping[str, Twin]] = {
    "request_total": Twin(f"{_OBJECTIVE}request_total", (*_M, "priority")),
    "request_error_total": Twin(f"{_OBJECTIVE}request_error_total", (*_M, "error_code")),
    "request_duration_seconds": Twin(f"{_OBJECTIVE}request_duration_seconds", _M),
    "request_size_bytes": Twin(f"{_OBJECTIVE}request_sizes", _M),
    "response_size_bytes": Twin(f"{_OBJECTIVE}response_sizes", _M),
    "request_input_tokens": Twin(f"{_OBJECTIVE}input_tokens", _M),
    "request_output_tokens": Twin(f"{_OBJECTIVE}output_tokens", _M),
    "request_cached_tokens": Twin(f"{_OBJECTIVE}prompt_cached_tokens", _M),
    "request_running": Twin(f"{_OBJECTIVE}running_requests", ("model_name",)),
    "request_ntpot_seconds": Twin(f"{_OBJECTIVE}normalized_time_per_output_token_seconds", _M),
    "model_rewrite_decisions_total": Twin(
        f"{_EXTENSION}model_rewrite_decisions_total", ("model_rewrite_name", "model_name", "target_model")
    ),
    "info": Twin(f"{_EXTENSION}info", ("commit", "build_ref")),
    "leader": Twin("leader_election_master_status", ("name",)),
    "scheduler_e2e_duration_seconds": Twin(f"{_EXTENSION}scheduler_e2e_duration_seconds"),
    "scheduler_attempts_total": Twin(
        f"{_EXTENSION}scheduler_attempts_total",
        ("status", "target_model_name", "pod_name", "namespace", "port"),
        {"pod_name": "endpoint_name"},
    ),
    "plugin_duration_seconds": Twin(f"{_EXTENSION}plugin_duration_seconds", ("extension_point", "plugin_type", "plugin_name")),
    "datalayer_poll_errors_total": Twin(f"{_SCHEDULER}datalayer_poll_errors_total", ("source_type",)),
    "datalayer_extract_errors_total": Twin(f"{_SCHEDULER}datalayer_extract_errors_total", ("source_type", "extractor_type")),
    "disagg_decision_total": Twin(f"{_SCHEDULER}disagg_decision_total", ("model_name", "decision_type")),
    "pd_decision_total": Twin(f"{_SCHEDULER}pd_decision_total", ("model_name", "decision_type")),
    "prefix_indexer_size": Twin(f"{_EXTENSION}prefix_indexer_size"),
    "prefix_indexer_hit_ratio": Twin(f"{_EXTENSION}prefix_indexer_hit_ratio"),
    "prefix_indexer_hit_bytes": Twin(f"{_EXTENSION}prefix_indexer_hit_bytes"),
    "flow_control_request_queue_duration_seconds": Twin(
        f"{_EXTENSION}flow_control_request_queue_duration_seconds", ("fairness_id", "priority", "outcome", "inference_pool", *_M)
    ),
    "flow_control_request_enqueue_duration_seconds": Twin(
        f"{_EXTENSION}flow_control_request_enqueue_duration_seconds", ("fairness_id", "priority", "outcome")
    ),
    "flow_control_dispatch_cycle_duration_seconds": Twin(f"{_EXTENSION}flow_control_dispatch_cycle_duration_seconds"),
    "flow_control_queue_size": Twin(f"{_EXTENSION}flow_control_queue_size", ("fairness_id", "priority", "inference_pool", *_M)),
    "flow_control_queue_bytes": Twin(f"{_EXTENSION}flow_control_queue_bytes", ("fairness_id", "priority", "inference_pool", *_M)),
    "flow_control_pool_saturation": Twin(f"{_EXTENSION}flow_control_pool_saturation", ("inference_pool", "stage")),
    "replicas_needed": Twin("epp_replicas_needed", ("name",)),
    "pool_headroom_ratio": Twin("epp_pool_headroom_ratio", ("name",)),
    "average_kv_cache_utilization": Twin(f"{_POOL}average_kv_cache_utilization", ("name",)),
    "average_queue_size": Twin(f"{_POOL}average_queue_size", ("name",)),
    "average_running_requests": Twin(f"{_POOL}average_running_requests", ("name",)),
    "ready_endpoints": Twin(f"{_POOL}ready_pods", ("name",)),
    "per_endpoint_queue_size": Twin(
        f"{_POOL}per_pod_queue_size", ("name", "model_server_pod"), {"model_server_pod": "model_server_endpoint"}
    ),
}


def older_name(metric: Metric) -> str:
    """Returns the help text of the twin of this metric."""
    return f"Older name of {PREFIX}{metric.name}."
