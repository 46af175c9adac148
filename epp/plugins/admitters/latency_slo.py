"""Refuse sheddable requests if no endpoint can meet their latency objectives."""

import msgspec

from epp.candidates import Candidates
from epp.data import KV_USAGE, RUNNING
from epp.errors import Cause, Refused
from epp.learning.latency import TPOT_HEADERS, TTFT_HEADERS, latency_predictions, objective_ms
from epp.plugin import Admitter, plugin
from epp.request import Request

COLD = 0.02  # share of the KV cache in use; for an endpoint below this share, predictions say little


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Names the latency predictions to read.

    latency_prediction_info_producer_name: The producer of the latency predictions to read.
    """

    latency_prediction_info_producer_name: str = ""


@plugin("latency-slo-admitter")
class LatencySlo(Admitter):
    """Refuses a sheddable request (priority below 0) if no endpoint is predicted to meet its latency objectives.

    A request without an objective above 0, or without predictions, is always admitted. A request is also admitted if an endpoint is
    predicted to meet both objectives, runs no request, or uses less than 2 % of its KV cache.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._predictions = latency_predictions(params.latency_prediction_info_producer_name)
        self.consumes = (self._predictions, RUNNING, KV_USAGE)

    def admit(self, request: Request, candidates: Candidates) -> None:
        predictions = request[self._predictions]
        if request.priority >= 0 or predictions is None:
            return
        if not (objective_ms(request, TTFT_HEADERS) > 0 or objective_ms(request, TPOT_HEADERS) > 0):
            return
        known, kept = predictions.known(), predictions.kept()
        if candidates.rows is not None:
            known, kept = known[candidates.rows], kept[candidates.rows]
        if kept.any() or not known.any():
            return
        if (candidates[RUNNING] <= 0).any() or (candidates[KV_USAGE] < COLD).any():
            return
        raise Refused(Cause.NOT_ADMITTED, "no endpoint is predicted to keep its latency objectives")
