"""The parameters of `epp.plugins.saturation.utilization`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated, Literal

import msgspec

from epp.points.tuning import tuned


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When an endpoint is full, and for how long values count.

    queue_depth_threshold: Waiting requests at which an endpoint is full.
    kv_cache_util_threshold: Share of the KV cache at which an endpoint is full.
    metrics_staleness_threshold: The age up to which metrics are fresh for this detector, as a duration. Empty: the picker's limit.
    headroom: How far above a threshold the filter still keeps an endpoint, 0.2 for 20 %.
    staleness_policy: How a stale or unknown endpoint counts. Empty, the default: by its requests in flight. `saturated`: as full, as in the
        reference picker; then dispatch stops when all scrapes fail. `ignore`: not at all; if all endpoints are stale, the saturation is 0.
    """

    queue_depth_threshold: Annotated[int, msgspec.Meta(gt=0), tuned(1, 256)] = 5
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1), tuned(0.5, 1)] = 0.8
    metrics_staleness_threshold: str = ""
    headroom: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    staleness_policy: Literal["", "saturated", "ignore"] = ""
