"""Prefer endpoints whose queue is short against a threshold, whatever the others' queues are."""

import msgspec
import numpy as np

from epp.candidates import Candidates, Scores
from epp.data import WAITING
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request

THRESHOLD = 128
NO_QUEUE = 0.5  # the field keeps the upper half for endpoints with room, which nobody reports


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`threshold`: the queue that scores 0; 0 and less stand for the default."""

    threshold: int = THRESHOLD


@plugin("load-aware-scorer")
class LoadAware(Scorer):
    """0.5 * (1 - min(waiting, threshold) / threshold): 0.5 without a queue, 0 from the threshold on."""

    Params = Parameters
    consumes = (WAITING,)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._threshold = float(params.threshold if params.threshold > 0 else THRESHOLD)
        self._slope = NO_QUEUE / self._threshold

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        short: Scores = np.minimum(candidates[WAITING], self._threshold)
        short *= -self._slope
        short += NO_QUEUE
        return short
