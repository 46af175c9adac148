"""Each fault of a plugin costs one request. Then the plugin is left out for a while, and then it is tried again."""

from collections.abc import Callable
from typing import Any

import pytest

from epp.candidates import Candidates, Scores
from epp.decision.decision import Decision, Response
from epp.metrics.request_series import ISOLATION
from epp.plugin import (
    DataProducer,
    NoParams,
    Plugin,
    PreRequest,
    Profile,
    RequestHeader,
    ResponseComplete,
    ResponseReceived,
    ResponseStreaming,
    Scorer,
    Screener,
)  # fmt: skip
from epp.points.isolation import FAULTS_MAX, PAUSE_S
from epp.request import Request
from shm.segment import Region
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from tests.pair import Pair, bodies
from tests.workers.worker.extproc.streams import BODY, USAGE, pair
from workers.cli import explain_view
from workers.process.layout import series_schema_of
from workers.worker.isolation import Isolation


class Fails:
    """A plugin with a call that fails while the test wants it."""

    failing = True
    calls = 0

    def call(self) -> None:
        self.calls += 1
        if self.failing:
            raise ZeroDivisionError


class FailsHeader(Fails, RequestHeader):
    def read(self, request: Request) -> None:
        self.call()


class FailsProducer(Fails, DataProducer):
    def produce(self, request: Request, candidates: Candidates) -> None:
        self.call()


class FailsScorer(Fails, Scorer):
    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        self.call()
        return None


class FailsBefore(Fails, PreRequest):
    def before_send(self, request: Request, decision: Decision) -> None:
        self.call()


class FailsReceived(Fails, ResponseReceived):
    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        self.call()


class FailsStreaming(Fails, ResponseStreaming):
    def response_streaming(self, request: Request, decision: Decision) -> None:
        self.call()


class FailsComplete(Fails, ResponseComplete):
    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self.call()


class FailsScreener(Fails, Screener):
    def screen(self, request: Request, candidates: Candidates) -> Any:
        self.call()


class Isolated:
    """A pair with isolation of plugins. It has the pair's clock."""

    def __init__(self, *plugins: Plugin) -> None:
        self.pair: Pair = pair(*plugins)
        self.faulty: list[str] = []
        self.warned: list[str] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        schema = series_schema_of(ISOLATION, areas=1)
        self.region = Region(memoryview(bytearray(schema.bytes)))
        self.schema = schema
        isolation = Isolation(
            self.pair.app.pipelines,
            SeriesWriter(schema, schema.area(self.region, 0)),
            now=lambda: self.pair.time,
            later=lambda seconds, act: self.later.append((self.pair.time + seconds, act)),
            on_fault=lambda _problem, plugin: self.faulty.append(plugin),
            warn=lambda event, **fields: self.warned.append(f"{fields['plugin']}: {event}"),
        )
        self.pair.app.guards.on_fault = isolation.fault

    def request(self) -> str:
        """The outcome of one request, after the end of its answer."""
        envoy = self.pair.open()
        envoy.headers()
        answers = envoy.body(BODY)
        if answers[0].WhichOneof("response") == "immediate_response":
            return str(answers[0].immediate_response.status.code)
        envoy.response_headers()
        whole = envoy.response_body(USAGE[:9], last=False) + envoy.response_body(USAGE[9:])
        return "ok" if bodies(whole, "response_body")[0] == USAGE and envoy.stream.ended is None else "cut"

    def wait(self, seconds: float) -> None:
        self.pair.time += seconds
        due = [entry for entry in self.later if entry[0] <= self.pair.time]
        self.later = [entry for entry in self.later if entry not in due]
        for _, act in due:
            act()

    def rows(self) -> Any:
        rows = SeriesReader(self.schema, self.region, serving=lambda _: True).rows()
        return {labels[0]: (*gauges, *counters) for labels, (gauges, counters, _) in rows.items()}


IN_THE_WAY = (FailsHeader, FailsProducer, FailsBefore)
AFTERWARDS = (FailsReceived, FailsStreaming, FailsComplete)


