"""Plugins that prefer endpoints close to the server of the previous stage."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from epp.candidates import Candidates, Endpoint, Mask, Scores
from epp.data import Datum
from epp.endpoints.topology import LEVELS, Places
from epp.plugin import Extractor, Filter, Need, Plugin, Profile, Scorer, plugin
from epp.request import Request

PEER = Datum("peer-endpoint", Endpoint, per_profile=True)


class FollowsPeer(Plugin):
    """Finds host, rack, zone and region of endpoints by their labels.

    The topology-extractor `topology_producer_name` names the labels; without an extractor, the labels are those of Kubernetes.
    """

    optional = (PEER,)

    def __init__(self, name: str, params: Any) -> None:
        super().__init__(name, params)
        self.places = Places()
        if params.topology_producer_name:
            self.needs = {"labels": Need("topologyProducerName", params.topology_producer_name, Extractor)}

    def meet(self, plugins: Sequence[Plugin]) -> None:
        if not self.needs:
            self.places = Places.of(plugins)

    def resolve(self, found: Mapping[str, Plugin]) -> None:
        if found:
            self.places = Places.named(found["labels"])


class FilterParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How near endpoints must be.

    min_affinity: What an endpoint must at least share with the peer.
    topology_producer_name: The topology-extractor that names the labels; without an extractor, those of Kubernetes.
    """

    min_affinity: Literal["host", "rack", "zone", "region", ""] = "host"
    topology_producer_name: str = ""


@plugin("topology-affinity-filter")
class TopologyAffinityFilter(FollowsPeer, Filter):
    """Keeps endpoints on the same host as the peer (the target of the previous stage) or, by `minAffinity`, in its rack, zone or region.

    All endpoints stay if there is no peer, if the peer has no known place, or if no endpoint is close enough.
    """

    Params = FilterParameters

    def __init__(self, name: str, params: FilterParameters) -> None:
        super().__init__(name, params)
        self._farthest = LEVELS.index(params.min_affinity or "host")

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        peer = request[PEER]
        if peer is not None:
            near: Mask = self.places.level(peer, candidates) <= self._farthest
            if near.any():
                return near
        return np.ones(len(candidates), dtype=np.bool_)


SCORES = np.array((1.0, 0.20, 0.05, 0.02, 0.0))  # in this order: same host, same rack, same zone, same region, none of these


class ScorerParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which labels name places.

    topology_producer_name: The topology-extractor that names the labels; without an extractor, those of Kubernetes.
    """

    topology_producer_name: str = ""


@plugin("topology-affinity-scorer")
class TopologyAffinityScorer(FollowsPeer, Scorer):
    """Scores 1 on the host of the peer (the target of the previous stage), 0.20 in its rack, 0.05 in its zone, 0.02 in its region, else 0.

    The scores follow the bandwidth for copying a KV cache over such a distance. Without a peer, all endpoints score 0.
    """

    Params = ScorerParameters

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        peer = request[PEER]
        if peer is None:
            return None
        scores: Scores = SCORES[self.places.level(peer, candidates)]
        return scores
