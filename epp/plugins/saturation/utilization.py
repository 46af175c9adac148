"""How full the pool is by what its servers report: waiting requests and KV cache."""

from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Candidates, Mask
from epp.plugin import Filter, Profile, SaturationDetector, plugin
from epp.pressure import Pressure
from epp.quantities import parse_duration
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What counts as full, per endpoint: waiting requests, share of the KV cache in use.

    `metrics_staleness_threshold`: a duration that replaces the picker's own limit for this detector. `headroom`: by how much of
    a threshold the filter lets an endpoint be above it, 0.2 for 20 %.
    """

    queue_depth_threshold: Annotated[int, msgspec.Meta(gt=0)] = 5
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    metrics_staleness_threshold: str = ""
    headroom: Annotated[float, msgspec.Meta(ge=0)] = 0.0


@plugin("utilization-detector")
class Utilization(SaturationDetector, Filter):
    """The mean over the endpoints of max(waiting / queue threshold, KV usage / KV threshold); 1 for no endpoints.

    `waiting` counts what was sent since the scrape. A stale or unknown endpoint counts by what is in flight there alone: `waiting`
    is what is in flight now, the KV cache is not counted. Every endpoint weighs the same, however large its server is.

    As a filter it keeps endpoints below both thresholds x (1 + headroom); nobody left: everyone.
    """

    Params = Parameters
    consumes = Pressure.reads

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        waiting, kv = float(params.queue_depth_threshold), params.kv_cache_util_threshold
        self._pressure = Pressure(waiting, kv, staleness_s(params.metrics_staleness_threshold))
        self._waiting_limit = waiting * (1.0 + params.headroom)
        self._kv_limit = kv * (1.0 + params.headroom)

    def saturation(self, candidates: Candidates) -> float:
        return self._pressure.mean(candidates)

    def step(self, candidates: Candidates) -> float:
        size = len(candidates)
        return 1.0 / (self._pressure.waiting_full * size) if size else 0.0

    def stale(self, candidates: Candidates) -> int:
        return len(candidates) - int(np.count_nonzero(self._pressure.fresh(candidates)))

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        mask = self._pressure.below(candidates, self._waiting_limit, self._kv_limit)
        if not mask.any():
            mask[:] = True
        return mask


def staleness_s(text: str) -> float | None:
    """The parameter in seconds; None: not set."""
    if not text:
        return None
    try:
        seconds = parse_duration(text)
    except ValueError as problem:
        raise ValueError(f"metricsStalenessThreshold: {problem}") from None
    if seconds <= 0:
        raise ValueError(f"metricsStalenessThreshold: '{text}' is not above 0; write for example 2s, or leave it out")
    return seconds
