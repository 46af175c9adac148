"""Prefer the endpoint that serves the client's session."""

import numpy as np

from epp.candidates import Candidates, Scores
from epp.decision import Decision, Response
from epp.plugin import PreRequest, Profile, ResponseReceived, Scorer, Services, plugin
from epp.plugins.sessions._affinity import Parameters, strategy
from epp.request import Request


@plugin("session-affinity-scorer")
class SessionAffinityScorer(Scorer, PreRequest, ResponseReceived):
    """1 for the pinned endpoint, 0 for the others; no pin: 0 for all."""

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self.strategy = strategy(name, params)
        self.consumes = self.strategy.consumes
        self.keeps = self.strategy.keeps

    def start(self, services: Services) -> None:
        self.strategy.start(services)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        pinned = self.strategy.pinned(request, candidates, profile.name)
        if pinned < 0:
            return None
        scores: Scores = np.zeros(len(candidates))
        scores[pinned] = 1.0
        return scores

    def before_send(self, request: Request, decision: Decision) -> None:
        self.strategy.sent(request, decision)

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        self.strategy.answered(decision, response)
