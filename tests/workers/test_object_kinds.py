"""Objects of two sources: which of them count, in which order, and what is said of it."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.model_rewrite import Rewrite
from workers import object_kinds
from workers.object_kinds import Found, ModelRewrite, Object, Objective, Once, PoolName, by_name, together

POOL = PoolName("pool")


def objective(name: str, priority: int, group: int = 0, pool: PoolName | None = POOL, place: str = "") -> Objective:
    return Objective(name, priority, group, pool, place or f"file/{name}")


def rewrite(name: str, created: float | None = None, group: int = 0, *remarks: str) -> ModelRewrite:
    return ModelRewrite(name, Rewrite(name, created, ()), group, POOL, f"file/{name}", remarks)


def found(*objects: Object) -> Found:
    return by_name(objects, POOL, once=lambda *_: None, faults=[])


def test_of_a_name_in_both_sources_the_directorys_counts_and_that_is_said_once() -> None:
    reports: list[str] = []
    once = Once(reports.append)
    directory = found(objective("a", 1), rewrite("r", 1.0))
    api = found(objective("a", 2, place="ns/a"), objective("b", 3), rewrite("r", 2.0), rewrite("s", 3.0))
    for _ in range(2):
        objects = together(directory, api, once)
        assert objects.priorities == {"a": 1, "b": 3}
        assert [(r.name, r.created) for r in objects.rewrites] == [("r", 1.0), ("s", 3.0)]
    assert reports == [
        "file/a: InferenceObjective 'a' is in the directory and in Kubernetes (ns/a): the directory's counts",
        "file/r: InferenceModelRewrite 'r' is in the directory and in Kubernetes (file/r): the directory's counts",
    ]


def test_an_objective_and_a_rewrite_of_one_name_have_nothing_to_do_with_each_other() -> None:
    reports: list[str] = []
    objects = together(found(objective("a", 1)), found(rewrite("a")), Once(reports.append))
    assert objects.priorities == {"a": 1} and len(objects.rewrites) == 1 and not reports


def test_rewrites_stand_in_the_order_of_the_directory_and_then_of_the_apis_names() -> None:
    objects = together(found(rewrite("z"), rewrite("b")), found(rewrite("y", 1.0), rewrite("c", 1.0)), lambda *_: None)
    assert [r.name for r in objects.rewrites] == ["z", "b", "c", "y"]


def test_the_newer_group_counts_whichever_comes_first_and_two_of_a_group_are_a_fault() -> None:
    faults: list[str] = []
    objects = [objective("a", 1, 1), objective("a", 2, 0), objective("a", 3, 1), objective("a", 4, 0)]
    seen = by_name(objects, POOL, once=lambda *_: None, faults=faults)
    assert seen.objectives["a"].priority == 2
    assert faults == ["file/a: InferenceObjective 'a' is given twice; first in file/a"]


def test_objects_of_other_pools_are_left_out_and_remarks_are_passed_on() -> None:
    reports: list[str] = []
    objects = [objective("a", 1, pool=PoolName("other")), objective("b", 2, pool=None), rewrite("r", None, 0, "is odd")]
    seen = by_name(objects, POOL, once=Once(reports.append), faults=[])
    assert list(seen.objectives) == ["b"]
    assert reports == [
        "file/a: InferenceObjective 'a' is for pool 'other', this is 'pool': it is left out",
        "file/r: is odd",
    ]


def test_there_are_no_more_objects_of_a_kind_than_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_kinds, "OBJECTS_MAX", 2)
    faults: list[str] = []
    objects = [*(objective(name, 1) for name in "abc"), rewrite("r"), objective("a", 2, 1)]
    seen = by_name(objects, POOL, once=lambda *_: None, faults=faults)
    assert list(seen.objectives) == ["a", "b"] and list(seen.rewrites) == ["r"]
    assert faults == ["file/c: InferenceObjective 'c': more than 2 objects of this kind: it is left out"]


def test_what_is_said_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_kinds, "SAID_MAX", 2)
    reports: list[str] = []
    once = Once(reports.append)
    for text in "aabbccdd":
        once(text, text)
    assert reports == ["a", "b"]


names = st.sampled_from("abc")
sources = st.lists(st.builds(objective, names, st.integers(-2, 2), st.integers(0, 1)), max_size=8)


@given(sources, sources)
@settings(max_examples=200, deadline=None)
def test_a_name_has_the_priority_of_the_first_who_gives_it_directory_before_api_and_newer_before_older(
    directory: Sequence[Objective], api: Sequence[Objective]
) -> None:
    objects = together(found(*directory), found(*api), lambda *_: None)
    ranked = [
        (source, each.group, at, each)
        for source, given_ in enumerate((directory, api))
        for at, each in enumerate(given_)
    ]
    for name in {each.name for *_, each in ranked}:
        first = min((rank for rank in ranked if rank[3].name == name), key=lambda rank: rank[:3])
        assert objects.priorities[name] == first[3].priority
    assert objects.priorities.keys() == {each.name for *_, each in ranked}
