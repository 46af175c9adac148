"""Leader election by a Lease, with the real driver in virtual time against an API server that forgets, hangs and goes away."""

import asyncio
import contextlib
import json
import random
import selectors
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from workers.kube.api import ApiError, Unreachable
from workers.kube.lease import RESIGN_S, Candidacy, clock, decoded, encoded, lease_name, micro_time
from workers.leader import NEVER, TIMES, Election, Lease, Write

COLLECTION = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
NAME = "epp-ns-pool.llm-d.ai"


class _Jump(selectors.SelectSelector):
    """Waits for nothing: time goes on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing is to be done."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def virtual(scenario: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def run() -> None:
            await scenario()

        runner.run(run())


def now() -> float:
    return asyncio.get_running_loop().time()


class ApiServer:
    """One lease with optimistic concurrency, watches, and what may go wrong."""

    def __init__(self, seed: int = 0) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.random = random.Random(seed)
        self.away = False
        self.watched = True
        self.refuses: ApiError | None = None
        self.lost = 0.0  # chance that an answer does not come
        self.asked: list[tuple[float, str]] = []
        self.watches: set[asyncio.Queue[bytes]] = set()

    async def request(self, verb: str, path: str, *, body: bytes | None = None, timeout_s: float = 10.0) -> bytes:
        self.asked.append((now(), verb))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer(verb, path, body)
        except TimeoutError:
            raise Unreachable("no answer in time") from None

    async def _answer(self, verb: str, path: str, body: bytes | None) -> bytes:
        await asyncio.sleep(0.005)
        if self.away:
            raise Unreachable("connection refused")
        if self.refuses is not None:
            raise self.refuses
        answer = self._done(verb, path, body)
        if self.random.random() < self.lost:
            await asyncio.sleep(60)
        return answer

    def _done(self, verb: str, path: str, body: bytes | None) -> bytes:
        if verb == "POST":
            assert path == COLLECTION
            if self.lease is not None:
                raise ApiError(409, "AlreadyExists", "it exists", "create", path)
        else:
            assert path == f"{COLLECTION}/{NAME}"
            if self.lease is None:
                raise ApiError(404, "NotFound", "no such lease", verb, path)
        if body is not None:
            found = json.loads(body)
            if verb == "PUT" and found["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:  # type: ignore[index]
                raise ApiError(409, "Conflict", "modified", "update", path)
            self.put(found)
        return json.dumps(self.lease).encode()

    def put(self, lease: dict[str, Any]) -> None:
        self.version += 1
        lease["metadata"]["resourceVersion"] = str(self.version)
        self.lease = lease
        for watch in self.watches:
            watch.put_nowait(b"{}")

    async def lines(self, path: str, *, query: Mapping[str, str], idle_s: float) -> AsyncGenerator[bytes, None]:
        assert path == COLLECTION
        assert query["fieldSelector"] == f"metadata.name={NAME}"
        if not self.watched:
            raise ApiError(403, "Forbidden", "no", "watch", path)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.watches.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self.watches.discard(queue)

    @property
    def holder(self) -> str:
        return (self.lease or {"spec": {}})["spec"].get("holderIdentity") or ""


class Picker:
    """A candidate that runs, and what it has kept for a successor."""

    def __init__(self, api: ApiServer, identity: str, leads_until: float = NEVER, wall: float = 1.7e9) -> None:
        self.kept = leads_until
        self.identity = identity
        self.api = api
        election = Election(identity, leads_until=leads_until, random=api.random.random)
        self.candidacy = Candidacy(election, "ns", "pool", keep=self._keep, now=now, wall=lambda: wall + now())
        self.task = asyncio.ensure_future(self.candidacy.run(api))

    def _keep(self, leads_until: float) -> None:
        self.kept = leads_until

    @property
    def leads(self) -> bool:
        return not self.task.cancelled() and self.candidacy.leads

    async def kill(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


def test_the_lease_is_named_as_the_fields_other_pickers_name_it() -> None:
    assert lease_name("ns", "pool") == NAME


def test_the_clock_goes_on_while_a_machine_is_suspended_and_never_back() -> None:
    assert clock() <= clock()


def test_the_first_takes_the_lease_at_once_and_the_second_says_who_holds_it() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        assert one.candidacy.missing() == f"not the leader yet: the lease {NAME} is not taken"
        await asyncio.sleep(0.1)
        two = Picker(api, "two")
        await asyncio.sleep(60)
        assert (one.leads, two.leads) == (True, False)
        assert one.candidacy.missing() == ""
        assert two.candidacy.missing() == "not the leader: held by one"
        assert one.candidacy.by_lease()[NAME]() is True
        for picker in (one, two):
            await picker.kill()

    virtual(scenario)


def test_what_is_written_is_what_the_field_writes() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await asyncio.sleep(3)
        assert api.lease is not None
        assert api.lease["spec"] == {
            "holderIdentity": "one",
            "leaseDurationSeconds": 15,
            "leaseTransitions": 0,
            "acquireTime": "2023-11-14T22:13:20.005000Z",
            "renewTime": "2023-11-14T22:13:22.005000Z",
        }
        await one.kill()

    virtual(scenario)


@pytest.mark.parametrize("watched", [True, False])
def test_a_killed_leader_is_followed_within_the_lease(watched: bool) -> None:
    async def scenario() -> None:
        api = ApiServer()
        api.watched = watched
        one, two = Picker(api, "one"), Picker(api, "two")
        await asyncio.sleep(31)
        first, second = (one, two) if one.leads else (two, one)
        await first.kill()
        begun = now()
        async with asyncio.timeout(60):
            await second.candidacy.elected()
        slack = 0.1 if watched else TIMES.retry_s * (1 + TIMES.jitter)
        assert TIMES.lease_s - TIMES.retry_s - 0.1 < now() - begun <= TIMES.lease_s + slack
        assert api.lease is not None
        assert api.lease["spec"]["leaseTransitions"] == 1
        await second.kill()

    virtual(scenario)


def test_who_resigns_is_followed_at_once() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await asyncio.sleep(1)
        two = Picker(api, "two")
        await asyncio.sleep(30.7)
        begun = now()
        one.candidacy.resign()
        assert (one.leads, one.kept) == (False, NEVER)
        assert one.candidacy.missing() == "not the leader: it has given the lease back"
        await one.candidacy.given_back()
        await two.candidacy.elected()
        assert now() - begun < 0.1
        await one.task
        await two.kill()

    virtual(scenario)


def test_who_resigns_while_the_lease_is_being_taken_gives_it_back_too() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await asyncio.sleep(0.007)  # the lease is being made
        one.candidacy.resign()
        await one.candidacy.given_back()
        assert (api.version, api.holder) == (2, "")
        await one.task

    virtual(scenario)


def test_a_resignation_that_nobody_hears_takes_no_longer_than_its_time() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await asyncio.sleep(1)
        api.away = True
        begun = now()
        one.candidacy.resign()
        await one.candidacy.given_back()
        assert now() - begun == pytest.approx(RESIGN_S)
        await one.kill()

    virtual(scenario)


def test_a_standby_that_is_told_to_stop_leaves_the_lease_alone() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await asyncio.sleep(1)
        two = Picker(api, "two")
        await asyncio.sleep(1)
        two.candidacy.resign()
        await two.candidacy.given_back()
        assert two.task.done()
        assert api.holder == "one"
        await one.kill()

    virtual(scenario)


def test_a_successor_of_a_killed_supervisor_goes_on_leading_without_a_gap() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await asyncio.sleep(9)
        two = Picker(api, "two")
        await one.kill()
        successor = Picker(api, "one", leads_until=one.kept)
        for _ in range(400):
            assert successor.leads
            assert not two.leads
            await asyncio.sleep(0.1)
        await successor.candidacy.elected()
        assert api.lease is not None
        assert api.lease["spec"]["leaseTransitions"] == 0
        for picker in (successor, two):
            await picker.kill()

    virtual(scenario)


def test_while_the_api_is_away_the_leader_leads_until_its_deadline_and_says_why_not_after() -> None:
    async def scenario() -> None:
        api = ApiServer()
        with capture_logs() as lines:
            one = Picker(api, "one")
            await asyncio.sleep(4.5)
            assert one.leads
            api.away = True
            await asyncio.sleep(9)
            assert one.leads
            await asyncio.sleep(1)
            assert not one.leads
            assert one.candidacy.missing() == (
                f"not the leader any more: the lease {NAME} cannot be renewed (connection refused)"
            )
            await asyncio.sleep(60)
            api.away = False
            await asyncio.sleep(TIMES.retry_s + 0.1)
            assert one.leads
        events = [line["event"] for line in lines]
        assert events.count("this picker leads") == 2
        assert events.count("this picker leads no more") == 1
        assert len(api.asked) < 60
        await one.kill()

    virtual(scenario)


def test_a_picker_without_the_right_to_the_lease_names_the_rule_that_is_missing() -> None:
    async def scenario() -> None:
        api = ApiServer()
        api.refuses = ApiError(403, "Forbidden", "no", "get", f"{COLLECTION}/{NAME}")
        with capture_logs() as lines:
            one = Picker(api, "one")
            await asyncio.sleep(30)
        rule = '{apiGroups: ["coordination.k8s.io"], resources: ["leases"], verbs: ["get"]}'
        assert rule in one.candidacy.missing()
        assert [rule in line["event"] for line in lines] == [True, True, True]  # one each ten seconds
        await one.kill()

    virtual(scenario)


def test_a_lease_that_somebody_deletes_is_made_again_by_its_leader() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await asyncio.sleep(1)
        two = Picker(api, "two")
        await asyncio.sleep(5)
        api.lease = None
        for _ in range(200):
            assert (one.leads, two.leads) == (True, False)
            await asyncio.sleep(0.1)
        assert api.holder == "one"
        for picker in (one, two):
            await picker.kill()

    virtual(scenario)


def test_wall_clocks_that_are_years_apart_change_nothing() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one", wall=0.0)
        await asyncio.sleep(1)
        two = Picker(api, "two", wall=3e9)
        await asyncio.sleep(120)
        assert (one.leads, two.leads) == (True, False)
        for picker in (one, two):
            await picker.kill()

    virtual(scenario)


def test_a_candidate_costs_the_api_server_few_requests_and_a_leader_one_in_two_seconds() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await asyncio.sleep(100)
        assert len(api.asked) <= 53
        two = Picker(api, "two")
        api.asked.clear()
        await asyncio.sleep(100)
        assert len(api.asked) <= 50 + 105
        for picker in (one, two):
            await picker.kill()

    virtual(scenario)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), lost=st.sampled_from((0.0, 0.1, 0.4)), watched=st.booleans())
def test_at_most_one_driver_leads_whatever_is_lost_killed_or_away(seed: int, lost: float, watched: bool) -> None:
    async def scenario() -> None:
        api = ApiServer(seed)
        api.lost, api.watched = lost, watched
        draw = random.Random(seed)
        pickers = [Picker(api, f"p{i}") for i in range(3)]
        for turn in range(400):
            await asyncio.sleep(draw.uniform(0, 1))
            assert sum(picker.leads for picker in pickers) <= 1
            place = draw.randrange(3)
            old = pickers[place]
            if draw.random() < 0.03:
                await old.kill()
                with_word = draw.random() < 0.5
                pickers[place] = Picker(api, old.identity, old.kept) if with_word else Picker(api, f"p{place}-{turn}")
            elif draw.random() < 0.02:
                old.candidacy.resign()
                await old.candidacy.given_back()
                await old.kill()
                pickers[place] = Picker(api, f"p{place}-{turn}")
            elif draw.random() < 0.02:
                api.away = not api.away
        api.lost, api.away = 0.0, False
        await asyncio.sleep(40)
        assert sum(picker.leads for picker in pickers) == 1
        for picker in pickers:
            await picker.kill()

    with capture_logs():
        virtual(scenario)


def test_a_lease_is_read_whatever_is_missing_in_it() -> None:
    assert decoded(b'{"metadata": {"resourceVersion": "5"}}') == Lease("5")
    assert decoded(
        b'{"metadata": {"resourceVersion": "5"}, "spec": {"holderIdentity": null, "leaseDurationSeconds": -3}}'
    ) == Lease("5")
    full = (
        b'{"kind": "Lease", "metadata": {"resourceVersion": "5", "name": "n"}, "spec": {"holderIdentity": "h", '
        b'"leaseDurationSeconds": 15, "leaseTransitions": 2, "acquireTime": "a", "renewTime": "r", "strategy": null}}'
    )
    assert decoded(full) == Lease("5", "h", 15.0, 2, "a", "r")
    with pytest.raises(Unreachable, match="is no Lease"):
        decoded(b"<html>")


def test_a_lease_that_is_given_back_has_no_holder_and_the_time_of_its_end() -> None:
    before = Lease("5", "me", 15.0, 2, "a", "r")
    spec = json.loads(encoded(Write(before, "", 1.0, 2), "n", 0.5))["spec"]
    assert spec == {
        "holderIdentity": None,
        "leaseDurationSeconds": 1,
        "leaseTransitions": 2,
        "acquireTime": "1970-01-01T00:00:00.500000Z",
        "renewTime": "1970-01-01T00:00:00.500000Z",
    }
    kept = json.loads(encoded(Write(before, "me", 15.0, 2), "n", 0.5))
    assert kept["spec"]["acquireTime"] == "a"
    assert kept["metadata"] == {"name": "n", "resourceVersion": "5"}


def test_times_have_six_digits_of_a_second() -> None:
    assert micro_time(1.0) == "1970-01-01T00:00:01.000000Z"
