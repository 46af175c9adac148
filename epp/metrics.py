"""Metrics by name: what is counted, where its buckets stand, its labels, and the older names that dashboards still ask for.

Names, labels and buckets follow the field's reference picker, so that dashboards carry over. Three kinds of place:

    lanes    labels known before the fork, or none: WORKER_*, SUPERVISOR_COUNTERS, STREAM_*, PLUGIN_DURATION, a plugin's own
    series   labels that come with the requests: a `Group` per label set, and one per counter that plugins declare; who
             records, addresses values by the names and indices below
    page     computed when it is read: pool, endpoints, index

A request decides what its labels say, so their number is bounded: `LabelCaps` folds what comes too late to `other`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

PREFIX = "llm_d_epp_"

LAT = (
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
    120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
)  # fmt: skip
TTFT = LAT[: LAT.index(120.0) + 1]
TPOT = (
    0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 2.0,
)  # fmt: skip
ITL = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0)
NTPOT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
SCHED = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
RQPROC = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RSPROC = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
STREAM = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
RATIO = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
HITB = (0.0, *(float(2**n) for n in range(4, 17)))
REQB = tuple(float(2**n) for n in range(6, 31))
OUTTOK = (1.0, *(float(2**n) for n in range(3, 14)))
RESB = (*OUTTOK, 16384.0, 32778.0, 65536.0)  # 32778: as in the reference, for the sake of recording rules
INTOK = (*RESB, *(float(2**n) for n in range(17, 21)))


class Metric(NamedTuple):
    """One family; `name` without the prefix. A plugin's own metrics get the labels plugin_name and plugin_type.

    `labels` are those that a plugin's counter has besides; their values come with the requests.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    help: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()


REQUEST_PROCESSING = Metric(
    "request_processing_duration_seconds",
    "histogram",
    "From the whole request to its answer, failures included.",
    RQPROC,
)
RESPONSE_PROCESSING = Metric(
    "response_processing_duration_seconds", "histogram", "Time spent handling one response.", RSPROC
)
SCHEDULER_E2E = Metric("scheduler_e2e_duration_seconds", "histogram", "One decision, data production included.", SCHED)
PLUGIN_DURATION = Metric(
    "plugin_duration_seconds",
    "histogram",
    "One call of a plugin at an extension point. Beyond 80 requests a second of a worker, one in eight is timed and counts eight times.",
    SCHED,
)

WORKER_HISTOGRAMS = (REQUEST_PROCESSING, RESPONSE_PROCESSING, SCHEDULER_E2E)
WORKER_COUNTERS = (
    Metric("streams_total", "counter", "ext_proc streams opened."),
    Metric("picks_total", "counter", "Requests that got an endpoint."),
    Metric("refusals_total", "counter", "Requests answered with an error by the picker."),
    Metric("faults_total", "counter", "Requests that failed by a fault of the picker or of a plugin."),
    Metric("deadly_requests_total", "counter", "Requests refused because the same had ended two workers."),
    Metric("violations_total", "counter", "Streams closed because the peer broke the protocol."),
    Metric("shadow_failures_total", "counter", "Runs of shadow profiles that failed."),
    Metric("producer_failures_total", "counter", "Data producers that failed open."),
    Metric("prompt_tokens_total", "counter", "Prompt tokens that model servers reported."),
    Metric("cached_prompt_tokens_total", "counter", "Prompt tokens that model servers reported as cached."),
    Metric("completion_tokens_total", "counter", "Completion tokens that model servers reported."),
    Metric("connections_total", "counter", "Connections accepted."),
    Metric("bus_frames_total", "counter", "Prefix-index frames sent to the index writer."),
    Metric(
        "objectives_unknown_total",
        "counter",
        "Requests that named an objective that is not known: their priority is 0.",
    ),
    Metric(
        "flow_policy_failures_total",
        "counter",
        "Policies of flow control that failed; the plain rule took their place.",
    ),
    Metric("bus_drops_total", "counter", "Prefix-index frames dropped because the bus was full."),
)
LOOP_LAG = Metric("loop_lag_us", "gauge", "By how much the worker's event loop was late at its last beat.")
WORKER_GAUGES = (
    Metric("streams", "gauge", "ext_proc streams open."),
    Metric("connections", "gauge", "Connections open."),
    Metric(
        "accept_load",
        "gauge",
        "What workers compare before they accept a connection: streams, at least 8 a connection.",
    ),
    LOOP_LAG,
)
SUPERVISOR_COUNTERS = (
    Metric("scrapes_total", "counter", "Metrics pages fetched and taken."),
    Metric("scrapes_skipped_total", "counter", "Scrapes skipped because the one before was still under way."),
    Metric("datalayer_poll_errors_total", "counter", "Metrics pages that could not be fetched."),
    Metric("datalayer_extract_errors_total", "counter", "Metrics pages that were refused as a whole."),
)

