"""Foreign plugins see of a request's data what they declare."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from epp.data import Datum
from epp.decision import Decision, Response
from epp.errors import PluginFault, ProducerFailed
from epp.guard import VIOLATIONS, counted, declared, guard, within
from epp.instrument import Point
from epp.isolation import culprit
from epp.plugin import DataProducer, Filter, NoParams, Plugin, PreRequest, Waiting
from epp.plugins.scorers.queue_depth import QueueDepth
from epp.request import Request
from tests.fakes import request

LENGTH = Datum("length", int, 7)
OWN = Datum("own", int)
KEPT = Datum("kept", int)
ASKED = Datum("asked", int)
OTHER = Datum("other", int, 9)
BY_PROFILE = Datum("by-profile", int, per_profile=True)


class Neighbour(Filter, DataProducer, PreRequest):
    type_name = "neighbour"
    consumes = (LENGTH, BY_PROFILE)
    optional = (ASKED,)
    produces = (OWN,)
    keeps = (KEPT,)


Seen = list[tuple[Point, str, str]]


@pytest.fixture
def seen() -> Seen:
    return []


def called(seen: Seen, act: Any, point: Point = Point.FILTER, plugin: Plugin | None = None) -> Any:
    """`act(request)` as the plugin's call at that point."""
    wrap = guard(lambda at, who, access: seen.append((at, who.name, access)))
    return wrap(point, plugin or Neighbour("n", NoParams()), act)


def test_what_is_declared_is_read_and_written_as_ever(seen: Seen) -> None:
    r = request()
    r[LENGTH], r[ASKED] = 1, 2
    r.profile = "p"
    r[BY_PROFILE] = 3

    def act(r: Request) -> list[int]:
        r[OWN], r[KEPT] = 4, 5
        return [r[LENGTH], r[ASKED], r[BY_PROFILE], r[OWN], r[KEPT]]

    assert called(seen, act)(r) == [1, 2, 3, 4, 5]
    assert (r[OWN], r[KEPT]) == (4, 5)
    assert seen == []
    assert type(r.data) is dict


def test_a_read_of_anything_else_gives_the_default_and_is_counted(seen: Seen) -> None:
    r = request()
    r[OTHER] = 1
    assert called(seen, lambda r: (r[OTHER], r.data.get("other"), "other" in r.data))(r) == (9, None, False)
    assert seen == [(Point.FILTER, "n", "read")] * 3
    assert r[OTHER] == 1


def test_a_write_of_anything_else_is_dropped_and_counted(seen: Seen) -> None:
    r = request()
    r[OTHER] = 1

    def act(r: Request) -> None:
        r[OTHER] = 2
        r[LENGTH] = 3  # read only
        r.data["raw"] = 4
        r.data.pop("other", None)

    called(seen, act)(r)
    assert r.data == {"other": 1}
    assert [access for _, _, access in seen] == ["write", "write", "write", "read"]
    with pytest.raises(KeyError):
        called(seen, lambda r: r.data["other"])(r)


def test_deleting_is_writing(seen: Seen) -> None:
    r = request()
    r[OTHER], r[OWN] = 1, 2

    def act(r: Request) -> tuple[int, list[Any]]:
        before = (len(r.data), list(r.data))
        del r.data["own"]
        del r.data["other"]
        return before

    assert called(seen, act)(r) == (1, ["own"])
    assert r.data == {"other": 1}
    assert seen == [(Point.FILTER, "n", "write")]


def test_a_producer_that_writes_what_it_does_not_declare_fails_open(seen: Seen) -> None:
    r = request()
    with pytest.raises(ProducerFailed, match="'n' writes 'other', which it does not declare"):
        called(seen, lambda r: r.__setitem__(OTHER, 1), Point.PRODUCER)(r)
    assert type(r.data) is dict
    assert seen == [(Point.PRODUCER, "n", "write")]


def test_whatever_the_call_raises_the_request_has_its_data_back(seen: Seen) -> None:
    r = request()

    def broken(_: Request) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        called(seen, broken)(r)
    assert type(r.data) is dict


