"""Serves the request with the earliest deadline first. The deadline of a request is the end of its TTL."""

import math

from epp.plugin import OrderingPolicy, plugin
from epp.request.flows import Queued


@plugin("edf-ordering-policy")
class EarliestDeadline(OrderingPolicy):
    """Orders requests by deadline: arrival + effective TTL; equal ones by arrival. Requests without a TTL go last."""

    def key(self, item: Queued) -> tuple[float, float]:
        arrival, ttl_s = item.arrival, item.ttl_s
        return (arrival + ttl_s if ttl_s > 0.0 else math.inf, arrival)
