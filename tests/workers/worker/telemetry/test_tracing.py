"""Spans of requests: what they contain, how they nest, and that none stays open."""

import gc
import random

import pytest

from epp.plugin import NoParams
from epp.plugins.scorers.reported import KvUtilization, QueueDepth
from epp.points.instrument import Point, bare
from tests.pair import set_headers
from tests.workers.worker.telemetry.traces import (
    BODY,
    PARENT_ID,
    SAMPLED,
    TRACE_ID,
    Both,
    Broken,
    Keeps,
    Refuses,
    Silent,
    Site,
    Waits,
    headers,
)
from workers.worker.telemetry.tracing import Span, Trace, Tracer


def test_a_sampled_request_has_all_spans_and_each_is_inside_its_caller() -> None:
    site = Site((Keeps("a", 0, 1), Keeps("b", 0), QueueDepth("queue", NoParams()), KvUtilization("kv", NoParams())))
    site.answered(traceparent=SAMPLED)
    assert site.tree() == [
        "gateway.request",
        "  gateway.request_orchestration",
        "    run_scheduler_profile",
        "      filter_endpoints",
        "      llm_d.epp.scoring",
        "        llm_d.epp.scorer.kv-cache-utilization-scorer",
        "        llm_d.epp.scorer.queue-scorer",
        "      pick_endpoints",
    ]
    for span in site.spans:
        parent = next((s for s in site.spans if s.span_id == span.parent), None)
        assert parent is None or parent.start <= span.start < span.end <= parent.end
    assert {span.trace_id for span in site.spans} == {int(TRACE_ID, 16)}
    assert len({span.span_id for span in site.spans}) == len(site.spans)


def test_spans_have_the_decision_and_its_reasons() -> None:
    site = Site((Keeps("a", 1, 2), QueueDepth("queue", NoParams()), Silent("quiet", NoParams())))
    site.answered(traceparent=SAMPLED, **{"x-request-id": "id-1"})
    common = {"gen_ai.request.model": "m", "gen_ai.request.id": "id-1"}
    assert all(common.items() <= span.attributes.items() for span in site.spans)
    own = {span.name: {k: v for k, v in span.attributes.items() if k not in common} for span in site.spans}
    scorer = "llm_d.epp.scorer"
    assert own == {
        "gateway.request": {},
        "gateway.request_orchestration": {"target_model": "m", "request_prio": 0},
        "run_scheduler_profile": {"llm_d.epp.scheduling.profile.name": "default"},
        "filter_endpoints": {"llm_d.epp.filter.candidate_endpoints": 3, "llm_d.epp.filter.filtered_endpoints": 2},
        "llm_d.epp.scoring": {f"{scorer}.count": 2, "llm_d.epp.scoring.candidate_endpoints": 2},
        f"{scorer}.queue-scorer": {
            f"{scorer}.type": "queue-scorer",
            f"{scorer}.name": "queue",
            f"{scorer}.weight": 2.0,
            f"{scorer}.candidate_endpoints": 2,
            f"{scorer}.score.max": 1.0,
            f"{scorer}.score.avg": 0.5,
            f"{scorer}.endpoints_scored": 2,
        },
        f"{scorer}.silent-scorer": {
            f"{scorer}.type": "silent-scorer",
            f"{scorer}.name": "quiet",
            f"{scorer}.weight": 2.0,
            f"{scorer}.candidate_endpoints": 2,
        },
        "pick_endpoints": {
            "llm_d.epp.picker.candidate_endpoints": 2,
            "llm_d.epp.picker.top_endpoints": ["default/pod-1", "default/pod-2"],
            "llm_d.epp.picker.top_scores": [2.0, 0.0],
        },
    }


def test_the_model_server_continues_the_trace_below_the_request() -> None:
    site = Site()
    sent = site.answered(traceparent=SAMPLED, tracestate="vendor=1", baggage="user=7")
    root = site.span("gateway.request")
    assert sent["traceparent"] == f"00-{TRACE_ID}-{root.span_id:016x}-01"
    assert not {"tracestate", "baggage"} & sent.keys()  # they pass unchanged
    assert (root.parent, root.remote) == (int(PARENT_ID, 16), True)
    assert not any(span.remote for span in site.spans if span is not root)


