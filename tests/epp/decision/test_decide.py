"""The hot path, with a handmade pipeline."""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest

from epp.candidates import Candidates, Scores
from epp.data import WAITING
from epp.decision.decide import PROFILE_ROUNDS_MAX, choose
from epp.decision.decision import Decision
from epp.decision.pipeline import Pipeline, WiredProfile, Wiring, compile_pipeline
from epp.errors import Cause, PluginFault, ProducerFailed, Refused, blamed
from epp.plugin import Admitter, DataProducer, Filter, NoParams, Picker, Plugin, PreRequest, Profile, Scorer
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles import SingleProfile
from epp.plugins.scorers.reported import QueueDepth
from epp.request import Request, Subset
from tests.fakes import FakePool, FakeServices, candidates, request


def pipeline(*members: Plugin, extra: Sequence[Plugin] = (), handler: Any = None) -> Pipeline:
    picker = () if any(isinstance(m, Picker) for m in members) else (MaxScore("pick", MaxScore.Params()),)
    in_profile = (*members, *picker)
    compiled = compile_pipeline(
        Wiring(
            plugins=(*in_profile, *extra),
            parsers=(),
            handler=handler or SingleProfile("handler", NoParams()),
            profiles=(WiredProfile("default", tuple((m, 1.0) for m in in_profile)),),
            producers=tuple(p for p in extra if isinstance(p, DataProducer)),
            columns=(WAITING,),
        )
    )
    compiled.start(FakeServices())
    return compiled


def run(compiled: Pipeline, pool: FakePool, req: Request | None = None) -> Decision:
    coroutine = choose(compiled, req or request(), pool)
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Decision = done.value
        return result
    raise AssertionError("the decision waits")


def test_the_shortest_queue_gets_the_request() -> None:
    pool = FakePool(candidates({"waiting_requests": [5, 1, 3]}))
    decision = run(pipeline(QueueDepth("q", NoParams())), pool)
    assert [t.name for t in decision.targets] == ["pod-1"]
    assert decision.runs["default"].totals.tolist() == [0.0, 1.0, 0.5]


def test_a_request_without_candidates_is_refused() -> None:
    pool = FakePool(candidates({"waiting_requests": [5]}))
    with pytest.raises(Refused) as refused:
        run(pipeline(QueueDepth("q", NoParams())), pool, request(subset=Subset([])))
    assert refused.value.cause is Cause.NO_CANDIDATES


def test_the_target_comes_from_the_subset() -> None:
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


def test_each_filter_gets_what_the_one_before_kept() -> None:
    pool = FakePool(candidates({"waiting_requests": [0, 3, 0, 1]}))
    decision = run(pipeline(KeepOdd("a", NoParams()), SeesTwo("b", NoParams()), QueueDepth("q", NoParams())), pool)
    assert decision.targets[0].name == "pod-3"


def test_a_request_is_refused_if_the_filters_keep_no_candidate() -> None:
    with pytest.raises(Refused) as refused:
        run(pipeline(KeepNone("none", NoParams())), FakePool(candidates({"waiting_requests": [0, 3]})))
    assert refused.value.cause is Cause.NO_ENDPOINT_LEFT


class Foreign(Scorer):
    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        return np.array([np.nan, 7.0, -3.0])


Foreign.__module__ = "foreign.plugins"


def test_a_foreign_scorer_is_clipped_and_nan_counts_as_0() -> None:
    decision = run(pipeline(Foreign("f", NoParams())), FakePool(candidates({"waiting_requests": [0, 0, 0]})))
    assert decision.runs["default"].totals.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("picked", [(), (3,), (-1,), (0, 0), (0, 5)])
def test_the_error_names_a_picker_that_breaks_its_contract(picked: tuple[int, ...]) -> None:
    class Bad(Picker):
        def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: Profile) -> Sequence[int]:
            return picked

    with pytest.raises(PluginFault, match="picker 'bad'"):
        run(pipeline(Bad("bad", NoParams())), FakePool(candidates({"waiting_requests": [0, 0, 0]})))


def test_a_handler_that_never_stops_is_a_plugin_fault() -> None:
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


class TimesOut(DataProducer):
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
    assert run(pipeline(QueueDepth("q", NoParams()), extra=[FailsOpen("p", NoParams())]), pool).targets[0].name == "pod-1"
    assert pool.failures == [("p", "no answer")]


