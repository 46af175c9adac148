"""Metric families with values in areas of shared memory. Their label values are known before the fork, or they have no labels."""

from epp.metrics import Metric, buckets

REQUEST_PROCESSING = Metric(
    "request_processing_duration_seconds",
    "histogram",
    "Time from the request's arrival to the picker's answer, failures included.",
    buckets.REQUEST_PROCESSING_S,
)
RESPONSE_PROCESSING = Metric(
    "response_processing_duration_seconds", "histogram", "Time that the picker spends on one response.", buckets.RESPONSE_PROCESSING_S
)
SCHEDULER_E2E = Metric(
    "scheduler_e2e_duration_seconds", "histogram", "Duration of one decision, data producers included.", buckets.DECISION_S
)
PLUGIN_DURATION = Metric(
    "plugin_duration_seconds",
    "histogram",
    "Duration of one call of a plugin. Above 80 requests per second in a worker, one request in eight is timed and counts eight times.",
    buckets.DECISION_S,
)

WORKER_HISTOGRAMS = (REQUEST_PROCESSING, RESPONSE_PROCESSING, SCHEDULER_E2E)
WORKER_COUNTERS = (
    Metric("streams_total", "counter", "ext_proc streams opened."),
    Metric("picks_total", "counter", "Requests that got an endpoint."),
    Metric("refusals_total", "counter", "Requests answered with an error by the picker."),
    Metric("load_refusals_total", "counter", "Requests refused because the pool had no capacity for them."),
    Metric("failed_answers_total", "counter", "Answers of model servers with an error status, or empty where tokens were due."),
    Metric("faults_total", "counter", "Requests that failed because of a fault of the picker or a plugin."),
    Metric("deadly_requests_total", "counter", "Requests refused because the same request had crashed two workers."),
    Metric("violations_total", "counter", "Streams closed because the peer broke the protocol."),
    Metric("streams_not_duplex_total", "counter", "Requests whose gateway does not stream both bodies in full duplex."),
    Metric("subset_empty_total", "counter", "Requests whose gateway allows only endpoints that are not in the pool."),
    Metric("shadow_failures_total", "counter", "Failed runs of shadow profiles."),
    Metric("producer_failures_total", "counter", "Failures of data producers (they fail open)."),
    Metric("prompt_tokens_total", "counter", "Prompt tokens that model servers reported."),
    Metric("cached_prompt_tokens_total", "counter", "Prompt tokens that model servers reported as cached."),
    Metric("salt_checked_tokens_total", "counter", "Prompt tokens of a sample of requests with a tenant's cache salt."),
    Metric("salt_lost_tokens_total", "counter", "Those of salt_checked_tokens_total that could be cached if tenants shared prefixes."),
    Metric("completion_tokens_total", "counter", "Completion tokens that model servers reported."),
    Metric("connections_total", "counter", "Connections accepted."),
    Metric("handshakes_given_up_total", "counter", "TLS connections that the peer closed before the handshake was complete."),
    Metric("bus_frames_total", "counter", "Prefix-index frames sent to the index writer."),
    Metric("objectives_unknown_total", "counter", "Requests that named an unknown objective; their priority is 0."),
    Metric("flow_policy_failures_total", "counter", "Failures of flow control's policies; a plain rule replaced the policy."),
    Metric("bus_drops_total", "counter", "Prefix-index frames dropped because the bus was full."),
    Metric(
        "recording_lost_records_total", "counter", "Records that are missing in a recording because a pipe, a queue or the disk was full."
    ),
)
LOOP_LAG = Metric("loop_lag_us", "gauge", "Lateness of the worker's event loop at its last heartbeat.")
WORKER_GAUGES = (
    Metric("streams", "gauge", "Open ext_proc streams."),
    Metric("connections", "gauge", "Open connections."),
    Metric("accept_load", "gauge", "The load that workers compare before they accept a connection: streams, at least 8 per connection."),
    LOOP_LAG,
)
FILE_CHANGES = Metric(
    "endpoints_file_changes_total", "counter", "Changes of the endpoints file that were read; the log names a file that changes often."
)
OVERWRITTEN = Metric(
    "shared_memory_overwritten_total", "counter", "Times that a supervisor found that another program had overwritten its shared memory."
)
SUPERVISOR_COUNTERS = (
    FILE_CHANGES,
    OVERWRITTEN,
    Metric("scrapes_total", "counter", "Successful scrapes."),
    Metric("scrapes_skipped_total", "counter", "Scrapes skipped because the previous one had not ended."),
    Metric("datalayer_poll_errors_total", "counter", "Metrics pages that could not be fetched."),
    Metric(
        "datalayer_extract_errors_total",
        "counter",
        "Metrics pages that were refused, and values of other pages that could not be read: each cause once while it lasts.",
    ),
    Metric("endpoint_ejections_total", "counter", "Endpoints that were ejected because their requests failed."),
    Metric("scrapes_foreign_total", "counter", "Scrapes that showed more requests than the picker has at the endpoint."),
    Metric("recording_records_total", "counter", "Records written to recordings."),
    Metric("recording_bytes_total", "counter", "Bytes written to recordings, compressed."),
    Metric(
        "metrics_port_abuse_total",
        "counter",
        "Clients of the metrics port that cost too much; the log names them, and most are disconnected.",
    ),
)
# Errors of data sources after the first one, numbered in their order. The page shows them as rows of the two metrics, with the source's
# labels.
FURTHER_SOURCES_MAX = 7
POLL_ERRORS, EXTRACT_ERRORS = (
    tuple(f"datalayer_{kind}_errors_total@{at}" for at in range(1, FURTHER_SOURCES_MAX + 1)) for kind in ("poll", "extract")
)

# With --enable-grpc-stream-metrics, the areas have one counter per gRPC code, `extproc_streams_<code>`.
GRPC_CODES = (
    "OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound", "AlreadyExists", "PermissionDenied",
    "ResourceExhausted", "FailedPrecondition", "Aborted", "OutOfRange", "Unimplemented", "Internal", "Unavailable", "DataLoss",
    "Unauthenticated",
)  # fmt: skip
STREAM_DURATION = Metric(
    "extproc_stream_duration_seconds", "histogram", "Time from the start to the end of an ext_proc stream.", buckets.STREAM_S
)
STREAMS_INFLIGHT = Metric("extproc_streams_inflight", "gauge", "Open ext_proc streams.")
STREAMS_BY_CODE = Metric("extproc_streams_total", "counter", "Ended ext_proc streams, by gRPC code.")
STREAM_COUNTERS = tuple(f"extproc_streams_{code}" for code in GRPC_CODES)