# With --enable-grpc-stream-metrics: one counter in the lanes per code, `extproc_streams_<code>`.
GRPC_CODES = (
    "OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound", "AlreadyExists", "PermissionDenied",
    "ResourceExhausted", "FailedPrecondition", "Aborted", "OutOfRange", "Unimplemented", "Internal", "Unavailable", "DataLoss",
    "Unauthenticated",
)  # fmt: skip
STREAM_DURATION = Metric(
    "extproc_stream_duration_seconds", "histogram", "How long an ext_proc stream was open.", STREAM
)
STREAMS_INFLIGHT = Metric("extproc_streams_inflight", "gauge", "ext_proc streams open.")
STREAMS_BY_CODE = Metric("extproc_streams_total", "counter", "ext_proc streams ended, by gRPC code.")
STREAM_COUNTERS = tuple(f"extproc_streams_{code}" for code in GRPC_CODES)


# Computed when the page is read.
INFO = Metric("info", "gauge", "What runs.")
LEADER = Metric(
    "leader", "gauge", "1 while this picker leads by the named Lease, 0 while it stands by.", labels=("name",)
)
POOL_FIGURES = ("kv_cache_utilization", "queue_size", "running_requests")
POOL_AVERAGES = {f: Metric(f"average_{f}", "gauge", "Mean over endpoints with fresh metrics.") for f in POOL_FIGURES}
POOL_DEVIATIONS = {
    f: Metric(f"std_dev_{f}", "gauge", "Sample deviation over endpoints with fresh metrics.") for f in POOL_FIGURES
}
READY_ENDPOINTS = Metric("ready_endpoints", "gauge", "Endpoints with fresh metrics.")
ENDPOINT_QUEUE = Metric("per_endpoint_queue_size", "gauge", "Waiting requests of one endpoint.")
ENDPOINT_AGE = Metric("endpoint_values_age_seconds", "gauge", "Time since one endpoint's metrics were last read.")
ENDPOINT_SCRAPE = Metric("endpoint_scrape_seconds", "gauge", "How long the last read of one endpoint's metrics took.")
ENDPOINT_REQUESTS = Metric(
    "inflight_requests",
    "gauge",
    "Requests in flight, counted per endpoint: fairness_id and priority are always empty.",
)
ENDPOINT_TOKENS = Metric(
    "inflight_tokens", "gauge", "Tokens in flight, counted per endpoint: fairness_id and priority are always empty."
)
INDEX_SIZE = Metric("prefix_indexer_size", "gauge", "Entries of the prefix index, over all endpoints.")
INDEX_EVICTIONS = Metric("prefix_indexer_evictions_total", "counter", "Live entries overwritten.")
INDEX_FREED = Metric(
    "prefix_indexer_freed_total",
    "counter",
    "Entries that left the prefix index: full (the oldest of its buckets), capacity (the oldest of an endpoint whose cache takes no "
    "more), gone (the endpoint left), taken_back (the request failed).",
    labels=("cause",),
)
INDEX_DROPPED = Metric("prefix_indexer_dropped_total", "counter", "Blocks not taken into the index.")
BUS_CORRUPT = Metric("bus_corrupt_frames_total", "counter", "Frames from workers that were refused.")
WORKER_SERVING = Metric("worker_serving", "gauge", "Whether the worker takes streams.")
WORKER_BEAT_AGE = Metric("worker_beat_age_seconds", "gauge", "Time since the worker's event loop last turned.")
WORKER_LOOP_LAG = Metric("worker_loop_lag_seconds", "gauge", LOOP_LAG.help)
WORKER_SHARE = Metric("worker_accepted_share", "gauge", "The worker's share of all connections accepted so far.")
WORKER_STARTS = Metric("worker_starts_total", "counter", "How often the worker was started.")
SERIES_USED = Metric(
    "series_blocks_used", "gauge", "Label tuples that the worker knows, of one table of labelled metrics."
)
SERIES_OVERFLOW = Metric(
    "series_overflow_total",
    "counter",
    "How often a new label tuple was counted under `other`, in one table of labelled metrics.",
)


