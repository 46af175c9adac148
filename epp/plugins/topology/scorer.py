"""Prefer the endpoints that are close to the peer: the target of the stage before, in disaggregated inference."""

import msgspec
import numpy as np

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, Scorer, plugin
from epp.plugins.topology import PEER, FollowsPeer
from epp.request import Request

SCORES = np.array((1.0, 0.20, 0.05, 0.02, 0.0))  # same host, rack, zone, region, none


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which labels name places.

    topology_producer_name: The topology-extractor that names the labels; without one, those of Kubernetes.
    """

    topology_producer_name: str = ""


@plugin("topology-affinity-scorer")
class TopologyAffinityScorer(FollowsPeer, Scorer):
    """Scores 1 on the host of the peer (the target of the stage before), 0.20 in its rack, 0.05 in its zone, 0.02 in its region, else 0.

    The scores follow the bandwidth for copying a KV cache between two servers that far apart. Without a peer all score 0.
    """

    Params = Parameters

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        peer = request[PEER]
        if peer is None:
            return None
        scores: Scores = SCORES[self.places.level(peer, candidates)]
        return scores
