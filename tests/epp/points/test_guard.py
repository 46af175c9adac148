"""The guard: foreign plugins can access only the request data that they declare, and must return what their point requires."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from epp.candidates import Candidates
from epp.data import WAITING, Datum
from epp.decision.decision import Decision, Response
from epp.errors import PluginFault, ProducerFailed
from epp.plugin import DataProducer, Filter, NoParams, Plugin, PreRequest, Profile, Scorer, Waiting
from epp.plugins.scorers.reported import QueueDepth
from epp.points.guard import VIOLATIONS, counted, declared, guard, within
from epp.points.instrument import Point, scorer
from epp.points.isolation import culprit
from epp.request import Request
from tests.fakes import candidates, request

LENGTH = Datum("length", int, 7)
PRODUCED = Datum("produced", int)
KEPT = Datum("kept", int)
OPTIONAL = Datum("optional", int)
OTHER = Datum("other", int, 9)
BY_PROFILE = Datum("by-profile", int, per_profile=True)


class Foreign(Filter, DataProducer, PreRequest):
    type_name = "foreign"
    consumes = (LENGTH, BY_PROFILE)
    optional = (OPTIONAL,)
    produces = (PRODUCED,)
    keeps = (KEPT,)


Violations = list[tuple[Point, str, str]]


@pytest.fixture
def violations() -> Violations:
    return []


def guarded(violations: Violations, act: Any, point: Point = Point.FILTER, plugin: Plugin | None = None) -> Any:
    """`act(request)`, guarded as the plugin's call at that point."""
    wrap = guard(lambda point, plugin, access: violations.append((point, plugin.name, access)))
    return wrap(point, plugin or Foreign("n", NoParams()), act)


def test_declared_data_can_be_read_and_written(violations: Violations) -> None:
    r = request()
    r[LENGTH], r[OPTIONAL] = 1, 2
    r.profile = "p"
    r[BY_PROFILE] = 3

    def act(r: Request) -> list[int]:
        r[PRODUCED], r[KEPT] = 4, 5
        return [r[LENGTH], r[OPTIONAL], r[BY_PROFILE], r[PRODUCED], r[KEPT]]

    assert guarded(violations, act)(r) == [1, 2, 3, 4, 5]
    assert (r[PRODUCED], r[KEPT]) == (4, 5)
    assert violations == []
    assert type(r.data) is dict


def test_an_undeclared_read_gives_the_default_and_is_counted(violations: Violations) -> None:
    r = request()
    r[OTHER] = 1
    assert guarded(violations, lambda r: (r[OTHER], r.data.get("other"), "other" in r.data))(r) == (9, None, False)
    assert violations == [(Point.FILTER, "n", "read")] * 3
    assert r[OTHER] == 1


def test_an_undeclared_write_is_dropped_and_counted(violations: Violations) -> None:
    r = request()
    r[OTHER] = 1

    def act(r: Request) -> None:
        r[OTHER] = 2
        r[LENGTH] = 3  # read only
        r.data["raw"] = 4
        r.data.pop("other", None)

    guarded(violations, act)(r)
    assert r.data == {"other": 1}
    assert [access for _, _, access in violations] == ["write", "write", "write", "read"]
    with pytest.raises(KeyError):
        guarded(violations, lambda r: r.data["other"])(r)


def test_a_deletion_counts_as_a_write(violations: Violations) -> None:
    r = request()
    r[OTHER], r[PRODUCED] = 1, 2

    def act(r: Request) -> tuple[int, list[Any]]:
        before = (len(r.data), list(r.data))
        del r.data["produced"]
        del r.data["other"]
        return before

    assert guarded(violations, act)(r) == (1, ["produced"])
    assert r.data == {"other": 1}
    assert violations == [(Point.FILTER, "n", "write")]


def test_a_producer_with_an_undeclared_write_fails_open(violations: Violations) -> None:
    r = request()
    with pytest.raises(ProducerFailed, match="'n' writes 'other', which it does not declare"):
        guarded(violations, lambda r: r.__setitem__(OTHER, 1), Point.PRODUCER)(r)
    assert type(r.data) is dict
    assert violations == [(Point.PRODUCER, "n", "write")]


