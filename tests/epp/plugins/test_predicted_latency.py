"""The latency predictor: its questions and samples, the use of its answers, and requests without an answer."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from epp.candidates import Candidates
from epp.decision.decision import Decision, ProfileRun, Response, Usage
from epp.errors import ProducerFailed
from epp.learning.latency import PREDICTOR, LatencyPredictions, latency_predictions
from epp.plugins.producers._predictor import FAILURES_MAX, REST_S, SAMPLES_MAX, Settings, settings
from epp.plugins.producers.predicted_latency import PredictedLatency
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from epp.request.tokens import MediaMatch, media_match
from tests.fakes import FakeCall, FakeServices, candidates, request
from tests.reports import Reports

PREDICTED = latency_predictions("")
TTFT, TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
COLUMNS = {"kv_cache_usage": [0.25, 0.5, 1.5], "waiting_requests": [0.0, 2.0, 4.0]}
C = candidates(COLUMNS, inflight=[1, 2, 3], tokens=[100, 200, 300])


def asking(headers: dict[str, str] | None = None, *, prompt: bytes = b"x" * 400, now: float = 0.0) -> Request:
    return request(prompt, headers=headers or {}, now=now)


class Site:
    """A producer with a predictor that the test plays."""

    def __init__(self, environment: dict[str, str] | None = None, **params: object) -> None:
        self.services = FakeServices()
        self.services.environment = environment or {}
        self.plugin = PredictedLatency(PREDICTOR, msgspec.convert(params, PredictedLatency.Params))
        self.plugin.start(self.services)
        (self.status,) = self.services.asked
        del self.services.asked[:]
        ((self.flush_s, self.flush),) = self.services.periodic

    def ask(self, r: Request, c: Candidates = C) -> Any:
        return self.plugin.produce(r, c)

    def close_window(self) -> FakeCall:
        """Ends the window and returns the call that goes out."""
        _, pause = self.services.pauses[-1]
        pause.finish()
        return self.services.asked[-1]

    def predicted(self, r: Request, *rows: tuple[float, float], c: Candidates = C) -> LatencyPredictions:
        self.ask(r, c)
        answer(self.close_window(), *rows)
        predictions = r[PREDICTED]
        assert predictions is not None
        return predictions

    def taught(self) -> list[dict[str, Any]]:
        self.flush()
        entries: list[dict[str, Any]] = json.loads(self.services.asked[-1].body)["entries"]
        return entries


def answer(call: FakeCall, *rows: tuple[float, float], seconds: float = 0.002) -> None:
    predictions = [{"ttft_ms": ttft, "tpot_ms": tpot, "model_type": "xgboost"} for ttft, tpot in rows]
    call.answer(json.dumps({"predictions": predictions, "total_requests": len(rows)}).encode(), 200, seconds)


def outcome(waiting: Any) -> None:
    async def decide() -> None:
        await waiting

    with pytest.raises(StopIteration):
        decide().send(None)


def decided(c: Candidates, index: int, prefill: int | None = None) -> Decision:
    runs: dict[str, ProfileRun | None] = {"default": ProfileRun(c, c.zeros(), [index])}
    if prefill is not None:
        runs["prefill"] = ProfileRun(c, c.zeros(), [prefill])
    return Decision([c.endpoint(index)], runs, "default")


def respond(site: Site, r: Request, decision: Decision, *, first: float = 0.0, end: float, tokens: int | None = None, **more: Any) -> None:
    """The rest of a request's life. Times are in seconds; the request was sent at 10."""
    r.sent_at = 10.0
    site.plugin.before_send(r, decision)
    if first:
        r.now = first
        site.plugin.response_streaming(r, decision)
    r.now = end
    response = Response(more.get("status", 200))
    response.whole = more.get("whole", True)
    response.empty = more.get("empty", False)
    response.usage = None if tokens is None else Usage(completion=tokens)
    site.plugin.response_complete(r, decision, response)


# Questions