def test_every_call_of_a_sampled_request_is_counted() -> None:
    site = Site((Keeps("all", 0, 1, 2), KvUtilization("kv", NoParams()), QueueDepth("queue", NoParams())))
    site.answered(traceparent=SAMPLED)
    assert [name for _, name in site.timers.calls] == ["o", "h", "all", "kv", "queue", "best", "h", "h"]


def test_static_scorers_with_kept_scores_are_named() -> None:
    site = Site((KvUtilization("kv", NoParams()), QueueDepth("queue", NoParams())))
    kept = "llm_d.epp.scoring.kept_scorers"
    site.answered(traceparent=SAMPLED)
    assert kept not in site.span("llm_d.epp.scoring").attributes
    assert site.span("llm_d.epp.scorer.kv-cache-utilization-scorer").attributes["llm_d.epp.scorer.weight"] == 2.0
    site.spans.clear()
    site.answered(traceparent=SAMPLED)
    assert site.span("llm_d.epp.scoring").attributes[kept] == ["kv"]
    assert [name for name in site.tree() if "scorer." in name] == ["        llm_d.epp.scorer.queue-scorer"]


def test_scoring_with_only_kept_scores_has_a_span_too() -> None:
    site = Site((KvUtilization("kv", NoParams()),))
    site.answered()
    site.answered(traceparent=SAMPLED)
    assert [name.strip() for name in site.tree()[2:]] == ["run_scheduler_profile", "llm_d.epp.scoring", "pick_endpoints"]


def test_a_profile_without_scorers_has_no_scoring() -> None:
    site = Site(())
    site.answered(traceparent=SAMPLED)
    assert [name.strip() for name in site.tree()[2:]] == ["run_scheduler_profile", "pick_endpoints"]


def test_a_shadow_profile_has_no_spans() -> None:
    queue, broken = QueueDepth("queue", NoParams()), Broken("b", NoParams())
    site = Site((queue,), (queue, broken), shadow=True)
    site.answered(traceparent=SAMPLED)
    assert site.tree().count("    run_scheduler_profile") == 1
    assert not any(span.error for span in site.spans)
    assert (Point.SCORER, "b") in site.timers.calls


def test_a_refusal_sets_the_status_of_the_request_and_of_its_orchestration() -> None:
    site = Site(count=0)
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED)
    (answer,) = envoy.body(BODY)
    assert answer.immediate_response.status.code == 503
    assert site.tree() == ["gateway.request", "  gateway.request_orchestration"]
    assert {(span.problem, span.error) for span in site.spans} == {("Refused", "no-candidates")}
    assert site.span("gateway.request_orchestration").attributes["target_model"] == "m"


def test_a_request_that_cannot_be_parsed_has_a_trace_too() -> None:
    site = Site()
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED)
    envoy.body(b"{")
    assert site.tree() == ["gateway.request", "  gateway.request_orchestration"]
    assert site.span("gateway.request").error.startswith("invalid-body: ")


def test_a_fault_ends_all_open_spans_with_an_error() -> None:
    site = Site((QueueDepth("queue", NoParams()), Refuses("b", NoParams())))
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED)
    envoy.body(BODY)
    envoy.handler.closed()
    assert site.tree() == [
        "gateway.request",
        "  gateway.request_orchestration",
        "    run_scheduler_profile",
        "      llm_d.epp.scoring",
        "        llm_d.epp.scorer.queue-scorer",
        "        llm_d.epp.scorer.broken-scorer",
    ]
    failed = {span.name for span in site.spans if span.error}
    assert failed == {span.name for span in site.spans} - {"llm_d.epp.scorer.queue-scorer"}
    assert {span.error for span in site.spans} == {"not-admitted: no luck", ""}


def test_a_scorer_that_raises_has_an_error_in_its_span_alone() -> None:
    site = Site((Broken("b", NoParams()), QueueDepth("queue", NoParams())))
    site.answered(traceparent=SAMPLED)
    assert {span.name: span.error for span in site.spans if span.error} == {"llm_d.epp.scorer.broken-scorer": "no luck"}
    assert site.span("pick_endpoints").parent == site.span("run_scheduler_profile").span_id


