"""The latency predictor: what it is asked and taught, what becomes of its answers, and what happens without them."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from epp.candidates import Candidates
from epp.decision import Decision, ProfileRun, Response, Usage
from epp.errors import ProducerFailed
from epp.latency import PREDICTOR, LatencyPredictions, latency_predictions
from epp.multimodal import MediaMatch, media_match
from epp.plugins.producers._predictor import FAILURES_MAX, REST_S, SAMPLES_MAX, Settings, settings
from epp.plugins.producers.predicted_latency import PredictedLatency
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from tests.fakes import FakeCall, FakeServices, candidates, request

PREDICTED = latency_predictions("")
TTFT, TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
COLUMNS = {"kv_cache_usage": [0.25, 0.5, 1.5], "waiting_requests": [0.0, 2.0, 4.0]}
C = candidates(COLUMNS, inflight=[1, 2, 3], tokens=[100, 200, 300])


def asked_for(headers: dict[str, str] | None = None, *, prompt: bytes = b"x" * 400, now: float = 0.0) -> Request:
    return request(prompt, headers=headers or {}, now=now)


class Site:
    """A producer and its predictor, for which the test answers."""

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
        """The call that goes out when the window is over."""
        _, pause = self.services.pauses[-1]
        pause.finish()
        return self.services.asked[-1]

    def predicted(self, r: Request, *rows: tuple[float, float], c: Candidates = C) -> LatencyPredictions:
        self.ask(r, c)
        answer(self.close_window(), *rows)
        found = r[PREDICTED]
        assert found is not None
        return found

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


def respond(
    site: Site,
    r: Request,
    decision: Decision,
    *,
    first: float = 0.0,
    end: float,
    tokens: int | None = None,
    **more: Any,
) -> None:
    """The rest of a request's life; times in seconds, it was sent at 10."""
    r.sent_at = 10.0
    site.plugin.before_send(r, decision)
    if first:
        r.now = first
        site.plugin.response_streaming(r, decision)
    r.now = end
    response = Response(more.get("status", 200))
    response.whole = more.get("whole", True)
    response.usage = None if tokens is None else Usage(completion=tokens)
    site.plugin.response_complete(r, decision, response)


# What is asked


def test_all_candidates_are_asked_about_in_one_call_with_what_the_request_finds() -> None:
    site = Site()
    r = asked_for()
    r[prefix_match(APPROXIMATE)] = PrefixMatch(np.array([0.0, 1.0, 3.0]), np.zeros(4, np.uint64), 64)
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
        # Nothing was in flight at the scrape, so what is now has come since, and counts as waiting: 0 + 1, 2 + 2, 4 + 3.
        for kv, waiting, running, prefix, load in [
            (0.25, 1, 1, 0.0, 100),
            (0.5, 4, 2, 0.25, 200),
            (1.0, 7, 3, 0.75, 300),
        ]
    ]


def test_roles_and_media_are_told_where_they_are_configured() -> None:
    site = Site(endpointRoleLabel="role", useEncoderCacheFeatures=True)
    c = candidates(COLUMNS, labels=[{"role": "prefill"}, {"role": "decode"}, {}])
    r = asked_for()
    r[media_match("")] = MediaMatch(np.array([0.0, 2.0, 3.0]), 3)
    site.ask(r, c.keep(np.array([True, False, True])))
    rows = json.loads(site.close_window().body)["requests"]
    assert [(row.get("pod_type"), row["encoder_input_size"], row["encoder_matched_size"]) for row in rows] == [
        ("prefill", 3, 0),
        (None, 3, 3),
    ]


def test_requests_of_one_window_share_a_call_and_each_gets_its_own_predictions() -> None:
    site = Site()
    first, other = asked_for(), asked_for({TTFT: "100"})
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
    assert site.ask(asked_for()) is not waiting, "the window is over"
    assert site.services.measured["request_ttft_prediction_duration_seconds"].values == [0.002, 0.002]


