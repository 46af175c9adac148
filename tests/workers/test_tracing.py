"""Traces: who is sampled, what the spans say, and that nobody waits for whoever collects them."""

import asyncio
import gc
import itertools
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates, Mask, Scores
from epp.data import KV_USAGE, WAITING
from epp.decision import Decision, ProfileRun
from epp.errors import Cause, Refused
from epp.instrument import C, Point, bare
from epp.pipeline import Recipe, WiredProfile, compile_pipeline
from epp.plugin import DataProducer, Filter, NoParams, Plugin, Profile, ProfileHandler, Scorer
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.parsers.passthrough import Passthrough
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles.single import SingleProfile
from epp.plugins.scorers.kv_utilization import KvUtilization
from epp.plugins.scorers.queue_depth import QueueDepth
from epp.protocol import codec
from epp.request import Request
from tests.fakes import FakePool, FakeServices, candidates
from tests.pair import Pair, set_headers
from workers.cli.options import Options, serve_options
from workers.exit_codes import ExitCode
from workers.tracing import Span, Trace, Tracer, parse_traceparent
from workers.tracing_export import SPANS_MAX, Exporter, _Told
from workers.tracing_settings import Settings, settings

ROOT = Path(__file__).parents[2]
BODY = b'{"model":"m","prompt":"hello"}'
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (f"00-{TRACE_ID}-{PARENT_ID}-{flags}" for flags in ("01", "00"))


class Keeps(Filter):
    """The endpoints at these places."""

    def __init__(self, name: str, *places: int) -> None:
        super().__init__(name, NoParams())
        self.places = places

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        return np.isin(np.arange(len(candidates)), self.places)


class Silent(Scorer):
    type_name = "silent-scorer"

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        return None


class Broken(Scorer):
    type_name = "broken-scorer"

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        raise ZeroDivisionError("no luck")


class Both(ProfileHandler):
    """All profiles in one round; the last that found somebody counts."""

    def pick(
        self, request: Request, profiles: Mapping[str, Profile], runs: Mapping[str, ProfileRun | None]
    ) -> Sequence[Profile]:
        return () if runs else tuple(profiles.values())

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        found = {name: run for name, run in runs.items() if run is not None}
        if not found:
            raise Refused(Cause.NO_ENDPOINT_LEFT)
        name, run = found.popitem()
        return Decision(run.targets, runs, primary=name)


class Waits(DataProducer):
    """Never has what it waits for."""

    def __init__(self) -> None:
        super().__init__("waits", NoParams())

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        """Nobody calls it."""

    def __await__(self) -> Any:
        yield self

    def produce(self, request: Request, candidates: Candidates) -> Any:
        return self