class Group(NamedTuple):
    """Metrics that share their labels, and one block per label tuple. `fixed` labels stand behind them."""

    name: str
    labels: tuple[str, ...]
    gauges: tuple[Metric, ...] = ()
    counters: tuple[Metric, ...] = ()
    histograms: tuple["Labelled", ...] = ()
    blocks: int = 1024


class Labelled(NamedTuple):
    """A histogram of a group; several of one metric differ by a further label whose values are known."""

    metric: Metric
    label: str = ""
    value: str = ""

    @property
    def key(self) -> str:
        return f"{self.metric.name}@{self.value}" if self.label else self.metric.name


MFP = ("model_name", "target_model_name", "fairness_id", "priority")
REQUEST_TOTAL = Metric("request_total", "counter", "Requests that got an endpoint by their body.")
REQUEST_RUNNING = Metric("request_running", "gauge", "Requests that were sent on and have not ended.")
REQUEST_ERRORS = Metric("request_error_total", "counter", "Requests that failed, here or at the model server.")
SCHEDULER_ATTEMPTS = Metric("scheduler_attempts_total", "counter", "Decisions, by their outcome and endpoint.")
TIME_TO_FIRST = Metric(
    "request_ttft_seconds", "histogram", "From the request to the first piece of the answer's body.", TTFT
)

