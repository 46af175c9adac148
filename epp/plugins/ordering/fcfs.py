"""Serves requests in order of arrival (first come, first served)."""

from epp.flows import Capability, Queued
from epp.plugin import OrderingPolicy, plugin


@plugin("fcfs-ordering-policy")
class FirstCome(OrderingPolicy):
    """Orders requests by arrival. A FIFO queue is enough for it."""

    queue_needs = Capability.HEAD

    def key(self, item: Queued) -> float:
        return item.arrival
