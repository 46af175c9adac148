"""The reflector follows a resource through all faults of servers and networks."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.waiting import elapse
from tests.workers.supervisor.kube.fake import FakeApi
from tests.workers.supervisor.kube.following import AWAY, THINGS, Followed, decode, scenario, things
from workers.supervisor.endpoints.discovery import HOLD_S
from workers.supervisor.kube.errors import ApiError
from workers.supervisor.kube.known import Known
from workers.supervisor.kube.reflect import IDLE_S


def test_a_list_in_pages_becomes_known_at_once_and_the_watch_continues() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        (first,) = followed.changes
        assert first.listed
        assert (len(first.upserted), first.known) == (7, followed.truth)
        assert followed.reflector.synced
        api.put(THINGS, "new", {"text": "x"})
        api.put(THINGS, "t1", {"text": "changed"})
        api.delete(THINGS, "t0")
        await elapse(0.1)
        assert [(dict(c.upserted), dict(c.deleted), c.listed) for c in followed.changes[1:]] == [
            ({"new": "x"}, {}, False),
            ({"t1": "changed"}, {}, False),
            ({}, {"t0": "0"}, False),
        ]
        assert followed.known == followed.truth
        assert followed.reports == []

    api = things(7)
    api.page = 2
    scenario(main, api)


def test_an_unchanged_object_causes_no_change() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.put(THINGS, "t1", {"text": "1", "metadata": {"labels": {"a": "b"}}})
        api.forget()
        api.break_watches()
        await elapse(5)
        assert api.requests.count(("list", "")) == 2
        assert len(followed.changes) == 1

    scenario(main)


def test_an_outage_removes_nothing_and_is_reported_once_at_its_begin_and_once_at_its_end() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        known = followed.known
        api.failure = AWAY
        api.break_watches()
        api.delete(THINGS, "t0")
        await elapse(1800)
        assert followed.known == known
        assert followed.reflector.problem == "connection refused"
        tries = len(api.requests)
        assert tries < 1800 / 2.4
        api.failure = None
        await elapse(7)
        assert followed.known == followed.truth
        begin, end = followed.reports
        assert begin.startswith("the Kubernetes API is away: what is known stays") and begin.endswith("reason=connection refused")
        assert end.startswith("the Kubernetes API answers again away_s=18")
        assert followed.reflector.problem == ""

    scenario(main)


def test_a_watch_that_breaks_continues_from_the_last_version_without_a_report() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        for n in range(20):
            api.break_watches()
            api.put(THINGS, "t0", {"text": f"after {n}"})
            await elapse(2)
        assert followed.known == followed.truth
        assert api.requests.count(("list", "")) == 1
        assert followed.reports == []

    scenario(main)


@pytest.mark.parametrize("in_stream", [False, True])
def test_after_a_lost_history_the_resource_is_listed_again_and_only_differences_are_changes(in_stream: bool) -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.gone_in_stream = in_stream
        api.failure = AWAY
        api.break_watches()
        await elapse(1)
        api.delete(THINGS, "t0")
        api.put(THINGS, "t9", {"text": "9"})
        api.forget()
        api.failure = None
        await elapse(3)
        assert followed.known == followed.truth
        change = followed.changes[-1]
        assert (change.listed, dict(change.upserted), dict(change.deleted)) == (True, {"t9": "9"}, {"t0": "0"})
        assert len(followed.changes) == 2

    scenario(main)


def test_an_error_in_the_stream_raises_expired_or_api_error() -> None:
    known = Known(THINGS, decode, print)
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    with pytest.raises(Exception, match=r"the history of things\.example\.com in namespace space is gone: too old"):
        known.event(json.dumps(error).encode())
    error["object"] = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}
    with pytest.raises(ApiError, match="etcd"):
        known.event(json.dumps(error).encode())


def test_a_server_that_always_answers_gone_does_not_cause_a_busy_loop() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.forgotten = 1 << 40
        api.break_watches()
        before = len(api.requests)
        await elapse(60)
        assert len(api.requests) - before < 60
        assert len(followed.reports) == 1
        assert "too old resource version" in followed.reports[0]

    scenario(main)


def test_a_server_that_ends_every_watch_at_once_does_not_cause_a_busy_loop() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await elapse(60)
        assert len(api.requests) < 60
        assert followed.known == followed.truth

    api = things()
    api.closes_at_once = True
    scenario(main, api)


def test_a_version_that_went_back_means_another_history() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        for n in range(50):
            api.put(THINGS, "t0", {"text": str(n)})
        await elapse(1)
        api.restore(20)
        del api.install(THINGS).objects["t1"]
        await elapse(100)
        assert followed.known == followed.truth

    scenario(main)


def test_a_watch_without_events_is_replaced() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        api.silent = True
        api.delete(THINGS, "t1")
        await elapse(IDLE_S - 5)
        assert "t1" in followed.known
        api.silent = False
        await elapse(10)
        assert followed.known == followed.truth
        assert followed.reports == []

    scenario(main)


def test_a_watch_continues_after_the_server_has_ended_it_in_time() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await elapse(3600)
        watches = api.requests.count(("watch", ""))
        assert 6 <= watches <= 13
        assert api.requests.count(("list", "")) == 1
        assert followed.reports == []

    scenario(main)


def test_without_a_watch_the_resource_is_listed_again_and_again() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        await elapse(60)
        api.delete(THINGS, "t0")
        await elapse(6)
        assert followed.known == followed.truth

    api = things()
    api.forbidden.add("watch")
    scenario(main, api)


def test_retry_after_is_respected_up_to_a_limit() -> None:
    async def main(api: FakeApi, followed: Followed) -> None:
        before = len(api.requests)
        await elapse(300)
        assert 8 <= len(api.requests) - before <= 16
        api.failure = None
        await elapse(32)
        assert followed.known == followed.truth

    api = things()
    api.failure = ApiError(429, "TooManyRequests", "later", "list", THINGS.path, retry_after_s=3600.0)
    scenario(main, api)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("put", "put", "put", "delete", "delete"),
                *("break", "forget", "away", "back", "away 503", "empty lists", "full lists", "silent", "speaking", "page"),
            )
        ),
        st.integers(0, 4),
        st.sampled_from((0.0, 0.0, 0.01, 0.3, 2.0, 8.0)),
    ),
    max_size=40,
)


@examples(300)
@given(STEPS)
def test_the_known_objects_become_right_whatever_the_server_does_and_no_object_is_removed_that_was_not_deleted(
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
            case "empty lists" | "full lists":
                api.empty_lists = step == "empty lists"
            case "silent" | "speaking":
                api.silent = step == "silent"
            case "page":
                api.page = which

    async def main(api: FakeApi, followed: Followed) -> None:
        wrong_s = 0.0
        for step, which, wait in steps:
            act(api, step, which)
            if api.empty_lists and (wrong_s := wrong_s + wait) >= HOLD_S - 1:
                api.empty_lists, wait = False, 0.0
            await elapse(wait)
            assert all(deleted[name] >= count for name, count in followed.deletes.items())
        api.failure, api.empty_lists, api.silent = None, False, False
        await elapse(IDLE_S + HOLD_S + 10)
        assert followed.known == followed.truth
        assert all(deleted[name] >= count for name, count in followed.deletes.items())

    scenario(main)
