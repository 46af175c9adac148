"""Requests with a body that comes too slowly are refused, and at the limit of memory those that cost most. No other requests are."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workers.worker.body_timeout import BODY_RATE, NEW_S, SPARE, BodyRelief, BodyTimeout


class Stream:
    """A stream that may wait for its gateway."""

    def __init__(self, received: int) -> None:
        self.received = received
        self.refused: list[float] = []

    def awaited(self) -> int:
        return self.received

    def origin(self) -> str:
        return "request 5"

    def give_up_waiting(self, seconds: float) -> None:
        self.refused.append(seconds)


def test_a_stream_that_receives_nothing_between_two_looks_is_refused_once():
    stream, timeout = Stream(100), BodyTimeout(30.0)
    assert timeout.look([stream]) == []
    assert timeout.look([stream]) == ["request 5"]
    assert stream.refused == [30.0]
    stream.received = -1
    assert timeout.look([stream]) == []


def test_a_stream_that_receives_enough_is_never_refused():
    stream, timeout = Stream(0), BodyTimeout(30.0)
    for _ in range(50):
        stream.received += 15 * BODY_RATE
        assert timeout.look([stream]) == []


def test_a_stream_that_receives_a_byte_now_and_then_is_refused():
    stream, timeout = Stream(1_000_000), BodyTimeout(30.0)
    assert timeout.look([stream]) == []
    stream.received += 15 * BODY_RATE - 1
    assert timeout.look([stream]) == ["request 5"]


class Body:
    """A stream with an incomplete body."""

    def __init__(self, size: int, received_at: float = 0.0, pool: int = 0) -> None:
        self.size = size
        self.received_at = received_at
        self.pool = pool

    def unfinished(self) -> int:
        return self.size

    def origin(self) -> str:
        return "request 5" if self.size >= 0 else "gone"

    def give_up_body(self) -> None:
        self.size = -1


class Relieved:
    """A relief for these bodies at the time 100."""

    def __init__(self, bodies: Sequence[Body], limit: int = 0) -> None:
        self.said: list[str] = []
        self.relief = BodyRelief(limit, lambda among: bodies if among is None else among, lambda: 100.0, self.said.append)

    def __call__(self, excess: int, among: Any = None) -> None:
        self.relief(among, excess)


def test_the_body_that_has_cost_most_is_given_up_first():
    slow, large, new, small = Body(1000, 40.0), Body(50_000, 99.5), Body(50_000, 100.0), Body(10, 99.0)
    relieved = Relieved([small, new, large, slow])
    for first in (slow, large, new, small):
        relieved(1)
        assert first.size == -1
    assert relieved.said[0] == "body_given_up: 1000 bytes after 60.0 s, request 5"
    assert len(relieved.said) == 4


def test_a_relief_frees_what_is_missing_and_some_more():
    bodies = [Body(100) for _ in range(100)]
    Relieved(bodies, limit=SPARE * 1000)(50)
    assert sum(body.size < 0 for body in bodies) == 11


def test_a_relief_of_one_connection_gives_up_no_body_of_others():
    own, others = Body(1), Body(10_000)
    Relieved([own, others])(100, [own])
    assert (own.size, others.size) == (-1, 10_000)


def test_complete_requests_and_those_without_a_byte_are_not_given_up():
    complete, empty = Body(-1), Body(0)
    relieved = Relieved([complete, empty])
    relieved(100)
    assert (complete.size, empty.size, relieved.said) == (-1, 0, [])


def test_an_answer_that_needs_memory_during_a_relief_asks_for_no_other_relief():
    class Answered(Body):
        def give_up_body(self) -> None:
            super().give_up_body()
            relieved(100)

    bodies = [Answered(100), Body(100)]
    relieved = Relieved(bodies)
    relieved(100)
    assert sorted(body.size for body in bodies) == [-1, 100]


def held(bodies: Sequence[Body], pool: int) -> int:
    return sum(body.size for body in bodies if body.pool == pool and body.size > 0)


def test_of_several_pools_the_one_that_holds_most_gives_up_bodies_first_also_if_those_of_others_cost_more():
    flood = [Body(1000, 100.0, pool=1) for _ in range(100)]
    old, large = Body(5000, 0.0, pool=2), Body(90_000, 0.0, pool=3)
    relieved = Relieved([*flood, old, large])
    relieved(10_000)
    assert (old.size, large.size, held(flood, 1)) == (5000, 90_000, 90_000)


def test_pools_that_flood_together_come_down_together_and_leave_the_share_of_others_alone():
    bodies = [Body(1000, 100.0 - number, pool=number % 2) for number in range(100)]
    others = [Body(1000, 0.0, pool=2) for _ in range(10)]
    Relieved([*bodies, *others])(60_000)
    assert [held([*bodies, *others], pool) for pool in range(3)] == [20_000, 20_000, 10_000]


@given(st.lists(st.tuples(st.integers(1, 1 << 16), st.floats(0, 100), st.integers(0, 4)), max_size=60), st.integers(1, 1 << 21))
def test_a_pool_loses_bodies_only_down_to_what_the_largest_holds_then(made, excess):
    bodies = [Body(size, at, pool) for size, at, pool in made]
    before = [held(bodies, pool) for pool in range(5)]
    sizes = [body.size for body in bodies]
    Relieved(bodies)(excess)
    after = [held(bodies, pool) for pool in range(5)]
    longest = [max((size for size, body in zip(sizes, bodies, strict=True) if body.pool == pool), default=0) for pool in range(5)]
    for pool in range(5):
        assert after[pool] == before[pool] or after[pool] + longest[pool] >= max(after)
    assert sum(before) - sum(after) >= min(excess, sum(before))


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 100)), max_size=50), st.integers(1, 1 << 22))
def test_a_relief_never_keeps_a_body_that_costs_more_than_one_it_gives_up(made, excess):
    bodies = [Body(size, at) for size, at in made]
    sizes = [size for size, _ in made]
    Relieved(bodies)(excess)
    costs = [size * (100.0 - at + NEW_S) for size, at in made]
    gone = [cost for cost, body in zip(costs, bodies, strict=True) if body.size < 0]
    kept = [cost for cost, body in zip(costs, bodies, strict=True) if body.size > 0]
    assert max(kept, default=0.0) <= min(gone, default=float("inf"))
    freed = sum(size for size, body in zip(sizes, bodies, strict=True) if body.size < 0)
    assert freed >= min(excess, sum(sizes))


def test_a_stream_with_a_complete_request_is_never_refused():
    stream, timeout = Stream(-1), BodyTimeout()
    assert [timeout.look([stream]) for _ in range(5)] == [[]] * 5


def test_streams_that_are_gone_are_forgotten():
    timeout = BodyTimeout()
    timeout.look([Stream(1), Stream(2)])
    timeout.look([])
    assert timeout._seen == {}