def test_one_call_asks_about_all_candidates_with_the_state_that_the_request_finds() -> None:
    site = Site()
    r = asking()
    r[prefix_match(APPROXIMATE)] = PrefixMatch(np.array([0.0, 1.0, 3.0]), np.zeros(4, np.uint64), 64, 257)
    site.ask(r)
    call = site.close_window()
    assert (call.method, call.url) == ("POST", "http://localhost:8001/predict/bulk/strict")
    assert call.headers["content-type"] == "application/json"
    rows = json.loads(call.body)["requests"]
    common = {"input_token_length": 100, "num_tokens_generated": 1, "decode_tokens_in_flight": 0}
    media = {"encoder_input_size": 0, "encoder_matched_size": 0}
    assert rows == [
        {
            "kv_cache_percentage": kv,
            "num_request_waiting": waiting,
            "num_request_running": running,
            "prefix_cache_score": prefix,
            "prefill_tokens_in_flight": load,
            **common,
            **media,
        }
        # Nothing was in flight at the scrape, so everything now in flight came later and counts as waiting: 0 + 1, 2 + 2, 4 + 3.
        for kv, waiting, running, prefix, load in [(0.25, 1, 1, 0.0, 100), (0.5, 4, 2, 0.25, 200), (1.0, 7, 3, 0.75, 300)]
    ]


def test_roles_and_media_are_sent_if_they_are_configured() -> None:
    site = Site(endpointRoleLabel="role", useEncoderCacheFeatures=True)
    c = candidates(COLUMNS, labels=[{"role": "prefill"}, {"role": "decode"}, {}])
    r = asking()
    r[media_match("")] = MediaMatch(np.array([0.0, 2.0, 3.0]), 3)
    site.ask(r, c.keep(np.array([True, False, True])))
    rows = json.loads(site.close_window().body)["requests"]
    assert [(row.get("pod_type"), row["encoder_input_size"], row["encoder_matched_size"]) for row in rows] == [
        ("prefill", 3, 0),
        (None, 3, 3),
    ]


def test_requests_of_one_window_share_a_call_and_each_gets_its_own_predictions() -> None:
    site = Site()
    first, other = asking(), asking({TTFT: "100"})
    narrow = C.keep(np.array([False, True, False]))
    waiting = site.ask(first)
    assert site.ask(other, narrow) is waiting
    answer(site.close_window(), (1, 1), (2, 2), (3, 3), (40, 4))
    outcome(waiting)
    one, two = first[PREDICTED], other[PREDICTED]
    assert one is not None and two is not None
    assert one.ttft_ms.tolist() == [1, 2, 3]
    assert np.isnan(two.ttft_ms).tolist() == [True, False, True]
    assert (two.ttft_ms[1], two.ttft_headroom[1]) == (40, 60)
    assert two.known().tolist() == [False, True, False]
    assert site.ask(asking()) is not waiting, "the window is over"
    assert site.services.measured["request_ttft_prediction_duration_seconds"].values == [0.002, 0.002]


def test_without_a_window_each_request_has_its_own_call() -> None:
    site = Site({"LATENCY_COALESCE_WINDOW_MS": "0"})
    site.ask(asking())
    site.ask(asking())
    assert len(site.services.asked) == 2 and site.services.pauses == []


def test_the_rows_of_one_call_are_bounded() -> None:
    site = Site({"LATENCY_MAX_COALESCED_ROWS": "7"})
    waits = [site.ask(asking()) for _ in range(3)]  # of 3 rows each
    assert waits[0] is waits[1] is not waits[2]


def test_a_batch_stays_open_while_too_many_calls_are_under_way() -> None:
    site = Site({"LATENCY_MAX_CONCURRENT_DISPATCHES": "1"})
    site.ask(asking())
    first = site.close_window()
    waiting = site.ask(asking())
    assert site.close_window() is first, "the second call waits"
    assert site.ask(asking()) is waiting
    answer(first, (1, 1), (1, 1), (1, 1))
    assert len(json.loads(site.close_window().body)["requests"]) == 6


def test_prediction_servers_are_chosen_at_random() -> None:
    site = Site({"PREDICTION_SERVER_URL": "http://a:1/, http://b:2", "LATENCY_COALESCE_WINDOW_MS": "0"})
    for _ in range(30):
        site.ask(asking())
    assert {call.url for call in site.services.asked} == {"http://a:1/predict/bulk/strict", "http://b:2/predict/bulk/strict"}