def test_without_a_window_each_request_has_its_own_call() -> None:
    site = Site({"LATENCY_COALESCE_WINDOW_MS": "0"})
    site.ask(asked_for())
    site.ask(asked_for())
    assert len(site.services.asked) == 2 and site.services.pauses == []


def test_a_call_has_so_many_rows_at_most() -> None:
    site = Site({"LATENCY_MAX_COALESCED_ROWS": "7"})
    waits = [site.ask(asked_for()) for _ in range(3)]  # of 3 rows each
    assert waits[0] is waits[1] is not waits[2]


def test_while_too_many_calls_are_under_way_a_batch_stays_open() -> None:
    site = Site({"LATENCY_MAX_CONCURRENT_DISPATCHES": "1"})
    site.ask(asked_for())
    first = site.close_window()
    waiting = site.ask(asked_for())
    assert site.close_window() is first, "the second waits for its turn"
    assert site.ask(asked_for()) is waiting
    answer(first, (1, 1), (1, 1), (1, 1))
    assert len(json.loads(site.close_window().body)["requests"]) == 6


def test_prediction_servers_take_turns_at_random() -> None:
    site = Site({"PREDICTION_SERVER_URL": "http://a:1/, http://b:2", "LATENCY_COALESCE_WINDOW_MS": "0"})
    for _ in range(30):
        site.ask(asked_for())
    assert {call.url for call in site.services.asked} == {
        "http://a:1/predict/bulk/strict",
        "http://b:2/predict/bulk/strict",
    }


# What becomes of the answers


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
def test_headroom_is_the_objective_less_the_prediction(
    streaming: bool, headers: dict[str, str], ttft: list[float], tpot: list[float]
) -> None:
    c = candidates({"waiting_requests": [0, 0]})
    found = Site(streamingMode=streaming).predicted(asked_for(headers), (80, 20), (120, 40), c=c)
    assert found.ttft_headroom.tolist() == ttft and found.tpot_headroom.tolist() == tpot


def test_time_per_token_says_nothing_of_servers_that_only_prefill() -> None:
    site = Site(streamingMode=True, endpointRoleLabel="role")
    c = candidates({"waiting_requests": [0, 0]}, labels=[{"role": "prefill"}, {"role": "decode"}])
    assert site.predicted(asked_for(), (80, 20), (80, 20), c=c).tpot_headroom.tolist() == [0, -20]


def test_the_objective_per_token_is_limited_by_the_smallest_that_runs_there() -> None:
    site = Site(streamingMode=True, sloBufferFactor=0.5)
    c = candidates({"waiting_requests": [0, 0]})
    running = [asked_for({TPOT: text}) for text in ("50", "20", "80")]
    for r in running:
        site.predicted(r, (1, 1), (1, 1), c=c)
        site.plugin.before_send(r, decided(c, 1))
    site.predicted(none := asked_for(), (1, 1), (1, 1), c=c)
    site.plugin.before_send(none, decided(c, 1))  # without an objective: it limits nobody

    def limits() -> list[float]:
        """The headroom of an objective of 60 ms at 1 ms predicted: half of the least, less 1."""
        return site.predicted(asked_for({TPOT: "60"}), (1, 1), (1, 1), c=c).tpot_headroom.tolist()

    assert limits() == [29, 9]
    site.plugin.response_complete(running[1], decided(c, 1), Response(0))
    assert limits() == [29, 24]
    for r in (running[0], running[2], none):
        site.plugin.response_complete(r, decided(c, 1), Response(0))
    assert limits() == [29, 29] and site.plugin._running == {}


def test_training_alone_asks_nothing() -> None:
    site = Site(predictInProduce=False)
    assert site.ask(asked_for()) is None
    assert site.services.asked == [] and site.services.works[1:] == []


