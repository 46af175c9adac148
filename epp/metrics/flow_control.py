"""Metric families of flow control: series with labels from requests, then families computed when the page is read."""

from epp.metrics import Group, Labelled, buckets, counter, gauge, histogram

REVOCATIONS_ISSUED_TOTAL = counter(
    "flow_control_revocations_issued_total", "Requests in service that were evicted, by the priority of the request that waited."
)
REVOCATIONS_TOTAL = counter(
    "flow_control_revocations_total", "Revocations by outcome: the stream ended in time (confirmed), or it did not (timed_out)."
)
REVOCATION_CONFIRMATION = histogram(
    "flow_control_revocation_confirmation_seconds", "Time from a revocation to the end of its stream.", buckets.REVOCATION_S
)
REVOCATIONS_ISSUED = Group("revocations_issued", ("priority", "inference_pool"), counters=(REVOCATIONS_ISSUED_TOTAL,), blocks=64)
REVOCATIONS = Group("revocations", ("outcome", "inference_pool"), counters=(REVOCATIONS_TOTAL,), blocks=4)
CONFIRMATIONS = Group("revocation_confirmations", ("inference_pool",), histograms=(Labelled(REVOCATION_CONFIRMATION),), blocks=4)
REVOKED = (REVOCATIONS_ISSUED, REVOCATIONS, CONFIRMATIONS)
FLOW_REQUESTS_TOTAL = counter("flow_control_requests_total", "Requests that entered flow control, by outcome.")
FLOW_QUEUE_DURATION = histogram(
    "flow_control_request_queue_duration_seconds", "Time from a request's arrival at flow control to its outcome.", buckets.QUEUE_S
)
FLOW_ENQUEUE_DURATION = histogram(
    "flow_control_request_enqueue_duration_seconds",
    "Time to dispatch, refuse or enqueue an arriving request; NotYetFinalized: it was enqueued.",
    buckets.DECISION_S,
)
FLOW_QUEUE_SIZE = gauge("flow_control_queue_size", "Waiting requests.")
FLOW_QUEUE_BYTES = gauge("flow_control_queue_bytes", "Body bytes of waiting requests.")
FLOW_CYCLE = histogram(
    "flow_control_dispatch_cycle_duration_seconds", "Duration of one dispatch cycle, while requests wait.", buckets.DECISION_S
)
FLOW_REQUESTS = Group("flow_requests", ("outcome", "priority", "inference_pool"), counters=(FLOW_REQUESTS_TOTAL,), blocks=640)
FLOW_DURATIONS = Group(
    "flow_durations",
    ("fairness_id", "priority", "outcome", "inference_pool", "model_name", "target_model_name"),
    histograms=(Labelled(FLOW_QUEUE_DURATION),),
    blocks=128,
    page_bytes=700_000,
    ages=True,
)
FLOW_ENQUEUES = Group(
    "flow_enqueues",
    ("fairness_id", "priority", "outcome"),
    histograms=(Labelled(FLOW_ENQUEUE_DURATION),),
    blocks=128,
    page_bytes=300_000,
    ages=True,
)
FLOW_QUEUES = Group(
    "flow_queues",
    ("fairness_id", "priority", "inference_pool", "model_name", "target_model_name"),
    gauges=(FLOW_QUEUE_SIZE, FLOW_QUEUE_BYTES),
    page_bytes=250_000,
    at_once=True,
    ages=True,
)
# These exist only with flow control.
FLOW_GROUPS = (FLOW_REQUESTS, FLOW_DURATIONS, FLOW_ENQUEUES, FLOW_QUEUES, *REVOKED)

# Computed when the page is read.
FLOW_SATURATION = gauge("flow_control_pool_saturation", "How full the pool is, by stage; effective: the fullest stage, which decides.")
FLOW_STALE = gauge("flow_control_stale_endpoints", "Endpoints that the detector counts by their load in flight alone.")
FLOW_CAPACITY = {
    unit: gauge(f"flow_control_capacity_utilization_{unit}", f"Waiting {unit} as a fraction of their band's limit, over all workers.")
    for unit in ("requests", "bytes")
}
FLOW_CAPACITY_ALL = {
    unit: gauge(f"flow_control_global_capacity_utilization_{unit}", f"Waiting {unit} as a fraction of the limit over all bands.")
    for unit in ("requests", "bytes")
}
FLOW_OLDEST = gauge("flow_control_oldest_age_seconds", "Waiting time of the band's oldest request.")
FLOW_RECLAIM_TARGET = gauge("flow_control_reclaim_target", "Excess saturation at the last revocation.")
FLOW_RECLAIM_PENDING = gauge("flow_control_pending_reclaim", "Saturation that revocations under way will free.")