class Counts:
    """A `Wrap` that counts calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Point, str]] = []

    def __call__(self, point: Point, plugin: Plugin, call: C, /) -> C:
        def counted(*args: Any) -> Any:
            self.calls.append((point, plugin.name))
            return call(*args)

        return counted  # type: ignore[return-value]


class Site:
    """A pair whose sampled requests leave their spans in `spans`, in the order in which they ended."""

    def __init__(
        self,
        *profiles: Sequence[Plugin],
        handler: ProfileHandler | None = None,
        producers: tuple[DataProducer, ...] = (),
        ratio: float = 0.0,
        count: int = 3,
        shadow: bool = False,
        emit: Callable[[Span], None] | None = None,
    ) -> None:
        picker = MaxScore("best", MaxScore.Params())
        parsers = (OpenAI("o", NoParams()), Passthrough("x", NoParams()))
        handler = handler or SingleProfile("h", NoParams())
        members = [(*given, picker) for given in profiles or ((QueueDepth("queue", NoParams()),),)]
        names = ("default", "second")[: len(members)]
        recipe = Recipe(
            plugins=(handler, *parsers, *producers, *{p.name: p for given in members for p in given}.values()),
            parsers=parsers,
            handler=handler,
            profiles=tuple(
                WiredProfile(name, tuple((p, 2.0) for p in given), shadow=shadow and name == "second")
                for name, given in zip(names, members, strict=True)
            ),
            producers=producers,
            columns=(WAITING, KV_USAGE),
        )
        self.timers = Counts()
        pipeline = compile_pipeline(recipe, self.timers)
        pipeline.start(FakeServices())
        columns = {"waiting_requests": [2.0, 0.0, 1.0], KV_USAGE.name: [0.5, 0.25, 0.0]}
        self.pair = Pair(pipeline, FakePool(candidates({n: v[:count] for n, v in columns.items()}, count=count)))
        self.spans: list[Span] = []
        self.ticks = iter(range(1, 1 << 30))
        self.pair.app.tracer = Tracer(
            pipeline,
            self.timers,
            emit or self.spans.append,
            ratio=ratio,
            rng=random.Random(7),
            clock=lambda: next(self.ticks),
            wall=lambda: 1_000_000,
        )

    def answered(self, *, status: str = "200", **headers: str) -> Mapping[str, str]:
        """One whole request; returns the headers that the model server gets."""
        envoy = self.pair.open()
        envoy.headers(**headers)
        answers = envoy.body(BODY)
        envoy.response_headers(status)
        envoy.response_body(b"{}")
        envoy.handler.half_closed()
        return set_headers(answers[0])

    def tree(self) -> list[str]:
        """Names, indented by depth, in the order in which the spans began."""
        by_id = {span.span_id: span for span in self.spans}

        def depth(span: Span) -> int:
            above = by_id.get(span.parent)
            return 0 if above is None else 1 + depth(above)

        return ["  " * depth(span) + span.name for span in sorted(self.spans, key=lambda s: (s.start, -s.end))]

    def span(self, name: str) -> Span:
        (found,) = (span for span in self.spans if span.name == name)
        return found


def headers(**values: str) -> codec.Headers:
    message = b"".join(
        codec.field(1, codec.field(1, name.encode()) + codec.field(3, value.encode())) for name, value in values.items()
    )
    payload = codec.field(1, message)
    return codec.Headers(payload, 0, len(payload))


def test_a_sampled_request_has_all_spans_each_inside_its_caller() -> None:
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


def test_spans_say_what_was_decided_and_why() -> None:
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


def test_the_model_server_joins_the_trace_below_the_request() -> None:
    site = Site()
    sent = site.answered(traceparent=SAMPLED, tracestate="vendor=1", baggage="user=7")
    root = site.span("gateway.request")
    assert sent["traceparent"] == f"00-{TRACE_ID}-{root.span_id:016x}-01"
    assert not {"tracestate", "baggage"} & sent.keys()  # they pass as they came
    assert (root.parent, root.remote) == (int(PARENT_ID, 16), True)
    assert not any(span.remote for span in site.spans if span is not root)


def test_without_a_parent_the_ratio_decides_and_a_new_trace_begins() -> None:
    site = Site(ratio=1.0)
    parent = parse_traceparent(site.answered()["traceparent"])
    root = site.span("gateway.request")
    assert parent == (root.trace_id, root.span_id, True)
    assert (root.parent, root.remote) == (0, False)


@pytest.mark.parametrize(("ratio", "given"), [(1.0, {"traceparent": UNSAMPLED}), (0.0, {})])
def test_a_request_that_is_not_sampled_is_answered_as_if_there_were_no_tracing(
    ratio: float, given: dict[str, str]
) -> None:
    site = Site((KvUtilization("kv", NoParams()), QueueDepth("queue", NoParams())), ratio=ratio)
    with_tracing = site.answered(**given, **{"x-request-id": "1"})
    calls = list(site.timers.calls)
    site.pair.app.tracer = None
    site.timers.calls.clear()
    assert site.answered(**given, **{"x-request-id": "1"}) == with_tracing
    assert site.spans == []
    assert [call for call in calls if call != (Point.SCORER, "kv")] == site.timers.calls  # static: once per scrape
    assert "traceparent" not in with_tracing


@pytest.mark.parametrize(
    "text",
    [
        "", "00", SAMPLED[:-1], SAMPLED + "0", SAMPLED + "-00", SAMPLED.upper(), "ff" + SAMPLED[2:], "zz" + SAMPLED[2:],
        f"00-{'0' * 32}-{PARENT_ID}-01", f"00-{TRACE_ID}-{'0' * 16}-01", f"00-{TRACE_ID}-{PARENT_ID}-1g",
        f" {SAMPLED}", f"00-{'0' * 32}-{PARENT_ID}-00", SAMPLED + "\n",
    ],
)  # fmt: skip
def test_a_malformed_parent_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None
    site = Site(ratio=1.0)
    site.answered(traceparent=text)
    assert site.span("gateway.request").parent == 0
    site = Site(ratio=0.0)
    site.answered(traceparent=text)
    assert site.spans == []


def test_a_parent_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    parent = (int(TRACE_ID, 16), int(PARENT_ID, 16), True)
    assert parse_traceparent(f"01-{TRACE_ID}-{PARENT_ID}-09-more") == parent
    assert parse_traceparent(f"cc-{TRACE_ID}-{PARENT_ID}-01") == parent


@given(st.text(max_size=80))
def test_any_text_is_a_parent_or_none(text: str) -> None:
    parent = parse_traceparent(text)
    assert parent is None or (parent.trace_id and parent.span_id)


@given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.integers(0, 255))
def test_every_well_formed_parent_is_understood(trace_id: int, span_id: int, flags: int) -> None:
    text = f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"
    assert parse_traceparent(text) == (trace_id, span_id, flags & 1 == 1)
    begun = Site(ratio=1.0).pair.app.tracer.begin(headers(traceparent=text))  # type: ignore[union-attr]
    assert (begun is not None) == (flags & 1 == 1)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_the_ratio_is_the_share_of_requests_that_are_sampled(ratio: float) -> None:
    tracer = Site(ratio=ratio).pair.app.tracer
    assert tracer is not None
    given = headers(accept="*/*")
    share = sum(tracer.begin(given) is not None for _ in range(4000)) / 4000
    assert abs(share - ratio) < 0.03
    assert share == ratio or 0 < ratio < 1


def decided(site: Site, **given: str) -> tuple[list[list[float] | None], list[float], list[int]]:
    """What a request's run says: scores, totals, picked."""
    envoy = site.pair.open()
    envoy.headers(**given)
    envoy.body(BODY)
    run = envoy.handler._decision.runs["default"]
    envoy.handler.closed()
    scores = [None if given is None else given.tolist() for given in run.scores]
    return scores, run.totals.tolist(), list(run.picked)


