"""Which requests are sampled: the parent's flag or the ratio decides, and a malformed parent is ignored."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.plugin import NoParams
from epp.plugins.scorers.reported import KvUtilization, QueueDepth
from epp.points.instrument import Point
from tests.workers.worker.telemetry.traces import PARENT_ID, SAMPLED, TRACE_ID, UNSAMPLED, Silent, Site, decided, headers
from workers.worker.telemetry.trace_context import parse_traceparent
from workers.worker.telemetry.tracing import Span, Tracer


def test_without_a_parent_the_ratio_decides_and_a_new_trace_begins() -> None:
    site = Site(ratio=1.0)
    parent = parse_traceparent(site.answered()["traceparent"])
    root = site.span("gateway.request")
    assert parent == (root.trace_id, root.span_id, True)
    assert (root.parent, root.remote) == (0, False)


@pytest.mark.parametrize(("ratio", "given"), [(1.0, {"traceparent": UNSAMPLED}), (0.0, {})])
def test_a_request_that_is_not_sampled_is_answered_as_without_tracing(ratio: float, given: dict[str, str]) -> None:
    site = Site((KvUtilization("kv", NoParams()), QueueDepth("queue", NoParams())), ratio=ratio)
    with_tracing = site.answered(**given, **{"x-request-id": "1"})
    calls = list(site.timers.calls)
    site.pair.app.pipelines.tracer = None
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


def test_unknown_fields_of_a_later_traceparent_version_are_ignored() -> None:
    parent = (int(TRACE_ID, 16), int(PARENT_ID, 16), True)
    assert parse_traceparent(f"01-{TRACE_ID}-{PARENT_ID}-09-more") == parent
    assert parse_traceparent(f"cc-{TRACE_ID}-{PARENT_ID}-01") == parent


@given(st.text(max_size=80))
def test_any_text_is_a_parent_or_none(text: str) -> None:
    parent = parse_traceparent(text)
    assert parent is None or (parent.trace_id and parent.span_id)


@given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.integers(0, 255))
def test_every_well_formed_parent_is_parsed(trace_id: int, span_id: int, flags: int) -> None:
    text = f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"
    assert parse_traceparent(text) == (trace_id, span_id, flags & 1 == 1)
    begun = Site(ratio=1.0).pair.app.pipelines.tracer.begin(headers(traceparent=text))  # type: ignore[union-attr]
    assert (begun is not None) == (flags & 1 == 1)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_the_ratio_is_the_share_of_requests_that_are_sampled(ratio: float) -> None:
    tracer = Site(ratio=ratio).pair.app.pipelines.tracer
    assert tracer is not None
    given = headers(accept="*/*")
    share = sum(tracer.begin(given) is not None for _ in range(4000)) / 4000
    assert abs(share - ratio) < 0.03
    assert share == ratio or 0 < ratio < 1


def test_a_sampler_that_does_not_follow_the_client_decides_by_the_trace_id() -> None:
    usual = Site(ratio=1.0).pair.app.pipelines.tracer
    assert usual is not None

    def begun(ratio: float, trace_id: int, flags: int) -> bool:
        spans: list[Span] = []
        bare = usual._timers
        tracer = Tracer(usual.pipeline, bare, spans.append, ratio=ratio, parent_based=False, rng=random.Random(1))
        trace = tracer.begin(headers(traceparent=f"00-{trace_id:032x}-{7:016x}-{flags:02x}"))
        assert trace is None or trace.trace_id == trace_id
        return trace is not None

    assert begun(1.0, 1, 0) and begun(1.0, 1, 1)
    assert not begun(0.0, 1, 1)
    low, high = 1 << 62, 3 << 62
    assert begun(0.5, low, 0) and not begun(0.5, high, 1)


def test_sampled_and_other_requests_get_the_same_decision_in_any_order() -> None:
    scorers = (KvUtilization("kv", NoParams()), QueueDepth("queue", NoParams()), Silent("quiet", NoParams()))
    expected = decided(Site(scorers))
    for order in itertools.product(({}, {"traceparent": SAMPLED}), repeat=3):
        site = Site(scorers)
        assert [decided(site, **headers) for headers in order] == [expected] * 3