(
    DURATION, REQUEST_BYTES, RESPONSE_BYTES, INPUT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS, PER_OUTPUT_TOKEN,
    TTFT_STREAMING, TTFT_WHOLE, STREAMING_PER_TOKEN, BETWEEN_CHUNKS,
) = range(11)  # fmt: skip
REQUEST = Group(
    "request",
    MFP,
    gauges=(REQUEST_RUNNING,),
    counters=(REQUEST_TOTAL,),
    histograms=(
        Labelled(Metric("request_duration_seconds", "histogram", "From the request to the end of its answer.", LAT)),
        Labelled(Metric("request_size_bytes", "histogram", "Bytes of the request's body.", REQB)),
        Labelled(Metric("response_size_bytes", "histogram", "Bytes of the answer's body.", RESB)),
        Labelled(Metric("request_input_tokens", "histogram", "Prompt tokens, by the model server's count.", INTOK)),
        Labelled(
            Metric("request_output_tokens", "histogram", "Tokens of the answer, by the model server's count.", OUTTOK)
        ),
        Labelled(
            Metric(
                "request_cached_tokens",
                "histogram",
                "Prompt tokens that were cached, by the model server's count.",
                INTOK,
            )
        ),
        Labelled(
            Metric("request_ntpot_seconds", "histogram", "Duration of the request by tokens of its answer.", NTPOT)
        ),
        Labelled(TIME_TO_FIRST, "streaming", "true"),
        Labelled(TIME_TO_FIRST, "streaming", "false"),
        Labelled(
            Metric(
                "request_streaming_tpot_seconds",
                "histogram",
                "Time per token after the first, of streamed answers.",
                TPOT,
            )
        ),
        Labelled(
            Metric(
                "request_streaming_itl_seconds",
                "histogram",
                "Time between two chunks of a streamed answer's body.",
                ITL,
            )
        ),
    ),
)
ERROR = Group("error", (*MFP, "error_code"), counters=(REQUEST_ERRORS,))
ATTEMPTS = Group(
    "attempts", ("status", "target_model_name", "endpoint_name", "namespace", "port"), counters=(SCHEDULER_ATTEMPTS,)
)
PREDICTION_CHECKED = Metric(
    "prefix_checked_requests_total",
    "counter",
    "Requests whose cached prompt tokens were predicted by the picker and reported by the model server.",
)
PREDICTION_UNREPORTED = Metric(
    "prefix_unreported_requests_total",
    "counter",
    "Requests with a prediction, answered by a model server that has never reported cached prompt tokens.",
)
PREDICTION_MISSED = Metric(
    "prefix_unreported_hits_total",
    "counter",
    "Unreported requests of whose prompt more than a quarter was predicted to be cached.",
)
PREDICTION_PROMPT_TOKENS = Metric(
    "prefix_checked_prompt_tokens_total", "counter", "Prompt tokens of checked requests, by the model server's count."
)
PREDICTED_TOKENS = Metric(
    "prefix_predicted_tokens_total",
    "counter",
    "Prompt tokens of checked requests that the picker took for cached when it chose the endpoint: that share of the server's count.",
)
REPORTED_TOKENS = Metric(
    "prefix_reported_tokens_total",
    "counter",
    "Prompt tokens of checked requests that were cached, by the model server's count.",
)
OVERPREDICTED_TOKENS = Metric(
    "prefix_overpredicted_tokens_total",
    "counter",
    "Predicted less reported cached tokens, over checked requests with more predicted.",
)
UNDERPREDICTED_TOKENS = Metric(
    "prefix_underpredicted_tokens_total",
    "counter",
    "Reported less predicted cached tokens, over checked requests with more reported.",
)
PREDICTION = Group(
    "prefix_prediction",
    ("endpoint_name", "namespace", "port"),
    counters=(
        PREDICTION_CHECKED,
        PREDICTION_UNREPORTED,
        PREDICTION_PROMPT_TOKENS,
        PREDICTED_TOKENS,
        REPORTED_TOKENS,
        OVERPREDICTED_TOKENS,
        UNDERPREDICTED_TOKENS,
        PREDICTION_MISSED,
    ),
)
SHADOW_DECISIONS = Metric(
    "shadow_decisions_total",
    "counter",
    "Decisions of shadow profiles, by whether they agreed with what was picked.",
)
SHADOWS = Group("shadows", ("profile", "outcome"), counters=(SHADOW_DECISIONS,), blocks=64)
PEER_FAULTS = Metric(
    "abuse_total",
    "counter",
    "Connections closed, or streams given up, because the peer of the ext_proc port cost more than it brought, by cause.",
)
ABUSE = Group("abuse", ("cause",), counters=(PEER_FAULTS,), blocks=64)
PLUGIN_LABELS = ("plugin_name", "plugin_type")
PLUGIN_LEFT_OUT = Metric(
    "plugin_left_out", "gauge", "Whether the plugin is left out of the pipeline, because it failed again and again."
)
PLUGIN_FAULTS = Metric("plugin_faults_total", "counter", "Exceptions of the plugin; each cost at most one request.")
PLUGIN_EXCLUSIONS = Metric("plugin_exclusions_total", "counter", "How often the plugin was left out for a while.")
ISOLATION = Group(
    "isolation", PLUGIN_LABELS, gauges=(PLUGIN_LEFT_OUT,), counters=(PLUGIN_FAULTS, PLUGIN_EXCLUSIONS), blocks=256
)
MODEL_REWRITE_DECISIONS = Metric(
    "model_rewrite_decisions_total",
    "counter",
    "Requests whose model was chosen by a rule, by the InferenceModelRewrite that the rule is of.",
)
MODEL_REWRITES = Group(
    "model_rewrites", ("model_rewrite_name", "model_name", "target_model"), counters=(MODEL_REWRITE_DECISIONS,)
)
REVOKE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REVOCATIONS_ISSUED_TOTAL = Metric(
    "flow_control_revocations_issued_total",
    "counter",
    "Requests that were being served and were given up, by the priority of who waited.",
)
REVOCATIONS_TOTAL = Metric(
    "flow_control_revocations_total",
    "counter",
    "Revocations by how they ended: the stream's end is known (confirmed), or it was not in time (timed_out).",
)
REVOCATION_CONFIRMATION = Metric(
    "flow_control_revocation_confirmation_seconds", "histogram", "From a revocation to its stream's end.", REVOKE
)
REVOCATIONS_ISSUED = Group(
    "revocations_issued", ("priority", "inference_pool"), counters=(REVOCATIONS_ISSUED_TOTAL,), blocks=64
)
REVOCATIONS = Group("revocations", ("outcome", "inference_pool"), counters=(REVOCATIONS_TOTAL,), blocks=4)
CONFIRMATIONS = Group(
    "revocation_confirmations", ("inference_pool",), histograms=(Labelled(REVOCATION_CONFIRMATION),), blocks=4
)
REVOKED = (REVOCATIONS_ISSUED, REVOCATIONS, CONFIRMATIONS)
QDUR = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FLOW_REQUESTS_TOTAL = Metric(
    "flow_control_requests_total", "counter", "Requests that came to flow control, by how their way through it ended."
)
FLOW_QUEUE_DURATION = Metric(
    "flow_control_request_queue_duration_seconds",
    "histogram",
    "From a request's arrival at flow control to its outcome.",
    QDUR,
)
FLOW_ENQUEUE_DURATION = Metric(
    "flow_control_request_enqueue_duration_seconds",
    "histogram",
    "Time taken to let a request through, turn it away or give it a place; NotYetFinalized: it waits.",
    SCHED,
)
FLOW_QUEUE_SIZE = Metric("flow_control_queue_size", "gauge", "Requests that wait.")
FLOW_QUEUE_BYTES = Metric("flow_control_queue_bytes", "gauge", "Bytes of the bodies of requests that wait.")
FLOW_CYCLE = Metric(
    "flow_control_dispatch_cycle_duration_seconds", "histogram", "One look at who may go, while something waits.", SCHED
)
FLOW_REQUESTS = Group(
    "flow_requests", ("outcome", "priority", "inference_pool"), counters=(FLOW_REQUESTS_TOTAL,), blocks=640
)
FLOW_DURATIONS = Group(
    "flow_durations",
    ("fairness_id", "priority", "outcome", "inference_pool", "model_name", "target_model_name"),
    histograms=(Labelled(FLOW_QUEUE_DURATION),),
)
FLOW_ENQUEUES = Group(
    "flow_enqueues", ("fairness_id", "priority", "outcome"), histograms=(Labelled(FLOW_ENQUEUE_DURATION),)
)
FLOW_QUEUES = Group(
    "flow_queues",
    ("fairness_id", "priority", "inference_pool", "model_name", "target_model_name"),
    gauges=(FLOW_QUEUE_SIZE, FLOW_QUEUE_BYTES),
)
FLOW_GROUPS = (FLOW_REQUESTS, FLOW_DURATIONS, FLOW_ENQUEUES, FLOW_QUEUES, *REVOKED)  # only with flow control
# Of flow control, computed when the page is read.
FLOW_SATURATION = Metric(
    "flow_control_pool_saturation", "gauge", "How full the pool is, by stage; effective: the fullest, which counts."
)
FLOW_STALE = Metric(
    "flow_control_stale_endpoints", "gauge", "Endpoints that the detector counts by what is in flight alone."
)
FLOW_CAPACITY = {
    unit: Metric(
        f"flow_control_capacity_utilization_{unit}",
        "gauge",
        f"Waiting {unit} by the limit of their band, over all workers.",
    )
    for unit in ("requests", "bytes")
}
FLOW_CAPACITY_ALL = {
    unit: Metric(
        f"flow_control_global_capacity_utilization_{unit}",
        "gauge",
        f"Waiting {unit} by the limit of all bands together.",
    )
    for unit in ("requests", "bytes")
}
FLOW_OLDEST = Metric("flow_control_oldest_age_seconds", "gauge", "How long the oldest request of a band has waited.")
FLOW_RECLAIM_TARGET = Metric(
    "flow_control_reclaim_target", "gauge", "By how much the saturation was too high at the last revocation."
)
FLOW_RECLAIM_PENDING = Metric(
    "flow_control_pending_reclaim", "gauge", "The saturation that is on its way to be freed by revocations."
)
GROUPS = (REQUEST, ERROR, ATTEMPTS, PREDICTION, SHADOWS, ABUSE, ISOLATION, MODEL_REWRITES)


