"""A watch that lies: foreign objects, versions that go back, deletes of nothing, other UIDs, bookmarks, huge labels."""

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.cases import cases
from tests.reports import Reports
from tests.waiting import elapse, in_virtual_time
from tests.workers.supervisor.kube.fake import Object
from tests.workers.supervisor.kube.worlds import NO_WORK
from workers.supervisor.kube.api import EMPTY, Resource
from workers.supervisor.kube.object_kinds import OBJECTIVE, VERSION
from workers.supervisor.kube.object_watch import decode
from workers.supervisor.kube.reflect import Outage, Reflector

GROUP = "llm-d.ai"
OBJECTIVES = Resource(GROUP, VERSION, "inferenceobjectives", "ns")
HOUR_S = 3600.0
HUGE = 1 << 20


def objective(name: str, priority: int, version: str = "6", *, kind: str = OBJECTIVE, **metadata: Any) -> Object:
    return {
        "kind": kind,
        "apiVersion": f"{GROUP}/{VERSION}",
        "metadata": {"name": name, "namespace": "ns", "resourceVersion": version, "uid": f"uid-{name}", **metadata},
        "spec": {"priority": priority, "poolRef": {"name": "pool"}},
    }


class Liar:
    """Lists the true objects, and sends the same events in every watch, which then stays open. An event may be a line as it is sent."""

    def __init__(self, events: Sequence[tuple[str, Object | bytes]], *, pause_s: float = 0.0) -> None:
        self.truth = [objective("a", 1, "5"), objective("b", 2, "5")]
        self.events, self.pause_s = events, pause_s
        self.version = "5"
        self.lists = 0

    async def request(self, verb: str, path: str, *, query: Mapping[str, str] = EMPTY, **_: Any) -> bytes:
        self.lists += 1
        await elapse(0.001)
        return json.dumps({"metadata": {"resourceVersion": self.version}, "items": self.truth}).encode()

    async def lines(self, path: str, *, query: Mapping[str, str], idle_s: float) -> AsyncGenerator[bytes, None]:
        yield b""
        for kind, thing in self.events:
            await elapse(self.pause_s)
            yield thing if isinstance(thing, bytes) else json.dumps({"type": kind, "object": thing}).encode()
        await elapse(HOUR_S)


class Followed:
    """A reflector of objectives, with its reports and the number of its changes."""

    def __init__(self, api: Liar, cpu: Callable[[], float] = NO_WORK) -> None:
        self.reports = Reports()
        self.changes = 0
        self.reflector = Reflector(
            api,
            OBJECTIVES,
            decode=lambda item: decode(OBJECTIVE, f"{GROUP}/{VERSION}", item),
            changed=self._changed,
            report=self.reports,
            outage=Outage(self.reports),
            rng=random.Random(7),
            cpu=cpu,
        )

    def _changed(self, _: object) -> None:
        self.changes += 1

    @property
    def priorities(self) -> dict[str, int]:
        return {name: each.priority for name, seen in self.reflector.known.items() for each in seen}  # type: ignore[union-attr]


@contextlib.asynccontextmanager
async def following(api: Liar) -> AsyncIterator[Followed]:
    followed = Followed(api)
    task = asyncio.create_task(followed.reflector.run())
    try:
        yield followed
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def after(seconds: float, api: Liar) -> Followed:
    """What is known and reported some virtual seconds after the begin."""

    async def run() -> Followed:
        async with following(api) as followed:
            await elapse(seconds)
        return followed

    return in_virtual_time(run)


@cases("event", ["ADDED", "MODIFIED", "DELETED"])
@cases(
    ("foreign", "why"),
    [
        (objective("a", 9, namespace="other"), "is in namespace 'other'"),
        (objective("a", 9, kind="Pod"), "has kind 'Pod'"),
        ({**objective("a", 9), "apiVersion": "v1"}, "has API version 'v1'"),
        (objective("x" * HUGE, 9), f"has a name of {HUGE} characters"),
        (objective("", 9), "has a name of 0 characters"),
    ],
)
def test_a_foreign_object_changes_nothing_and_is_reported_once(event: str, foreign: Object, why: str) -> None:
    api = Liar([(event, foreign)] * 3)
    followed = after(10.0, api)
    assert followed.priorities == {"a": 1, "b": 2}
    assert (followed.changes, api.lists) == (1, 1)
    (report,) = followed.reports
    assert report.startswith("the API server sent an object of another resource, which is ignored resource=inferenceobjectives")
    assert f" reason={why}" in report
    assert len(report) < 1000


@cases("line", [b'{"type":"ADDED","object":{"metadata":{"name":"\xff"}}}', b'{"type":"ADDED","object":' + b"[" * 100_000])
def test_a_line_that_cannot_be_decoded_removes_nothing_and_ends_nothing(line: bytes) -> None:
    followed = after(30.0, Liar([("", line)]))
    assert followed.priorities == {"a": 1, "b": 2}
    assert "is not an API server's" in followed.reflector.problem


