"""Prefer the endpoint that has the request's adapter loaded."""

import numpy as np

from epp.candidates import Candidates, Scores
from epp.data import ACTIVE_MODELS, MAX_LORA, WAITING_MODELS
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request

LOADED, ROOM, QUEUED = 1.0, 0.8, 0.6


@plugin("lora-affinity-scorer")
class LoraAffinity(Scorer):
    """Adapter active: 1; room for another: 0.8; adapter waiting to load: 0.6; otherwise 0."""

    consumes = (ACTIVE_MODELS, WAITING_MODELS, MAX_LORA)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        model = request.target_model
        limits = candidates[MAX_LORA].tolist()
        rows = zip(candidates[ACTIVE_MODELS], candidates[WAITING_MODELS], limits, strict=True)
        return np.array([_score(model, active, waiting, limit) for active, waiting, limit in rows])


def _score(model: str, active: frozenset[str], waiting: frozenset[str], limit: float) -> float:
    if model in active:
        return LOADED
    if len(active) + len(waiting) < limit:
        return ROOM
    return QUEUED if model in waiting else 0.0
