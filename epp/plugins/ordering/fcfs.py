"""First come, first served."""

from epp.flows import Capability, Queued
from epp.plugin import OrderingPolicy, plugin


@plugin("fcfs-ordering-policy")
class FirstCome(OrderingPolicy):
    """In order of arrival. A queue in that order will do."""

    queue_needs = Capability.HEAD

    def key(self, item: Queued) -> float:
        return item.arrival
