"""Prefer endpoints by one value that they report: a short queue, few running requests, or much free KV cache."""

import numpy as np

from compiled.calls import fewest
from epp.candidates import Candidates, Scores
from epp.data import KV_USAGE, RUNNING, WAITING
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request


@plugin("queue-scorer")
class QueueDepth(Scorer):
    """Scores endpoints by their waiting requests: 1 for the shortest queue, 0 for the longest, linear between."""

    consumes = (WAITING,)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        return fewest(candidates[WAITING])


@plugin("kv-cache-utilization-scorer")
class KvUtilization(Scorer):
    """Scores endpoints by their free KV cache: 1 - usage. A server that reports more than 1 is treated as full."""

    static = True
    consumes = (KV_USAGE,)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        free: Scores = 1.0 - candidates[KV_USAGE]
        return np.maximum(free, 0.0, out=free)


@plugin("running-requests-size-scorer")
class RunningRequests(Scorer):
    """Scores endpoints by their running requests: 1 for the fewest, 0 for the most, linear between."""

    static = True
    consumes = (RUNNING,)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        return fewest(candidates[RUNNING])
