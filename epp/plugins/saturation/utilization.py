"""Measures the saturation by what servers report: waiting requests and KV cache."""

import numpy as np

from epp.candidates import Candidates, Mask
from epp.endpoints.pressure import Pressure
from epp.plugin import Filter, Profile, plugin
from epp.plugins._parameters import UtilizationParameters
from epp.points.flow import SaturationDetector
from epp.quantities import named_duration
from epp.request import Request


@plugin("utilization-detector")
class Utilization(SaturationDetector, Filter):
    """Computes the saturation as the mean over the endpoints of max(waiting / queue threshold, KV usage / KV threshold).

    Without endpoints the saturation is 1. `waiting` includes requests sent since the last scrape. For a stale or unknown endpoint,
    `waiting` is the number of requests in flight, and the KV cache is ignored, unless `stalenessPolicy` says otherwise. Every endpoint has
    the same weight, however large its server is.

    As a filter, this plugin keeps the endpoints that are below both thresholds x (1 + headroom), or all endpoints if no endpoint is.
    """

    Params = UtilizationParameters
    consumes = Pressure.reads

    def __init__(self, name: str, params: UtilizationParameters) -> None:
        super().__init__(name, params)
        waiting, kv = float(params.queue_depth_threshold), params.kv_cache_util_threshold
        self._pressure = Pressure(waiting, kv, staleness_s(params.metrics_staleness_threshold))
        self._waiting_limit = waiting * (1.0 + params.headroom)
        self._kv_limit = kv * (1.0 + params.headroom)

    def saturation(self, candidates: Candidates) -> float:
        policy: str = self.params.staleness_policy
        if not (policy and len(candidates)):
            return self._pressure.mean(candidates)
        pressure, fresh = self._pressure.of(candidates), self._pressure.fresh(candidates)
        if policy == "saturated":
            return float(np.where(fresh, pressure, 1.0).mean())
        return float(pressure[fresh].mean()) if fresh.any() else 0.0

    def step(self, candidates: Candidates) -> float:
        size = len(candidates)
        if self.params.staleness_policy == "ignore":
            size = int(np.count_nonzero(self._pressure.fresh(candidates)))
        return 1.0 / (self._pressure.waiting_full * size) if size else 0.0

    def stale(self, candidates: Candidates) -> int:
        return len(candidates) - int(np.count_nonzero(self._pressure.fresh(candidates)))

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        mask = self._pressure.below(candidates, self._waiting_limit, self._kv_limit)
        if not mask.any():
            mask[:] = True
        return mask


def staleness_s(text: str) -> float | None:
    """Returns `metricsStalenessThreshold` in seconds; None if not set. Raises ValueError if the value is invalid."""
    return named_duration("metricsStalenessThreshold", text, "write for example 2s, or omit it") if text else None
