"""Keep a client's session on the endpoint that serves it."""

import numpy as np

from epp.candidates import Candidates, Mask
from epp.plugin import Filter, Profile, plugin
from epp.plugins.sessions._affinity import Pinning
from epp.request import Request


@plugin("session-affinity-filter")
class SessionAffinityFilter(Pinning, Filter):
    """Keeps only the endpoint that serves the client's session, if this endpoint is a candidate and not down; otherwise keeps all."""

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        pinned = self.strategy.pinned(request, candidates, profile.name)
        mask: Mask = np.full(len(candidates), pinned < 0)
        if pinned >= 0:
            mask[pinned] = True
        return mask


@plugin("multicluster-session-affinity-filter")
class MultiClusterSessionAffinityFilter(SessionAffinityFilter):
    """Does the same as session-affinity-filter for endpoints of several clusters. Discovery gives each endpoint a unique name."""
