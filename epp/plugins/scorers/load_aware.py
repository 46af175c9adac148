"""Prefer endpoints with a short queue. Queues are compared with a threshold, not with each other."""

import msgspec
import numpy as np

from epp.candidates import Candidates, Scores
from epp.data import WAITING
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request

THRESHOLD = 128
# The score of an empty queue. The reference picker reserves higher scores for spare capacity, which no engine reports.
NO_QUEUE = 0.5


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When a queue is long.

    threshold: The queue length that scores 0; 0 or less means the default.
    """

    threshold: int = THRESHOLD


@plugin("load-aware-scorer")
class LoadAware(Scorer):
    """Scores endpoints by their waiting requests against a threshold: 0.5 * (1 - min(waiting, threshold) / threshold)."""

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
