"""Metric families of the learned latency model, computed when the page is read. They exist once an answer has been learned from."""

from epp.metrics import Metric, buckets

BY_ENDPOINT = ("name", "model_server_endpoint")
ERRORS = Metric(
    "learned_latency_error_ratio",
    "histogram",
    "Error of the predicted time to the first token, divided by the observed time.",
    buckets.RELATIVE_ERROR,
)
SECONDS = Metric(
    "learned_latency_seconds",
    "gauge",
    "What the model has learned of an endpoint: seconds that each unit of `term` adds to the first token; per_output_token is a time of "
    "its own.",
    labels=(*BY_ENDPOINT, "term"),
)
USED = Metric(
    "learned_latency_model_used", "gauge", "1 while the model predicts better than the pool's mean time, 0 while decisions do without it."
)
RECENT = Metric(
    "learned_latency_recent_error_ratio",
    "gauge",
    "Error of the last predictions, and of the pool's mean time instead, as a part of the larger of prediction and observation.",
    labels=("predicted_by",),
)