def test_a_producer_that_times_out_fails_open() -> None:
    pool = FakePool(candidates({"waiting_requests": [1, 0]}))
    extra = [FailsOpen("p", NoParams()), TimesOut("late", NoParams())]
    run(pipeline(QueueDepth("q", NoParams()), extra=extra), pool)
    assert pool.failures == [("p", "no answer"), ("late", "not done within 1 s")]


def test_the_error_names_a_plugin_that_cannot_start() -> None:
    class NoStart(QueueDepth):
        def start(self, services: Any) -> None:
            raise KeyError("a file")

    with pytest.raises(PluginFault, match="plugin 'cold' cannot start: KeyError: 'a file'"):
        pipeline(NoStart("cold", NoParams())).start(None)  # type: ignore[arg-type]


class Text(QueueDepth):
    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Any:
        return "high"


Text.__module__ = "foreign.plugins"


def test_the_error_of_a_scorer_without_numbers_says_what_to_return() -> None:
    pool = FakePool(candidates({"waiting_requests": [0]}))
    run(pipeline(Text("t", NoParams())), pool)
    assert "scorer 't' returned an object of type str; return one score per candidate" in str(pool.scorer_failures)


class Failing(QueueDepth):
    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Any:
        raise ZeroDivisionError


class FailingStatic(Failing):
    static = True


@pytest.mark.parametrize("kind", [Failing, FailingStatic])
def test_a_request_is_routed_without_a_scorer_that_raises(kind: type[QueueDepth]) -> None:
    pool = FakePool(candidates({"waiting_requests": [5, 0]}))
    compiled = pipeline(kind("f", NoParams()), QueueDepth("q", NoParams()))
    for count in (1, 2):  # the sum of static scorers is not kept without the one that failed
        decision = run(compiled, pool)
        assert decision.targets[0] is pool.fixed.endpoints[1]
        assert [blamed(problem).name for problem in pool.scorer_failures] == ["f"] * count  # type: ignore[attr-defined]


def test_a_scorer_may_still_refuse_a_request() -> None:
    class Refuses(QueueDepth):
        def score(self, request: Request, candidates: Candidates, profile: Profile) -> Any:
            raise Refused(Cause.NOT_ADMITTED)

    with pytest.raises(Refused):
        run(pipeline(Refuses("r", NoParams())), FakePool(candidates({"waiting_requests": [0]})))


def test_a_decision_yields_the_future_that_a_producer_waits_for() -> None:
    compiled = pipeline(QueueDepth("q", NoParams()), extra=[Waits("w", NoParams())])
    coroutine = choose(compiled, request(), FakePool(candidates({"waiting_requests": [1, 0]})))
    assert coroutine.send(None) == "a future"
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value.targets[0].name == "pod-1"


class Stamps(PreRequest):
    def before_send(self, request: Request, decision: Decision) -> None:
        decision.headers["x-stamped"] = decision.targets[0].address


def test_before_send_may_add_headers() -> None:
    decision = run(
        pipeline(QueueDepth("q", NoParams()), extra=[Stamps("s", NoParams())]), FakePool(candidates({"waiting_requests": [1, 0]}))
    )
    assert decision.headers == {"x-stamped": "10.0.0.2:8000"}


class Holds(Admitter):
    """Holds a request `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__("h", NoParams())
        self.left = times

    def admit(self, request: Request, candidates: Candidates) -> Any:
        self.left -= 1
        return Once() if self.left >= 0 else None


class Once:
    def __await__(self) -> Any:
        yield "a pause"

    def add_done_callback(self, call: object, /) -> None: ...


def test_a_held_request_is_asked_again_with_the_time_of_that_moment() -> None:
    compiled = pipeline(QueueDepth("q", NoParams()), extra=[Holds(1)])
    pool, held = FakePool(candidates({"waiting_requests": [1, 0]})), request()
    coroutine = choose(compiled, held, pool)
    assert coroutine.send(None) == "a pause"
    pool.time = 7.0
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value.targets[0].name == "pod-1" and held.now == 7.0


def test_a_request_that_is_held_without_end_is_refused() -> None:
    compiled = pipeline(QueueDepth("q", NoParams()), extra=[Holds(10**6)])
    coroutine = choose(compiled, request(), FakePool(candidates({"waiting_requests": [1, 0]})))
    with pytest.raises(Refused, match="held 64 times"):
        for _ in range(100):
            coroutine.send(None)
