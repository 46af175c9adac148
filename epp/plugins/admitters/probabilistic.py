"""Refuse sheddable requests with a probability that grows with the saturation of the pool."""

import math
import random
from typing import Annotated

import msgspec

from epp.candidates import Candidates
from epp.endpoints.pressure import Pressure
from epp.errors import Cause, Refused
from epp.plugin import Admitter, Services, plugin
from epp.request import Request

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When an endpoint is full, and how fast the probability of a refusal grows.

    queue_depth_threshold: Waiting requests at which an endpoint is full.
    kv_cache_util_threshold: Share of the KV cache at which an endpoint is full.
    power: The exponent of the saturation in the probability of a refusal.
    k: The factor by which saturation ^ power is multiplied.
    """

    queue_depth_threshold: Annotated[int, msgspec.Meta(gt=0)] = 5
    kv_cache_util_threshold: Positive = 0.8
    power: Positive = 5.0
    k: Positive = 300.0


@plugin("probabilistic-admitter")
class Probabilistic(Admitter):
    """Refuses a sheddable request (priority below 0) with probability min(1, saturation ^ power * k).

    The saturation is that of the utilization-detector (`epp/endpoints/pressure.py`): the mean over the candidates of
    max(waiting / queue threshold, KV usage / KV threshold). For a stale or unknown endpoint, only its requests in flight are used.
    """

    Params = Parameters
    consumes = Pressure.reads

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._pressure = Pressure(float(params.queue_depth_threshold), params.kv_cache_util_threshold)
        self._power = params.power
        self._log_k = math.log(params.k)
        self._rng: random.Random

    def start(self, services: Services) -> None:
        self._rng = services.rng

    def admit(self, request: Request, candidates: Candidates) -> None:
        if request.priority >= 0:
            return
        saturation = self.saturation(candidates)
        probability = self.probability(saturation)
        if self._rng.random() < probability:
            detail = f"saturation is {saturation:.3f}, at which requests like this are refused with probability {probability:.2f}"
            raise Refused(Cause.NOT_ADMITTED, detail)

    def saturation(self, candidates: Candidates) -> float:
        """Returns the saturation of the candidates: 0 is idle, 1 is at the thresholds."""
        return self._pressure.mean(candidates)

    def probability(self, saturation: float) -> float:
        """Returns the probability of a refusal. The computation uses logarithms, so that a high power cannot overflow."""
        if saturation <= 0.0:
            return 0.0
        exponent = self._log_k + self._power * math.log(saturation)
        return math.exp(exponent) if exponent < 0.0 else 1.0