# What goes wrong


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ((b"busy", 503), "answered 503: busy"),
        ((b"[]", 200), "no predictions"),
        ((b'{"predictions":[]}', 200), "answered 0 of 3 predictions"),
        (OSError("POST http://localhost:8001/x: refused"), "refused"),
        (TimeoutError("POST http://localhost:8001/x: not done within 0.38 s"), "not done"),
    ],
)
def test_without_predictions_the_producer_fails_and_the_datum_has_its_default(said: Any, message: str) -> None:
    site = Site()
    r = asked_for()
    waiting = site.ask(r)
    call = site.close_window()
    if isinstance(said, Exception):
        call.finish(problem=said)
    else:
        call.answer(*said)

    async def decide() -> None:
        await waiting

    with pytest.raises(ProducerFailed, match=message):
        decide().send(None)
    assert r[PREDICTED] is None


def fail(site: Site, now: float) -> None:
    site.ask(asked_for(now=now))
    site.close_window().finish(problem=OSError("refused"))


def test_a_predictor_that_keeps_failing_is_left_alone_for_a_while_then_tried_by_one_batch() -> None:
    site = Site()
    for number in range(FAILURES_MAX):
        fail(site, float(number))
    rested = FAILURES_MAX - 1 + REST_S
    with pytest.raises(ProducerFailed, match="left alone"):
        site.ask(asked_for(now=rested - 0.1))
    waiting = site.ask(asked_for(now=rested))
    call = site.close_window()
    with pytest.raises(ProducerFailed, match="left alone"):
        site.ask(asked_for(now=rested))
    answer(call, (1, 1), (1, 1), (1, 1))
    outcome(waiting)
    assert site.ask(asked_for(now=rested)) is not None


def test_requests_that_leave_say_nothing_about_the_predictor() -> None:
    site = Site()
    for _ in range(FAILURES_MAX + 1):
        waiting = site.ask(asked_for())
        site.services.pauses[-1][1].finish()

        async def decide(waiting: Any = waiting) -> None:
            await waiting

        client = decide()
        client.send(None)
        client.close()
        assert site.services.asked[-1].left
    assert site.ask(asked_for()) is not None


def test_the_predictor_is_greeted_and_silence_is_said() -> None:
    site = Site()
    assert site.status.url == "http://localhost:8001/status"
    site.status.finish(problem=OSError("refused"))
    assert site.services.warned == ["the predictor does not answer yet: refused"]


# What is taught


def test_a_whole_answer_teaches_how_long_it_took() -> None:
    site = Site()
    r = asked_for({TTFT: "1000"})
    r[prefix_match(APPROXIMATE)] = PrefixMatch(np.array([0.0, 2.0, 0.0]), np.zeros(4, np.uint64), 64)
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


def test_a_streamed_answer_teaches_the_first_token_and_the_time_per_token() -> None:
    site = Site(streamingMode=True)
    r = asked_for({TTFT: "1000", TPOT: "40"})
    site.predicted(r, (1, 1), (300, 30), (1, 1))
    # 0.25 s to the first token, 2 s for the 40 others: 50 ms each.
    respond(site, r, decided(C, 1), first=10.25, end=12.25, tokens=41)
    first, each = site.taught()
    assert (first["actual_ttft_ms"], first["actual_tpot_ms"]) == (250.0, 0.0)
    assert (each["actual_ttft_ms"], each["actual_tpot_ms"]) == (0.0, 50.0)
    assert site.services.measured["request_predicted_tpot_seconds"].values == [0.03]
    assert site.services.counted["request_slo_violation_total"].values == {("m", "m", "tpot"): 1}


def test_the_first_token_is_taught_as_the_prefill_server_s_and_the_others_as_the_target_s() -> None:
    site = Site(streamingMode=True, predictInProduce=False)
    r = asked_for()
    site.ask(r)
    respond(site, r, decided(C, 0, prefill=2), first=10.5, end=11.5, tokens=11)
    first, each = site.taught()
    assert (first["num_request_running"], first["actual_ttft_ms"]) == (3, 500.0)
    assert (each["num_request_running"], each["actual_tpot_ms"]) == (1, 100.0)