# Answers


@pytest.mark.parametrize(
    ("streaming", "headers", "ttft", "tpot"),
    [
        (False, {}, [-80, -120], [0, 0]),
        (False, {TTFT: "100", TPOT: "1"}, [20, -20], [0, 0]),
        (True, {TTFT: "100", TPOT: "30"}, [20, -20], [10, -10]),
        (True, {"x-slo-ttft-ms": "100", "x-slo-tpot-ms": "30"}, [20, -20], [10, -10]),
        (True, {}, [-80, -120], [-20, -40]),
    ],
)
def test_headroom_is_the_objective_minus_the_prediction(
    streaming: bool, headers: dict[str, str], ttft: list[float], tpot: list[float]
) -> None:
    c = candidates({"waiting_requests": [0, 0]})
    predictions = Site(streamingMode=streaming).predicted(asking(headers), (80, 20), (120, 40), c=c)
    assert predictions.ttft_headroom.tolist() == ttft and predictions.tpot_headroom.tolist() == tpot


def test_tpot_is_ignored_for_servers_that_only_prefill() -> None:
    site = Site(streamingMode=True, endpointRoleLabel="role")
    c = candidates({"waiting_requests": [0, 0]}, labels=[{"role": "prefill"}, {"role": "decode"}])
    assert site.predicted(asking(), (80, 20), (80, 20), c=c).tpot_headroom.tolist() == [0, -20]


def test_the_tpot_objective_is_limited_by_the_smallest_one_running_on_the_endpoint() -> None:
    site = Site(streamingMode=True, sloBufferFactor=0.5)
    c = candidates({"waiting_requests": [0, 0]})
    running = [asking({TPOT: text}) for text in ("50", "20", "80")]
    for r in running:
        site.predicted(r, (1, 1), (1, 1), c=c)
        site.plugin.before_send(r, decided(c, 1))
    site.predicted(none := asking(), (1, 1), (1, 1), c=c)
    site.plugin.before_send(none, decided(c, 1))  # has no objective, so it limits no other request

    def limits() -> list[float]:
        """The headrooms of an objective of 60 ms, with 1 ms predicted: half of the smallest objective, minus 1."""
        return site.predicted(asking({TPOT: "60"}), (1, 1), (1, 1), c=c).tpot_headroom.tolist()

    assert limits() == [29, 9]
    site.plugin.response_complete(running[1], decided(c, 1), Response(0))
    assert limits() == [29, 24]
    for r in (running[0], running[2], none):
        site.plugin.response_complete(r, decided(c, 1), Response(0))
    assert limits() == [29, 29] and site.plugin._running == {}


def test_a_producer_that_only_trains_asks_nothing() -> None:
    site = Site(predictInProduce=False)
    assert site.ask(asking()) is None
    assert site.services.asked == [] and site.services.works[1:] == []


# Failures


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((b"busy", 503), "answered 503: busy"),
        ((b"[]", 200), "no predictions"),
        ((b'{"more":' + b"[" * 100_000, 200), "no predictions"),
        ((b'{"predictions":[]}', 200), "has 0 predictions for 3 rows"),
        (OSError("POST http://localhost:8001/x: refused"), "refused"),
        (TimeoutError("POST http://localhost:8001/x: not done within 0.38 s"), "not done"),
    ],
)
def test_without_predictions_the_producer_fails_and_the_datum_has_its_default(result: Any, message: str) -> None:
    site = Site()
    r = asking()
    waiting = site.ask(r)
    call = site.close_window()
    if isinstance(result, Exception):
        call.finish(problem=result)
    else:
        call.answer(*result)

    async def decide() -> None:
        await waiting

    with pytest.raises(ProducerFailed, match=message):
        decide().send(None)
    assert r[PREDICTED] is None


def fail(site: Site, now: float) -> None:
    site.ask(asking(now=now))
    site.close_window().finish(problem=OSError("refused"))


