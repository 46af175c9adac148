"""Leader election by a Lease: the real driver in virtual time, with a fake API server that loses answers, hangs and goes away."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.examples import examples
from tests.waiting import elapse, in_virtual_time
from workers.supervisor.kube.election import NEVER, TIMES, Election, Lease, Write
from workers.supervisor.kube.errors import ApiError, Unreachable
from workers.supervisor.kube.lease import RESIGN_S, Candidacy, clock, decoded, encoded, lease_name, micro_time

COLLECTION = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"
NAME = "epp-ns-pool.llm-d.ai"


def now() -> float:
    return asyncio.get_running_loop().time()


class ApiServer:
    """A server with one lease: optimistic concurrency, watches and faults."""

    def __init__(self, seed: int = 0) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.random = random.Random(seed)
        self.away = False
        self.watched = True
        self.refuses: ApiError | None = None
        self.lost = 0.0  # chance that an answer is lost
        self.requests: list[tuple[float, str]] = []
        self.watches: set[asyncio.Queue[bytes]] = set()

    async def request(self, verb: str, path: str, *, body: bytes | None = None, timeout_s: float = 10.0) -> bytes:
        self.requests.append((now(), verb))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer(verb, path, body)
        except TimeoutError:
            raise Unreachable("no answer in time") from None

    async def _answer(self, verb: str, path: str, body: bytes | None) -> bytes:
        # Virtual here, and real in the tests of a standby: an answer takes time in both.
        await asyncio.sleep(0.005)
        if self.away:
            raise Unreachable("connection refused")
        if self.refuses is not None:
            raise self.refuses
        answer = self._done(verb, path, body)
        if self.random.random() < self.lost:
            await elapse(60)
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
    """A running candidate. `kept` is the value for a successor."""

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


def test_the_lease_has_the_same_name_as_in_the_go_picker() -> None:
    assert lease_name("ns", "pool") == NAME


def test_the_clock_never_goes_back() -> None:
    assert clock() <= clock()


def test_the_first_picker_takes_the_lease_at_once_and_the_second_names_the_holder() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        assert one.candidacy.missing() == f"not the leader yet: the lease {NAME} is not taken"
        await elapse(0.1)
        two = Picker(api, "two")
        await elapse(60)
        assert (one.leads, two.leads) == (True, False)
        assert one.candidacy.missing() == ""
        assert two.candidacy.missing() == "not the leader: held by one"
        assert one.candidacy.by_lease()[NAME]() is True
        for picker in (one, two):
            await picker.kill()

    in_virtual_time(scenario)


def test_the_written_lease_has_the_fields_that_other_clients_write() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await elapse(3)
        assert api.lease is not None
        assert api.lease["spec"] == {
            "holderIdentity": "one",
            "leaseDurationSeconds": 15,
            "leaseTransitions": 0,
            "acquireTime": "2023-11-14T22:30:00.005000Z",
            "renewTime": "2023-11-14T22:30:02.005000Z",
        }
        await one.kill()

    in_virtual_time(scenario)


@pytest.mark.parametrize("watched", [True, False])
def test_another_picker_replaces_a_killed_leader_within_the_lease(watched: bool) -> None:
    async def scenario() -> None:
        api = ApiServer()
        api.watched = watched
        one, two = Picker(api, "one"), Picker(api, "two")
        await elapse(31)
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

    in_virtual_time(scenario)


def test_another_picker_replaces_a_leader_that_resigns_at_once() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await elapse(1)
        two = Picker(api, "two")
        await elapse(30.7)
        begun = now()
        one.candidacy.resign()
        assert (one.leads, one.kept) == (False, NEVER)
        assert one.candidacy.missing() == "not the leader: this picker has given the lease back"
        await one.candidacy.given_back()
        await two.candidacy.elected()
        assert now() - begun < 0.1
        await one.task
        await two.kill()

    in_virtual_time(scenario)


def test_a_picker_that_resigns_while_it_takes_the_lease_gives_it_back() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await elapse(0.007)  # the lease is being created
        one.candidacy.resign()
        await one.candidacy.given_back()
        assert (api.version, api.holder) == (2, "")
        await one.task

    in_virtual_time(scenario)


def test_a_resignation_without_an_answer_ends_after_its_time() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await elapse(1)
        api.away = True
        begun = now()
        one.candidacy.resign()
        await one.candidacy.given_back()
        assert now() - begun == pytest.approx(RESIGN_S)
        await one.kill()

    in_virtual_time(scenario)


def test_a_standby_that_stops_does_not_touch_the_lease() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await elapse(1)
        two = Picker(api, "two")
        await elapse(1)
        two.candidacy.resign()
        await two.candidacy.given_back()
        assert two.task.done()
        assert api.holder == "one"
        await one.kill()

    in_virtual_time(scenario)


def test_the_successor_of_a_killed_supervisor_continues_to_lead_without_a_gap() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await elapse(9)
        two = Picker(api, "two")
        await one.kill()
        successor = Picker(api, "one", leads_until=one.kept)
        for _ in range(400):
            assert successor.leads
            assert not two.leads
            await elapse(0.1)
        await successor.candidacy.elected()
        assert api.lease is not None
        assert api.lease["spec"]["leaseTransitions"] == 0
        for picker in (successor, two):
            await picker.kill()

    in_virtual_time(scenario)


def test_while_the_api_is_away_the_leader_leads_until_its_deadline_and_then_gives_the_reason() -> None:
    async def scenario() -> None:
        api = ApiServer()
        with capture_logs() as lines:
            one = Picker(api, "one")
            await elapse(4.5)
            assert one.leads
            api.away = True
            await elapse(9)
            assert one.leads
            await elapse(1)
            assert not one.leads
            assert one.candidacy.missing() == (f"not the leader any more: the lease {NAME} cannot be renewed (connection refused)")
            await elapse(60)
            api.away = False
            await elapse(TIMES.retry_s + 0.1)
            assert one.leads
        events = [line["event"] for line in lines]
        assert events.count("this picker leads") == 2
        assert events.count("this picker does not lead any more") == 1
        assert len(api.requests) < 60
        await one.kill()

    in_virtual_time(scenario)


def test_a_picker_without_access_to_the_lease_names_the_missing_rule() -> None:
    async def scenario() -> None:
        api = ApiServer()
        api.refuses = ApiError(403, "Forbidden", "no", "get", f"{COLLECTION}/{NAME}")
        with capture_logs() as lines:
            one = Picker(api, "one")
            await elapse(30)
        rule = '{apiGroups: ["coordination.k8s.io"], resources: ["leases"], verbs: ["get"]}'
        assert rule in one.candidacy.missing()
        assert [rule in line["last"] for line in lines] == [True, True, True]  # one every ten seconds
        await one.kill()

    in_virtual_time(scenario)


def test_the_leader_creates_a_deleted_lease_again() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await elapse(1)
        two = Picker(api, "two")
        await elapse(5)
        api.lease = None
        for _ in range(200):
            assert (one.leads, two.leads) == (True, False)
            await elapse(0.1)
        assert api.holder == "one"
        for picker in (one, two):
            await picker.kill()

    in_virtual_time(scenario)


def test_wall_clocks_that_are_years_apart_have_no_effect() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one", wall=0.0)
        await elapse(1)
        two = Picker(api, "two", wall=3e9)
        await elapse(120)
        assert (one.leads, two.leads) == (True, False)
        for picker in (one, two):
            await picker.kill()

    in_virtual_time(scenario)


def test_a_leader_sends_a_request_every_two_seconds_and_a_candidate_only_few() -> None:
    async def scenario() -> None:
        api = ApiServer()
        one = Picker(api, "one")
        await elapse(100)
        assert len(api.requests) <= 53
        two = Picker(api, "two")
        api.requests.clear()
        await elapse(100)
        assert len(api.requests) <= 50 + 105
        for picker in (one, two):
            await picker.kill()

    in_virtual_time(scenario)


@examples(25)
@given(seed=st.integers(0, 2**32), lost=st.sampled_from((0.0, 0.1, 0.4)), watched=st.booleans())
def test_at_most_one_picker_leads_with_lost_answers_killed_pickers_and_outages(seed: int, lost: float, watched: bool) -> None:
    async def scenario() -> None:
        api = ApiServer(seed)
        api.lost, api.watched = lost, watched
        draw = random.Random(seed)
        pickers = [Picker(api, f"p{i}") for i in range(3)]
        for turn in range(400):
            await elapse(draw.uniform(0, 1))
            assert sum(picker.leads for picker in pickers) <= 1
            place = draw.randrange(3)
            old = pickers[place]
            if draw.random() < 0.03:
                await old.kill()
                inherits = draw.random() < 0.5
                pickers[place] = Picker(api, old.identity, old.kept) if inherits else Picker(api, f"p{place}-{turn}")
            elif draw.random() < 0.02:
                old.candidacy.resign()
                await old.candidacy.given_back()
                await old.kill()
                pickers[place] = Picker(api, f"p{place}-{turn}")
            elif draw.random() < 0.02:
                api.away = not api.away
        api.lost, api.away = 0.0, False
        await elapse(40)
        assert sum(picker.leads for picker in pickers) == 1
        for picker in pickers:
            await picker.kill()

    with capture_logs():
        in_virtual_time(scenario)


def test_a_lease_with_missing_fields_is_decoded() -> None:
    assert decoded(b'{"metadata": {"resourceVersion": "5"}}') == Lease("5")
    assert decoded(b'{"metadata": {"resourceVersion": "5"}, "spec": {"holderIdentity": null, "leaseDurationSeconds": -3}}') == Lease("5")
    full = (
        b'{"kind": "Lease", "metadata": {"resourceVersion": "5", "name": "n"}, "spec": {"holderIdentity": "h", '
        b'"leaseDurationSeconds": 15, "leaseTransitions": 2, "acquireTime": "a", "renewTime": "r", "strategy": null}}'
    )
    assert decoded(full) == Lease("5", "h", 15.0, 2, "a", "r")
    for answer in (b"<html>", b'{"metadata": {"resourceVersion": "\xff"}}', b'{"more":' + b"[" * 100_000):
        with pytest.raises(Unreachable, match="is not a Lease"):
            decoded(answer)


def test_a_lease_that_is_given_back_has_no_holder_and_the_time_of_the_change() -> None:
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
