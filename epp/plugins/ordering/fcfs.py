"""Serves requests in order of arrival (first come, first served)."""

from epp.plugin import OrderingPolicy, plugin
from epp.request.flows import Capability, Queued


@plugin("fcfs-ordering-policy")
class FirstCome(OrderingPolicy):
    """Orders requests by arrival. A FIFO queue is enough for it."""

    queue_needs = Capability.HEAD

    def key(self, item: Queued) -> float:
        return item.arrival
