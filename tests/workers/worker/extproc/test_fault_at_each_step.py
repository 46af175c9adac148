"""A fault at any step of a routed request leaks no load, no running request and no ticket."""

import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest

import workers.worker.extproc.reservation as reservation
from epp.decision.decision import Decision, Response
from epp.metrics.request_series import REQUEST, REQUEST_RUNNING
from epp.plugin import NoParams, PreRequest, ResponseComplete
from epp.plugins.producers.inflight import InflightLoad
from epp.request import Request
from tests.fakes import FakeServices
from tests.modes import interpreted_only
from tests.pair import Envoy, Pair
from tests.workers.worker.extproc.streams import USAGE, Remembers
from tests.workers.worker.extproc.test_evicted_stream import Tracked
from tests.workers.worker.extproc.test_stages import BODY, pair

pytestmark = interpreted_only("breaks steps of the request path")


class Injected(Exception):
    """The fault that a test injects."""


def raises(*_arguments: Any, **_more: Any) -> Any:
    raise Injected


class Tickets:
    """Stands for flow control: gives every request this ticket, and counts its calls."""

    waited = False

    def __init__(self) -> None:
        self.given = self.ended = 0
        self.placed: Callable[[], None] = lambda: None
        self.after_done: Callable[[], None] = lambda: None

    def enter(self, request: Request) -> "Tickets":
        self.given += 1
        return self

    def freed(self) -> None: ...

    def done(self) -> None:
        self.ended += 1
        self.after_done()


class Breaks(PreRequest, ResponseComplete):
    """Breaks the decision before it is placed, or raises when the answer has ended."""

    def __init__(self) -> None:
        super().__init__("breaks", NoParams())
        self.before: Callable[[Decision], None] = lambda decision: None
        self.after: Callable[[], None] = lambda: None

    def before_send(self, request: Request, decision: Decision) -> None:
        self.before(decision)

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self.after()


class Parts:
    """Is a `Recorder`, `Agreements` and `Comparison` whose calls have no effect until a test breaks one."""

    def __init__(self) -> None:
        self.decided: Callable[..., int] = lambda *_: 1
        self.ended: Callable[..., None] = lambda *_: None
        self.count: Callable[..., None] = lambda *_: None
        self.answered: Callable[..., None] = lambda *_: None
        self.refused: Callable[..., None] = lambda *_: None


