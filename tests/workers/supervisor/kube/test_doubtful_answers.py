"""Answers of the API server that may be wrong: no object is removed because of one, and each is reported once."""

import asyncio
import json
from typing import Any

import pytest

from tests.reports import Reports
from tests.waiting import elapse, in_virtual_time
from tests.workers.supervisor.kube.fake import PODS, FakeApi
from tests.workers.supervisor.kube.following import AWAY, THINGS, Followed, decode, scenario, things
from workers.supervisor.endpoints.discovery import HOLD_S
from workers.supervisor.kube.api import EMPTY, Resource
from workers.supervisor.kube.errors import ApiError, Unreachable
from workers.supervisor.kube.known import OBJECTS_MAX, REPORTED_MAX, REPORTED_S, Known
from workers.supervisor.kube.reflect import Outage, Reflector


def test_a_wrongly_empty_list_removes_nothing() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.empty_lists = True
        api.forget()
        api.put(THINGS, "t0", {"text": "later"})
        api.forget()
        api.break_watches()
        await elapse(HOLD_S - 4)
        assert len(followed.known) == 3
        api.empty_lists = False
        api.put(THINGS, "t7", {"text": "7"})
        api.delete(THINGS, "t2")
        await elapse(0.5)
        assert set(followed.known) == {"t0", "t1", "t7"}
        await elapse(HOLD_S)
        assert followed.known == followed.truth
        assert followed.deletes == {"t2": 1}

    scenario(main)


def test_a_list_that_stays_empty_is_believed_after_a_while() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.failure = AWAY
        api.break_watches()
        await elapse(1)
        for n in range(3):
            api.delete(THINGS, f"t{n}")
        api.forget()
        api.failure = None
        await elapse(HOLD_S - 2)
        assert len(followed.known) == 3
        suddenly = [report for report in followed.reports if report.startswith("a list is suddenly empty")]
        await elapse(4)
        assert followed.known == {}
        (report,) = suddenly
        assert report.endswith(f" resource=things.example.com namespace=space kept_s={HOLD_S}")

    scenario(main)


def test_the_objects_of_a_predecessor_stay_for_a_while_if_the_first_list_is_empty() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await elapse(HOLD_S - 2)
        assert (followed.changes, followed.reflector.synced) == ([], False)
        await elapse(4)
        (change,) = followed.changes
        assert (change.listed, followed.reflector.synced) == (True, True)

    scenario(main, things(0), expects=True)


def test_an_empty_first_list_without_a_predecessor_is_believed_at_once() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        (change,) = followed.changes
        assert (change.listed, dict(change.known), followed.reflector.synced) == (True, {}, True)

    scenario(main, things(0))


def test_a_resource_that_is_installed_later_is_followed() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await elapse(60)
        assert followed.reflector.absent
        assert followed.reports == []
        assert len(api.requests) <= 60 / 2.4 + 1
        api.put(THINGS, "t0", {"text": "0"})
        await elapse(4)
        assert (followed.known, followed.reflector.absent) == ({"t0": "0"}, False)
        api.remove(THINGS)
        api.break_watches()
        await elapse(3 * HOLD_S)
        assert (followed.known, followed.reflector.absent) == ({}, True)

    scenario(main, FakeApi())


@pytest.mark.parametrize("expects", [False, True])
def test_not_found_from_a_load_balancer_removes_nothing(expects: bool) -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        before = followed.known
        api.misrouted = True
        api.break_watches()
        await elapse(6 * HOLD_S)
        assert (followed.known, followed.reflector.absent) == (before, False)
        assert "not from the API server" in followed.reflector.problem
        assert sum("the Kubernetes API is away" in line for line in followed.reports) == 1
        api.misrouted = False
        await elapse(6)
        assert (followed.known, followed.reflector.problem) == (followed.truth, "")

    scenario(main, things(0 if expects else 3), expects=expects)


def test_failures_reduce_the_page_size() -> None:
    class Narrow(FakeApi):
        async def request(self, verb: str, path: str, *, query: Any = EMPTY, **more: Any) -> bytes:
            if int(query["limit"]) > 20:
                raise Unreachable("the answer is longer than 64 bytes")
            return await super().request(verb, path, query=query, **more)

    async def main(api: FakeApi, followed: Followed) -> None:
        await elapse(30)
        assert followed.known == followed.truth
        assert len(followed.known) == 50

    api = Narrow()
    api.install(THINGS)
    for n in range(50):
        api.put(THINGS, f"t{n}", {"text": str(n)})
    scenario(main, api)


def test_a_core_resource_never_counts_as_not_installed() -> None:
    async def main() -> None:
        api = FakeApi()
        reports = Reports()
        reflector = Reflector(api, PODS, decode=decode, changed=lambda _: None, report=reports, outage=Outage(reports))
        task = asyncio.create_task(reflector.run())
        await elapse(3 * HOLD_S)
        assert (reflector.absent, reflector.synced) == (False, False)
        assert "refused to list pods in namespace space" in reflector.problem
        task.cancel()

    in_virtual_time(main)


