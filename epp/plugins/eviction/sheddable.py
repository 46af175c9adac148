"""Give up what may be shed, and nothing else."""

from epp.flows import FlowKey, sheddable
from epp.plugin import EvictionFilter, plugin


@plugin("sheddable-eviction-filter", "eviction-sheddable-filter")
class Sheddable(EvictionFilter):
    """Requests of a priority below 0."""

    def evictable(self, flow: FlowKey) -> bool:
        return sheddable(flow.priority)
