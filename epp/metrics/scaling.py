"""Metric families of the scaling signal, computed when the page is read."""

from epp.metrics import Metric

NEEDED = Metric(
    "replicas_needed",
    "gauge",
    "Replicas of the model server that the pool needs for the work that arrives. Missing while it is not known.",
    labels=("name",),
)
HEADROOM = Metric(
    "pool_headroom_ratio",
    "gauge",
    "1 - work / what the ready replicas do at the target: 1 is idle, 0 is at the target, below 0 are too few replicas.",
    labels=("name",),
)
