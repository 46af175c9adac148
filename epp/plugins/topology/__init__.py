"""Plugins that prefer endpoints close to the server of the stage before, and the code they share."""

from collections.abc import Mapping, Sequence
from typing import Any

from epp.candidates import Endpoint
from epp.data import Datum
from epp.endpoints.topology import Places
from epp.plugin import Extractor, Need, Plugin

PEER = Datum("peer-endpoint", Endpoint, per_profile=True)


class FollowsPeer(Plugin):
    """Finds host, rack, zone and region of endpoints by their labels.

    The topology-extractor `topology_producer_name` names the labels; without one, they are those of Kubernetes.
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
