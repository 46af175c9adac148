"""Metric families of the learned latency model, computed when the page is read. They exist once the model has learned from an answer."""

from epp.metrics import buckets, gauge, histogram

BY_ENDPOINT = ("name", "model_server_endpoint")
ERRORS = histogram(
    "learned_latency_error_ratio", "Error of the predicted time to the first token, divided by the observed time.", buckets.RELATIVE_ERROR
)
SECONDS = gauge(
    "learned_latency_seconds",
    "What the model has learned of an endpoint: seconds that each unit of `term` adds to the first token; per_output_token is a time of "
    "its own.",
    *BY_ENDPOINT,
    "term",
)
USED = gauge("learned_latency_model_used", "1 while the model predicts better than the pool's mean time, 0 while decisions do without it.")
RECENT = gauge(
    "learned_latency_recent_error_ratio",
    "Error of the last predictions, and of the pool's mean time instead, as a part of the larger of prediction and observation.",
    "predicted_by",
)
