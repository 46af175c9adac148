"""Defines predicted latencies of one request per endpoint: typed data that one producer predicts and other plugins read.

All values are in milliseconds. Headroom = objective - prediction; at 0 and above the endpoint meets the objective. The producer
computes the headroom. Readers use the key `latency_predictions(producer)`.
"""

from collections.abc import Sequence

import numpy as np

from epp.candidates import Floats, Mask
from epp.data import Datum
from epp.request import Request, client_headers

PREDICTOR = "predicted-latency-producer"
TTFT_HEADERS = client_headers.TTFT_SLO_MS
TPOT_HEADERS = client_headers.TPOT_SLO_MS


class LatencyPredictions:
    """Holds four float64 arrays of the snapshot's shape (endpoints,). An endpoint without a prediction is NaN in all of them.

    TTFT is the time to the first token, TPOT the time per output token. Where TPOT does not apply (a response that is not streamed, a
    prefill server), its headroom is 0. A request without an objective counts as one with an objective of 0 ms, so its headroom is negative.
    """

    __slots__ = ("tpot_headroom", "tpot_ms", "ttft_headroom", "ttft_ms")

    def __init__(self, *, ttft_ms: Floats, tpot_ms: Floats, ttft_headroom: Floats, tpot_headroom: Floats) -> None:
        self.ttft_ms = ttft_ms
        self.tpot_ms = tpot_ms
        self.ttft_headroom = ttft_headroom
        self.tpot_headroom = tpot_headroom

    def known(self) -> Mask:
        """Returns bool, shape (endpoints,): whether the endpoint has a prediction."""
        return ~np.isnan(self.ttft_headroom)

    def kept(self) -> Mask:
        """Returns bool, shape (endpoints,): whether the endpoint has a prediction that meets both objectives."""
        return (self.ttft_headroom >= 0.0) & (self.tpot_headroom >= 0.0)


def latency_predictions(producer: str) -> Datum[LatencyPredictions]:
    """Returns the key of the predictions that the named producer emits. An empty name stands for PREDICTOR."""
    return Datum(f"latency_predictions/{producer or PREDICTOR}", LatencyPredictions)


def objective_ms(request: Request, names: Sequence[str]) -> float:
    """Returns the latency objective in ms from the first header of `names` that the request has; 0 without a number above 0."""
    return client_headers.slo_ms(request.headers, names)
