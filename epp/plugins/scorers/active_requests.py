"""Prefer the endpoint with the fewest requests in flight, as the picker itself counts them."""

import msgspec
import numpy as np

from epp.candidates import Candidates, Scores
from epp.data import INFLIGHT_REQUESTS
from epp.inflight_load import named_load
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`idle_threshold`: up to so many requests an endpoint is idle; less than 0 stands for 0.

    `max_busy_score`: what the least busy of the others may score; outside 0 to 1 it stands for 1. `request_timeout` is accepted
    and has no effect: what is in flight ends with its stream.
    """

    idle_threshold: int = 0
    max_busy_score: float | None = 1.0
    in_flight_load_producer_name: str = ""
    request_timeout: str = ""


@plugin("active-request-scorer")
class ActiveRequests(Scorer):
    """Idle: 1; others (most - count) / most * maxBusyScore, where most is the largest count among the candidates."""

    Params = Parameters
    consumes = (INFLIGHT_REQUESTS,)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self.needs = named_load(params.in_flight_load_producer_name)
        self._idle = max(0, params.idle_threshold)
        given = params.max_busy_score
        in_range = given is not None and 0.0 <= given <= 1.0
        self._busy = given if given is not None and in_range else 1.0
        remarks = []
        if given is not None and not in_range:
            remarks.append(f"maxBusyScore: {given} is not in 0 to 1; 1 is used")
        if params.request_timeout:
            remarks.append("requestTimeout: has no effect: a request is in flight until its stream ends")
        self.without_effect = remarks

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        counts = candidates[INFLIGHT_REQUESTS]
        most = np.maximum.reduce(counts)
        if most <= self._idle:
            return candidates.ones()
        scores: Scores = (most - counts) * (self._busy / most)
        scores[counts <= self._idle] = 1.0
        return scores
