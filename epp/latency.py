"""Predicted latencies of one request, endpoint by endpoint: typed data between the predictor and those who decide by it.

Milliseconds throughout. Headroom is objective - prediction: 0 and above keeps the objective. Who produces the data computes it;
who reads them does so by `latency_predictions(producer)`.
"""

from collections.abc import Sequence

import numpy as np

from epp import client_headers
from epp.candidates import Floats, Mask
from epp.data import Datum
from epp.request import Request

PREDICTOR = "predicted-latency-producer"
TTFT_HEADERS = client_headers.TTFT_SLO_MS
TPOT_HEADERS = client_headers.TPOT_SLO_MS


class LatencyPredictions:
    """Four float64 arrays of the snapshot's shape. An endpoint without a prediction is NaN in all of them.

    Where TPOT says nothing (an answer that is not streamed, a server that only prefills) its headroom is 0. Without an objective
    the headroom is that of an objective of 0 ms: negative.
    """

    __slots__ = ("tpot_headroom", "tpot_ms", "ttft_headroom", "ttft_ms")

    def __init__(self, *, ttft_ms: Floats, tpot_ms: Floats, ttft_headroom: Floats, tpot_headroom: Floats) -> None:
        self.ttft_ms = ttft_ms
        self.tpot_ms = tpot_ms
        self.ttft_headroom = ttft_headroom
        self.tpot_headroom = tpot_headroom

    def known(self) -> Mask:
        """Who has a prediction."""
        return ~np.isnan(self.ttft_headroom)

    def kept(self) -> Mask:
        """Who has one that keeps both objectives."""
        return (self.ttft_headroom >= 0.0) & (self.tpot_headroom >= 0.0)


def latency_predictions(producer: str) -> Datum[LatencyPredictions]:
    """The key under which the producer of that name emits its predictions; an empty name is the usual producer."""
    return Datum(f"latency_predictions/{producer or PREDICTOR}", LatencyPredictions)


def objective_ms(request: Request, names: Sequence[str]) -> float:
    """The objective in the first of these headers that is there; what is no number above 0 counts as none, which is 0."""
    return client_headers.slo_ms(request.headers, names)
