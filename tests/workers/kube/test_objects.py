"""Objectives and rewrites of an API server: both kinds, both groups, what is bad, what is absent, what counts."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.model_rewrite import Rule, Target
from workers.kube.api import EMPTY, ApiError
from workers.kube.objects import DEPTH_MAX, KubeObjects, decode
from workers.kube.reflect import Outage
from workers.object_kinds import API_VERSIONS, GROUPS, OBJECTIVE, REWRITE, Found, ModelRewrite, Objective, PoolName

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
    rule = {
        "matches": [{"model": {"type": "Exact", "value": name}}],
        "targets": [{"modelRewrite": target, "weight": 3}],
    }
    return item(name, {"poolRef": {"name": "pool"}, "rules": [rule], **more}, version)


class FakeApi:
    """Lists by path, and watches that wait for what the test says. A path without a list is not installed."""

    def __init__(self) -> None:
        self.lists: dict[str, list[dict[str, Any]]] = {one: [] for one in ALL}
        self.watches: dict[str, asyncio.Queue[tuple[str, dict[str, Any]]]] = {}
        self.failures: dict[str, ApiError] = {}

    async def request(self, verb: str, asked: str, *, query: Mapping[str, str] = EMPTY, **_: Any) -> bytes:
        if asked in self.failures:
            raise self.failures[asked]
        if asked not in self.lists:
            raise ApiError(404, "NotFound", "the server could not find it", "list", asked)
        return json.dumps({"metadata": {"resourceVersion": "5"}, "items": self.lists[asked]}).encode()

    async def lines(self, asked: str, *, query: Mapping[str, str], idle_s: float) -> AsyncGenerator[bytes, None]:
        queue = self.watches.setdefault(asked, asyncio.Queue())
        while True:
            kind, given = await queue.get()
            yield json.dumps({"type": kind, "object": given}).encode()

    def say(self, asked: str, kind: str, given: dict[str, Any]) -> None:
        self.watches.setdefault(asked, asyncio.Queue()).put_nowait((kind, given))


class Heard:
    """What was told, and reported."""

    def __init__(self) -> None:
        self.found = Found()
        self.complete = False
        self.times = 0
        self.reports: list[str] = []
        self.objects: KubeObjects
        self._told = asyncio.Event()

    def told(self, found: Found, complete: bool) -> None:
        self.found, self.complete, self.times = found, complete, self.times + 1
        self._told.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._told.clear()
                await self._told.wait()

    def priorities(self) -> dict[str, int]:
        return {name: each.priority for name, each in self.found.objectives.items()}

    def targets(self) -> dict[str, str]:
        return {n: each.rewrite.rules[0].targets[0].model for n, each in self.found.rewrites.items()}


def followed(api: FakeApi, test: Callable[[Heard], Awaitable[None]], expects: Collection[str] = ()) -> Heard:
    async def run() -> Heard:
        heard = Heard()
        objects = heard.objects = KubeObjects(
            api,
            "ns",
            POOL,
            told=heard.told,
            report=heard.reports.append,
            outage=Outage(heard.reports.append),
            expects=expects,
        )
        running = asyncio.create_task(objects.run())
        try:
            await test(heard)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return heard

    return asyncio.run(run())


def test_both_kinds_are_listed_and_followed() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 4)]
    api.lists[path(REWRITES)] = [rewrite("m", "x")]

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.complete)
        assert (heard.priorities(), heard.targets()) == ({"a": 4}, {"m": "x"})
        api.say(path(OBJECTIVES), "MODIFIED", objective("a", -5, 6))
        api.say(path(OBJECTIVES), "ADDED", objective("b", 2, 7))
        api.say(path(REWRITES), "MODIFIED", rewrite("m", "y", 8))
        await heard.until(lambda: heard.priorities() == {"a": -5, "b": 2} and heard.targets() == {"m": "y"})
        api.say(path(OBJECTIVES), "DELETED", objective("a", -5, 9))
        api.say(path(REWRITES), "DELETED", rewrite("m", "y", 10))
        await heard.until(lambda: heard.priorities() == {"b": 2} and heard.targets() == {})

    assert followed(api, test).reports == []


def test_what_changes_together_is_told_once() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective(f"o{n}", n) for n in range(50)]

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.complete and len(heard.priorities()) == 50)
        assert heard.times == 1
        for n in range(50):
            api.say(path(OBJECTIVES), "DELETED", objective(f"o{n}", n, 10 + n))
        await heard.until(lambda: not heard.priorities())
        assert heard.times <= 4

    followed(api, test)


def test_an_object_says_what_it_would_say_in_a_file() -> None:
    (found,) = decode(REWRITE, NEW, json.dumps(rewrite("m", "x")).encode())
    assert isinstance(found, ModelRewrite)
    assert (found.name, found.group, found.pool, found.place) == ("m", 0, POOL, "ns/m")
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
        ({"rules": {}}, "spec.rules is a list"),
        (None, "spec.rules: no list of rules"),
        ([], "spec is a mapping"),
    ],
)
def test_what_is_wrong_is_told_with_its_place_in_the_object(spec: Any, fault: str) -> None:
    with pytest.raises(ValueError, match="InferenceModelRewrite 'm'") as wrong:
        decode(REWRITE, NEW, json.dumps(item("m", spec)).encode())
    assert fault in str(wrong.value)
    assert str(wrong.value).endswith("what was last good of it stays")


def test_what_nests_without_end_is_a_fault() -> None:
    deep: Any = {}
    for _ in range(DEPTH_MAX + 1):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="nested deeper"):
        decode(REWRITE, NEW, json.dumps(item("m", deep)).encode())


def test_a_bad_object_is_reported_once_and_what_was_last_good_of_it_stays() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 4), objective("bad", "high")]

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.complete)
        assert heard.priorities() == {"a": 4}
        for version in (6, 7):
            api.say(path(OBJECTIVES), "MODIFIED", objective("a", 1 << 40, version))
        api.say(path(OBJECTIVES), "ADDED", objective("b", 1, 8))
        await heard.until(lambda: heard.priorities() == {"a": 4, "b": 1})
        api.say(path(OBJECTIVES), "MODIFIED", objective("a", 5, 9))
        await heard.until(lambda: heard.priorities()["a"] == 5)

    bad, changed = followed(api, test).reports
    assert "'bad' in namespace ns" in bad and "spec.priority: 'high' is not an integer" in bad
    assert "'a' in namespace ns" in changed and "what was last good of it stays" in changed


def test_an_object_that_is_being_deleted_counts_no_more() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 4)]

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.priorities() == {"a": 4})
        api.say(path(OBJECTIVES), "MODIFIED", objective("a", 4, 6, deletionTimestamp="2026-01-01T00:00:00Z"))
        await heard.until(lambda: heard.priorities() == {})

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
def test_only_objects_of_the_pool_count_and_others_are_not_mentioned(reference: Any, counts: bool) -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 4, pool=reference)]

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.complete)
        assert bool(heard.priorities()) is counts

    assert followed(api, test).reports == []


def test_of_both_groups_the_newer_counts_name_by_name_and_the_older_is_mentioned_once() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 1), objective("b", 2)]
    api.lists[path(OBJECTIVES, OLD)] = [objective("a", 10), objective("c", 3), objective("d", 4)]

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.complete)
        assert heard.priorities() == {"a": 1, "b": 2, "c": 3, "d": 4}
        api.say(path(OBJECTIVES), "DELETED", objective("a", 1, 6))
        await heard.until(lambda: heard.priorities()["a"] == 10)

    (report,) = followed(api, test).reports
    assert f"{OLD} of InferenceObjective is deprecated" in report and NEW in report


def test_kinds_that_are_not_installed_have_no_objects_and_are_seen_when_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.kube.reflect.ABSENT_S", 0.01)
    api = FakeApi()
    api.lists = {path(OBJECTIVES, OLD): [objective("a", 1)]}

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.complete)
        assert heard.priorities() == {"a": 1}
        api.lists[path(REWRITES)] = [rewrite("m", "x")]
        api.lists[path(OBJECTIVES)] = [objective("a", 2)]
        await heard.until(lambda: heard.priorities() == {"a": 2} and heard.targets() == {"m": "x"})

    reports = followed(api, test).reports
    assert all("deprecated" in report for report in reports)


def test_a_list_that_is_refused_does_not_hold_up_the_others_and_is_named() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 1)]
    api.failures[path(REWRITES, OLD)] = ApiError(403, "Forbidden", "no", "list", path(REWRITES, OLD))

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.complete)
        assert heard.priorities() == {"a": 1}

    (report,) = followed(api, test).reports
    assert f'apiGroups: ["{GROUPS[1]}"], resources: ["{REWRITES}"], verbs: ["list"]' in report


def test_while_a_list_does_not_arrive_what_is_told_is_not_complete() -> None:
    api = FakeApi()
    api.lists[path(OBJECTIVES)] = [objective("a", 1)]
    api.failures[path(REWRITES)] = ApiError(503, "ServiceUnavailable", "starting", "list", path(REWRITES))

    async def test(heard: Heard) -> None:
        waits = "inferencemodelrewrites.llm-d.ai were not listed yet"
        await heard.until(lambda: bool(heard.priorities()) and heard.objects.missing().startswith(waits))
        assert not heard.complete
        assert heard.objects.missing() == (
            "inferencemodelrewrites.llm-d.ai were not listed yet: "
            "the API server refused to list inferencemodelrewrites in namespace ns: ServiceUnavailable: starting"
        )
        del api.failures[path(REWRITES)]
        await heard.until(lambda: heard.complete)
        assert heard.objects.missing() == ""

    followed(api, test)


def test_that_a_kind_has_no_objects_any_more_is_believed_after_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.kube.objects.HOLD_S", 0.1)
    api = FakeApi()
    api.lists[path(OBJECTIVES, OLD)] = [objective("a", 1)]

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.objects.missing() == "" and heard.times > 0)
        assert not heard.complete
        await heard.until(lambda: heard.complete)

    followed(api, test, [OBJECTIVE, REWRITE])


def test_a_predecessors_objects_are_not_given_up_while_the_role_to_list_them_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.kube.objects.HOLD_S", 0.1)
    api = FakeApi()
    for group in (NEW, OLD):
        at = path(OBJECTIVES, group)
        api.failures[at] = ApiError(403, "Forbidden", "no", "list", at)

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.times > 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(heard.until(lambda: heard.complete), 0.5)
        api.failures.clear()
        await heard.until(lambda: heard.complete)

    followed(api, test, [OBJECTIVE])


def test_what_is_expected_and_found_is_complete_at_once_in_whichever_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.kube.objects.HOLD_S", 1000.0)
    api = FakeApi()
    api.lists[path(OBJECTIVES, OLD)] = [objective("a", 1)]

    async def test(heard: Heard) -> None:
        await heard.until(lambda: heard.complete)

    followed(api, test, [OBJECTIVE])


def test_nobody_waits_for_ever_for_a_kind_whose_lists_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi()
    api.failures[path(REWRITES)] = ApiError(500, "InternalError", "no conversion", "list", path(REWRITES))

    async def test(heard: Heard) -> None:
        assert heard.objects.missing()
        await heard.until(lambda: heard.times > 0)
        assert heard.objects.missing()
        monkeypatch.setattr("workers.kube.objects.WAIT_S", 0.0)
        assert heard.objects.missing() == ""

    followed(api, test)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 40), 1 << 40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
keys = st.sampled_from(
    [
        "poolRef",
        "name",
        "group",
        "priority",
        "rules",
        "matches",
        "model",
        "type",
        "value",
        "targets",
        "modelRewrite",
        "weight",
    ]
)
specs = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5), max_leaves=20
)


@given(
    st.sampled_from([OBJECTIVE, REWRITE]),
    specs,
    st.text(max_size=8) | st.sampled_from(["a", "a.b"]),
    st.text(max_size=30),
)
@settings(max_examples=300, deadline=None)
def test_whatever_an_object_says_it_is_read_or_refused_with_a_text(
    kind: str, spec: Any, name: str, created: str
) -> None:
    try:
        found = decode(kind, NEW, json.dumps(item(name, spec, creationTimestamp=created)).encode())
    except ValueError as wrong:
        assert kind in str(wrong)
    else:
        assert len(found) == 1


@pytest.mark.parametrize("created", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00Z"])
def test_times_at_the_ends_of_the_calendar_are_times(created: str) -> None:
    (found,) = decode(REWRITE, NEW, json.dumps(item("m", {"rules": []}, creationTimestamp=created)).encode())
    assert isinstance(found, ModelRewrite) and isinstance(found.rewrite.created, float)
