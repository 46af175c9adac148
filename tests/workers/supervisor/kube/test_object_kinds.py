"""Merging the objects of two sources: which objects count, in which order, and what is reported."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.request.model_rewrite import Rewrite
from tests.examples import examples
from tests.reports import Reports
from workers.supervisor.kube import object_kinds
from workers.supervisor.kube.object_kinds import Found, ModelRewrite, Object, Objective, Once, PoolName, Remark, by_name, merge

POOL = PoolName("pool")


def objective(name: str, priority: int, group: int = 0, pool: PoolName | None = POOL, place: str = "") -> Objective:
    return Objective(name, priority, group, (pool,) if pool is not None else (), place or f"file/{name}")


def rewrite(name: str, created: float | None = None, group: int = 0, *remarks: str) -> ModelRewrite:
    return ModelRewrite(name, Rewrite(name, created, ()), group, (POOL,), f"file/{name}", remarks)


def found(*objects: Object) -> Found:
    return by_name(objects, POOL, once=lambda *_: None, faults=[])


def test_the_directory_wins_a_name_in_both_sources_and_this_is_reported_once() -> None:
    reports = Reports()
    once = Once(reports)
    directory = found(objective("a", 1), rewrite("r", 1.0))
    api = found(objective("a", 2, place="ns/a"), objective("b", 3), rewrite("r", 2.0), rewrite("s", 3.0))
    for _ in range(2):
        objects = merge(directory, api, once)
        assert objects.priorities == {"a": 1, "b": 3}
        assert [(r.name, r.created) for r in objects.rewrites] == [("r", 1.0), ("s", 3.0)]
    assert reports == [
        "remark on an object place=file/a reason=InferenceObjective 'a' is in the directory and in Kubernetes (ns/a): the directory wins",
        "remark on an object place=file/r reason="
        "InferenceModelRewrite 'r' is in the directory and in Kubernetes (file/r): the directory wins",
    ]


def test_an_objective_and_a_rewrite_with_the_same_name_are_independent() -> None:
    reports = Reports()
    objects = merge(found(objective("a", 1)), found(rewrite("a")), Once(reports))
    assert objects.priorities == {"a": 1} and len(objects.rewrites) == 1 and not reports


def test_rewrites_of_the_directory_come_first_in_their_order_then_those_of_the_api_by_name() -> None:
    objects = merge(found(rewrite("z"), rewrite("b")), found(rewrite("y", 1.0), rewrite("c", 1.0)), lambda *_: None)
    assert [r.name for r in objects.rewrites] == ["z", "b", "c", "y"]


def test_the_newer_group_wins_in_any_order_and_a_duplicate_within_a_group_is_a_fault() -> None:
    faults: list[Remark] = []
    objects = [objective("a", 1, 1), objective("a", 2, 0), objective("a", 3, 1), objective("a", 4, 0)]
    seen = by_name(objects, POOL, once=lambda *_: None, faults=faults)
    assert seen.objectives["a"].priority == 2
    assert list(map(str, faults)) == ["file/a: InferenceObjective 'a' is given twice; first in file/a"]


def test_objects_of_other_pools_are_left_out_and_remarks_are_reported() -> None:
    reports = Reports()
    objects = [objective("a", 1, pool=PoolName("other")), objective("b", 2, pool=None), rewrite("r", None, 0, "is odd")]
    seen = by_name(objects, POOL, once=Once(reports), faults=[])
    assert list(seen.objectives) == ["b"]
    assert reports == [
        "remark on an object place=file/a reason=InferenceObjective 'a' is for pool 'other', this is 'pool': it is left out",
        "remark on an object place=file/r reason=is odd",
    ]


def test_the_number_of_objects_per_kind_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_kinds, "OBJECTS_MAX", 2)
    faults: list[Remark] = []
    objects = [*(objective(name, 1) for name in "abc"), rewrite("r"), objective("a", 2, 1)]
    seen = by_name(objects, POOL, once=lambda *_: None, faults=faults)
    assert list(seen.objectives) == ["a", "b"] and list(seen.rewrites) == ["r"]
    assert list(map(str, faults)) == ["file/c: InferenceObjective 'c': more than 2 objects of this kind: it is left out"]


def test_the_number_of_reports_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_kinds, "REPORTED_MAX", 2)
    reports = Reports()
    once = Once(reports)
    for text in "aabbccdd":
        once(Remark("file", text))
    assert reports == [f"remark on an object place=file reason={text}" for text in "ab"]


names = st.sampled_from("abc")
sources = st.lists(st.builds(objective, names, st.integers(-2, 2), st.integers(0, 1)), max_size=8)


@given(sources, sources)
@examples(200)
def test_a_name_gets_its_priority_from_the_directory_before_the_api_and_from_the_newer_group_before_the_older(
    directory: Sequence[Objective], api: Sequence[Objective]
) -> None:
    objects = merge(found(*directory), found(*api), lambda *_: None)
    ranked = [(source, each.group, at, each) for source, given_ in enumerate((directory, api)) for at, each in enumerate(given_)]
    for name in {each.name for *_, each in ranked}:
        first = min((rank for rank in ranked if rank[3].name == name), key=lambda rank: rank[:3])
        assert objects.priorities[name] == first[3].priority
    assert objects.priorities.keys() == {each.name for *_, each in ranked}