def test_a_predictor_that_keeps_failing_is_not_called_for_a_while_then_one_batch_tries_it() -> None:
    site = Site()
    for number in range(FAILURES_MAX):
        fail(site, float(number))
    rested = FAILURES_MAX - 1 + REST_S
    with pytest.raises(ProducerFailed, match="is not called"):
        site.ask(asking(now=rested - 0.1))
    waiting = site.ask(asking(now=rested))
    call = site.close_window()
    with pytest.raises(ProducerFailed, match="is not called"):
        site.ask(asking(now=rested))
    answer(call, (1, 1), (1, 1), (1, 1))
    outcome(waiting)
    assert site.ask(asking(now=rested)) is not None


def test_requests_that_are_cancelled_do_not_count_as_failures_of_the_predictor() -> None:
    site = Site()
    for _ in range(FAILURES_MAX + 1):
        waiting = site.ask(asking())
        site.services.pauses[-1][1].finish()

        async def decide(waiting: Any = waiting) -> None:
            await waiting

        client = decide()
        client.send(None)
        client.close()
        assert site.services.asked[-1].left
    assert site.ask(asking()) is not None


def test_the_predictor_is_contacted_at_start_and_a_missing_answer_is_logged() -> None:
    site = Site()
    assert site.status.url == "http://localhost:8001/status"
    site.status.finish(problem=OSError("refused"))
    assert site.services.warned == ["the predictor does not answer yet reason=refused"]


# Samples


def test_an_answer_teaches_its_latency() -> None:
    site = Site()
    r = asking({TTFT: "1000"})
    r[prefix_match(APPROXIMATE)] = PrefixMatch(np.array([0.0, 2.0, 0.0]), np.zeros(4, np.uint64), 64, 257)
    site.predicted(r, (900, 1), (1200, 1), (1300, 1))
    respond(site, r, decided(C, 1), end=11.5)
    (entry,) = site.taught()
    call = site.services.asked[-1]
    assert call.url == "http://localhost:8000/add_training_data_bulk"
    assert entry == {
        "kv_cache_percentage": 0.5,
        "input_token_length": 100,
        "num_request_waiting": 4,
        "num_request_running": 2,
        "num_tokens_generated": 0,
        "prefix_cache_score": 0.5,
        "encoder_input_size": 0,
        "encoder_matched_size": 0,
        "prefill_tokens_in_flight": 200,
        "decode_tokens_in_flight": 0,
        "actual_ttft_ms": 1500.0,
        "actual_tpot_ms": 0.0,
    }
    assert site.services.measured["request_predicted_ttft_seconds"].values == [1.2]
    assert site.services.counted["request_slo_violation_total"].values == {("m", "m", "ttft"): 1}


def test_a_streamed_answer_teaches_ttft_and_tpot() -> None:
    site = Site(streamingMode=True)
    r = asking({TTFT: "1000", TPOT: "40"})
    site.predicted(r, (1, 1), (300, 30), (1, 1))
    # 0.25 s to the first token, 2 s for the 40 others: 50 ms each.
    respond(site, r, decided(C, 1), first=10.25, end=12.25, tokens=41)
    first, each = site.taught()
    assert (first["actual_ttft_ms"], first["actual_tpot_ms"]) == (250.0, 0.0)
    assert (each["actual_ttft_ms"], each["actual_tpot_ms"]) == (0.0, 50.0)
    assert site.services.measured["request_predicted_tpot_seconds"].values == [0.03]
    assert site.services.counted["request_slo_violation_total"].values == {("m", "m", "tpot"): 1}


def test_ttft_is_a_sample_of_the_prefill_server_and_tpot_of_the_target() -> None:
    site = Site(streamingMode=True, predictInProduce=False)
    r = asking()
    site.ask(r)
    respond(site, r, decided(C, 0, prefill=2), first=10.5, end=11.5, tokens=11)
    first, each = site.taught()
    assert (first["num_request_running"], first["actual_ttft_ms"]) == (3, 500.0)
    assert (each["num_request_running"], each["actual_tpot_ms"]) == (1, 100.0)


