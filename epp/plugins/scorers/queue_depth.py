"""Prefer the endpoint with the fewest waiting requests."""

from compiled.calls import fewest
from epp.candidates import Candidates, Scores
from epp.data import WAITING
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request


@plugin("queue-scorer")
class QueueDepth(Scorer):
    """Scores endpoints by their waiting requests: 1 for the shortest queue, 0 for the longest, linear between."""

    consumes = (WAITING,)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        return fewest(candidates[WAITING])