class World:
    """One request of three stages, with everything that it may hold."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.remembers, self.breaks, self.parts, self.tickets = Remembers(), Breaks(), Parts(), Tickets()
        self.tokens = InflightLoad("inflight-load-producer", InflightLoad.Params())
        self.services = FakeServices()
        self.tokens.start(self.services)
        self.pair: Pair = pair(self.breaks, self.tokens, self.remembers)
        self.pair.series.caps.served("m", "m", "")  # so that requests are counted at once
        self.tokens.start(self.services)  # `pair` has started it with services of its own
        self.app: Any = self.pair.app
        self.app.admission = self.tickets
        self.app.evictions = self.tracked = Tracked()
        telemetry = self.app.telemetry
        telemetry.recorder = telemetry.agreements = telemetry.comparison = self.parts

    def breaks_count(self, number: int) -> None:
        """Lets the count with this number fail, among those that a request begins with."""
        real, calls = reservation.increase, itertools.count()
        self.monkeypatch.setattr(reservation, "increase", lambda *given: raises() if next(calls) == number else real(*given))

    def breaks_block(self, writer: Any) -> None:
        self.monkeypatch.setattr(type(writer), "block", lambda one, labels: raises() if one is writer else 0)

    def run(self) -> Envoy:
        envoy = self.pair.open()
        for step in (envoy.headers, lambda: envoy.body(BODY), envoy.response_headers, lambda: envoy.response_body(USAGE)):
            if envoy.stream.ended is None:
                step()
        if envoy.stream.ended is None:
            envoy.handler.closed()
        return envoy

    @property
    def running(self) -> int:
        at = [gauge.name for gauge in REQUEST.gauges].index(REQUEST_RUNNING.name)
        return sum(values.gauges[at] for values in self.pair.series.rows(REQUEST).values())


def on_trial(w: World) -> None:
    w.app.trials = {0: 1}
    w.app.pool.tried = raises


def no_target(w: World) -> None:
    def empty(decision: Decision) -> None:
        decision.targets = ()

    w.breaks.before = empty


def foreign_pick(w: World) -> None:
    def pick(decision: Decision) -> None:
        run = decision.run("prefill")
        assert run is not None
        run.picked = [99]

    w.breaks.before = pick


BEFORE: Final[dict[str, Callable[[World], None]]] = {
    "the decision has no target": no_target,
    "a profile has picked no candidate": foreign_pick,
    "the trial of an ejected endpoint": on_trial,
    "the first count": lambda w: w.breaks_count(0),
    "the second count": lambda w: w.breaks_count(1),
    "the third count": lambda w: w.breaks_count(2),
    "the ticket is placed": lambda w: setattr(w.tickets, "placed", raises),
    "the answer": lambda w: setattr(w.app, "destination", raises),
    "the transport": lambda w: w.monkeypatch.setattr("tests.pair.FakeStream.release", raises),
    "the recording": lambda w: setattr(w.parts, "decided", raises),
    "the last decisions": lambda w: w.monkeypatch.setattr(type(w.pair.recent), "add", raises),
    "the shadow profiles": lambda w: setattr(w.parts, "count", raises),
    "the running requests": lambda w: w.breaks_block(w.app.telemetry.metrics._requests),
    "the scheduling attempts": lambda w: w.breaks_block(w.app.telemetry.metrics._attempts),
    "the eviction's start": lambda w: setattr(w.tracked, "track", raises),
}
AFTER: Final[dict[str, Callable[[World], None]]] = {
    "the eviction's end": lambda w: setattr(w.tracked, "ended", raises),
    "the figures": lambda w: w.monkeypatch.setattr(type(w.app.telemetry.metrics.figures), "observe_each", raises),
    "the recording's end": lambda w: setattr(w.parts, "ended", raises),
    "a plugin at the end": lambda w: setattr(w.breaks, "after", raises),
    "the comparison": lambda w: setattr(w.parts, "answered", raises),
    "the ticket's end": lambda w: setattr(w.tickets, "after_done", raises),
}


def test_without_a_fault_nothing_is_held_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(monkeypatch)
    w.run()
    assert w.pair.faults == []
    assert w.tickets.given == w.tickets.ended == len(w.remembers.usages) == 1
    assert sum(w.pair.inflight) == w.running == sum(w.services.tokens.values()) == 0
    assert len(w.services.tokens) == 3


@pytest.mark.parametrize("step", [*BEFORE, *AFTER])
def test_after_a_fault_at_any_step_nothing_is_held(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(monkeypatch)
    {**BEFORE, **AFTER}[step](w)
    envoy = w.run()
    assert len(w.pair.faults) == 1, "the fault is counted once"
    assert sum(map(abs, w.pair.inflight)) == 0
    assert w.running == 0
    assert set(w.services.tokens.values()) <= {0}
    assert w.tickets.given == w.tickets.ended == 1
    assert len(w.remembers.usages) == 1, "the other plugins release what they hold"
    assert envoy.stream.ended is not None or step in AFTER


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_tokens_that_were_counted_before_a_fault_are_released(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w, calls = World(monkeypatch), itertools.count()
    real = FakeServices.add_tokens
    monkeypatch.setattr(FakeServices, "add_tokens", lambda *given: raises() if next(calls) == failing else real(*given))
    w.run()
    assert len(w.pair.faults) == 1
    assert set(w.services.tokens.values()) <= {0}
    assert len(w.services.tokens) == failing
    assert w.tickets.given == w.tickets.ended == 1
