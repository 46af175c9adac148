"""In-flight eviction decides which requests that are being served may be ended, and which of them is ended first."""

from epp.plugin import EvictionFilter, EvictionOrder, plugin
from epp.request.flows import FlowKey, rank, sheddable


@plugin("priority-then-time-eviction-order-policy", "eviction-priority-then-time-ordering")
class PriorityThenTime(EvictionOrder):
    """Evicts the request with the lowest priority first; among equal priorities, the one dispatched last."""

    def key(self, flow: FlowKey, dispatched_at: float) -> tuple[int, float]:
        return (-rank(flow.priority), -dispatched_at)


@plugin("sheddable-eviction-filter", "eviction-sheddable-filter")
class Sheddable(EvictionFilter):
    """Allows the eviction of requests with a priority below 0."""

    def evictable(self, flow: FlowKey) -> bool:
        return sheddable(flow.priority)
