"""Defines observed times to the first token per endpoint: typed data between the observing producer and the scorer that reads it.

The key is `ttft_percentiles(producer)`. Times are in seconds, loads are requests in flight.
"""

from epp.candidates import Floats, Mask
from epp.data import Datum

OBSERVER = "latency-observer-producer-hub"


class TtftPercentiles:
    """Holds three points of each endpoint's curve of the time to the first token over requests in flight. Arrays: shape (endpoints,).

    `floor_s`: the time without load; 0 if the endpoint is cold, that is, if too few requests were observed. `low_s` at `low_load` and
    `typical_s` at `typical_load`: the points of low and of typical load, all 0 without recent requests. `recent`: bool, whether enough
    recent requests were observed to trust these two points.
    """

    __slots__ = ("floor_s", "low_load", "low_s", "recent", "typical_load", "typical_s")

    def __init__(self, *, floor_s: Floats, low_s: Floats, low_load: Floats, typical_s: Floats, typical_load: Floats, recent: Mask) -> None:
        self.floor_s = floor_s
        self.low_s = low_s
        self.low_load = low_load
        self.typical_s = typical_s
        self.typical_load = typical_load
        self.recent = recent


def ttft_percentiles(producer: str) -> Datum[TtftPercentiles]:
    """Returns the key of the percentiles that the named producer emits. An empty name stands for OBSERVER."""
    return Datum(f"ttft_percentiles/{producer or OBSERVER}", TtftPercentiles)