def test_foreign_objects_of_a_list_are_left_out() -> None:
    api = Liar([])
    api.truth.append(objective("c", 3, namespace="other"))
    followed = after(1.0, api)
    assert followed.priorities == {"a": 1, "b": 2}
    assert len(followed.reports) == 1


def test_the_version_of_a_foreign_object_does_not_count() -> None:
    api = Liar([("MODIFIED", objective("z", 9, "999", namespace="other")), ("MODIFIED", objective("a", 7, "6"))])
    followed = after(1.0, api)
    assert followed.priorities == {"a": 7, "b": 2}
    assert api.lists == 1


def test_a_watch_whose_versions_always_go_back_is_listed_again_at_a_bounded_rate() -> None:
    api = Liar([("MODIFIED", objective("a", 7, "8")), ("MODIFIED", objective("a", 9, "3"))])
    followed = after(100.0, api)
    assert followed.priorities in ({"a": 1, "b": 2}, {"a": 7, "b": 2})  # never the state of the older version
    assert 10 < api.lists < 60
    assert len(followed.reports) == 1


@pytest.mark.parametrize("version", ["9" * 5000, "9" * HUGE, "²", "\u0663"])
def test_an_absurd_version_ends_the_watch_and_not_the_reflector(version: str) -> None:
    api = Liar([("MODIFIED", objective("a", 7)), ("BOOKMARK", {"metadata": {"resourceVersion": version}})])
    followed = after(100.0, api)
    assert followed.priorities in ({"a": 1, "b": 2}, {"a": 7, "b": 2})
    assert 10 < api.lists < 60
    (report,) = followed.reports
    assert "is not a resource version" in report and len(report) < 1000


def test_an_absurd_version_of_a_list_is_reported() -> None:
    api = Liar([])
    api.version = "9" * 5000
    followed = after(10.0, api)
    assert followed.priorities == {}
    assert not followed.reflector.synced
    assert "is not a resource version" in followed.reports[0]


def test_the_delete_of_an_unknown_object_changes_nothing() -> None:
    api = Liar([("DELETED", objective(f"unknown-{n}", 1, str(6 + n))) for n in range(100)])
    followed = after(10.0, api)
    assert followed.priorities == {"a": 1, "b": 2}
    assert (followed.changes, followed.reports) == (1, [])


def test_an_object_with_another_uid_replaces_the_one_of_its_name() -> None:
    followed = after(1.0, Liar([("MODIFIED", objective("a", 7, uid="another"))]))
    assert followed.priorities == {"a": 7, "b": 2}
    followed = after(1.0, Liar([("DELETED", objective("a", 7, uid="another"))]))
    assert followed.priorities == {"b": 2}


def test_endless_bookmarks_change_nothing_and_cause_no_list() -> None:
    bookmarks = [("BOOKMARK", {"metadata": {"resourceVersion": str(6 + n)}}) for n in range(10_000)]
    api = Liar([*bookmarks, ("MODIFIED", objective("a", 7, "20000"))], pause_s=0.01)
    followed = after(HOUR_S / 30, api)
    assert followed.priorities == {"a": 7, "b": 2}
    assert (followed.changes, api.lists, followed.reports) == (2, 1, [])


def test_huge_labels_are_not_kept() -> None:
    labels = {f"label-{n}": "x" * 1000 for n in range(1000)}
    api = Liar([("MODIFIED", objective("a", 7, labels=labels, annotations={"x": "y" * HUGE}))])
    followed = after(1.0, api)
    assert followed.priorities == {"a": 7, "b": 2}
    assert len(repr(followed.reflector.known)) < 2000


def test_a_flood_of_events_is_read_within_a_share_of_the_time_and_named_once() -> None:
    """Each event seems to take 10 ms. Without a limit, all of them would be read at the time of the first one."""
    bookmarks = [("BOOKMARK", {"metadata": {"resourceVersion": str(6 + n)}}) for n in range(100)]
    api = Liar([*bookmarks, ("MODIFIED", objective("a", 7, "20000"))])
    readings = itertools.count()

    async def run() -> Followed:
        followed = Followed(api, cpu=lambda: next(readings) * 0.01)
        task = asyncio.create_task(followed.reflector.run())
        await elapse(20.0)
        assert not task.done() and followed.priorities == {"a": 1, "b": 2}
        await elapse(HOUR_S / 4)
        task.cancel()
        return followed

    followed = in_virtual_time(run)
    assert followed.priorities == {"a": 7, "b": 2}
    assert api.lists == 1
    named = [report for report in followed.reports if "sends events faster than they are processed" in report]
    assert 1 <= len(named) <= 10
    assert "resource=inferenceobjectives" in named[0]