def test_narrowed_candidates_keep_their_rows() -> None:
    site = Site(predictInProduce=False)
    narrow = C.keep(np.array([False, True, True]))
    r = asking()
    site.ask(r, narrow)
    respond(site, r, decided(narrow, 1), end=11.0)
    assert site.taught()[0]["num_request_running"] == 3


@pytest.mark.parametrize("ending", [{"status": 503}, {"empty": True}, {"whole": False}, {"status": 0, "whole": False}])
def test_a_failed_answer_teaches_nothing(ending: dict[str, Any]) -> None:
    site = Site(predictInProduce=False)
    r = asking()
    site.ask(r)
    respond(site, r, decided(C, 1), end=11.0, **ending)
    site.flush()
    assert site.services.asked == []


@pytest.mark.parametrize(("first", "tokens", "count"), [(0.0, 9, 0), (10.5, None, 1), (10.5, 1, 1), (10.5, 2, 2)])
def test_in_streaming_mode_only_streamed_answers_teach(first: float, tokens: int | None, count: int) -> None:
    site = Site(streamingMode=True, predictInProduce=False)
    r = asking()
    site.ask(r)
    respond(site, r, decided(C, 1), first=first, end=11.0, tokens=tokens)
    assert len(site.plugin._predictor._samples) == count


def test_too_many_samples_are_sampled_evenly() -> None:
    site = Site({"LATENCY_MAX_SAMPLE_SIZE": "10"}, predictInProduce=False)
    for number in range(1000):
        r = asking()
        site.ask(r)
        respond(site, r, decided(C, 1), end=11.0 + number)
    taught = [entry["actual_ttft_ms"] for entry in site.taught()]
    assert len(taught) == 10 and max(taught) > 200_000.0
    site.flush()
    assert len(site.services.asked) == 1, "no sample is left"


def test_while_a_flush_is_under_way_samples_wait_and_lost_ones_are_logged() -> None:
    site = Site(predictInProduce=False)

    def learn() -> None:
        r = asking()
        site.ask(r)
        respond(site, r, decided(C, 1), end=11.0)

    learn()
    site.flush()
    learn()
    site.flush()
    (call,) = site.services.asked
    call.answer(b"", status=500)
    assert site.services.warned == [
        "samples for the predictor are lost count=1 reason=http://localhost:8000/add_training_data_bulk answered 500"
    ]
    site.flush()
    assert len(site.services.asked) == 2
    site.services.asked[1].answer(b"{}", status=202)
    assert len(site.services.warned) == 1


# Settings


def test_settings_come_from_the_environment() -> None:
    warned = Reports()
    read = settings(
        {
            "TRAINING_SERVER_URL": "http://t:1/",
            "PREDICTION_SERVER_URL": " http://a:1 ,http://b:2/ ,",
            "LATENCY_MAX_SAMPLE_SIZE": "5",
            "LATENCY_FLUSH_INTERVAL_SEC": "3",
            "LATENCY_HTTP_TIMEOUT_SEC": "7",
            "LATENCY_COALESCE_WINDOW_MS": "20",
            "LATENCY_MAX_COALESCED_ROWS": "50",
            "LATENCY_MAX_CONCURRENT_DISPATCHES": "2",
        },
        warned,
    )
    assert read == Settings("http://t:1", ("http://a:1", "http://b:2"), 5, 3, 7, 0.02, 50, 2)
    assert warned == []
    assert settings({}, warned) == Settings()


@pytest.mark.parametrize("text", ["x", "-1", "0", "1.5", str(SAMPLES_MAX + 1)])
def test_an_invalid_setting_is_reported_and_has_its_default(text: str) -> None:
    warned = Reports()
    assert settings({"LATENCY_MAX_SAMPLE_SIZE": text}, warned).samples == 1000
    assert warned == [
        f"invalid setting: its default is used variable=LATENCY_MAX_SAMPLE_SIZE value={text} default=1000 "
        f"reason=not a whole number from 1 to {SAMPLES_MAX}"
    ]


def test_an_slo_buffer_of_nothing_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"sloBufferFactor": 0}, PredictedLatency.Params)
