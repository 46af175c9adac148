"""The contracts of extension points in `epp.plugin`: how often each is called, in which order, and what it may do."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from epp.candidates import Candidates, Mask, Scores
from epp.data import Datum
from epp.decision.decision import Decision, ProfileRun, Response
from epp.decision.pipeline import Pipeline, WiredProfile, Wiring, compile_pipeline
from epp.errors import Cause, Refused
from epp.plugin import (
    Admitter,
    DataProducer,
    Filter,
    NoParams,
    Picker,
    Plugin,
    PreRequest,
    Profile,
    ProfileHandler,
    RequestHeader,
    ResponseComplete,
    ResponseReceived,
    ResponseStreaming,
    Scorer,
    Screener,
)
from epp.plugins.parsers.openai import OpenAI
from epp.points.instrument import Point
from epp.protocol.codec import PIECE_BYTES_MAX
from epp.request import Request
from tests.fakes import FakePool, FakeServices, candidates
from tests.pair import Pair, set_headers
from tests.workers.worker.extproc.streams import BODY, USAGE

NOTE = Datum("note", str, per_profile=True)


class Everything(
    RequestHeader, Screener, DataProducer, Admitter, ProfileHandler, Filter, Scorer, Picker, PreRequest,
    ResponseReceived, ResponseStreaming, ResponseComplete,
):  # fmt: skip
    """A plugin with all points that records every call. Two profiles run, one after the other."""

    def __init__(self) -> None:
        super().__init__("everything", NoParams())
        self.calls: list[str] = []
        self.notes: list[Any] = []
        self.refuses = ""
        self.responses: list[Response] = []

    def note(self, point: str) -> None:
        self.calls.append(point)
        if point == self.refuses:
            raise Refused(Cause.NOT_ADMITTED, f"{point} says no")

    def read(self, request: Request) -> None:
        self.note("read")

    def screen(self, request: Request, candidates: Candidates) -> Mask:
        self.note("screen")
        return np.ones(len(candidates), dtype=bool)

    def produce(self, request: Request, candidates: Candidates) -> None:
        self.note("produce")

    def admit(self, request: Request, candidates: Candidates) -> None:
        self.note("admit")

    def pick(self, request: Request, *args: Any) -> Any:  # of the profile handler or of the picker
        if len(args) == 2:
            profiles, runs = args
            self.note("pick profiles")
            return [] if len(runs) == 2 else [profiles["b" if runs else "a"]]
        candidates, _, _ = args
        self.note("pick")
        self.notes.append(request[NOTE])
        return (len(candidates) - 1,)

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        self.note("result")
        assert runs["a"] is not None
        return Decision(runs["a"].targets, runs, primary="a")

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        self.note("keep")
        return np.arange(len(candidates)) < 2

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        self.note("score")
        self.notes.append(request[NOTE])
        request[NOTE] = f"written by {profile.name}"
        return candidates.ones()

    def before_send(self, request: Request, decision: Decision) -> None:
        self.note("before send")

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        self.note("received")
        response.set_headers["x-of-plugin"] = response.headers["content-type"]

    def response_streaming(self, request: Request, decision: Decision) -> None:
        self.note("streaming")

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self.note("complete")
        self.responses.append(response)


REQUEST_PHASE = [
    "read", "screen", "produce", "admit", "pick profiles", "keep", "score", "pick", "pick profiles", "keep", "score", "pick",
    "pick profiles", "result", "before send",
]  # fmt: skip


def made(plugin: Everything, *others: Plugin, shadow: bool = False) -> Pipeline:
    members = ((plugin, 1.0),)
    profiles = (WiredProfile("a", members), WiredProfile("b", members))
    pipeline = compile_pipeline(
        Wiring(
            plugins=(plugin, *others),
            parsers=(OpenAI("o", NoParams()),),
            handler=plugin,
            profiles=(*profiles, WiredProfile("shadow", members, shadow=True)) if shadow else profiles,
            producers=(plugin,),
        )
    )
    pipeline.start(FakeServices())
    return pipeline


def pair(pipeline: Pipeline) -> Pair:
    return Pair(pipeline, FakePool(candidates({"waiting_requests": [0, 0, 0]})))


def test_each_point_is_called_as_often_and_in_the_order_that_its_contract_says() -> None:
    plugin = Everything()
    envoy = pair(made(plugin)).open()
    envoy.headers()
    assert plugin.calls == []
    envoy.body(BODY)
    assert plugin.calls == REQUEST_PHASE
    del plugin.calls[:]
    answers = envoy.response_headers(kind="text/event-stream")
    added = answers[0].response_headers.response.header_mutation.set_headers
    assert [(o.header.key, o.header.raw_value) for o in added] == [("x-of-plugin", b"text/event-stream")]
    for _ in range(3):
        envoy.response_body(b"data: x\n\n", last=False)
    envoy.response_body(USAGE)
    envoy.handler.half_closed()
    envoy.handler.closed()
    assert plugin.calls == ["received", "streaming", "streaming", "streaming", "complete"]


@pytest.mark.parametrize("ending", ["lost", "half closed", "response headers", "response"])
def test_response_complete_is_called_once_for_each_routed_request_for_every_ending(ending: str) -> None:
    plugin = Everything()
    envoy = pair(made(plugin)).open()
    envoy.headers()
    envoy.body(BODY)
    if ending in ("response headers", "response"):
        envoy.response_headers("503")
    if ending == "response":
        envoy.response_body(USAGE)
    if ending == "half closed":
        envoy.handler.half_closed()
    envoy.handler.closed()
    assert Counter(plugin.calls)["complete"] == 1
    (response,) = plugin.responses
    assert response.status == (503 if ending in ("response headers", "response") else 0)
    assert (response.usage is not None) == (ending == "response")


def test_no_point_after_parsing_is_called_for_a_request_that_cannot_be_parsed() -> None:
    plugin = Everything()
    envoy = pair(made(plugin)).open()
    envoy.headers()
    envoy.body(b"{")
    envoy.handler.closed()
    assert plugin.calls == []


@pytest.mark.parametrize("point", sorted({*REQUEST_PHASE} - {"before send"}))
def test_any_point_may_refuse_the_request_and_no_later_point_runs(point: str) -> None:
    plugin = Everything()
    plugin.refuses = point
    p = pair(made(plugin))
    envoy = p.open()
    envoy.headers()
    (answer,) = envoy.body(BODY)
    envoy.handler.closed()
    assert answer.immediate_response.status.code == 429
    assert f"{point} says no".encode() in answer.immediate_response.body
    assert plugin.calls == REQUEST_PHASE[: REQUEST_PHASE.index(point) + 1]
    assert sum(p.inflight) == 0 and p.faults == []
    assert p.counter("load_refusals_total") == 1


def test_per_profile_data_of_one_profile_are_not_seen_by_another() -> None:
    plugin = Everything()
    envoy = pair(made(plugin)).open()
    envoy.headers()
    envoy.body(BODY)
    assert plugin.notes == [None, "written by a", None, "written by b"]


class Screens(Screener):
    def __init__(self, mask: Sequence[bool]) -> None:
        super().__init__("screens", NoParams())
        self.mask = np.array(mask)

    def screen(self, request: Request, candidates: Candidates) -> Mask:
        assert len(candidates) == 3, "each screener sees all endpoints"
        return self.mask


def test_endpoints_that_pass_all_screeners_stay_candidates() -> None:
    plugin = Everything()
    envoy = pair(made(plugin, Screens([True, False, True]), Screens([False, True, True]))).open()
    envoy.headers()
    assert set_headers(envoy.body(BODY)[0])["x-gateway-destination-endpoint"] == "10.0.0.3:8000"


def test_a_request_is_refused_as_without_endpoints_when_screeners_leave_none() -> None:
    plugin = Everything()
    envoy = pair(made(plugin, Screens([True, False, False]), Screens([False, True, True]))).open()
    envoy.headers()
    (answer,) = envoy.body(BODY)
    assert answer.immediate_response.status.code == 503
    assert b"screeners eliminated all endpoint candidates" in answer.immediate_response.body


class Reports(ResponseComplete):
    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        response.metadata["envoy.lb"] = {"tokens": response.usage.prompt if response.usage else -1}


@pytest.mark.parametrize("size", [0, 10, 200_000])
def test_metadata_of_plugins_goes_with_the_last_piece_of_the_body(size: int) -> None:
    plugin = Everything()
    envoy = pair(made(plugin, Reports("r", NoParams()))).open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    text = USAGE + b" " * size
    answers = envoy.response_body(text)
    pieces = [a.response_body.response.body_mutation.streamed_response for a in answers]
    assert b"".join(p.body for p in pieces) == text
    assert [p.end_of_stream for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces[-1].body) == len(text) - (len(pieces) - 1) * PIECE_BYTES_MAX, "no piece is empty"
    assert answers[-1].dynamic_metadata["envoy.lb"]["tokens"] == 9
    assert not any(a.HasField("dynamic_metadata") for a in answers[:-1])


def reporting(reporter: ResponseComplete) -> Any:
    """Opens a stream of a picker with this plugin alone. Its request is routed."""
    envoy = pair(made(Everything(), reporter)).open()
    envoy.headers()
    envoy.body(BODY)
    return envoy


def test_metadata_of_plugins_goes_with_trailers_if_they_end_the_answer() -> None:
    envoy = reporting(Reports("r", NoParams()))
    envoy.response_headers()
    assert not any(a.HasField("dynamic_metadata") for a in envoy.response_body(USAGE, last=False))
    (answer,) = envoy.response_trailers()
    assert answer.WhichOneof("response") == "response_trailers"
    assert answer.dynamic_metadata["envoy.lb"]["tokens"] == 9


def test_metadata_of_plugins_goes_with_headers_if_no_body_follows() -> None:
    (answer,) = reporting(Reports("r", NoParams())).response_headers("204", last=True)
    assert answer.WhichOneof("response") == "response_headers"
    assert answer.dynamic_metadata["envoy.lb"]["tokens"] == -1


class Unsendable(ResponseComplete):
    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        response.metadata["envoy.lb"] = {"tokens": object()}


def test_metadata_that_cannot_be_sent_are_a_fault_and_the_answer_ends_as_without_them() -> None:
    site = pair(made(Everything(), Unsendable("u", NoParams())))
    envoy = site.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    (answer,) = envoy.response_body(USAGE)
    assert answer.response_body.response.body_mutation.streamed_response.body == USAGE
    assert not answer.HasField("dynamic_metadata")
    assert (site.counter("faults_total"), envoy.stream.ended) == (1, None)


class Keeps(PreRequest):
    def __init__(self) -> None:
        super().__init__("keeps", NoParams())
        self.decisions: list[Decision] = []

    def before_send(self, request: Request, decision: Decision) -> None:
        self.decisions.append(decision)


def test_a_shadow_profile_runs_after_the_decision_and_changes_nothing() -> None:
    plugin, keeps = Everything(), Keeps()
    p = pair(made(plugin, keeps, shadow=True))
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    assert plugin.calls == [*REQUEST_PHASE[:-1], "keep", "score", "pick", "before send"]
    (decision,) = keeps.decisions
    assert list(decision.runs) == ["a", "b"] and list(decision.shadows) == ["shadow"]
    assert sum(p.inflight) == 2, "one per profile that is not a shadow profile"


def test_a_plugin_of_shadow_profiles_alone_only_chooses_there() -> None:
    real, other = Everything(), Everything()
    other.name = "other"
    wiring = made(real).wiring
    shadow = WiredProfile("shadow", ((other, 1.0),), shadow=True)
    pipeline = compile_pipeline(
        Wiring((*wiring.plugins, other), wiring.parsers, wiring.handler, (*wiring.profiles, shadow), wiring.producers)
    )
    p = pair(pipeline)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    envoy.response_body(b"x", last=False)
    envoy.response_body(USAGE)
    assert other.calls == ["read", "keep", "score", "pick"]
    assert not p.faults


class Fails(Scorer):
    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        raise ZeroDivisionError


def test_a_shadow_profile_that_fails_does_not_disturb_the_request() -> None:
    plugin = Everything()
    pool = FakePool(candidates({"waiting_requests": [0, 0, 0]}))
    wiring = made(plugin).wiring
    shadow = WiredProfile("shadow", ((Fails("f", NoParams()), 1.0), (plugin, 1.0)), shadow=True)
    pipeline = compile_pipeline(Wiring(wiring.plugins, wiring.parsers, wiring.handler, (*wiring.profiles, shadow), wiring.producers))
    envoy = Pair(pipeline, pool).open()
    envoy.headers()
    assert envoy.body(BODY)[0].WhichOneof("response") == "request_headers"
    assert [type(problem) for problem in pool.shadow_failures] == [ZeroDivisionError]


def test_every_call_of_every_plugin_can_be_wrapped_and_is_named_once() -> None:
    plugin = Everything()
    pipeline = made(plugin)
    counted: Counter[Point] = Counter()

    def wrap(point: Point, _plugin: Plugin, call: Any, /) -> Any:
        def counting(*args: Any) -> Any:
            counted[point] += 1
            return call(*args)

        return counting

    envoy = pair(pipeline.wrapped(wrap)).open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    envoy.response_body(b"x", last=False)
    envoy.response_body(USAGE)
    twice = {Point.FILTER, Point.SCORER, Point.PICKER}
    assert counted == {p: 3 if p is Point.PROFILE_PICKER else 2 if p in twice else 1 for p in Point}
    named = [point for point, _ in pipeline.timed_points()]
    assert sorted(named) == sorted(point.value for point in Point)


def test_scores_of_all_candidates_go_to_the_gateway_if_that_is_configured() -> None:
    plugin = Everything()
    p = pair(made(plugin))
    p.app.emit_scores = True
    envoy = p.open()
    envoy.headers()
    metadata = envoy.body(BODY)[0].dynamic_metadata["envoy.lb"]
    assert metadata["x-gateway-destination-endpoint"] == "10.0.0.2:8000"
    assert dict(metadata["x-gateway-destination-endpoint-scores"]) == {"10.0.0.1:8000": 1.0, "10.0.0.2:8000": 1.0}
