"""Says which labels of endpoints name their host, rack, zone and region."""

import msgspec

from epp.endpoints.topology import LABELS, NamesPlaces
from epp.plugin import Extractor, plugin


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Names of labels. An empty name means the default, a label of Kubernetes.

    hostname: The label of the host.
    rack: The label of the rack.
    zone: The label of the zone.
    region: The label of the region.
    """

    hostname: str = LABELS[0]
    rack: str = LABELS[1]
    zone: str = LABELS[2]
    region: str = LABELS[3]


@plugin("topology-extractor")
class TopologyExtractor(NamesPlaces, Extractor):
    """Names the labels that the topology filter and scorer read. This extractor needs no data source.

    If an endpoint lacks the label that is configured for the host, its label `kubernetes.io/hostname` is used. The picker gives this label,
    with the name of the node, to each pod that lacks it.
    """

    Params = Parameters
    reads_pages = False

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        given = (params.hostname, params.rack, params.zone, params.region)
        host, rack, zone, region = (label or default for label, default in zip(given, LABELS, strict=True))
        self.labels = (host, rack, zone, region)
