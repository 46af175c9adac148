"""Prefer the endpoint with the most free KV cache."""

import numpy as np

from epp.candidates import Candidates, Scores
from epp.data import KV_USAGE
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request


@plugin("kv-cache-utilization-scorer")
class KvUtilization(Scorer):
    """Scores endpoints by their free KV cache: 1 - usage. A server that reports more than 1 counts as full."""

    static = True
    consumes = (KV_USAGE,)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        free: Scores = 1.0 - candidates[KV_USAGE]
        return np.maximum(free, 0.0, out=free)