def test_the_request_has_its_data_back_after_an_exception(violations: Violations) -> None:
    r = request()

    def broken(_: Request) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        guarded(violations, broken)(r)
    assert type(r.data) is dict


class Later:
    """Work that accesses the request only when it is awaited."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(0).__await__()
        self.act()

    def add_done_callback(self, call: Any, /) -> Any:
        return call


@pytest.mark.parametrize("fails", [False, True])
def test_a_producer_that_waits_is_guarded_until_its_work_is_done(violations: Violations, fails: bool) -> None:
    r = request()
    r[OTHER] = 1
    values: list[int] = []

    def work() -> None:
        values.append(r[OTHER])
        r[PRODUCED] = 2
        if fails:
            raise TimeoutError

    async def wait(waiting: Waiting) -> None:
        await waiting

    waiting = guarded(violations, lambda _: Later(work), Point.PRODUCER)(r)
    assert waiting.add_done_callback(len) is len
    if fails:
        with pytest.raises(TimeoutError):
            asyncio.run(wait(waiting))
    else:
        asyncio.run(wait(waiting))
    assert values == [9]
    assert r.data == {"other": 1, "produced": 2}
    assert type(r.data) is dict
    assert violations == [(Point.PRODUCER, "n", "read")]


def test_shipped_plugins_are_not_guarded(violations: Violations) -> None:
    shipped = QueueDepth("queue-scorer", NoParams())
    assert guarded(violations, shipped.score, Point.SCORER, shipped) == shipped.score


def test_violations_are_counted_by_plugin_point_and_access_if_there_is_a_foreign_plugin() -> None:
    foreign, shipped = Foreign("n", NoParams()), QueueDepth("queue-scorer", NoParams())
    assert declared([shipped]) == ()
    assert declared([shipped, foreign]) == (VIOLATIONS,)
    counts: list[Any] = []

    class Services:
        def count(self, plugin: Plugin, metric: Any) -> Any:
            counts.append((plugin.name, metric.name))
            return self

        def add(self, *labels: str) -> None:
            counts.append(labels)

    call = guard(counted(Services()))(Point.FILTER, foreign, lambda r: r[OTHER])  # type: ignore[arg-type]
    assert call(request()) == 9
    assert counts == [("n", "plugin_data_scope_violations_total"), ("Filter", "read")]


def test_the_guard_is_inside_the_wrap_that_measures_the_call(violations: Violations) -> None:
    order: list[str] = []

    def measured(point: Point, plugin: Plugin, call: Any, /) -> Any:
        return lambda r: (order.append(type(r.data).__name__), call(r))[1]

    wrap = within(guard(lambda *_: None), measured)
    inner = wrap(Point.FILTER, Foreign("n", NoParams()), lambda r: order.append(type(r.data).__name__))
    inner(request())
    assert order == ["dict", "Scope"]


async def later() -> None:
    pass


@pytest.mark.parametrize(
    ("point", "result", "message"),
    [
        (Point.PRODUCER, later(), "data producer 'n' returned an object of type coroutine; return None or a Waiting of `services`"),
        (Point.PROFILE_PICKER, ["default"], "profile handler 'n' picked an object of type list; return a collection of its `profiles`"),
        (Point.PROFILES_RESULT, None, "the result of profile handler 'n' is None; return a Decision with a target"),
        (Point.PROFILES_RESULT, Decision((), {}, "p"), "handler 'n' is an object of type Decision; return a Decision with a target"),
        (Point.PICKER, 0, "picker 'n' returned an object of type int; return a sequence of indices"),
    ],
)  # fmt: skip
def test_the_error_of_a_wrong_result_says_what_to_return(violations: Violations, point: Point, result: Any, message: str) -> None:
    with pytest.raises(PluginFault) as caught:
        guarded(violations, lambda *_: result, point)(request())
    assert message in str(caught.value)
    assert culprit(caught.value).name == "n"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("point", "result"),
    [(Point.PRODUCER, None), (Point.PROFILE_PICKER, None), (Point.PROFILE_PICKER, {}.values()), (Point.PICKER, np.array([0]))],
)  # fmt: skip
def test_valid_results_pass(violations: Violations, point: Point, result: Any) -> None:
    assert guarded(violations, lambda *_: result, point)(request()) is result


@pytest.mark.parametrize("header", [("x-n", 3), ("x-n", "a\r\nb: c"), ("x-n", "\u20ac"), ("x n", "v"), (":status", "200"), (1, "v")])
def test_a_header_that_cannot_be_sent_is_removed_and_the_error_names_the_plugin(violations: Violations, header: tuple[Any, Any]) -> None:
    decision, response = Decision((), {}, "p"), Response()

    def before_send(r: Request, decision: Decision) -> None:
        decision.headers |= {"x-good": "\xe9 1", header[0]: header[1]}

    def response_received(r: Request, decision: Decision, response: Response) -> None:
        response.set_headers |= {"x-good": "1", header[0]: header[1]}

    for act, point, more in (
        (before_send, Point.PRE_REQUEST, (decision,)),
        (response_received, Point.RESPONSE_RECEIVED, (decision, response)),
    ):
        with pytest.raises(PluginFault, match=r"'n' set the header .*a name must be a token, a value one line"):
            guarded(violations, act, point)(request(), *more)
    assert list(decision.headers) == list(response.set_headers) == ["x-good"]


def test_a_plugin_that_tries_to_end_the_process_fails_one_request(violations: Violations) -> None:
    r = request()
    with pytest.raises(PluginFault, match="'n' tried to end the process") as caught:
        guarded(violations, lambda r: sys.exit(1))(r)
    assert culprit(caught.value).name == "n"  # type: ignore[union-attr]
    assert type(r.data) is dict


@pytest.mark.parametrize("wrong", [{"a": {"k": object()}}, {"a": "text"}, {3: {"k": 1}}, {"a": {"k": [{4: 1}]}}])
def test_metadata_that_cannot_be_sent_are_removed_and_the_error_names_the_plugin(violations: Violations, wrong: dict[Any, Any]) -> None:
    decision, response = Decision((), {}, "p"), Response()

    def response_complete(r: Request, decision: Decision, response: Response) -> None:
        response.metadata["good"] = {"n": 1.5, "s": "t", "b": True, "l": [None, {"m": 1}]}
        response.metadata |= wrong

    with pytest.raises(PluginFault, match="'n' set the metadata"):
        guarded(violations, response_complete, Point.RESPONSE_COMPLETE)(request(), decision, response)
    assert list(response.metadata) == ["good"]


class Eager(Scorer):
    """Reads a column that it does not declare if `peeks`, and returns `scores`."""

    peeks = False
    scores: ClassVar[list[float]] = [0.0, 1.0]

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Any:
        if self.peeks:
            candidates.keep(np.array([True, False]))[WAITING]
        return self.scores


Eager.__module__ = "foreign.plugins"


def test_a_column_that_a_foreign_plugin_does_not_declare_is_an_error() -> None:
    plugin = Eager("eager", NoParams())
    plugin.peeks = True
    call = guard(lambda *_: None)(Point.SCORER, plugin, plugin.score)
    seen = candidates({"waiting_requests": [1, 2]})
    with pytest.raises(PluginFault, match=r"'eager' reads the column 'waiting_requests', .* add it to `consumes`"):
        call(request(), seen, None)  # type: ignore[arg-type]
    plugin.consumes = (WAITING,)
    guard(lambda *_: None)(Point.SCORER, plugin, plugin.score)(request(), seen, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("scores", "told"), [([0.0, 1.0], 0), ([-0.5, 1.0], 1), ([0.0, 1.5], 1), ([float("nan"), 1.0], 1)])
def test_scores_outside_0_to_1_are_remarked_once(scores: list[float], told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Eager, "scores", scores)
    plugin = Eager("eager", NoParams())
    remarks: list[str] = []
    wrap = guard(lambda *_: None, lambda plugin, text: remarks.append(f"{plugin.name}: {text}"))
    call = wrap(Point.SCORER, plugin, scorer(plugin))
    for _ in range(3):
        call(request(), candidates({"waiting_requests": [1, 2]}), None)  # type: ignore[arg-type]
    assert len(remarks) == told
    assert all(remark.startswith("eager: scores outside [0, 1]") for remark in remarks)
