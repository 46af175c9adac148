"""The hot path, with a pipeline made by hand."""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest

from epp.candidates import Candidates, Scores
from epp.data import WAITING
from epp.decide import PROFILE_ROUNDS_MAX, decide
from epp.decision import Decision
from epp.errors import Cause, PluginFault, ProducerFailed, Refused
from epp.pipeline import Pipeline, Recipe, WiredProfile, compile_pipeline
from epp.plugin import DataProducer, Filter, NoParams, Picker, Plugin, PreRequest, Profile, Scorer
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles.single import SingleProfile
from epp.plugins.scorers.queue_depth import QueueDepth
from epp.request import Request, Subset
from tests.fakes import FakePool, FakeServices, candidates, request


def pipeline(*members: Plugin, others: Sequence[Plugin] = (), handler: Any = None) -> Pipeline:
    picker = () if any(isinstance(m, Picker) for m in members) else (MaxScore("pick", MaxScore.Params()),)
    everyone = (*members, *picker)
    made = compile_pipeline(
        Recipe(
            plugins=(*everyone, *others),
            parsers=(),
            handler=handler or SingleProfile("handler", NoParams()),
            profiles=(WiredProfile("default", tuple((m, 1.0) for m in everyone)),),
            producers=tuple(p for p in others if isinstance(p, DataProducer)),
            columns=(WAITING,),
        )
    )
    made.start(FakeServices())
    return made


def run(made: Pipeline, pool: FakePool, req: Request | None = None) -> Decision:
    coroutine = decide(made, req or request(), pool)
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Decision = done.value
        return result
    raise AssertionError("the decision waits for something")


def test_the_shortest_queue_gets_the_request() -> None:
    pool = FakePool(candidates({"waiting_requests": [5, 1, 3]}))
    decision = run(pipeline(QueueDepth("q", NoParams())), pool)
    assert [t.name for t in decision.targets] == ["pod-1"]
    assert decision.runs["default"].totals.tolist() == [0.0, 1.0, 0.5]


def test_no_candidates_is_a_refusal() -> None:
    pool = FakePool(candidates({"waiting_requests": [5]}))
    with pytest.raises(Refused) as refused:
        run(pipeline(QueueDepth("q", NoParams())), pool, request(subset=Subset([])))
    assert refused.value.cause is Cause.NO_CANDIDATES


def test_a_subset_is_obeyed() -> None:
    pool = FakePool(candidates({"waiting_requests": [5, 1, 3]}))
    decision = run(pipeline(QueueDepth("q", NoParams())), pool, request(subset=Subset(["10.0.0.3:8000", "10.0.0.1"])))
    assert decision.targets[0].name == "pod-2"


class KeepNone(Filter):
    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Any:
        return np.zeros(len(candidates), dtype=bool)


class KeepOdd(Filter):
    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Any:
        return np.arange(len(candidates)) % 2 == 1


class SeesTwo(Filter):
    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Any:
        assert len(candidates) == 2
        return np.ones(2, dtype=bool)


def test_filters_narrow_in_order() -> None:
    pool = FakePool(candidates({"waiting_requests": [0, 3, 0, 1]}))
    decision = run(pipeline(KeepOdd("a", NoParams()), SeesTwo("b", NoParams()), QueueDepth("q", NoParams())), pool)
    assert decision.targets[0].name == "pod-3"


def test_filters_that_leave_nobody_refuse_the_request() -> None:
    with pytest.raises(Refused) as refused:
        run(pipeline(KeepNone("none", NoParams())), FakePool(candidates({"waiting_requests": [0, 3]})))
    assert refused.value.cause is Cause.NO_ENDPOINT_LEFT


class Foreign(Scorer):
    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        return np.array([np.nan, 7.0, -3.0])


Foreign.__module__ = "somebody.elses"


def test_a_foreign_scorer_is_clipped_and_nan_counts_as_nothing() -> None:
    decision = run(pipeline(Foreign("f", NoParams())), FakePool(candidates({"waiting_requests": [0, 0, 0]})))
    assert decision.runs["default"].totals.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("picked", [(), (3,), (-1,), (0, 0), (0, 5)])
