"""Earliest deadline first: the deadline is the end of the wait that the request is granted."""

import math

from epp.flows import Queued
from epp.plugin import OrderingPolicy, plugin


@plugin("edf-ordering-policy")
class EarliestDeadline(OrderingPolicy):
    """Arrival + effective TTL, ties in order of arrival. Without a TTL there is no deadline: behind all that have one."""

    def key(self, item: Queued) -> tuple[float, float]:
        arrival, ttl_s = item.arrival, item.ttl_s
        return (arrival + ttl_s if ttl_s > 0.0 else math.inf, arrival)
