"""Predicted latencies with the backend `built-in`: they come from the learned model, and no server is asked."""

import msgspec
import numpy as np
import pytest

from epp.decision.decision import Decision, ProfileRun, Response
from epp.learning.costs import FEW, learned_costs
from epp.learning.latency import PREDICTOR, LatencyPredictions, latency_predictions
from epp.learning.model import LatencyModel
from epp.plugins.producers.predicted_latency import PredictedLatency
from epp.request import Request
from tests.fakes import FakeServices, candidates, predictions, request

COLUMNS = {"kv_cache_usage": [0.25, 0.5, 1.5], "waiting_requests": [0.0, 2.0, 4.0]}
C = candidates(COLUMNS, inflight=[1, 2, 3], tokens=[100, 200, 300])
FIRST_S = np.array([0.1, 0.2, 0.3])
OBJECTIVES = {"x-llm-d-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "50"}


class Site:
    """A producer, and a request for which the model predicts FIRST_S."""

    def __init__(self, why_not: str = "", producer: str = "") -> None:
        self.services = FakeServices()
        params = {"backend": "built-in", "streamingMode": True, "learnedLatencyProducerName": producer}
        self.plugin = PredictedLatency(PREDICTOR, msgspec.convert(params, PredictedLatency.Params))
        self.plugin.start(self.services)
        self.model = LatencyModel()
        self.asked: Request = request(b"x" * 400, headers=OBJECTIVES, now=0.0)
        self.asked[learned_costs(producer)] = predictions(FIRST_S, model=self.model, why_not=why_not)

    @property
    def predictions(self) -> LatencyPredictions:
        predictions = self.asked[latency_predictions("")]
        assert predictions is not None
        return predictions


@pytest.mark.parametrize("producer", ["", "mine"])
def test_the_learned_model_predicts_without_waiting(producer: str) -> None:
    site = Site(producer=producer)
    assert site.plugin.produce(site.asked, C) is None
    per_token = [1000.0 * site.model.per_token_s(slot, load) for slot, load in enumerate((1.0, 2.0, 3.0))]
    np.testing.assert_allclose(site.predictions.ttft_ms, [100.0, 200.0, 300.0])
    np.testing.assert_allclose(site.predictions.ttft_headroom, [150.0, 50.0, -50.0])
    np.testing.assert_allclose(site.predictions.tpot_ms, per_token)
    np.testing.assert_allclose(site.predictions.tpot_headroom, 50.0 - np.array(per_token))


def test_only_candidates_have_predictions() -> None:
    site = Site()
    site.plugin.produce(site.asked, C.keep(np.array([False, True, True])))
    assert site.predictions.known().tolist() == [False, True, True]


def test_there_are_no_predictions_while_the_model_is_not_used() -> None:
    site = Site(FEW)
    assert site.plugin.produce(site.asked, C) is None
    assert site.asked[latency_predictions("")] is None


def test_missed_objectives_count_and_no_server_is_called() -> None:
    site = Site()
    site.plugin.produce(site.asked, C)
    decision = Decision([C.endpoint(1)], {"default": ProfileRun(C, C.zeros(), [1])}, "default")
    site.asked.sent_at = 1.0
    site.plugin.before_send(site.asked, decision)
    site.asked.now = 1.3
    site.plugin.response_streaming(site.asked, decision)
    answered = Response(200)
    answered.whole = True
    site.plugin.response_complete(site.asked, decision, answered)
    assert site.services.counted["request_slo_violation_total"].values == {("m", "m", "ttft"): 1}
    assert site.services.measured["request_predicted_ttft_seconds"].values == [0.2]
    assert site.services.asked == []
    assert site.services.periodic == []
