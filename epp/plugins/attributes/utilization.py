"""Drop endpoints that are above a load limit."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Mask
from epp.data import INFLIGHT_REQUESTS, KV_USAGE, RUNNING, WAITING, Column
from epp.plugin import Filter, Profile, plugin
from epp.plugins.attributes import Reporters
from epp.points.parameters import named_load
from epp.request import Request

METRICS: Mapping[str, Column[Any]] = {
    "active-requests": INFLIGHT_REQUESTS,
    "running-requests": RUNNING,
    "waiting-queue": WAITING,
    "kv-cache-utilization": KV_USAGE,
}


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The highest value that a metric may have.

    metric: The metric. kv-cache-utilization is a fraction, 0 to 1.
    max_value: The highest value.
    """

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: Annotated[float, msgspec.Meta(ge=0)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """An endpoint stays only if it meets all conditions.

    conditions: The conditions.
    fallback_on_empty: Keep all endpoints if no endpoint meets all conditions.
    in_flight_load_producer_name: A listed `inflight-load-producer`. The name changes nothing: the picker counts the load for all plugins.
    """

    conditions: Annotated[tuple[Condition, ...], msgspec.Meta(min_length=1)]
    fallback_on_empty: bool = False
    in_flight_load_producer_name: str = ""


@plugin("utilization-filter")
class Utilization(Filter):
    """Drops an endpoint if one of the configured metrics is above its maxValue.

    A missing or stale metric drops no endpoint. If no endpoint meets all conditions, the filter keeps no endpoint, or all endpoints with
    `fallbackOnEmpty`.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        for index, condition in enumerate(params.conditions):
            if METRICS[condition.metric] is KV_USAGE and condition.max_value > 1.0:
                raise ValueError(
                    f"conditions[{index}].maxValue: {condition.max_value:g} is more than 1, but {condition.metric} is a fraction (0 to 1)"
                )
        limits = [(METRICS[condition.metric], condition.max_value) for condition in params.conditions]
        self.consumes = tuple(dict.fromkeys(column for column, _ in limits))
        self._limits = [(column, most, Reporters(column)) for column, most in limits if column is not INFLIGHT_REQUESTS]
        self._inflight = min((most for column, most in limits if column is INFLIGHT_REQUESTS), default=None)
        self._fallback = params.fallback_on_empty
        if INFLIGHT_REQUESTS in self.consumes:
            self.needs = named_load(params.in_flight_load_producer_name)

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        kept: Mask | None = None if self._inflight is None else candidates[INFLIGHT_REQUESTS] <= self._inflight
        for column, most, reporters in self._limits:
            within: Mask = candidates[column] <= most
            reports = reporters.among(candidates)
            if reports is not None:
                within |= ~reports.fresh
            kept = within if kept is None else np.logical_and(kept, within, out=kept)
        assert kept is not None  # there is at least one condition
        if self._fallback and not kept.any():
            kept[:] = True
        return kept
