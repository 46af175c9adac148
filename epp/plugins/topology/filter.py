"""Keep the endpoints that are close to the peer: the target of the stage before, in disaggregated inference."""

from typing import Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Mask
from epp.endpoints.topology import LEVELS
from epp.plugin import Filter, Profile, plugin
from epp.plugins.topology import PEER, FollowsPeer
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How near endpoints must be.

    min_affinity: What an endpoint must have in common with the peer, at least.
    topology_producer_name: The topology-extractor that names the labels; without one, those of Kubernetes.
    """

    min_affinity: Literal["host", "rack", "zone", "region", ""] = "host"
    topology_producer_name: str = ""


@plugin("topology-affinity-filter")
class TopologyAffinityFilter(FollowsPeer, Filter):
    """Keeps endpoints on the same host as the peer (the target of the stage before) or, by `minAffinity`, in its rack, zone or region.

    All endpoints stay if there is no peer, if the peer has no known place, or if no endpoint is close enough.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._farthest = LEVELS.index(params.min_affinity or "host")

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        peer = request[PEER]
        if peer is not None:
            near: Mask = self.places.level(peer, candidates) <= self._farthest
            if near.any():
                return near
        return np.ones(len(candidates), dtype=np.bool_)