class Later:
    """Work that looks at the request only when it is awaited."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(0).__await__()
        self.act()

    def add_done_callback(self, call: Any, /) -> Any:
        return call


@pytest.mark.parametrize("fails", [False, True])
def test_a_producer_that_waits_is_held_to_it_until_its_work_is_done(seen: Seen, fails: bool) -> None:
    r = request()
    r[OTHER] = 1
    found: list[int] = []

    def work() -> None:
        found.append(r[OTHER])
        r[OWN] = 2
        if fails:
            raise TimeoutError

    async def wait(waiting: Waiting) -> None:
        await waiting

    waiting = called(seen, lambda _: Later(work), Point.PRODUCER)(r)
    assert waiting.add_done_callback(len) is len
    if fails:
        with pytest.raises(TimeoutError):
            asyncio.run(wait(waiting))
    else:
        asyncio.run(wait(waiting))
    assert found == [9]
    assert r.data == {"other": 1, "own": 2}
    assert type(r.data) is dict
    assert seen == [(Point.PRODUCER, "n", "read")]


def test_our_own_plugins_are_called_as_they_are(seen: Seen) -> None:
    own = QueueDepth("queue-scorer", NoParams())
    assert called(seen, own.score, Point.SCORER, own) == own.score


def test_violations_are_counted_by_plugin_point_and_access_if_there_is_a_foreign_plugin() -> None:
    neighbour, own = Neighbour("n", NoParams()), QueueDepth("queue-scorer", NoParams())
    assert declared([own]) == ()
    assert declared([own, neighbour]) == (VIOLATIONS,)
    counts: list[Any] = []

    class Services:
        def count(self, plugin: Plugin, metric: Any) -> Any:
            counts.append((plugin.name, metric.name))
            return self

        def add(self, *labels: str) -> None:
            counts.append(labels)

    call = guard(counted(Services()))(Point.FILTER, neighbour, lambda r: r[OTHER])  # type: ignore[arg-type]
    assert call(request()) == 9
    assert counts == [("n", "plugin_data_scope_violations_total"), ("Filter", "read")]


def test_a_guard_stands_within_what_measures_the_call(seen: Seen) -> None:
    order: list[str] = []

    def measured(point: Point, plugin: Plugin, call: Any, /) -> Any:
        return lambda r: (order.append(type(r.data).__name__), call(r))[1]

    wrap = within(guard(lambda *_: None), measured)
    inner = wrap(Point.FILTER, Neighbour("n", NoParams()), lambda r: order.append(type(r.data).__name__))
    inner(request())
    assert order == ["dict", "Scope"]


async def later() -> None:
    pass


@pytest.mark.parametrize(
    ("point", "given", "said"),
    [
        (Point.PRODUCER, later(), "data producer 'n' returned an object of type coroutine; return None, or what `services`"),
        (Point.PROFILE_PICKER, ["default"], "profile handler 'n' picked an object of type list; return some of the profiles"),
        (Point.PROFILES_RESULT, None, "profile handler 'n' gave as its result None; return a Decision with a target"),
        (Point.PROFILES_RESULT, Decision((), {}, "p"), "gave as its result an object of type Decision; return a Decision with a"),
        (Point.PICKER, 0, "picker 'n' returned an object of type int; return a sequence of indices"),
    ],
)  # fmt: skip
def test_what_a_call_must_not_return_is_told_with_what_to_return(
    seen: Seen, point: Point, given: Any, said: str
) -> None:
    with pytest.raises(PluginFault) as caught:
        called(seen, lambda *_: given, point)(request())
    assert said in str(caught.value)
    assert culprit(caught.value).name == "n"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("point", "given"),
    [(Point.PRODUCER, None), (Point.PROFILE_PICKER, None), (Point.PROFILE_PICKER, {}.values()), (Point.PICKER, np.array([0]))],
)  # fmt: skip
def test_what_a_call_may_return_passes(seen: Seen, point: Point, given: Any) -> None:
    assert called(seen, lambda *_: given, point)(request()) is given


@pytest.mark.parametrize(
    "header", [("x-n", 3), ("x-n", "a\r\nb: c"), ("x-n", "\u20ac"), ("x n", "v"), (":status", "200"), (1, "v")]
)
def test_a_header_that_cannot_be_sent_leaves_again_and_the_plugin_is_named(seen: Seen, header: tuple[Any, Any]) -> None:
    decision, response = Decision((), {}, "p"), Response()

    def before_send(r: Request, decision: Decision) -> None:
        decision.headers |= {"x-good": "\xe9 1", header[0]: header[1]}

    def response_received(r: Request, decision: Decision, response: Response) -> None:
        response.set_headers |= {"x-good": "1", header[0]: header[1]}

    for act, point, more in (
        (before_send, Point.PRE_REQUEST, (decision,)),
        (response_received, Point.RESPONSE_RECEIVED, (decision, response)),
    ):
        with pytest.raises(PluginFault, match=r"'n' set the header .*names are tokens, and values one line"):
            called(seen, act, point)(request(), *more)
    assert list(decision.headers) == list(response.set_headers) == ["x-good"]


def test_a_plugin_that_ends_the_process_costs_one_request(seen: Seen) -> None:
    r = request()
    with pytest.raises(PluginFault, match="'n' tried to end the process") as caught:
        called(seen, lambda r: sys.exit(1))(r)
    assert culprit(caught.value).name == "n"  # type: ignore[union-attr]
    assert type(r.data) is dict


@pytest.mark.parametrize("told", [{"a": {"k": object()}}, {"a": "text"}, {3: {"k": 1}}, {"a": {"k": [{4: 1}]}}])
def test_metadata_that_cannot_be_sent_leave_again_and_the_plugin_is_named(seen: Seen, told: dict[Any, Any]) -> None:
    decision, response = Decision((), {}, "p"), Response()

    def response_complete(r: Request, decision: Decision, response: Response) -> None:
        response.metadata["good"] = {"n": 1.5, "s": "t", "b": True, "l": [None, {"m": 1}]}
        response.metadata |= told

    with pytest.raises(PluginFault, match="'n' set the metadata"):
        called(seen, response_complete, Point.RESPONSE_COMPLETE)(request(), decision, response)
    assert list(response.metadata) == ["good"]
