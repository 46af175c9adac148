"""Which pool has ended a worker, and when a pool is taken out of service."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.plugin import NoParams, Scorer, foreign
from epp.plugins.scorers.reported import QueueDepth
from epp.points.instrument import Point
from workers.shared.pool_crashes import CRASHES, MEMORY_S, Culprit, OutOfService, PoolCrashes, culprit, mark_of, marking, named, word_of


class Odd(Scorer):
    def score(self, *_arguments: Any) -> Any: ...


class Parent:
    """The parent's table for three pools, as its children see it. Every crash is one of another request."""

    def __init__(self) -> None:
        table = memoryview(bytearray(8 * 7)).cast("q")
        self.crashes, self.out = PoolCrashes(table), OutOfService(table)
        self.requests = 0

    def crash(self, pool: int, at: float = 0.0, *, number: int = 1, request: int | None = None, plugin: str = "odd") -> bool:
        self.requests += 1
        found = Culprit(pool, mark_of(plugin))
        return self.crashes.crashed(found, f"pool {pool}", number, self.requests if request is None else request, at)

    def those_out(self, number: int = 1) -> list[int]:
        return [pool for pool in range(3) if self.out.of(pool, f"pool {pool}", number) is not None]


@given(st.integers(0, 1000), st.text(min_size=1), st.integers())
def test_a_worker_that_ends_during_a_call_of_a_plugin_tells_pool_and_plugin(pool: int, plugin: str, deciding: int) -> None:
    word = word_of(pool, plugin)
    assert -(1 << 63) <= word < 1 << 63
    found = culprit(deciding, word, 0)
    assert found == Culprit(pool, mark_of(plugin))
    assert named(found.mark, ["other", plugin]) in (plugin, "other")
    assert culprit(0, word_of(pool), 0) is None, "the decision is over"
    assert culprit(7, word_of(pool), 0) == Culprit(pool)


def test_a_worker_that_ends_while_it_loads_a_pool_tells_it_unless_a_decision_runs() -> None:
    assert culprit(0, 0, 3) == Culprit(2)
    assert culprit(0, word_of(1), 3) == Culprit(2)
    assert culprit(9, word_of(1), 3) == Culprit(1)
    assert culprit(9, 0, 0) is None


def test_only_calls_of_foreign_plugins_are_published_and_only_while_they_run() -> None:
    running = memoryview(bytearray(8)).cast("q")
    wrap = marking(running, 4)
    odd, own = Odd("odd", NoParams()), QueueDepth("queue", NoParams())
    assert foreign(type(odd)) and not foreign(type(own))
    seen: list[int] = []

    def call(*_arguments: Any) -> str:
        seen.append(running[0])
        raise ValueError("a bug")

    assert wrap(Point.SCORER, own, call) is call
    with pytest.raises(ValueError, match="a bug"):
        wrap(Point.SCORER, odd, call)("request")
    assert seen == [word_of(4, "odd")]
    assert running[0] == word_of(4)


def test_a_pool_is_out_of_service_after_two_crashes_until_its_configuration_changes() -> None:
    parent = Parent()
    assert [parent.crash(1) for _ in range(CRASHES)] == [False, True]
    assert parent.those_out() == [1]
    assert parent.out.of(1, "pool 1", 1) == Culprit(1, mark_of("odd"))
    assert parent.those_out(number=2) == []
    assert not parent.crash(1, number=2), "the crashes of another configuration do not count"


def test_crashes_of_different_pools_or_long_ago_do_not_add_up() -> None:
    parent = Parent()
    assert not any(parent.crash(pool) for pool in range(3))
    assert not parent.crash(0, 2 * MEMORY_S)
    assert parent.crash(0, 3 * MEMORY_S)


def test_a_request_that_ends_workers_again_and_again_counts_once() -> None:
    parent = Parent()
    assert not any(parent.crash(0, request=5) for _ in range(5))
    assert parent.crash(0, request=6)


def test_crashes_without_a_request_count_each() -> None:
    parent = Parent()
    assert [parent.crash(0, request=0) for _ in range(2)] == [False, True]


def test_another_pool_in_the_same_place_begins_anew() -> None:
    parent = Parent()
    for _ in range(CRASHES):
        parent.crash(2)
    changes = parent.out.changes
    parent.crashes.renamed(2)
    assert (parent.those_out(), parent.crashes.seen) == ([], {})
    assert parent.out.changes > changes
    assert not parent.crash(2)


def test_another_pool_in_the_place_of_one_out_of_service_serves_before_the_parent_notices() -> None:
    parent = Parent()
    for _ in range(CRASHES):
        parent.crash(2)
    assert parent.out.of(2, "other", 1) is None
    assert not parent.crashes.crashed(Culprit(2), "other", 1, 99, 0.0), "the crashes of the other pool do not count"