def test_an_error_of_the_model_server_sets_the_status_of_the_request_alone() -> None:
    site = Site()
    site.answered(status="500", traceparent=SAMPLED)
    assert {span.name: span.error for span in site.spans if span.error} == {"gateway.request": "ModelServerError"}


def test_a_profile_ends_without_a_pick_if_its_filters_leave_no_endpoint() -> None:
    site = Site((Keeps("none"), Keeps("never asked", 0), QueueDepth("queue", NoParams())))
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED)
    envoy.body(BODY)
    assert [name.strip() for name in site.tree()[2:]] == ["run_scheduler_profile", "filter_endpoints"]
    assert site.span("filter_endpoints").attributes["llm_d.epp.filter.filtered_endpoints"] == 0
    assert not site.span("run_scheduler_profile").error
    assert site.span("gateway.request").error == "no-endpoint-left"


@pytest.mark.parametrize("first", [Keeps("some", 0, 1), Keeps("none")])
def test_profiles_of_one_round_follow_each_other(first: Keeps) -> None:
    queue = QueueDepth("queue", NoParams())
    site = Site((first, queue), (queue,), handler=Both("both", NoParams()))
    site.answered(traceparent=SAMPLED)
    runs = sorted((s for s in site.spans if s.name == "run_scheduler_profile"), key=lambda span: span.start)
    assert [span.attributes["llm_d.epp.scheduling.profile.name"] for span in runs] == ["default", "second"]
    assert runs[0].end == runs[1].start
    second = [span.name for span in site.spans if span.parent == runs[1].span_id]
    assert second == ["llm_d.epp.scoring", "pick_endpoints"]


def test_a_request_without_a_body_has_only_the_outer_span() -> None:
    site = Site()
    envoy = site.pair.open()
    (answer,) = envoy.headers("/v1/models", last=True, traceparent=SAMPLED)
    root_id = set_headers(answer)["traceparent"].split("-")[2]
    envoy.response_headers(last=True)
    assert site.tree() == ["gateway.request"]
    assert f"{site.spans[0].span_id:016x}" == root_id


def test_a_client_that_leaves_before_the_decision_leaves_no_span_open() -> None:
    site = Site(producers=(Waits(),))
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED)
    envoy.body(BODY)
    assert site.spans == []
    envoy.handler.closed()
    assert site.tree() == ["gateway.request", "  gateway.request_orchestration"]
    envoy.handler.closed()
    assert len(site.spans) == 2


def test_spans_of_a_request_without_an_id_have_the_new_id() -> None:
    site = Site()
    sent = site.answered(traceparent=SAMPLED)
    assert site.span("gateway.request").attributes["gen_ai.request.id"] == sent["x-request-id"]


def test_text_from_clients_cannot_make_a_span_large() -> None:
    site = Site()
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED, **{"x-request-id": "i" * 5000})
    envoy.body(b'{"model":"%b","prompt":"x"}' % (b"m" * 1000))
    envoy.handler.closed()
    assert len(site.spans) == 6
    assert max(len(value) for span in site.spans for value in span.attributes.values() if isinstance(value, str)) == 128


def test_a_step_of_the_wall_clock_does_not_distort_a_span() -> None:
    spans: list[Span] = []
    walls = iter((5_000_000, 1_000))
    monotonic = iter(range(10, 20))
    tracer = Tracer(
        Site().pair.app.pipelines.current.pipeline, bare, spans.append, ratio=1.0, rng=random.Random(1),
        clock=lambda: next(monotonic), wall=lambda: next(walls),
    )  # fmt: skip
    trace = tracer.begin(headers(accept="*/*"))
    assert trace is not None
    trace.end("")
    assert (spans[0].start, spans[0].end) == (5_000_001, 5_000_002)


def test_a_trace_is_freed_with_its_stream_without_the_collector() -> None:
    site = Site()
    gc.collect()
    gc.disable()
    try:
        site.answered(traceparent=SAMPLED)
        assert len(site.spans) == 6
        assert not [held for held in gc.get_objects() if isinstance(held, Trace)]
    finally:
        gc.enable()
