"""Names the plugins, and their types, that are used where a configuration names none.

The defaults of flow control are in `epp.config.flow_assembly`.
"""

from typing import Final

from epp.points.inflight_load import INFLIGHT_LOAD

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
