"""Names the plugins, and their types, that are used where a configuration names no plugin."""

from typing import Final

from epp.points.parameters import INFLIGHT_LOAD

DEFAULT_PROFILE: Final = "default"
DEFAULT_HANDLER: Final = "single-profile-handler"
DEFAULT_PICKER: Final = "max-score-picker"
DEFAULT_PARSERS: Final = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser")
DEFAULT_DETECTOR: Final = "utilization-detector"
DEFAULT_SOURCE: Final = "metrics-data-source"
DEFAULT_EXTRACTOR: Final = "core-metrics-extractor"
DEFAULT_PRODUCERS: Final = (
    "approx-prefix-cache-producer", INFLIGHT_LOAD, "predicted-latency-producer",
    "mm-embeddings-cache-producer", "token-producer", "session-id-producer", "latency-observer-producer-hub", "latency-observer-producer",
    "learned-latency-producer",
)  # fmt: skip
DEFAULT_WEIGHT: Final = 1.0

# Flow control
BAND_BYTES: Final = 1_000_000_000
BAND_REQUESTS: Final = 5000
TTL_S: Final = 60.0
ORDERING: Final = "fcfs-ordering-policy"
FAIRNESS: Final = "global-strict-fairness-policy"
DISPLACEMENT: Final = "newest-displacement-policy"
USAGE_LIMIT: Final = "static-usage-limit-policy"
EVICTION_FILTER: Final = "sheddable-eviction-filter"
EVICTION_ORDER: Final = "priority-then-time-eviction-order-policy"
QUEUES: Final = ("fifo-queue", "priority-queue")  # the queue types, in the order in which they are tried
DEFAULTS: Final = frozenset((ORDERING, FAIRNESS, DISPLACEMENT, USAGE_LIMIT, *QUEUES))
# these types are experimental, so the effective configuration does not list them
IMPLIED: Final = frozenset((EVICTION_FILTER, EVICTION_ORDER))