def test_sampled_requests_and_others_come_to_the_same_decision_in_any_order() -> None:
    scorers = (KvUtilization("kv", NoParams()), QueueDepth("queue", NoParams()), Silent("quiet", NoParams()))
    expected = decided(Site(scorers))
    for order in itertools.product(({}, {"traceparent": SAMPLED}), repeat=3):
        site = Site(scorers)
        assert [decided(site, **headers) for headers in order] == [expected] * 3


def test_every_call_of_a_sampled_request_is_counted() -> None:
    site = Site((Keeps("all", 0, 1, 2), KvUtilization("kv", NoParams()), QueueDepth("queue", NoParams())))
    site.answered(traceparent=SAMPLED)
    assert [name for _, name in site.timers.calls] == ["o", "h", "all", "kv", "queue", "best", "h", "h"]


def test_static_scorers_whose_scores_were_kept_are_named() -> None:
    site = Site((KvUtilization("kv", NoParams()), QueueDepth("queue", NoParams())))
    kept = "llm_d.epp.scoring.kept_scorers"
    site.answered(traceparent=SAMPLED)
    assert kept not in site.span("llm_d.epp.scoring").attributes
    assert site.span("llm_d.epp.scorer.kv-cache-utilization-scorer").attributes["llm_d.epp.scorer.weight"] == 2.0
    site.spans.clear()
    site.answered(traceparent=SAMPLED)
    assert site.span("llm_d.epp.scoring").attributes[kept] == ["kv"]
    assert [name for name in site.tree() if "scorer." in name] == ["        llm_d.epp.scorer.queue-scorer"]


def test_scoring_that_is_all_kept_is_a_span_all_the_same() -> None:
    site = Site((KvUtilization("kv", NoParams()),))
    site.answered()
    site.answered(traceparent=SAMPLED)
    assert [name.strip() for name in site.tree()[2:]] == [
        "run_scheduler_profile",
        "llm_d.epp.scoring",
        "pick_endpoints",
    ]


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


def test_a_refusal_is_the_status_of_the_request_and_of_its_orchestration() -> None:
    site = Site(count=0)
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED)
    (answer,) = envoy.body(BODY)
    assert answer.immediate_response.status.code == 503
    assert site.tree() == ["gateway.request", "  gateway.request_orchestration"]
    assert {(span.problem, span.error) for span in site.spans} == {("Refused", "no-candidates")}
    assert site.span("gateway.request_orchestration").attributes["target_model"] == "m"


