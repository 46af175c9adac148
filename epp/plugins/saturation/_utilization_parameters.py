"""The parameters of `epp.plugins.saturation.utilization`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated, Literal

import msgspec


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When an endpoint is full, and for how long values count.

    queue_depth_threshold: Waiting requests at which an endpoint is full.
    kv_cache_util_threshold: Share of the KV cache at which an endpoint is full.
    metrics_staleness_threshold: A duration that replaces the picker's limit for fresh metrics in this detector.
    headroom: How far above a threshold the filter still keeps an endpoint, 0.2 for 20 %.
    staleness_policy: What a stale or unknown endpoint counts as. Empty, the default: by its requests in flight. `saturated`: as 1,
        the default of the reference picker, with which dispatch stops when all scrapes fail. `ignore`: not at all; the saturation is 0
        if all endpoints are stale.
    """

    queue_depth_threshold: Annotated[int, msgspec.Meta(gt=0)] = 5
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    metrics_staleness_threshold: str = ""
    headroom: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    staleness_policy: Literal["", "saturated", "ignore"] = ""