def test_a_picker_that_breaks_its_contract_is_named(picked: tuple[int, ...]) -> None:
    class Bad(Picker):
        def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: Profile) -> Sequence[int]:
            return picked

    with pytest.raises(PluginFault, match="picker 'bad'"):
        run(pipeline(Bad("bad", NoParams())), FakePool(candidates({"waiting_requests": [0, 0, 0]})))


def test_a_handler_that_never_stops_is_a_fault_and_not_a_hang() -> None:
    class Endless(SingleProfile):
        rounds = 0

        def pick(self, request: Request, profiles: Any, runs: Any) -> Any:
            self.rounds += 1
            return tuple(profiles.values())

    handler = Endless("endless", NoParams())
    with pytest.raises(PluginFault, match="endless"):
        run(pipeline(QueueDepth("q", NoParams()), handler=handler), FakePool(candidates({"waiting_requests": [0]})))
    assert handler.rounds == PROFILE_ROUNDS_MAX


class FailsOpen(DataProducer):
    def produce(self, request: Request, candidates: Candidates) -> None:
        raise ProducerFailed("no answer")


class ComesLate(DataProducer):
    def produce(self, request: Request, candidates: Candidates) -> Any:
        raise TimeoutError("not done within 1 s")


class Waits(DataProducer):
    def produce(self, request: Request, candidates: Candidates) -> Any:
        class Once:
            def __await__(self) -> Generator[str, None, None]:
                yield "a future"

        return Once()


def test_a_producer_that_fails_open_is_counted_and_scoring_goes_on() -> None:
    pool = FakePool(candidates({"waiting_requests": [1, 0]}))
    assert (
        run(pipeline(QueueDepth("q", NoParams()), others=[FailsOpen("p", NoParams())]), pool).targets[0].name == "pod-1"
    )
    assert pool.failures == [("p", "no answer")]


def test_a_producer_that_comes_late_fails_open_under_its_own_name() -> None:
    pool = FakePool(candidates({"waiting_requests": [1, 0]}))
    others = [FailsOpen("p", NoParams()), ComesLate("late", NoParams())]
    run(pipeline(QueueDepth("q", NoParams()), others=others), pool)
    assert pool.failures == [("p", "no answer"), ("late", "not done within 1 s")]


def test_a_plugin_that_cannot_start_is_named() -> None:
    class NoStart(QueueDepth):
        def start(self, services: Any) -> None:
            raise KeyError("a file")

    with pytest.raises(PluginFault, match="plugin 'cold' cannot start: KeyError: 'a file'"):
        pipeline(NoStart("cold", NoParams())).start(None)  # type: ignore[arg-type]


class Text(QueueDepth):
    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Any:
        return "high"


Text.__module__ = "somebody.elses"


def test_a_scorer_that_returns_no_numbers_is_told_what_to_return() -> None:
    with pytest.raises(PluginFault, match="scorer 't' returned an object of type str; return one score per candidate"):
        run(pipeline(Text("t", NoParams())), FakePool(candidates({"waiting_requests": [0]})))


def test_a_decision_that_waits_is_stepped_by_its_owner() -> None:
    made = pipeline(QueueDepth("q", NoParams()), others=[Waits("w", NoParams())])
    coroutine = decide(made, request(), FakePool(candidates({"waiting_requests": [1, 0]})))
    assert coroutine.send(None) == "a future"
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value.targets[0].name == "pod-1"


class Stamps(PreRequest):
    def before_send(self, request: Request, decision: Decision) -> None:
        decision.headers["x-stamped"] = decision.targets[0].address


def test_before_send_may_add_headers() -> None:
    decision = run(
        pipeline(QueueDepth("q", NoParams()), others=[Stamps("s", NoParams())]),
        FakePool(candidates({"waiting_requests": [1, 0]})),
    )
    assert decision.headers == {"x-stamped": "10.0.0.2:8000"}
