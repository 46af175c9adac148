"""Isolation: which plugin failed, and the pipeline without it."""

from typing import Any

import numpy as np
import pytest

from epp.candidates import Candidates, Mask, Scores
from epp.decision.decide import check_picked, run
from epp.decision.pipeline import WiredProfile, Wiring, compile_pipeline
from epp.errors import PluginFault, blame
from epp.plugin import (
    Admitter,
    DataProducer,
    Filter,
    NoParams,
    Parser,
    Picker,
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
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles import SingleProfile
from epp.points import instrument
from epp.points.instrument import Point
from epp.points.isolation import FAULTS_MAX, WITHIN_S, Faults, culprit, dispensable, without
from epp.request import Request
from tests.cases import cases
from tests.fakes import candidates, request


class Raises(Scorer):
    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        return self._deeper()

    def _deeper(self) -> Scores | None:
        raise ZeroDivisionError


class Misshapen(Scorer):
    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        return np.zeros(99)


class RaisesMask(Filter):
    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        return np.zeros(1)[7]  # type: ignore[no-any-return]


class WrongPick(Picker):
    def pick(self, request: Request, candidates: Candidates, totals: Scores, profile: Profile) -> list[int]:
        return [99]


def wiring(*members: Plugin, plugins: tuple[Plugin, ...] = ()) -> Wiring:
    picker = next((m for m in members if isinstance(m, Picker)), MaxScore("p", MaxScore.Params()))
    in_profile = tuple(dict.fromkeys((*members, picker)))
    return Wiring(
        plugins=(*in_profile, *plugins),
        parsers=(),
        handler=SingleProfile("h", NoParams()),
        profiles=(WiredProfile("default", tuple((m, 1.0) for m in in_profile)),),
        producers=tuple(p for p in plugins if isinstance(p, DataProducer)),
    )


def timed(_point: Point, _plugin: Plugin, call: Any) -> Any:
    def wrapped(*args: Any) -> Any:
        return call(*args)

    return wrapped


@pytest.mark.parametrize("wrap", [instrument.bare, timed])
@pytest.mark.parametrize("cls", [Raises, Misshapen, RaisesMask, WrongPick])
def test_the_failing_plugin_is_found_for_each_kind_of_fault(cls: type[Plugin], wrap: Any) -> None:
    wrong = cls("wrong", NoParams())
    profile = compile_pipeline(wiring(wrong), wrap).profiles["default"]
    with pytest.raises(Exception) as raised:
        run(profile, request(), candidates({"waiting_requests": [1, 2]}))
    assert culprit(raised.value) is wrong


def test_an_exception_outside_plugins_has_no_culprit() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        1 / 0
    assert culprit(raised.value) is None
    assert culprit(ValueError("never raised")) is None


def test_the_innermost_plugin_of_nested_calls_is_the_culprit() -> None:
    inner, outer = Raises("inner", NoParams()), Raises("outer", NoParams())
    problem = ZeroDivisionError()
    for caller in (inner, outer):  # in the order in which the exception passes them
        blame(problem, caller)
    assert culprit(problem) is inner


def test_the_error_names_the_picker_that_broke_a_rule() -> None:
    profile = compile_pipeline(wiring(WrongPick("wrong", NoParams()))).profiles["default"]
    with pytest.raises(PluginFault, match="picker 'wrong'"):
        check_picked(profile, [99], 2)


@cases(
    ("points", "expected"),
    [
        ((Scorer,), True), ((DataProducer,), True), ((RequestHeader,), True), ((PreRequest,), True), ((ResponseReceived,), True),
        ((ResponseStreaming,), True), ((ResponseComplete,), True), ((DataProducer, PreRequest, ResponseComplete), True),
        ((Filter,), False), ((Screener,), False), ((Admitter,), False), ((Picker,), False), ((Parser,), False),
        ((Filter, Scorer), False), ((Scorer, Picker), False), ((), False),
    ],
)  # fmt: skip
def test_plugins_that_refuse_or_choose_are_indispensable_and_others_are_not(points: Any, expected: bool) -> None:
    cls = type("Made", points or (Plugin,), {})
    assert dispensable(cls("made", NoParams())) is expected


def test_a_wiring_without_a_plugin_makes_no_calls_of_it() -> None:
    both = type("Both", (DataProducer, Scorer, ResponseComplete), {})("both", NoParams())
    other = Raises("other", NoParams())
    whole = wiring(both, other, plugins=(both,))
    pipeline = compile_pipeline(without(whole, {"both"}))
    assert both not in pipeline.wiring.plugins
    assert pipeline.producers == () and pipeline.response_complete == ()
    assert len(pipeline.profiles["default"].scorers) == 1
    assert without(whole, ()) == whole


def test_five_faults_within_a_minute_are_too_many() -> None:
    faults = Faults()
    assert [faults.too_many("a", now) for now in range(FAULTS_MAX)] == [False] * (FAULTS_MAX - 1) + [True]
    assert not faults.too_many("b", 3.0), "faults are counted per plugin"


def test_faults_far_apart_are_tolerated() -> None:
    faults = Faults()
    assert not any(faults.too_many("a", now * WITHIN_S / 3) for now in range(50))


def test_for_a_minute_after_a_pause_one_more_fault_is_too_many() -> None:
    faults = Faults()
    faults.tried_again("a", 100.0)
    assert faults.too_many("a", 100.0 + WITHIN_S)
    faults.tried_again("a", 300.0)
    assert not faults.too_many("a", 300.1 + WITHIN_S)
