"""Objectives and rewrites of an API server: both kinds, both groups, bad objects, missing kinds, and which objects count."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.request.model_rewrite import Rule, Target
from tests.examples import examples
from tests.reports import Reports
from tests.waiting import until
from workers.supervisor.kube.api import EMPTY
from workers.supervisor.kube.errors import ApiError
from workers.supervisor.kube.object_kinds import API_VERSIONS, GROUPS, OBJECTIVE, REWRITE, Found, ModelRewrite, Objective, PoolName
from workers.supervisor.kube.object_watch import DEPTH_MAX, KubeObjects, decode
from workers.supervisor.kube.reflect import Outage

POOL = PoolName("pool")
NEW, OLD = API_VERSIONS
OBJECTIVES, REWRITES = "inferenceobjectives", "inferencemodelrewrites"


def path(plural: str, version: str = NEW) -> str:
    return f"/apis/{version}/namespaces/ns/{plural}"


ALL = tuple(path(plural, version) for plural in (OBJECTIVES, REWRITES) for version in API_VERSIONS)


def item(name: str, spec: Any, version: int = 1, **metadata: Any) -> dict[str, Any]:
    named = {"name": name, "namespace": "ns", "resourceVersion": str(version), **metadata}
    return {"metadata": {"creationTimestamp": "1970-01-01T00:00:05Z", **named}, "spec": spec}


def objective(name: str, priority: Any, version: int = 1, pool: Any = None, **metadata: Any) -> dict[str, Any]:
    reference = pool if pool is not None else {"name": "pool", "group": POOL.group, "kind": "InferencePool"}
    return item(name, {"priority": priority, "poolRef": reference}, version, **metadata)


def rewrite(name: str, target: str, version: int = 1, **more: Any) -> dict[str, Any]:
    rule = {"matches": [{"model": {"type": "Exact", "value": name}}], "targets": [{"modelRewrite": target, "weight": 3}]}
    return item(name, {"poolRef": {"name": "pool"}, "rules": [rule], **more}, version)


class FakeApi:
    """Lists by path, and watches that the test feeds. A path without a list is not installed."""

    def __init__(self) -> None:
        self.lists: dict[str, list[dict[str, Any]]] = {one: [] for one in ALL}
        self.watches: dict[str, asyncio.Queue[tuple[str, dict[str, Any]]]] = {}
        self.failures: dict[str, ApiError] = {}

    async def request(self, verb: str, url: str, *, query: Mapping[str, str] = EMPTY, **_: Any) -> bytes:
        if url in self.failures:
            raise self.failures[url]
        if url not in self.lists:
            raise ApiError(404, "NotFound", "the server could not find it", "list", url)
        return json.dumps({"metadata": {"resourceVersion": "5"}, "items": self.lists[url]}).encode()

    async def lines(self, url: str, *, query: Mapping[str, str], idle_s: float) -> AsyncGenerator[bytes, None]:
        queue = self.watches.setdefault(url, asyncio.Queue())
        while True:
            kind, thing = await queue.get()
            yield json.dumps({"type": kind, "object": thing}).encode()

    def send(self, url: str, kind: str, thing: dict[str, Any]) -> None:
        self.watches.setdefault(url, asyncio.Queue()).put_nowait((kind, thing))


class Received:
    """The latest objects that KubeObjects has published, and its reports."""

    def __init__(self) -> None:
        self.found = Found()
        self.complete = False
        self.times = 0
        self.reports = Reports()
        self.objects: KubeObjects
        self._changed = asyncio.Event()

    def changed(self, found: Found, complete: bool) -> None:
        self.found, self.complete, self.times = found, complete, self.times + 1
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def priorities(self) -> dict[str, int]:
        return {name: each.priority for name, each in self.found.objectives.items()}

    def targets(self) -> dict[str, str]:
        return {n: each.rewrite.rules[0].targets[0].model for n, each in self.found.rewrites.items()}


def followed(api: FakeApi, test: Callable[[Received], Awaitable[None]], expects: Collection[str] = ()) -> Received:
    async def run() -> Received:
        received = Received()
        objects = received.objects = KubeObjects(
            api, "ns", {POOL: [received.changed]}, report=received.reports, outage=Outage(received.reports), expects=expects
        )
        running = asyncio.create_task(objects.run())
        try:
            await test(received)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return received

    return asyncio.run(run())


def test_both_kinds_are_listed_and_followed() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 4)]
    api.lists[path(REWRITES)] = [rewrite("m", "x")]

    async def test(received: Received) -> None:
        await received.until(lambda: received.complete)
        assert (received.priorities(), received.targets()) == ({"a": 4}, {"m": "x"})
        api.send(path(OBJECTIVES), "MODIFIED", objective("a", -5, 6))
        api.send(path(OBJECTIVES), "ADDED", objective("b", 2, 7))
        api.send(path(REWRITES), "MODIFIED", rewrite("m", "y", 8))
        await received.until(lambda: received.priorities() == {"a": -5, "b": 2} and received.targets() == {"m": "y"})
        api.send(path(OBJECTIVES), "DELETED", objective("a", -5, 9))
        api.send(path(REWRITES), "DELETED", rewrite("m", "y", 10))
        await received.until(lambda: received.priorities() == {"b": 2} and received.targets() == {})

    assert followed(api, test).reports == []


def test_simultaneous_changes_are_published_together() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective(f"o{n}", n) for n in range(50)]

    async def test(received: Received) -> None:
        await received.until(lambda: received.complete and len(received.priorities()) == 50)
        assert received.times == 1
        for n in range(50):
            api.send(path(OBJECTIVES), "DELETED", objective(f"o{n}", n, 10 + n))
        await received.until(lambda: not received.priorities())
        assert received.times <= 4

    followed(api, test)


def test_an_object_means_the_same_as_in_a_file() -> None:
    (found,) = decode(REWRITE, NEW, json.dumps(rewrite("m", "x")).encode())
    assert isinstance(found, ModelRewrite)
    assert (found.name, found.group, found.pools, found.place) == ("m", 0, (POOL,), "ns/m")
    assert (found.rewrite.created, found.rewrite.rules) == (5.0, (Rule(("m",), (Target("x", 3),)),))
    (old,) = decode(OBJECTIVE, OLD, json.dumps(objective("a", 2147483647)).encode())
    assert isinstance(old, Objective) and (old.priority, old.group) == (2147483647, 1)
    (without,) = decode(OBJECTIVE, NEW, json.dumps(item("a", {"poolRef": {"name": "pool"}})).encode())
    assert isinstance(without, Objective) and without.priority == 0


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({"rules": [{"targets": [{"modelRewrite": "x", "weight": 0}]}]}, "spec.rules[0].targets[0].weight: '0' is not"),
        ({"rules": [{"targets": [{"modelRewrite": "x", "weight": True}]}]}, "spec.rules[0].targets[0].weight: 'true'"),
        ({"rules": [{"targets": []}]}, "spec.rules[0]: no targets"),
        ({"rules": {}}, "spec.rules must be a list"),
        (None, "spec.rules: the list of rules is missing"),
        ([], "spec must be a mapping"),
    ],
)
def test_a_fault_names_the_field(spec: Any, fault: str) -> None:
    with pytest.raises(ValueError, match="InferenceModelRewrite 'm'") as wrong:
        decode(REWRITE, NEW, json.dumps(item("m", spec)).encode())
    assert fault in str(wrong.value)
    assert str(wrong.value).endswith("its last good state stays")


def test_deep_nesting_is_a_fault() -> None:
    deep: Any = {}
    for _ in range(DEPTH_MAX + 1):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="nested deeper"):
        decode(REWRITE, NEW, json.dumps(item("m", deep)).encode())


def test_a_bad_object_is_reported_once_and_its_last_good_state_stays() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 4), objective("bad", "high")]

    async def test(received: Received) -> None:
        await received.until(lambda: received.complete)
        assert received.priorities() == {"a": 4}
        for version in (6, 7):
            api.send(path(OBJECTIVES), "MODIFIED", objective("a", 1 << 40, version))
        api.send(path(OBJECTIVES), "ADDED", objective("b", 1, 8))
        await received.until(lambda: received.priorities() == {"a": 4, "b": 1})
        api.send(path(OBJECTIVES), "MODIFIED", objective("a", 5, 9))
        await received.until(lambda: received.priorities()["a"] == 5)

    bad, changed = followed(api, test).reports
    assert "namespace=ns name=bad reason=" in bad and "spec.priority: 'high' is not an integer" in bad
    assert "namespace=ns name=a reason=" in changed and "its last good state stays" in changed


def test_an_object_that_is_being_deleted_does_not_count() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 4)]

    async def test(received: Received) -> None:
        await received.until(lambda: received.priorities() == {"a": 4})
        api.send(path(OBJECTIVES), "MODIFIED", objective("a", 4, 6, deletionTimestamp="2026-01-01T00:00:00Z"))
        await received.until(lambda: received.priorities() == {})

    followed(api, test)


@pytest.mark.parametrize(
    ("reference", "counts"),
    [
        ({"name": "pool"}, True),
        ({"name": "pool", "group": POOL.group, "kind": "Whatever"}, True),
        ({"name": "pool", "group": "inference.networking.x-k8s.io"}, False),
        ({"name": "pool", "group": ""}, False),
        ({"name": "other"}, False),
        ({}, False),
    ],
)
def test_only_objects_of_the_pool_count_and_others_are_not_reported(reference: Any, counts: bool) -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 4, pool=reference)]

    async def test(received: Received) -> None:
        await received.until(lambda: received.complete)
        assert bool(received.priorities()) is counts

    assert followed(api, test).reports == []


def test_the_newer_group_wins_for_each_name_and_the_older_group_is_reported_once() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 1), objective("b", 2)]
    api.lists[path(OBJECTIVES, OLD)] = [objective("a", 10), objective("c", 3), objective("d", 4)]

    async def test(received: Received) -> None:
        await received.until(lambda: received.complete)
        assert received.priorities() == {"a": 1, "b": 2, "c": 3, "d": 4}
        api.send(path(OBJECTIVES), "DELETED", objective("a", 1, 6))
        await received.until(lambda: received.priorities()["a"] == 10)

    (report,) = followed(api, test).reports
    assert f"{OLD} of InferenceObjective is deprecated" in report and NEW in report


def test_kinds_that_are_not_installed_have_no_objects_until_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.supervisor.kube.reflect.ABSENT_S", 0.01)
    api = FakeApi()
    api.lists = {path(OBJECTIVES, OLD): [objective("a", 1)]}

    async def test(received: Received) -> None:
        await received.until(lambda: received.complete)
        assert received.priorities() == {"a": 1}
        api.lists[path(REWRITES)] = [rewrite("m", "x")]
        api.lists[path(OBJECTIVES)] = [objective("a", 2)]
        await received.until(lambda: received.priorities() == {"a": 2} and received.targets() == {"m": "x"})

    reports = followed(api, test).reports
    assert all("deprecated" in report for report in reports)


def test_a_refused_list_does_not_delay_the_others_and_is_reported() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 1)]
    api.failures[path(REWRITES, OLD)] = ApiError(403, "Forbidden", "no", "list", path(REWRITES, OLD))

    async def test(received: Received) -> None:
        await received.until(lambda: received.complete)
        assert received.priorities() == {"a": 1}

    (report,) = followed(api, test).reports
    assert f'apiGroups: ["{GROUPS[1]}"], resources: ["{REWRITES}"], verbs: ["list"]' in report


def test_the_objects_are_incomplete_until_every_list_has_arrived() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 1)]
    api.failures[path(REWRITES)] = ApiError(503, "ServiceUnavailable", "starting", "list", path(REWRITES))

    async def test(received: Received) -> None:
        waits = "inferencemodelrewrites.llm-d.ai were not listed yet"
        await received.until(lambda: bool(received.priorities()) and received.objects.missing().startswith(waits))
        assert not received.complete
        assert received.objects.missing() == (
            "inferencemodelrewrites.llm-d.ai were not listed yet: "
            "the API server refused to list inferencemodelrewrites in namespace ns: ServiceUnavailable: starting"
        )
        del api.failures[path(REWRITES)]
        await received.until(lambda: received.complete)
        assert received.objects.missing() == ""

    followed(api, test)


def test_a_new_picker_waits_until_the_listed_objects_count() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 1)]

    async def test(received: Received) -> None:
        await until(lambda: not received.objects.missing())
        assert received.priorities() == {"a": 1}

    followed(api, test)


def test_an_empty_list_of_a_kind_that_had_objects_is_believed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.supervisor.kube.object_watch.HOLD_S", 0.1)
    api = FakeApi()
    api.lists[path(OBJECTIVES, OLD)] = [objective("a", 1)]

    async def test(received: Received) -> None:
        await received.until(lambda: received.objects.missing() == "" and received.times > 0)
        assert not received.complete
        await received.until(lambda: received.complete)

    followed(api, test, [OBJECTIVE, REWRITE])


def test_a_predecessors_objects_stay_while_the_role_to_list_them_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.supervisor.kube.object_watch.HOLD_S", 0.1)
    api = FakeApi()
    for group in (NEW, OLD):
        at = path(OBJECTIVES, group)
        api.failures[at] = ApiError(403, "Forbidden", "no", "list", at)

    async def test(received: Received) -> None:
        await received.until(lambda: received.times > 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(received.until(lambda: received.complete), 0.5)
        api.failures.clear()
        await received.until(lambda: received.complete)

    followed(api, test, [OBJECTIVE])


def test_expected_objects_of_either_group_make_the_objects_complete_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.supervisor.kube.object_watch.HOLD_S", 1000.0)
    api = FakeApi()
    api.lists[path(OBJECTIVES, OLD)] = [objective("a", 1)]

    async def test(received: Received) -> None:
        await received.until(lambda: received.complete)

    followed(api, test, [OBJECTIVE])


def test_a_kind_that_cannot_be_listed_does_not_delay_readiness_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi()
    api.failures[path(REWRITES)] = ApiError(500, "InternalError", "no conversion", "list", path(REWRITES))

    async def test(received: Received) -> None:
        assert received.objects.missing()
        await received.until(lambda: received.times > 0)
        assert received.objects.missing()
        monkeypatch.setattr("workers.supervisor.kube.object_watch.WAIT_S", 0.0)
        assert received.objects.missing() == ""

    followed(api, test)


scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
keys = st.sampled_from(
    ["poolRef", "name", "group", "priority", "rules", "matches", "model", "type", "value", "targets", "modelRewrite", "weight"]
)
specs = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5), max_leaves=20)


@given(st.sampled_from([OBJECTIVE, REWRITE]), specs, st.text(max_size=8) | st.sampled_from(["a", "a.b"]), st.text(max_size=30))
@examples(300)
def test_any_object_is_either_read_or_refused_with_a_text(kind: str, spec: Any, name: str, created: str) -> None:
    try:
        found = decode(kind, NEW, json.dumps(item(name, spec, creationTimestamp=created)).encode())
    except ValueError as wrong:
        assert kind in str(wrong)
    else:
        assert len(found) == 1


@pytest.mark.parametrize("created", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00Z"])
def test_times_at_the_ends_of_the_calendar_are_valid(created: str) -> None:
    (found,) = decode(REWRITE, NEW, json.dumps(item("m", {"rules": []}, creationTimestamp=created)).encode())
    assert isinstance(found, ModelRewrite) and isinstance(found.rewrite.created, float)