def _declared(found: Iterable[object]) -> Iterator[Metric]:
    """Those of any values: as they are, in groups, in tuples or in mappings."""
    for value in found:
        if isinstance(value, Metric):
            yield value
        elif isinstance(value, (tuple, Mapping)):
            yield from _declared(value.values() if isinstance(value, Mapping) else value)


# Names that plugins cannot have; gauges whose counter has their name too are shown as `_open`.
TAKEN: Final = frozenset(
    (*(m.name for m in _declared(tuple(globals().values()))), *(f"{m.name}_open" for m in WORKER_GAUGES))
)


def counter_groups(declared: Iterable[Metric]) -> tuple[Group, ...]:
    """One for each counter that plugins declare, whichever and however many of them do."""
    counters = dict.fromkeys(metric for metric in declared if metric.kind == "counter")
    return tuple(Group(c.name, (*PLUGIN_LABELS, *c.labels), counters=(c,)) for c in counters)


class Twin(NamedTuple):
    """An older name of a metric: its full name and labels. Values are summed over labels that it lacks."""

    name: str
    labels: tuple[str, ...] = ()
    renamed: Mapping[str, str] = {}  # the twin's label -> ours

    def places(self, labels: Sequence[str]) -> tuple[int, ...]:
        """Where the twin's labels stand among ours."""
        return tuple(labels.index(self.renamed.get(label, label)) for label in self.labels)


