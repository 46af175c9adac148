"""Drop endpoints that are too busy."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Mask
from epp.data import INFLIGHT_REQUESTS, KV_USAGE, RUNNING, WAITING, Column
from epp.inflight_load import named_load
from epp.plugin import Filter, Profile, plugin
from epp.plugins.attributes import Reporters
from epp.request import Request

METRICS: Mapping[str, Column[Any]] = {
    "active-requests": INFLIGHT_REQUESTS,
    "running-requests": RUNNING,
    "waiting-queue": WAITING,
    "kv-cache-utilization": KV_USAGE,
}


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The most that a metric may be; KV cache utilization is a share of 1."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: Annotated[float, msgspec.Meta(ge=0)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """All conditions must hold."""

    conditions: Annotated[tuple[Condition, ...], msgspec.Meta(min_length=1)]
    fallback_on_empty: bool = False
    in_flight_load_producer_name: str = ""


@plugin("utilization-filter")
class Utilization(Filter):
    """Drops an endpoint where any metric > its maxValue; a metric that is missing or stale drops nobody.

    Nobody left: nobody, or with `fallbackOnEmpty` everyone.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        for index, condition in enumerate(params.conditions):
            if METRICS[condition.metric] is KV_USAGE and condition.max_value > 1.0:
                raise ValueError(
                    f"conditions[{index}].maxValue: {condition.max_value:g} is more than 1, and {condition.metric} is a share of 1"
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
            who = reporters.among(candidates)
            if who is not None:
                within |= ~who.fresh
            kept = within if kept is None else np.logical_and(kept, within, out=kept)
        assert kept is not None  # there is at least one condition
        if self._fallback and not kept.any():
            kept[:] = True
        return kept
