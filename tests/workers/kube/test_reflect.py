"""A resource is followed through everything that servers and networks do, in a time that is a variable."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.kube.fake import PODS, FakeApi, in_virtual_time
from workers.kube.api import EMPTY, ApiError, Resource, Unreachable
from workers.kube.reflect import HOLD_S, IDLE_S, OBJECTS_MAX, Change, Known, Outage, Reflector

THINGS = Resource("example.com", "v1", "things", "space")
AWAY = Unreachable("connection refused")


def decode(raw: bytes) -> str:
    """A thing is its text."""
    text = json.loads(raw).get("text", "")
    if text == "bad":
        raise ValueError("text: 'bad' is none")
    return str(text)


class Followed:
    """A reflector on the fake server, what it said and what it changed."""

    def __init__(self, api: FakeApi, *, expects: bool = False) -> None:
        self.api = api
        self.said: list[str] = []
        self.changes: list[Change[str]] = []
        self.deletes: Counter[str] = Counter()
        self.reflector = Reflector(
            api,
            THINGS,
            decode=decode,
            changed=self._changed,
            report=self.said.append,
            expects=expects,
            rng=random.Random(7),
        )

    def _changed(self, change: Change[str]) -> None:
        assert change.known == self.known
        self.changes.append(change)
        self.deletes.update(change.deleted.keys())

    @property
    def known(self) -> dict[str, str]:
        return dict(self.reflector.known)

    @property
    def truth(self) -> dict[str, str]:
        objects = self.api.install(THINGS).objects
        return {name: thing.get("text", "") for name, thing in objects.items()}


@contextlib.asynccontextmanager
async def following(api: FakeApi, *, expects: bool = False) -> AsyncIterator[Followed]:
    followed = Followed(api, expects=expects)
    task = asyncio.create_task(followed.reflector.run())
    try:
        await asyncio.sleep(0.5)
        yield followed
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def things(count: int = 3) -> FakeApi:
    api = FakeApi()
    api.install(THINGS)
    for n in range(count):
        api.put(THINGS, f"t{n}", {"text": str(n)})
    return api


def scenario(main: Callable[[FakeApi, Followed], Any], api: FakeApi | None = None, *, expects: bool = False) -> None:
    async def run() -> None:
        server = api or things()
        async with following(server, expects=expects) as followed:
            await main(server, followed)

    in_virtual_time(run)


def test_a_list_in_pages_becomes_known_at_once_and_a_watch_goes_on() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        (first,) = followed.changes
        assert first.listed
        assert (len(first.upserted), first.known) == (7, followed.truth)
        assert followed.reflector.synced
        api.put(THINGS, "new", {"text": "x"})
        api.put(THINGS, "t1", {"text": "changed"})
        api.delete(THINGS, "t0")
        await asyncio.sleep(0.1)
        assert [(dict(c.upserted), dict(c.deleted), c.listed) for c in followed.changes[1:]] == [
            ({"new": "x"}, {}, False),
            ({"t1": "changed"}, {}, False),
            ({}, {"t0": "0"}, False),
        ]
        assert followed.known == followed.truth
        assert followed.said == []

    api = things(7)
    api.page = 2
    scenario(main, api)


def test_what_is_as_it_was_is_no_change() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.put(THINGS, "t1", {"text": "1", "metadata": {"labels": {"a": "b"}}})
        api.forget()
        api.break_watches()
        await asyncio.sleep(5)
        assert api.asked.count(("list", "")) == 2
        assert len(followed.changes) == 1

    scenario(main)


def test_an_outage_takes_nothing_and_is_said_once_at_its_begin_and_once_at_its_end() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        known = followed.known
        api.failure = AWAY
        api.break_watches()
        api.delete(THINGS, "t0")
        await asyncio.sleep(1800)
        assert followed.known == known
        assert followed.reflector.problem == "connection refused"
        tries = len(api.asked)
        assert tries < 1800 / 2.4
        api.failure = None
        await asyncio.sleep(7)
        assert followed.known == followed.truth
        begin, end = followed.said
        assert begin.startswith("the Kubernetes API is away (connection refused); what is known stays")
        assert end.startswith("the Kubernetes API answers again, after 18")
        assert followed.reflector.problem == ""

    scenario(main)


def test_a_watch_that_breaks_is_begun_again_from_where_it_was_without_a_word() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        for n in range(20):
            api.break_watches()
            api.put(THINGS, "t0", {"text": f"after {n}"})
            await asyncio.sleep(2)
        assert followed.known == followed.truth
        assert api.asked.count(("list", "")) == 1
        assert followed.said == []

    scenario(main)


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_history_that_is_gone_is_listed_anew_and_only_what_changed_is_told(in_stream: bool) -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.gone_in_stream = in_stream
        api.failure = AWAY
        api.break_watches()
        await asyncio.sleep(1)
        api.delete(THINGS, "t0")
        api.put(THINGS, "t9", {"text": "9"})
        api.forget()
        api.failure = None
        await asyncio.sleep(3)
        assert followed.known == followed.truth
        change = followed.changes[-1]
        assert (change.listed, dict(change.upserted), dict(change.deleted)) == (True, {"t9": "9"}, {"t0": "0"})
        assert len(followed.changes) == 2

    scenario(main)


def test_a_server_that_says_gone_in_the_stream_is_listed_anew() -> None:
    known = Known(THINGS, decode, print)
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    with pytest.raises(Exception, match=r"the history of things\.example\.com in namespace space is gone: too old"):
        known.event(json.dumps(error).encode())
    error["object"] = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}
    with pytest.raises(ApiError, match="etcd"):
        known.event(json.dumps(error).encode())


def test_a_server_that_always_says_gone_is_not_asked_in_a_circle() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.forgotten = 1 << 40
        api.break_watches()
        before = len(api.asked)
        await asyncio.sleep(60)
        assert len(api.asked) - before < 60
        assert len(followed.said) == 1
        assert "too old resource version" in followed.said[0]

    scenario(main)


def test_a_server_that_ends_every_watch_at_once_is_not_asked_in_a_circle() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await asyncio.sleep(60)
        assert len(api.asked) < 60
        assert followed.known == followed.truth

    api = things()
    api.closes_at_once = True
    scenario(main, api)


def test_versions_that_went_back_are_another_history() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        for n in range(50):
            api.put(THINGS, "t0", {"text": str(n)})
        await asyncio.sleep(1)
        api.restore(20)
        del api.install(THINGS).objects["t1"]
        await asyncio.sleep(100)
        assert followed.known == followed.truth

    scenario(main)


def test_a_watch_over_which_nothing_comes_is_given_up() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.deaf = True
        api.delete(THINGS, "t1")
        await asyncio.sleep(IDLE_S - 5)
        assert "t1" in followed.known
        api.deaf = False
        await asyncio.sleep(10)
        assert followed.known == followed.truth
        assert followed.said == []

    scenario(main)


def test_a_watch_that_the_server_ends_in_its_time_goes_on_where_it_was() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await asyncio.sleep(3600)
        watches = api.asked.count(("watch", ""))
        assert 6 <= watches <= 13
        assert api.asked.count(("list", "")) == 1
        assert followed.said == []

    scenario(main)


def test_a_list_that_is_wrongly_empty_takes_nothing() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.empty_lists = True
        api.forget()
        api.put(THINGS, "t0", {"text": "later"})
        api.forget()
        api.break_watches()
        await asyncio.sleep(HOLD_S - 4)
        assert len(followed.known) == 3
        api.empty_lists = False
        api.put(THINGS, "t7", {"text": "7"})
        api.delete(THINGS, "t2")
        await asyncio.sleep(0.5)
        assert set(followed.known) == {"t0", "t1", "t7"}
        await asyncio.sleep(HOLD_S)
        assert followed.known == followed.truth
        assert followed.deletes == {"t2": 1}

    scenario(main)


def test_a_list_that_stays_empty_is_believed_after_a_while() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.failure = AWAY
        api.break_watches()
        await asyncio.sleep(1)
        for n in range(3):
            api.delete(THINGS, f"t{n}")
        api.forget()
        api.failure = None
        await asyncio.sleep(HOLD_S - 2)
        assert len(followed.known) == 3
        await asyncio.sleep(4)
        assert followed.known == {}

    scenario(main)


def test_what_a_predecessor_knew_is_held_when_the_first_list_is_empty() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await asyncio.sleep(HOLD_S - 2)
        assert (followed.changes, followed.reflector.synced) == ([], False)
        await asyncio.sleep(4)
        (change,) = followed.changes
        assert (change.listed, followed.reflector.synced) == (True, True)

    scenario(main, things(0), expects=True)


def test_no_objects_from_the_start_is_known_at_once() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        (change,) = followed.changes
        assert (change.listed, dict(change.known), followed.reflector.synced) == (True, {}, True)

    scenario(main, things(0))


def test_a_resource_that_is_installed_later_is_seen() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await asyncio.sleep(60)
        assert followed.reflector.absent
        assert followed.said == []
        assert len(api.asked) <= 60 / 2.4 + 1
        api.put(THINGS, "t0", {"text": "0"})
        await asyncio.sleep(4)
        assert (followed.known, followed.reflector.absent) == ({"t0": "0"}, False)
        api.remove(THINGS)
        api.break_watches()
        await asyncio.sleep(3 * HOLD_S)
        assert (followed.known, followed.reflector.absent) == ({}, True)

    scenario(main, FakeApi())


@pytest.mark.parametrize("expects", [False, True])
def test_not_found_by_a_load_balancer_takes_nothing_away(expects: bool) -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        before = followed.known
        api.misrouted = True
        api.break_watches()
        await asyncio.sleep(6 * HOLD_S)
        assert (followed.known, followed.reflector.absent) == (before, False)
        assert "not the API server" in followed.reflector.problem
        assert sum("the Kubernetes API is away" in line for line in followed.said) == 1
        api.misrouted = False
        await asyncio.sleep(6)
        assert (followed.known, followed.reflector.problem) == (followed.truth, "")

    scenario(main, things(0 if expects else 3), expects=expects)


def test_pages_that_are_too_large_become_smaller() -> None:
    class Narrow(FakeApi):
        async def request(self, verb: str, path: str, *, query: Any = EMPTY, **more: Any) -> bytes:
            if int(query["limit"]) > 20:
                raise Unreachable("the answer is longer than 64 bytes")
            return await super().request(verb, path, query=query, **more)

    async def main(api: FakeApi, followed: Followed) -> None:
        await asyncio.sleep(30)
        assert followed.known == followed.truth
        assert len(followed.known) == 50

    api = Narrow()
    api.install(THINGS)
    for n in range(50):
        api.put(THINGS, f"t{n}", {"text": str(n)})
    scenario(main, api)


def test_pods_are_never_taken_for_not_installed() -> None:
    async def main() -> None:
        api = FakeApi()
        reflector = Reflector(api, PODS, decode=decode, changed=lambda _: None, report=lambda _: None)
        task = asyncio.create_task(reflector.run())
        await asyncio.sleep(3 * HOLD_S)
        assert (reflector.absent, reflector.synced) == (False, False)
        assert "refused to list pods in namespace space" in reflector.problem
        task.cancel()

    in_virtual_time(main)


@pytest.mark.parametrize("answer", [b"{}", b'{"kind":"Status","status":"Failure","code":500}', b"<html>", b"", b"null"])
def test_what_is_no_list_is_not_taken_for_an_empty_one(answer: bytes) -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        before, api.answer = followed.known, answer
        api.break_watches()
        api.put(THINGS, "t9", {"text": "9"})
        api.forget()
        await asyncio.sleep(6 * HOLD_S)
        assert followed.known == before
        assert (
            "what came for things.example.com in namespace space is not an API server's" in followed.reflector.problem
        )

    scenario(main)


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_rule_that_is_missing_is_named_once_and_its_coming_is_seen(verb: str) -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await asyncio.sleep(600)
        (said,) = followed.said
        rule = f'{{apiGroups: ["example.com"], resources: ["things"], verbs: ["{verb}"]}}'
        assert f"not allowed to {verb} things in namespace space" in said
        assert rule in said
        assert rule in followed.reflector.problem
        api.forbidden.clear()
        await asyncio.sleep(7)
        assert followed.known == followed.truth
        assert followed.said[1:] == ["things.example.com in namespace space can be followed again"]

    api = things()
    api.forbidden.add(verb)
    scenario(main, api)


def test_without_a_watch_lists_are_asked_for_again_and_again() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await asyncio.sleep(60)
        api.delete(THINGS, "t0")
        await asyncio.sleep(6)
        assert followed.known == followed.truth

    api = things()
    api.forbidden.add("watch")
    scenario(main, api)


def test_a_server_that_asks_for_patience_gets_it_within_bounds() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        before = len(api.asked)
        await asyncio.sleep(300)
        assert 8 <= len(api.asked) - before <= 16
        api.failure = None
        await asyncio.sleep(32)
        assert followed.known == followed.truth

    api = things()
    api.failure = ApiError(429, "TooManyRequests", "later", "list", THINGS.path, retry_after_s=3600.0)
    scenario(main, api)


def test_an_object_that_cannot_be_read_is_named_once_and_what_it_was_stays() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.put(THINGS, "t0", {"text": "bad"})
        api.put(THINGS, "t8", {"text": "bad"})
        await asyncio.sleep(0.1)
        api.put(THINGS, "t0", {"text": "bad", "metadata": {"labels": {"x": "y"}}})
        api.forget()
        api.break_watches()
        await asyncio.sleep(5)
        assert followed.known == {"t0": "0", "t1": "1", "t2": "2"}
        assert followed.said == [
            f"things.example.com '{n}' in namespace space: text: 'bad' is none" for n in ("t0", "t8")
        ]

    scenario(main)


def test_more_objects_than_there_is_room_for_are_left_out_and_said_so() -> None:
    said: list[str] = []
    known = Known(THINGS, lambda raw: 1, said.append)
    known.objects = {str(n): 1 for n in range(OBJECTS_MAX)}
    line = {"type": "ADDED", "object": {"metadata": {"name": "x", "resourceVersion": "5"}}}
    assert known.event(json.dumps(line).encode()) is None
    assert len(said) == 1


def test_resources_share_one_outage() -> None:
    said: list[str] = []
    outage = Outage(said.append)
    other = Resource("", "v1", "pods", "space")
    outage.lost(THINGS, AWAY, 10.0)
    outage.lost(other, ApiError(503, "ServiceUnavailable", "starting", "list", other.path), 11.0)
    outage.found(THINGS, 20.0)
    assert len(said) == 1
    outage.found(other, 25.0)
    assert said[1:] == ["the Kubernetes API answers again, after 15.0 s"]
    outage.lost(THINGS, AWAY, 30.0)
    outage.forget(THINGS)
    outage.found(THINGS, 31.0)
    assert len(said) == 3


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("put", "put", "put", "delete", "delete"),
                *("break", "forget", "away", "back", "away 503", "lie", "truth", "deaf", "hear", "page"),
            )
        ),
        st.integers(0, 4),
        st.sampled_from((0.0, 0.0, 0.01, 0.3, 2.0, 8.0)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_whatever_a_server_does_what_is_known_comes_to_be_true_and_nothing_is_removed_that_was_not_deleted(
    steps: list[tuple[str, int, float]],
) -> None:
    deleted: Counter[str] = Counter()

    def act(api: FakeApi, step: str, which: int) -> None:
        name = f"t{which}"
        match step:
            case "put":
                api.put(THINGS, name, {"text": str(api.version)})
            case "delete":
                deleted[name] += name in api.install(THINGS).objects
                api.delete(THINGS, name)
            case "break":
                api.break_watches()
            case "forget":
                api.forget()
                api.break_watches()
            case "away" | "away 503":
                api.failure = ApiError(503, "x", "y", "list", THINGS.path) if "503" in step else AWAY
                api.break_watches()
            case "back":
                api.failure = None
            case "lie" | "truth":
                api.empty_lists = step == "lie"
            case "deaf" | "hear":
                api.deaf = step == "deaf"
            case "page":
                api.page = which

    async def main(api: FakeApi, followed: Followed) -> None:
        lied = 0.0
        for step, which, wait in steps:
            act(api, step, which)
            if api.empty_lists and (lied := lied + wait) >= HOLD_S - 1:
                api.empty_lists, wait = False, 0.0
            await asyncio.sleep(wait)
            assert all(deleted[name] >= count for name, count in followed.deletes.items())
        api.failure, api.empty_lists, api.deaf = None, False, False
        await asyncio.sleep(IDLE_S + HOLD_S + 10)
        assert followed.known == followed.truth
        assert all(deleted[name] >= count for name, count in followed.deletes.items())

    scenario(main)
