"""Keep a client's session on the endpoint that serves it."""

import numpy as np

from epp.candidates import Candidates, Mask
from epp.decision import Decision, Response
from epp.plugin import Filter, PreRequest, Profile, ResponseReceived, Services, plugin
from epp.plugins.sessions._affinity import Parameters, strategy
from epp.request import Request


@plugin("session-affinity-filter")
class SessionAffinityFilter(Filter, PreRequest, ResponseReceived):
    """The pinned endpoint alone, if it is among the candidates and not down; otherwise all."""

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self.strategy = strategy(name, params)
        self.consumes = self.strategy.consumes
        self.keeps = self.strategy.keeps

    def start(self, services: Services) -> None:
        self.strategy.start(services)

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        pinned = self.strategy.pinned(request, candidates, profile.name)
        mask: Mask = np.full(len(candidates), pinned < 0)
        if pinned >= 0:
            mask[pinned] = True
        return mask

    def before_send(self, request: Request, decision: Decision) -> None:
        self.strategy.sent(request, decision)

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        self.strategy.answered(decision, response)


@plugin("multicluster-session-affinity-filter")
class MultiClusterSessionAffinityFilter(SessionAffinityFilter):
    """The same over the endpoints of several clusters: discovery gives each a namespace and name of its own."""
