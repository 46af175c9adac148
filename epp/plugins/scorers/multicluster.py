"""Prefer the cluster with the most room, by the averages of its pool. For these scorers, each endpoint is the gateway of a cluster."""

import numpy as np

from epp.candidates import Candidates, Floats, Mask, Scores
from epp.data import CLUSTER_KV_USAGE, CLUSTER_QUEUE, Column
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request


def _missing(candidates: Candidates, column: Column[float]) -> Mask:
    """Returns which candidates never reported the column: bool, shape (candidates,)."""
    snapshot = candidates.snapshot
    values = snapshot.values.get(column.name)
    if values is None:
        return np.ones(len(candidates), dtype=np.bool_)
    missing: Mask = np.isnan(values) | ~snapshot.known
    return missing if candidates.rows is None else missing[candidates.rows]


@plugin("multicluster-kv-cache-utilization-scorer")
class MulticlusterKvUtilization(Scorer):
    """Scores clusters by the free KV cache of their pools: 1 - average utilization.

    A cluster that has not reported its utilization scores 0.
    """

    static = True
    consumes = (CLUSTER_KV_USAGE,)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        free: Scores = np.clip(1.0 - candidates[CLUSTER_KV_USAGE], 0.0, 1.0)
        free[_missing(candidates, CLUSTER_KV_USAGE)] = 0.0
        return free


@plugin("multicluster-queue-scorer")
class MulticlusterQueue(Scorer):
    """Scores clusters by the average queue of their pools: 1 for the shortest, 0 for the longest, linear between.

    Equal queues score 1. A cluster that has not reported its queue scores 0.
    """

    static = True
    consumes = (CLUSTER_QUEUE,)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        queues: Floats = candidates[CLUSTER_QUEUE]
        missing = _missing(candidates, CLUSTER_QUEUE)
        if missing.all():
            return candidates.zeros()
        reported = queues[~missing]
        shortest, longest = float(reported.min()), float(reported.max())
        scores = candidates.ones() if shortest == longest else (longest - queues) / (longest - shortest)
        scores[missing] = 0.0
        return scores