DEEP = b'{"more":' + b"[" * 100_000
NOT_UTF8 = b'{"metadata":{"resourceVersion":"\xff"},"items":[]}'


@pytest.mark.parametrize("answer", [b"{}", b'{"kind":"Status","status":"Failure","code":500}', b"<html>", b"", b"null", NOT_UTF8, DEEP])
def test_an_invalid_list_does_not_count_as_empty(answer: bytes) -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        before, api.answer = followed.known, answer
        api.break_watches()
        api.put(THINGS, "t9", {"text": "9"})
        api.forget()
        await elapse(6 * HOLD_S)
        assert followed.known == before
        text = "the answer for things.example.com in namespace space is not an API server's"
        assert text in followed.reflector.problem

    scenario(main)


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_history_that_is_always_gone_is_reported_once_though_each_answer_names_another_version(in_stream: bool) -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.gone_in_stream = in_stream
        api.break_watches()
        for turn in range(60):
            api.put(THINGS, "t0", {"text": str(turn)})
            api.forgotten = api.version + 1
            await elapse(10)
        assert [report.split(" resource=")[0] for report in followed.reports] == ["a resource cannot be followed: the picker tries again"]
        assert "is gone" in followed.reflector.problem
        assert followed.known["t0"] == "59"

    scenario(main)


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_missing_role_is_reported_once_and_a_new_role_is_noticed(verb: str) -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await elapse(600)
        (report,) = followed.reports
        rule = f'{{apiGroups: ["example.com"], resources: ["things"], verbs: ["{verb}"]}}'
        assert f"not allowed to {verb} things in namespace space" in report
        assert rule in report
        assert rule in followed.reflector.problem
        api.forbidden.clear()
        await elapse(7)
        assert followed.known == followed.truth
        assert followed.reports[1:] == ["a resource can be followed again resource=things.example.com namespace=space"]

    api = things()
    api.forbidden.add(verb)
    scenario(main, api)


def test_an_object_that_cannot_be_decoded_is_reported_once_and_its_last_good_state_stays() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.put(THINGS, "t0", {"text": "bad"})
        api.put(THINGS, "t8", {"text": "bad"})
        await elapse(0.1)
        api.put(THINGS, "t0", {"text": "bad", "metadata": {"labels": {"x": "y"}}})
        api.forget()
        api.break_watches()
        await elapse(5)
        assert followed.known == {"t0": "0", "t1": "1", "t2": "2"}
        assert followed.reports == [
            f"object cannot be read resource=things.example.com namespace=space name={n} reason=text: 'bad' is not allowed"
            for n in ("t0", "t8")
        ]

    scenario(main)


def test_after_many_faults_objects_are_named_again_an_hour_later() -> None:
    reports, time = Reports(), [0.0]
    known = Known(THINGS, decode, reports, now=lambda: time[0])

    def changed(text: str, name: str, version: int) -> None:
        metadata = {"name": name, "resourceVersion": str(version)}
        known.event(json.dumps({"type": "MODIFIED", "object": {"text": text, "metadata": metadata}}).encode())

    for n in range(3 * REPORTED_MAX):
        changed("bad", f"t{n}", n + 1)
    assert len(reports) == REPORTED_MAX + 1
    assert f"{REPORTED_MAX} were named within an hour" in reports[-1]
    time[0] = REPORTED_S
    changed("bad", "later", 1000)
    changed("bad", "later", 1001)
    assert len(reports) == REPORTED_MAX + 2
    assert "name=later" in reports[-1]


def test_objects_beyond_the_limit_are_left_out_and_reported() -> None:
    reports = Reports()
    known = Known(THINGS, lambda raw: 1, reports)
    known.objects = {str(n): 1 for n in range(OBJECTS_MAX)}
    line = {"type": "ADDED", "object": {"metadata": {"name": "x", "resourceVersion": "5"}}}
    assert known.event(json.dumps(line).encode()) is None
    assert reports == [f"too many objects, the others are left out resource=things.example.com namespace=space limit={OBJECTS_MAX}"]


def test_resources_share_one_outage() -> None:
    reports = Reports()
    outage = Outage(reports)
    other = Resource("", "v1", "pods", "space")
    outage.lost(THINGS, AWAY, 10.0)
    outage.lost(other, ApiError(503, "ServiceUnavailable", "starting", "list", other.path), 11.0)
    outage.found(THINGS, 20.0)
    assert len(reports) == 1
    outage.found(other, 25.0)
    assert reports[1:] == ["the Kubernetes API answers again away_s=15.0"]
    outage.lost(THINGS, AWAY, 30.0)
    outage.forget(THINGS)
    outage.found(THINGS, 31.0)
    assert len(reports) == 3