_M = ("model_name", "target_model_name")
_OBJECTIVE, _POOL, _EXTENSION, _SCHEDULER = (
    "inference_objective_", "inference_pool_", "inference_extension_", "llm_d_inference_scheduler_",
)  # fmt: skip
TWINS: Mapping[str, Twin] = {
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
    "plugin_duration_seconds": Twin(
        f"{_EXTENSION}plugin_duration_seconds", ("extension_point", "plugin_type", "plugin_name")
    ),
    "datalayer_poll_errors_total": Twin(f"{_SCHEDULER}datalayer_poll_errors_total", ("source_type",)),
    "datalayer_extract_errors_total": Twin(
        f"{_SCHEDULER}datalayer_extract_errors_total", ("source_type", "extractor_type")
    ),
    "disagg_decision_total": Twin(f"{_SCHEDULER}disagg_decision_total", ("model_name", "decision_type")),
    "pd_decision_total": Twin(f"{_SCHEDULER}pd_decision_total", ("model_name", "decision_type")),
    "prefix_indexer_size": Twin(f"{_EXTENSION}prefix_indexer_size"),
    "prefix_indexer_hit_ratio": Twin(f"{_EXTENSION}prefix_indexer_hit_ratio"),
    "prefix_indexer_hit_bytes": Twin(f"{_EXTENSION}prefix_indexer_hit_bytes"),
    "flow_control_request_queue_duration_seconds": Twin(
        f"{_EXTENSION}flow_control_request_queue_duration_seconds",
        ("fairness_id", "priority", "outcome", "inference_pool", *_M),
    ),
    "flow_control_request_enqueue_duration_seconds": Twin(
        f"{_EXTENSION}flow_control_request_enqueue_duration_seconds", ("fairness_id", "priority", "outcome")
    ),
    "flow_control_dispatch_cycle_duration_seconds": Twin(f"{_EXTENSION}flow_control_dispatch_cycle_duration_seconds"),
    "flow_control_queue_size": Twin(
        f"{_EXTENSION}flow_control_queue_size", ("fairness_id", "priority", "inference_pool", *_M)
    ),
    "flow_control_queue_bytes": Twin(
        f"{_EXTENSION}flow_control_queue_bytes", ("fairness_id", "priority", "inference_pool", *_M)
    ),
    "flow_control_pool_saturation": Twin(f"{_EXTENSION}flow_control_pool_saturation", ("inference_pool", "stage")),
    "average_kv_cache_utilization": Twin(f"{_POOL}average_kv_cache_utilization", ("name",)),
    "average_queue_size": Twin(f"{_POOL}average_queue_size", ("name",)),
    "average_running_requests": Twin(f"{_POOL}average_running_requests", ("name",)),
    "ready_endpoints": Twin(f"{_POOL}ready_pods", ("name",)),
    "per_endpoint_queue_size": Twin(
        f"{_POOL}per_pod_queue_size", ("name", "model_server_pod"), {"model_server_pod": "model_server_endpoint"}
    ),
}


