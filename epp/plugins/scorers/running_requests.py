"""Prefer the endpoint with the fewest running requests."""

from compiled.calls import fewest
from epp.candidates import Candidates, Scores
from epp.data import RUNNING
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request


@plugin("running-requests-size-scorer")
class RunningRequests(Scorer):
    """Scores endpoints by their running requests: 1 for the fewest, 0 for the most, linear between."""

    static = True
    consumes = (RUNNING,)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        return fewest(candidates[RUNNING])