@pytest.mark.parametrize("cls", IN_THE_WAY)
def test_each_fault_costs_one_request_and_the_fifth_is_the_last(cls: Any) -> None:
    plugin = cls("bad", NoParams())
    world = Isolated(plugin)
    assert [world.request() for _ in range(FAULTS_MAX + 3)] == ["500"] * FAULTS_MAX + ["ok"] * 3
    assert plugin.calls == FAULTS_MAX and world.faulty == ["bad"] * FAULTS_MAX
    assert len(world.warned) == 1 and "bad: a plugin failed too often" in world.warned[0]
    assert world.pair.counter("faults_total") == FAULTS_MAX
    assert sum(world.pair.inflight) == 0


@pytest.mark.parametrize("cls", AFTERWARDS)
def test_a_fault_in_the_response_phase_costs_no_request_but_the_plugin_is_left_out_too(cls: Any) -> None:
    plugin = cls("bad", NoParams())
    world = Isolated(plugin)
    assert [world.request() for _ in range(FAULTS_MAX + 3)] == ["ok"] * (FAULTS_MAX + 3)
    assert plugin.calls == FAULTS_MAX and len(world.warned) == 1
    assert sum(world.pair.inflight) == 0


def test_after_a_minute_the_plugin_is_tried_again_and_one_fault_takes_it_out() -> None:
    plugin = FailsProducer("bad", NoParams())
    world = Isolated(plugin)
    for _ in range(FAULTS_MAX):
        world.request()
    world.wait(PAUSE_S)
    assert [world.request() for _ in range(3)] == ["500", "ok", "ok"]
    world.wait(PAUSE_S)
    plugin.failing = False
    assert [world.request() for _ in range(3)] == ["ok"] * 3
    assert plugin.calls == FAULTS_MAX + 1 + 3
    assert len(world.warned) == 4 and "tried again" in world.warned[1]


def test_a_screener_is_never_left_out() -> None:
    world = Isolated(FailsScreener("bad", NoParams()))
    assert [world.request() for _ in range(8)] == ["500"] * 8
    assert world.warned == [] and world.faulty == ["bad"] * 8


def test_other_plugins_continue_and_explanations_name_the_plugin_that_is_left_out() -> None:
    bad, good = FailsComplete("bad", NoParams()), FailsComplete("good", NoParams())
    good.failing = False
    world = Isolated(bad, good)
    for _ in range(FAULTS_MAX + 2):
        world.request()
    assert good.calls == FAULTS_MAX + 2
    newest, *_, oldest = world.pair.recent.explained()
    assert newest.targets and oldest.targets
    assert (newest.left_out, oldest.left_out) == (["bad"], [])
    assert "without bad: left out for a while after too many faults" in list(explain_view.lines(newest))


def test_the_explanation_of_a_request_that_failed_names_the_plugin_and_what_it_raised() -> None:
    world = Isolated(FailsProducer("bad", NoParams()))
    assert world.request() == "500"
    (explained,) = world.pair.recent.explained()
    assert "failed with 500: plugin 'bad' raised ZeroDivisionError" in list(explain_view.lines(explained))


def test_an_open_stream_calls_response_complete_of_all_plugins_that_ran_before_send() -> None:
    class Counts(PreRequest, ResponseComplete):
        failing = False

        def __init__(self) -> None:
            super().__init__("counts", NoParams())
            self.held: set[int] = set()

        def before_send(self, request: Request, decision: Decision) -> None:
            if self.failing:
                raise ZeroDivisionError
            self.held.add(id(request))

        def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
            self.held.discard(id(request))

    plugin = Counts()
    world = Isolated(plugin)
    envoy = world.pair.open()
    envoy.headers()
    envoy.body(BODY)
    plugin.failing = True
    for _ in range(FAULTS_MAX):
        world.request()
    assert plugin not in world.pair.app.pipelines.current.pipeline.wiring.plugins and len(plugin.held) == 1
    envoy.response_headers()
    envoy.response_body(USAGE)
    assert plugin.held == set()


def test_faults_and_plugins_that_are_left_out_are_counted_by_plugin() -> None:
    world = Isolated(FailsProducer("bad", NoParams()), FailsScreener("stays", NoParams()))
    world.request()
    assert "stays" in world.rows()
    world = Isolated(FailsProducer("bad", NoParams()))
    for _ in range(FAULTS_MAX + 1):
        world.request()
    assert world.rows() == {"bad": (1, FAULTS_MAX, 1)}
    world.wait(PAUSE_S)
    assert world.rows() == {"bad": (0, FAULTS_MAX, 1)}
