"""Metrics by name: what is counted, where its buckets stand, and the labels that are known before the fork.

Names, labels and buckets follow the field's reference picker, so that dashboards carry over.
"""

from typing import Literal, NamedTuple

PREFIX = "llm_d_epp_"

SCHED = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
RQPROC = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
RSPROC = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
RATIO = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
HITB = (0.0, *(float(2**n) for n in range(4, 17)))


class Metric(NamedTuple):
    """One family; `name` without the prefix. A plugin's own metrics get the labels plugin_name and plugin_type."""

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    help: str
    buckets: tuple[float, ...] = ()


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

WORKER_HISTOGRAMS = (REQUEST_PROCESSING, RESPONSE_PROCESSING, SCHEDULER_E2E)
WORKER_COUNTERS = (
    Metric("streams_total", "counter", "ext_proc streams opened."),
    Metric("picks_total", "counter", "Requests that got an endpoint."),
    Metric("refusals_total", "counter", "Requests answered with an error by the picker."),
    Metric("faults_total", "counter", "Requests that failed by a fault of the picker or of a plugin."),
    Metric("violations_total", "counter", "Streams closed because the peer broke the protocol."),
    Metric("producer_failures_total", "counter", "Data producers that failed open."),
    Metric("prompt_tokens_total", "counter", "Prompt tokens that model servers reported."),
    Metric("cached_prompt_tokens_total", "counter", "Prompt tokens that model servers reported as cached."),
    Metric("completion_tokens_total", "counter", "Completion tokens that model servers reported."),
    Metric("connections_total", "counter", "Connections accepted."),
    Metric("abuse_total", "counter", "Connections closed for abuse of HTTP/2."),
    Metric("bus_frames_total", "counter", "Prefix-index frames sent to the index writer."),
    Metric("bus_drops_total", "counter", "Prefix-index frames dropped because the bus was full."),
)
WORKER_GAUGES = (
    Metric("streams", "gauge", "ext_proc streams open."),
    Metric("connections", "gauge", "Connections open."),
    Metric(
        "accept_load",
        "gauge",
        "What workers compare before they accept a connection: streams, at least 8 a connection.",
    ),
)
SUPERVISOR_COUNTERS = (
    Metric("scrapes_total", "counter", "Metrics pages fetched and taken."),
    Metric("scrapes_skipped_total", "counter", "Scrapes skipped because the one before was still under way."),
    Metric("datalayer_poll_errors_total", "counter", "Metrics pages that could not be fetched."),
    Metric("datalayer_extract_errors_total", "counter", "Metrics pages that were refused as a whole."),
)
