"""Prefer the endpoint that has loaded the request's LoRA adapter."""

from typing import Any

import numpy as np

from epp.candidates import Candidates, Scores, Snapshot
from epp.data import ACTIVE_MODELS, MAX_LORA, WAITING_MODELS
from epp.plugin import NoParams, Profile, Scorer, plugin
from epp.request import Request

LOADED, ROOM, QUEUED = 1.0, 0.8, 0.6
MODELS_MAX = 256


@plugin("lora-affinity-scorer")
class LoraAffinity(Scorer):
    """Scores endpoints by the request's LoRA adapter: 1 if loaded, 0.8 if there is room to load it, 0.6 if requests wait for it, else 0.

    There is room if the running and the waiting adapters together are fewer than `max_lora`. vLLM reports the same set as running and as
    waiting, so an adapter in both sets is counted once. An endpoint that does not report `max_lora` has no room. Adapters change only with
    a scrape, so the scores of a model are cached until the next scrape.
    """

    consumes = (ACTIVE_MODELS, WAITING_MODELS, MAX_LORA)

    def __init__(self, name: str, params: NoParams) -> None:
        super().__init__(name, params)
        self._snapshot: Snapshot | None = None
        self._scores: dict[str, Scores] = {}

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        model = request.target_model
        # clients choose model names, so the cache is bounded
        if candidates.snapshot is not self._snapshot or len(self._scores) >= MODELS_MAX:
            self._snapshot, self._scores = candidates.snapshot, {}
        scores = self._scores.get(model)
        if scores is None:
            scores = self._scores[model] = _all(model, candidates.snapshot)
        narrowed: Scores = candidates.narrow(scores)
        return narrowed.copy() if narrowed is scores else narrowed


def _all(model: str, snapshot: Snapshot) -> Scores:
    none: list[Any] = [frozenset()] * len(snapshot.endpoints)
    active, waiting = (snapshot.names.get(column.name) or none for column in (ACTIVE_MODELS, WAITING_MODELS))
    limits = snapshot.settled(MAX_LORA, None).tolist()
    return np.array([_score(model, *row) for row in zip(active, waiting, limits, strict=True)])


def _score(model: str, active: frozenset[str], waiting: frozenset[str], limit: float) -> float:
    if model in active:
        return LOADED
    if len(active | waiting) < limit:
        return ROOM
    return QUEUED if model in waiting else 0.0
