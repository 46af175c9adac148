"""Earliest objective first: when the first token is due, by the request's own header."""

import math
from collections.abc import Mapping

from epp.flows import Queued, original
from epp.latency import TTFT_HEADERS
from epp.plugin import OrderingPolicy, plugin

MS_MAX = (2**63 - 1) // 1_000_000  # what an int64 of nanoseconds holds: about 292 years
DIGITS_MAX = 19


@plugin("slo-deadline-ordering-policy")
class SloDeadline(OrderingPolicy):
    """Arrival + the header `x-llm-d-slo-ttft-ms` in whole milliseconds, ties in order of arrival.

    Missing, no whole number, negative or beyond 292 years: no deadline, so behind all that have one.
    """

    def key(self, item: Queued) -> tuple[float, float]:
        headers = getattr(original(item), "headers", None)
        arrival = item.arrival
        return (arrival + objective_s(headers) if headers else math.inf, arrival)


def objective_s(headers: Mapping[str, str]) -> float:
    """The current header hides the older one, also when it is no number."""
    for name in TTFT_HEADERS:
        text = headers.get(name)
        if text is not None:
            digits = text.strip().removeprefix("+")
            if not (digits.isascii() and digits.isdigit() and len(digits) <= DIGITS_MAX):
                return math.inf
            ms = int(digits)
            return ms / 1000.0 if ms <= MS_MAX else math.inf
    return math.inf
