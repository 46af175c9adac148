"""Ordering policies decide which request of a flow goes first."""

import math
from collections.abc import Mapping

from epp.learning.latency import TTFT_HEADERS
from epp.plugin import OrderingPolicy, plugin
from epp.request.flows import Capability, Queued, original


@plugin("fcfs-ordering-policy")
class FirstCome(OrderingPolicy):
    """Orders requests by arrival. A FIFO queue is enough for this policy."""

    queue_needs = Capability.HEAD

    def key(self, item: Queued) -> float:
        return item.arrival


@plugin("edf-ordering-policy")
class EarliestDeadline(OrderingPolicy):
    """Orders requests by deadline: arrival + effective TTL; requests with equal deadlines, by arrival. Requests without a TTL go last."""

    def key(self, item: Queued) -> tuple[float, float]:
        arrival, ttl_s = item.arrival, item.ttl_s
        return (arrival + ttl_s if ttl_s > 0.0 else math.inf, arrival)


MS_MAX = (2**63 - 1) // 1_000_000  # the largest int64 in nanoseconds: about 292 years
DIGITS_MAX = 19


@plugin("slo-deadline-ordering-policy")
class SloDeadline(OrderingPolicy):
    """Orders requests by the time at which the first token is due, arrival + the header `x-llm-d-slo-ttft-ms`; then by arrival.

    The header has whole milliseconds. If it is missing, not a whole number, negative or above 292 years, the request has no deadline
    and goes behind all requests with a deadline.
    """

    def key(self, item: Queued) -> tuple[float, float]:
        headers = getattr(original(item), "headers", None)
        arrival = item.arrival
        return (arrival + objective_s(headers) if headers else math.inf, arrival)


def objective_s(headers: Mapping[str, str]) -> float:
    """Returns the objective in seconds; infinite without an objective. An older header is read only if the current one is missing."""
    for name in TTFT_HEADERS:
        text = headers.get(name)
        if text is not None:
            digits = text.strip().removeprefix("+")
            if not (digits.isascii() and digits.isdigit() and len(digits) <= DIGITS_MAX):
                return math.inf
            ms = int(digits)
            return ms / 1000.0 if ms <= MS_MAX else math.inf
    return math.inf