def test_a_request_that_cannot_be_read_is_a_trace_too() -> None:
    site = Site()
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED)
    envoy.body(b"{")
    assert site.tree() == ["gateway.request", "  gateway.request_orchestration"]
    assert site.span("gateway.request").error.startswith("invalid-body: ")


def test_a_fault_ends_all_spans_that_are_open_with_an_error() -> None:
    site = Site((QueueDepth("queue", NoParams()), Broken("b", NoParams())))
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
    assert {span.error for span in site.spans} == {"no luck", ""}


def test_an_error_of_the_model_server_is_the_status_of_the_request_alone() -> None:
    site = Site()
    site.answered(status="500", traceparent=SAMPLED)
    assert {span.name: span.error for span in site.spans if span.error} == {"gateway.request": "ModelServerError"}


def test_a_profile_whose_filters_leave_nobody_ends_without_a_pick() -> None:
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


def test_a_request_without_a_body_has_the_outer_span_alone() -> None:
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


def test_a_request_without_an_id_is_known_by_the_one_it_got() -> None:
    site = Site()
    sent = site.answered(traceparent=SAMPLED)
    assert site.span("gateway.request").attributes["gen_ai.request.id"] == sent["x-request-id"]


def test_what_clients_send_cannot_make_a_span_large() -> None:
    site = Site()
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED, **{"x-request-id": "i" * 5000})
    envoy.body(b'{"model":"%b","prompt":"x"}' % (b"m" * 1000))
    envoy.handler.closed()
    assert len(site.spans) == 6
    assert max(len(value) for span in site.spans for value in span.attributes.values() if isinstance(value, str)) == 128


