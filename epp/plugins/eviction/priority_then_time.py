"""Give up the least important first, and of those the one that has been served for the shortest time."""

from epp.flows import FlowKey, rank
from epp.plugin import EvictionOrder, plugin


@plugin("priority-then-time-eviction-order-policy", "eviction-priority-then-time-ordering")
class PriorityThenTime(EvictionOrder):
    """The lowest priority first, then the newest dispatch."""

    def key(self, flow: FlowKey, dispatched_at: float) -> tuple[int, float]:
        return (-rank(flow.priority), -dispatched_at)
