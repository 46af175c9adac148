"""Metric families that are computed when the page is read: pool, endpoints, index, workers."""

from collections.abc import Sequence

from epp.metrics import Metric
from epp.metrics.areas import LOOP_LAG

Value = float | tuple[list[int], float]  # a histogram has cumulative counts and a sum
Row = tuple[tuple[str, ...], Value]
Figures = tuple[Metric, tuple[str, ...], Sequence[Row]]  # a metric, its labels and its rows
Count = tuple[tuple[str, ...], float]  # a row of a counter or gauge
Counts = tuple[Metric, tuple[str, ...], Sequence[Count]]

INFO = Metric("info", "gauge", "Build information; the value is always 1.")
CONFIG_GENERATION = Metric("config_generation", "gauge", "Number of the configuration in force; it grows with each change.")
CONFIG_SUCCESSFUL = Metric(
    "config_last_reload_successful", "gauge", "Whether the last reload of the configuration succeeded; 1 before the first."
)
CONFIG_TIMESTAMP = Metric(
    "config_last_reload_timestamp_seconds", "gauge", "When the configuration in force was loaded, in seconds since the epoch."
)
CONFIG_TRYOUT = Metric("tryout_generation", "gauge", "Number of the candidate configuration that is tried; 0: none.")
CONFIG_TRYOUT_SHARE = Metric(
    "tryout_share", "gauge", "Share of the requests that the candidate configuration decides; 0: none, or a shadow."
)
LEADER = Metric("leader", "gauge", "1 while this picker holds the named Lease, 0 while it is on standby.", labels=("name",))
POOL_FIGURES = ("kv_cache_utilization", "queue_size", "running_requests")
POOL_AVERAGES = {f: Metric(f"average_{f}", "gauge", "Mean over endpoints with fresh metrics.") for f in POOL_FIGURES}
POOL_DEVIATIONS = {f: Metric(f"std_dev_{f}", "gauge", "Sample standard deviation over endpoints with fresh metrics.") for f in POOL_FIGURES}
READY_ENDPOINTS = Metric("ready_endpoints", "gauge", "Endpoints with fresh metrics.")
EJECTED_ENDPOINTS = Metric("ejected_endpoints", "gauge", "Endpoints that are ejected or on trial because their requests failed.")
ENDPOINT_QUEUE = Metric("per_endpoint_queue_size", "gauge", "Waiting requests at the endpoint.")
ENDPOINT_AGE = Metric("endpoint_values_age_seconds", "gauge", "Time since the endpoint's last successful scrape.")
ENDPOINT_FAILING = Metric(
    "endpoint_failing_share",
    "gauge",
    "Share of its requests that a failing endpoint fails beyond the others, by the most frequent cause; 1: it is ejected.",
)
ENDPOINT_SCRAPE = Metric("endpoint_scrape_seconds", "gauge", "Duration of the endpoint's last scrape.")
ENDPOINT_REQUESTS = Metric("inflight_requests", "gauge", "Requests in flight per endpoint; fairness_id and priority are always empty.")
ENDPOINT_TOKENS = Metric("inflight_tokens", "gauge", "Tokens in flight per endpoint; fairness_id and priority are always empty.")
INDEX_SIZE = Metric("prefix_indexer_size", "gauge", "Entries of the prefix index, over all endpoints.")
INDEX_EVICTIONS = Metric("prefix_indexer_evictions_total", "counter", "Live entries of the index that were overwritten.")
INDEX_FREED = Metric(
    "prefix_indexer_freed_total",
    "counter",
    "Entries that left the prefix index, by cause: full (the oldest in its buckets), capacity (the oldest of an endpoint with a full "
    "cache), gone (the endpoint left), taken_back (the request failed).",
    labels=("cause",),
)
INDEX_DROPPED = Metric("prefix_indexer_dropped_total", "counter", "Blocks that were not added to the index.")
BUS_CORRUPT = Metric("bus_corrupt_frames_total", "counter", "Malformed frames from workers.")
WORKER_SERVING = Metric("worker_serving", "gauge", "Whether the worker accepts streams.")
WORKER_BEAT_AGE = Metric("worker_beat_age_seconds", "gauge", "Time since the worker's event loop last ran.")
WORKER_LOOP_LAG = Metric("worker_loop_lag_seconds", "gauge", LOOP_LAG.help)
WORKER_SHARE = Metric("worker_accepted_share", "gauge", "The worker's share of all accepted connections.")
WORKER_STARTS = Metric("worker_starts_total", "counter", "Starts of the worker.")
SUPERVISOR_STARTS = Metric("supervisor_starts_total", "counter", "Starts of the supervisor; one more than its restarts.")
PROCESS_MEMORY = Metric(
    "process_resident_memory_bytes",
    "gauge",
    "Resident memory of the process, with the pages that it shares with other processes.",
    labels=("process",),
)
PROCESS_CPU = Metric(
    "process_cpu_seconds_total", "counter", "CPU time of the process and of its predecessors with the same name.", labels=("process",)
)
PROCESS_EXITS = Metric(
    "process_exits_total",
    "counter",
    "Processes that ended, by cause: done (it was told to), memory (it used more than its share), boot_failed (it could not start), "
    "fault (another exit code), signal (a crash, or killed from outside), hung (ended by the parent because it did not answer).",
    labels=("process", "cause"),
)
CERTIFICATE_EXPIRY = Metric(
    "certificate_expiry_timestamp_seconds",
    "gauge",
    "When the certificate that the port shows ends, in seconds since the epoch; of several workers the earliest.",
    labels=("port",),
)
SERIES_USED = Metric("series_blocks_used", "gauge", "Label tuples that the worker has in one table of labelled metrics.")
SERIES_OVERFLOW = Metric(
    "series_overflow_total", "counter", "How often labels counted as `other` for want of room, in one table of labelled metrics."
)
REPLICAS_NEEDED = Metric(
    "replicas_needed",
    "gauge",
    "Replicas of the model server that the pool needs for the work that arrives. Missing while it is not known.",
    labels=("name",),
)
POOL_HEADROOM = Metric(
    "pool_headroom_ratio",
    "gauge",
    "1 - work / what the ready replicas do at the target: 1 is idle, 0 is at the target, below 0 are too few replicas.",
    labels=("name",),
)
