"""Metric families that are computed when the page is read: pool, endpoints, index, workers, latency model."""

from collections.abc import Sequence

from epp.metrics import Metric, buckets, counter, gauge, histogram
from epp.metrics.areas import LOOP_LAG

Value = float | tuple[list[int], float]  # a histogram has cumulative counts and a sum
Row = tuple[tuple[str, ...], Value]
Figures = tuple[Metric, tuple[str, ...], Sequence[Row]]  # a metric, its labels and its rows
Count = tuple[tuple[str, ...], float]  # a row of a counter or gauge
Counts = tuple[Metric, tuple[str, ...], Sequence[Count]]

INFO = gauge("info", "Build information; the value is always 1.")
CONFIG_GENERATION = gauge("config_generation", "Number of the configuration in force; it grows with each change.")
CONFIG_SUCCESSFUL = gauge("config_last_reload_successful", "Whether the last reload of the configuration succeeded; 1 before the first.")
CONFIG_TIMESTAMP = gauge("config_last_reload_timestamp_seconds", "When the configuration in force was loaded, in seconds since the epoch.")
CONFIG_TRYOUT = gauge("tryout_generation", "Number of the candidate configuration that is tried; 0: none.")
CONFIG_TRYOUT_SHARE = gauge("tryout_share", "Share of the requests that the candidate configuration decides; 0: none, or a shadow.")
LEADER = gauge("leader", "1 while this picker holds the named Lease, 0 while it is on standby.", "name")
POOL_FIGURES = ("kv_cache_utilization", "queue_size", "running_requests")
POOL_AVERAGES = {f: gauge(f"average_{f}", "Mean over endpoints with fresh metrics.") for f in POOL_FIGURES}
POOL_DEVIATIONS = {f: gauge(f"std_dev_{f}", "Sample standard deviation over endpoints with fresh metrics.") for f in POOL_FIGURES}
READY_ENDPOINTS = gauge("ready_endpoints", "Endpoints with fresh metrics.")
EJECTED_ENDPOINTS = gauge("ejected_endpoints", "Endpoints that are ejected or on trial because their requests failed.")
ENDPOINT_QUEUE = gauge("per_endpoint_queue_size", "Waiting requests at the endpoint.")
ENDPOINT_AGE = gauge("endpoint_values_age_seconds", "Time since the endpoint's last successful scrape.")
ENDPOINT_FAILING = gauge(
    "endpoint_failing_share",
    "Share of its requests that a failing endpoint fails beyond the others, by the most frequent cause; 1: it is ejected.",
)
ENDPOINT_SCRAPE = gauge("endpoint_scrape_seconds", "Duration of the endpoint's last scrape.")
ENDPOINT_REQUESTS = gauge("inflight_requests", "Requests in flight per endpoint; fairness_id and priority are always empty.")
ENDPOINT_TOKENS = gauge("inflight_tokens", "Tokens in flight per endpoint; fairness_id and priority are always empty.")
INDEX_SIZE = gauge("prefix_indexer_size", "Entries of the prefix index, over all endpoints.")
INDEX_EVICTIONS = counter("prefix_indexer_evictions_total", "Live entries of the index that were overwritten.")
INDEX_FREED = counter(
    "prefix_indexer_freed_total",
    "Entries that left the prefix index, by cause: full (the oldest in its buckets), capacity (the oldest of an endpoint with a full "
    "cache), gone (the endpoint left), taken_back (the request failed).",
    "cause",
)
INDEX_DROPPED = counter("prefix_indexer_dropped_total", "Blocks that were not added to the index.")
BUS_CORRUPT = counter("bus_corrupt_frames_total", "Malformed frames from workers.")
WORKER_SERVING = gauge("worker_serving", "Whether the worker accepts streams.")
WORKER_BEAT_AGE = gauge("worker_beat_age_seconds", "Time since the worker's event loop last ran.")
WORKER_LOOP_LAG = gauge("worker_loop_lag_seconds", LOOP_LAG.help)
WORKER_SHARE = gauge("worker_accepted_share", "The worker's share of all accepted connections.")
WORKER_STARTS = counter("worker_starts_total", "Starts of the worker.")
SUPERVISOR_STARTS = counter("supervisor_starts_total", "Starts of the supervisor; one more than its restarts.")
PROCESS_MEMORY = gauge(
    "process_resident_memory_bytes", "Resident memory of the process, with the pages that it shares with other processes.", "process"
)
PROCESS_CPU = counter("process_cpu_seconds_total", "CPU time of the process and of its predecessors with the same name.", "process")
PROCESS_EXITS = counter(
    "process_exits_total",
    "Processes that ended, by cause: done (it was told to), memory (it used more than its share), boot_failed (it could not start), "
    "fault (another exit code), signal (a crash, or killed from outside), hung (ended by the parent because it did not answer).",
    "process",
    "cause",
)
CERTIFICATE_EXPIRY = gauge(
    "certificate_expiry_timestamp_seconds",
    "The end of the certificate that the port shows, in seconds since the epoch; with several workers, the earliest end.",
    "port",
)
CERTIFICATE_SOON = gauge(
    "certificate_expires_soon",
    "1 if less than a week is left of the certificate that the port shows, and less than a fifth of its validity; else 0.",
    "port",
)
SERIES_USED = gauge("series_blocks_used", "Label tuples that the worker has in one table of labelled metrics.")
SERIES_OVERFLOW = counter(
    "series_overflow_total", "How often labels were counted as `other` because there was no room, in one table of labelled metrics."
)
REPLICAS_NEEDED = gauge(
    "replicas_needed", "Replicas of the model server that the pool needs for the work that arrives. Missing while it is not known.", "name"
)
POOL_HEADROOM = gauge(
    "pool_headroom_ratio",
    "1 - work / what the ready replicas do at the target: 1 is idle, 0 is at the target, below 0 are too few replicas.",
    "name",
)
# metrics of the learned latency model, which has figures once it has learned from an answer
BY_ENDPOINT = ("name", "model_server_endpoint")
LEARNED_ERRORS = histogram(
    "learned_latency_error_ratio", "Error of the predicted time to the first token, divided by the observed time.", buckets.RELATIVE_ERROR
)
LEARNED_SECONDS = gauge(
    "learned_latency_seconds",
    "What the model has learned of an endpoint: seconds that each unit of `term` adds to the first token; per_output_token is a time of "
    "its own.",
    *BY_ENDPOINT,
    "term",
)
LEARNED_USED = gauge(
    "learned_latency_model_used", "1 while the model predicts better than the pool's mean time, 0 while decisions do without it."
)
LEARNED_RECENT = gauge(
    "learned_latency_recent_error_ratio",
    "Error of the last predictions, and of the pool's mean time instead, as a part of the larger of prediction and observation.",
    "predicted_by",
)
