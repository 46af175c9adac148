"""End the least important request first; among equally important ones, the one that has been served for the shortest time."""

from epp.plugin import EvictionOrder, plugin
from epp.request.flows import FlowKey, rank


@plugin("priority-then-time-eviction-order-policy", "eviction-priority-then-time-ordering")
class PriorityThenTime(EvictionOrder):
    """Evicts the request with the lowest priority first; among equal priorities, the one dispatched last."""

    def key(self, flow: FlowKey, dispatched_at: float) -> tuple[int, float]:
        return (-rank(flow.priority), -dispatched_at)