def test_a_step_of_the_wall_clock_does_not_bend_a_span() -> None:
    spans: list[Span] = []
    walls = iter((5_000_000, 1_000))
    monotonic = iter(range(10, 20))
    tracer = Tracer(
        Site().pair.app.pipeline, bare, spans.append, ratio=1.0, rng=random.Random(1),
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


# Settings.


def asked(installed: Callable[[str], Any] = lambda _: True, **environ: str) -> tuple[Settings | None, list[str]]:
    return settings({f"OTEL_{name}": value for name, value in environ.items()}, installed)


@pytest.mark.parametrize(
    "environ",
    [{}, {"TRACES_EXPORTER": ""}, {"TRACES_EXPORTER": "none", "TRACES_SAMPLER": "x"}, {"TRACES_EXPORTER": "otlp", "SDK_DISABLED": "true"},
     {"EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}],
)  # fmt: skip
def test_there_are_no_traces_unless_an_exporter_is_named(environ: dict[str, str]) -> None:
    assert asked(lambda module: pytest.fail(f"looked for {module}"), **environ) == (None, [])


def test_the_defaults_are_a_tenth_of_the_requests_in_plain_grpc() -> None:
    assert asked(TRACES_EXPORTER="otlp") == (
        Settings(exporter="otlp", ratio=0.1, timeout_s=10.0, compression="none"),
        [],
    )
    assert asked(TRACES_EXPORTER="console") == (Settings(exporter="console"), [])


def test_settings_of_traces_win_over_those_of_all_signals(tmp_path: Path) -> None:
    pem = tmp_path / "ca.pem"
    pem.touch()
    found, wrong = asked(
        TRACES_EXPORTER="OTLP", TRACES_SAMPLER="parentbased_traceidratio", TRACES_SAMPLER_ARG="1",
        EXPORTER_OTLP_TIMEOUT="1", EXPORTER_OTLP_TRACES_TIMEOUT="2500", EXPORTER_OTLP_COMPRESSION="gzip",
        EXPORTER_OTLP_PROTOCOL="grpc", EXPORTER_OTLP_ENDPOINT="https://collector", EXPORTER_OTLP_CERTIFICATE=str(pem),
    )  # fmt: skip
    assert (found, wrong) == (Settings(exporter="otlp", ratio=1.0, timeout_s=2.5, compression="gzip"), [])


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER 'zipkin' is not supported; use console, otlp or none"),
        ({"TRACES_SAMPLER": "always_on"}, "OTEL_TRACES_SAMPLER 'always_on' is not supported; use parentbased_traceidratio"),
        ({"TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG '2' is not a number from 0 to 1"),
        ({"TRACES_SAMPLER_ARG": "nan"}, "OTEL_TRACES_SAMPLER_ARG 'nan' is not a number from 0 to 1"),
        ({"TRACES_SAMPLER_ARG": "x"}, "OTEL_TRACES_SAMPLER_ARG 'x' is not a number from 0 to 1"),
        ({"EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL 'http/json' is not supported; use grpc"),
        ({"EXPORTER_OTLP_COMPRESSION": "zstd"}, "OTEL_EXPORTER_OTLP_COMPRESSION 'zstd' is not supported; use none or gzip"),
        ({"EXPORTER_OTLP_TIMEOUT": "10s"}, "OTEL_EXPORTER_OTLP_TIMEOUT '10s' is not a number of milliseconds above 0"),
        ({"EXPORTER_OTLP_TIMEOUT": "0"}, "OTEL_EXPORTER_OTLP_TIMEOUT '0' is not a number of milliseconds above 0"),
        ({"EXPORTER_OTLP_ENDPOINT": "ftp://x"}, "OTEL_EXPORTER_OTLP_ENDPOINT 'ftp://x' is no http:// or https:// URL"),
        ({"EXPORTER_OTLP_ENDPOINT": "http://x:y"}, "OTEL_EXPORTER_OTLP_ENDPOINT 'http://x:y' is no http:// or https:// URL"),
        ({"EXPORTER_OTLP_CERTIFICATE": "nowhere.pem"}, "OTEL_EXPORTER_OTLP_CERTIFICATE 'nowhere.pem' cannot be read"),
    ],
)  # fmt: skip
def test_what_would_not_work_is_refused_by_its_name(environ: dict[str, str], text: str) -> None:
    found, (line,) = asked(**({"TRACES_EXPORTER": "otlp"} | environ))
    assert found is None
    assert text in line


@pytest.mark.parametrize("exporter", ["otlp", "console"])
def test_without_the_extra_the_refusal_says_how_to_install_it(exporter: str) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(module)

    for installed in (missing, lambda _: None):
        _, (line,) = asked(installed, TRACES_EXPORTER=exporter)
        assert f"OTEL_TRACES_EXPORTER={exporter} needs OpenTelemetry, which is not installed" in line
        assert "pip install 'endpoint-picker[otel]'" in line


def served(*args: str, **environ: str) -> tuple[Result, Options | None]:
    """`epp serve` as far as its options."""
    seen: list[Options] = []

    @click.command()
    @serve_options
    def command(options: Options) -> None:
        seen.append(options)

    clean = dict.fromkeys(name for name in os.environ if name.startswith("OTEL_"))
    result = CliRunner().invoke(command, list(args), env=clean | environ)
    return result, seen[0] if seen else None


def test_the_flag_switches_off_what_the_environment_asks_for() -> None:
    environ = {"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    wanted = Settings(exporter="console", ratio=0.5)
    for flags, expected in ((), wanted), (("--tracing",), wanted), (("--tracing=false",), None):
        result, options = served(*flags, **environ)
        assert (result.stderr, options is not None and options.tracing) == ("", expected)


def test_what_is_wrong_with_the_environment_ends_the_start_unless_tracing_is_off() -> None:
    environ = {"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLER": "always_on"}
    result, options = served(**environ)
    assert (result.exit_code, options) == (ExitCode.CONFIG, None)
    assert result.stderr.startswith("error: OTEL_TRACES_SAMPLER 'always_on' is not supported")
    _, options = served("--tracing=false", **environ)
    assert options is not None
    assert options.tracing is None


def test_the_flag_alone_has_no_effect_and_says_so() -> None:
    result, options = served("--tracing")
    assert result.stderr.startswith("warning: --tracing has no effect: OTEL_TRACES_EXPORTER is not set")
    assert options is not None
    assert options.tracing is None


def python(script: str, **environ: str) -> str:
    """What a new interpreter prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=clean | environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOADED = "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('grpc', 'opentelemetry') and sys.modules[m].__spec__.origin))"


def test_nothing_of_opentelemetry_is_imported_by_those_who_fork() -> None:
    script = "import os, sys, workers.worker, workers.tracing_settings as t; found, wrong = t.settings(os.environ); "
    script += "assert not wrong; print(found and found.exporter, len(os.listdir('/proc/self/task'))); " + LOADED
    assert python(script, OPENBLAS_NUM_THREADS="1") == "None 1\n[]"
    assert python(script, OPENBLAS_NUM_THREADS="1", OTEL_TRACES_EXPORTER="otlp") == "otlp 1\n[]"


# Export.


def test_an_exporter_of_opentelemetry_gets_the_spans_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, StatusCode

    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    memory = InMemorySpanExporter()
    exporter = Exporter(memory)
    site = Site((QueueDepth("queue", NoParams()), Broken("b", NoParams())), emit=exporter.emit)
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED)
    envoy.body(BODY)
    asyncio.run(exporter.close())
    spans = {span.name: span for span in memory.get_finished_spans()}
    root, orchestration = spans["gateway.request"], spans["gateway.request_orchestration"]
    assert len(spans) == 6
    assert (root.kind, orchestration.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)
    assert root.parent.is_remote
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert not orchestration.parent.is_remote
    assert orchestration.parent.span_id == root.context.span_id
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "no luck")
    assert dict(root.events[0].attributes) == {"exception.type": "ZeroDivisionError", "exception.message": "no luck"}
    assert spans["llm_d.epp.scorer.queue-scorer"].status.status_code is StatusCode.UNSET
    assert spans["llm_d.epp.scorer.queue-scorer"].attributes["llm_d.epp.scorer.weight"] == 2.0
    assert root.resource.attributes["service.name"] == "llm-d-epp"
    assert root.resource.attributes["process.pid"] == os.getpid()
    assert root.resource.attributes["deployment.environment"] == "test"
    assert all("trace_id" in span.to_json() for span in spans.values())


@pytest.mark.parametrize("environ", [{"OTEL_SERVICE_NAME": "mine"}, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}])
def test_the_service_can_be_named(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    memory = InMemorySpanExporter()
    exporter = Exporter(memory)
    exporter.emit(Span("gateway.request", 1, 2, 0, 3, {}))
    asyncio.run(exporter.close())
    assert memory.get_finished_spans()[0].resource.attributes["service.name"] == "mine"


def test_the_console_gets_one_line_of_json_per_span() -> None:
    script = """if True:
        import asyncio
        from workers.tracing import Span
        from workers.tracing_export import Exporter, open_exporter
        from workers.tracing_settings import Settings
        exporter = Exporter(open_exporter(Settings(exporter="console")))
        for name in "ab":
            exporter.emit(Span(name, 1, 2, 0, 3, {"k": ["v"]}))
        asyncio.run(exporter.close())
    """
    lines = python(script).splitlines()
    assert len(lines) == 2
    assert all(line.startswith('{"name": ') and line.endswith("}") for line in lines)


BLACK_HOLE = """if True:
    import asyncio, gc, json, os, socket, sys
    from workers import log
    from workers.tracing import Span
    from workers.tracing_export import Exporter, open_exporter
    from workers.tracing_settings import settings

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096

    log.configure()
    hole = socket.create_server(("127.0.0.1", 0))  # the kernel accepts; nobody answers
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{hole.getsockname()[1]}"
    asked, wrong = settings(os.environ)
    exporter = Exporter(open_exporter(asked))

    def emit(count):
        for number in range(count):
            exporter.emit(Span("gateway.request", 1, number + 1, 0, 3, {"gen_ai.request.model": "m" * 128, "n": number}))

    emit(4_000)
    before = resident()
    emit(40_000)
    grown = resident() - before
    from opentelemetry.sdk.trace import ReadableSpan
    held = sum(isinstance(held, ReadableSpan) for held in gc.get_objects())
    asyncio.run(asyncio.wait_for(exporter.close(0.2), 20))
    print(json.dumps([held, grown]))
    sys.stdout.flush()
    os._exit(0)  # as a worker leaves
"""


def test_a_collector_that_never_answers_costs_no_waiting_and_bounded_memory() -> None:
    held, grown = json.loads(python(BLACK_HOLE, OTEL_TRACES_EXPORTER="otlp"))
    assert SPANS_MAX <= held <= SPANS_MAX + 256
    assert grown < 5 << 20


def test_what_repeats_itself_is_told_once_a_minute() -> None:
    told: list[str] = []

    class Log:
        def error(self, event: str, *, problem: str) -> None:
            told.append(problem)

    now = 100.0
    handler = _Told(Log(), now=lambda: now)
    for template in ("Failed to export %s", "Failed to export %s", "other %s"):
        handler.emit(logging.LogRecord("x", logging.ERROR, "", 0, template, ("traces",), None))
    now = 200.0
    handler.emit(logging.LogRecord("x", logging.ERROR, "", 0, "Failed to export %s", ("traces",), None))
    assert told == ["Failed to export traces", "other traces", "Failed to export traces"]