def test_candidates_that_were_narrowed_keep_their_own_rows() -> None:
    site = Site(predictInProduce=False)
    narrow = C.keep(np.array([False, True, True]))
    r = asked_for()
    site.ask(r, narrow)
    respond(site, r, decided(narrow, 1), end=11.0)
    assert site.taught()[0]["num_request_running"] == 3


@pytest.mark.parametrize("ending", [{"status": 503}, {"whole": False}, {"status": 0, "whole": False}])
def test_a_failed_answer_teaches_nothing(ending: dict[str, Any]) -> None:
    site = Site(predictInProduce=False)
    r = asked_for()
    site.ask(r)
    respond(site, r, decided(C, 1), end=11.0, **ending)
    site.flush()
    assert site.services.asked == []


@pytest.mark.parametrize(("first", "tokens", "count"), [(0.0, 9, 0), (10.5, None, 1), (10.5, 1, 1), (10.5, 2, 2)])
def test_in_streaming_mode_only_what_was_streamed_teaches(first: float, tokens: int | None, count: int) -> None:
    site = Site(streamingMode=True, predictInProduce=False)
    r = asked_for()
    site.ask(r)
    respond(site, r, decided(C, 1), first=first, end=11.0, tokens=tokens)
    assert len(site.plugin._predictor._samples) == count


def test_more_samples_than_are_sent_are_sampled_evenly() -> None:
    site = Site({"LATENCY_MAX_SAMPLE_SIZE": "10"}, predictInProduce=False)
    for number in range(1000):
        r = asked_for()
        site.ask(r)
        respond(site, r, decided(C, 1), end=11.0 + number)
    taught = [entry["actual_ttft_ms"] for entry in site.taught()]
    assert len(taught) == 10 and max(taught) > 200_000.0
    site.flush()
    assert len(site.services.asked) == 1, "nothing is left"


def test_while_a_flush_is_under_way_samples_wait_and_lost_ones_are_said() -> None:
    site = Site(predictInProduce=False)

    def learn() -> None:
        r = asked_for()
        site.ask(r)
        respond(site, r, decided(C, 1), end=11.0)

    learn()
    site.flush()
    learn()
    site.flush()
    (call,) = site.services.asked
    call.answer(b"", status=500)
    assert site.services.warned == [
        "1 samples for the predictor are lost: http://localhost:8000/add_training_data_bulk answered 500"
    ]
    site.flush()
    assert len(site.services.asked) == 2
    site.services.asked[1].answer(b"{}", status=202)
    assert len(site.services.warned) == 1


# Settings


def test_settings_come_from_the_environment() -> None:
    wrong: list[str] = []
    found = settings(
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
        wrong.append,
    )
    assert found == Settings("http://t:1", ("http://a:1", "http://b:2"), 5, 3, 7, 0.02, 50, 2)
    assert wrong == []
    assert settings({}, wrong.append) == Settings()


@pytest.mark.parametrize("text", ["x", "-1", "0", "1.5", str(SAMPLES_MAX + 1)])
def test_a_setting_that_is_no_number_in_its_range_is_named_and_has_its_default(text: str) -> None:
    wrong: list[str] = []
    assert settings({"LATENCY_MAX_SAMPLE_SIZE": text}, wrong.append).samples == 1000
    assert wrong == [f"LATENCY_MAX_SAMPLE_SIZE={text!r} is no whole number from 1 to {SAMPLES_MAX}: 1000 is used"]


def test_parameters_without_an_effect_are_said() -> None:
    params = {
        "contextTTL": 1,
        "samplingMean": 1,
        "maxDecodeTokenSamplesForPrediction": 1,
        "inFlightLoadProducerName": "x",
    }
    plugin = PredictedLatency("p", msgspec.convert(params, PredictedLatency.Params))
    assert [text.partition(":")[0] for text in plugin.without_effect] == list(params)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"sloBufferFactor": 0}, PredictedLatency.Params)
