"""Allow the eviction of sheddable requests only."""

from epp.plugin import EvictionFilter, plugin
from epp.request.flows import FlowKey, sheddable


@plugin("sheddable-eviction-filter", "eviction-sheddable-filter")
class Sheddable(EvictionFilter):
    """Allows the eviction of requests with a priority below 0."""

    def evictable(self, flow: FlowKey) -> bool:
        return sheddable(flow.priority)