def older_name(metric: Metric) -> str:
    """The help of a twin."""
    return f"Older name of {PREFIX}{metric.name}."


LABEL_VALUES_MAX = 1000
PINNED_MAX = 16384
OTHER = "other"


class LabelCaps:
    """Bounds the values of labels that clients choose. A value once admitted is never folded; an empty one needs no place.

    Models that operators name (`pin`) take no place of those that clients may fill, and are never folded either."""

    def __init__(self, models_max: int = LABEL_VALUES_MAX, fairness_ids_max: int = LABEL_VALUES_MAX) -> None:
        self._models: set[str] = set()
        self._pinned: set[str] = set()
        self._fairness_ids: set[str] = set()
        self._models_max = models_max
        self._fairness_ids_max = fairness_ids_max

    def model(self, name: str) -> str:
        """Requested and target models share one set."""
        return name if name in self._pinned else _admitted(self._models, name, self._models_max)

    def pin(self, models: Iterable[str]) -> None:
        """For good: what is counted under a name goes on under it."""
        for name in models:
            if len(self._pinned) < PINNED_MAX:
                self._pinned.add(name)

    def fairness_id(self, name: str) -> str:
        return _admitted(self._fairness_ids, name, self._fairness_ids_max)

    def fold(self, group: Group) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
        """A label tuple of this group -> what it is counted as."""
        bound = {
            "model_name": self.model,
            "target_model_name": self.model,
            "target_model": self.model,
            "fairness_id": self.fairness_id,
        }
        rules = tuple(bound.get(label) for label in group.labels)
        return lambda labels: tuple(
            rule(value) if rule is not None else value for rule, value in zip(rules, labels, strict=True)
        )


def _admitted(known: set[str], value: str, limit: int) -> str:
    if not value or value == OTHER or value in known:
        return value
    if len(known) >= limit:
        return OTHER
    known.add(value)
    return value
