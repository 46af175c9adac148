"""Metric families with values in areas of shared memory. Their label values are known before the fork, or they have no labels."""

from epp.metrics import buckets, counter, gauge, histogram

REQUEST_PROCESSING = histogram(
    "request_processing_duration_seconds",
    "Time from the request's arrival to the picker's answer, failures included.",
    buckets.REQUEST_PROCESSING_S,
)
RESPONSE_PROCESSING = histogram(
    "response_processing_duration_seconds", "Time that the picker spends on one response.", buckets.RESPONSE_PROCESSING_S
)
SCHEDULER_E2E = histogram("scheduler_e2e_duration_seconds", "Duration of one decision, data producers included.", buckets.DECISION_S)
PLUGIN_DURATION = histogram(
    "plugin_duration_seconds",
    "Duration of one call of a plugin. Above 80 requests per second in a worker, one request in eight is timed and counts eight times.",
    buckets.DECISION_S,
)

WORKER_HISTOGRAMS = (REQUEST_PROCESSING, RESPONSE_PROCESSING, SCHEDULER_E2E)
WORKER_COUNTERS = (
    counter("streams_total", "ext_proc streams opened."),
    counter("picks_total", "Requests that got an endpoint."),
    counter("refusals_total", "Requests answered with an error by the picker."),
    counter("load_refusals_total", "Requests refused because the pool had no capacity for them."),
    counter("failed_answers_total", "Answers of model servers with an error status, or empty where tokens were due."),
    counter("faults_total", "Requests that failed because of a fault of the picker or a plugin."),
    counter("deadly_requests_total", "Requests refused because the same request had crashed two workers."),
    counter("violations_total", "Streams closed because the peer broke the protocol."),
    counter("streams_not_duplex_total", "Requests whose gateway does not stream both bodies in full duplex."),
    counter("subset_empty_total", "Requests whose gateway allows only endpoints that are not in the pool."),
    counter("shadow_failures_total", "Failed runs of shadow profiles."),
    counter("producer_failures_total", "Failures of data producers (they fail open)."),
    counter("prompt_tokens_total", "Prompt tokens that model servers reported."),
    counter("cached_prompt_tokens_total", "Prompt tokens that model servers reported as cached."),
    counter("salt_checked_tokens_total", "Prompt tokens of a sample of requests with a tenant's cache salt."),
    counter("salt_lost_tokens_total", "Those of salt_checked_tokens_total that could be cached if tenants shared prefixes."),
    counter("completion_tokens_total", "Completion tokens that model servers reported."),
    counter("connections_total", "Connections accepted."),
    counter("handshakes_given_up_total", "TLS connections that the peer closed before the handshake was complete."),
    counter("bus_frames_total", "Prefix-index frames sent to the index writer."),
    counter("objectives_unknown_total", "Requests that named an unknown objective; their priority is 0."),
    counter("flow_policy_failures_total", "Failures of flow control's policies; a plain rule replaced the policy."),
    counter("bus_drops_total", "Prefix-index frames dropped because the bus was full."),
    counter("recording_lost_records_total", "Records that are missing in a recording because a pipe, a queue or the disk was full."),
)
LOOP_LAG = gauge("loop_lag_us", "Lateness of the worker's event loop at its last heartbeat.")
WORKER_GAUGES = (
    gauge("streams", "Open ext_proc streams."),
    gauge("connections", "Open connections."),
    gauge("accept_load", "The load that workers compare before they accept a connection: streams, at least 8 per connection."),
    LOOP_LAG,
)
FILE_CHANGES = counter(
    "endpoints_file_changes_total", "Changes of the endpoints file that were read; the log names a file that changes often."
)
OVERWRITTEN = counter(
    "shared_memory_overwritten_total", "Times that a supervisor found that another program had overwritten its shared memory."
)
SUPERVISOR_COUNTERS = (
    FILE_CHANGES,
    OVERWRITTEN,
    counter("scrapes_total", "Successful scrapes."),
    counter("scrapes_skipped_total", "Scrapes skipped because the previous one had not ended."),
    counter("datalayer_poll_errors_total", "Metrics pages that could not be fetched."),
    counter(
        "datalayer_extract_errors_total",
        "Metrics pages that were refused, and values of other pages that could not be read: each cause once while it lasts.",
    ),
    counter("endpoint_ejections_total", "Endpoints that were ejected because their requests failed."),
    counter("scrapes_foreign_total", "Scrapes that showed more requests than the picker has at the endpoint."),
    counter("recording_records_total", "Records written to recordings."),
    counter("recording_bytes_total", "Bytes written to recordings, compressed."),
    counter("metrics_port_abuse_total", "Clients of the metrics port that cost too much; the log names them, and most are disconnected."),
)
# Errors of data sources after the first source, numbered in the order of the sources. The page shows them as rows of the two metrics, with
# the source's labels.
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
STREAM_DURATION = histogram("extproc_stream_duration_seconds", "Time from the start to the end of an ext_proc stream.", buckets.STREAM_S)
STREAMS_INFLIGHT = gauge("extproc_streams_inflight", "Open ext_proc streams.")
STREAMS_BY_CODE = counter("extproc_streams_total", "Ended ext_proc streams, by gRPC code.")
STREAM_COUNTERS = tuple(f"extproc_streams_{code}" for code in GRPC_CODES)
