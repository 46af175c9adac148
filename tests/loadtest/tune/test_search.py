"""The search for better values, and its confirmation on held-out traffic."""

import numpy as np
import pytest

from loadtest.replay.configurations import Configuration
from loadtest.replay.figures import condition
from loadtest.replay.run import World, world
from loadtest.replay.servers import UNBOUNDED, Speed
from loadtest.tune.confirm import confirm
from loadtest.tune.search import Goal, Part, Progress, Search, Space
from tests.loadtest.replay.recordings import asked, lifetime

SPEED = Speed("steps", 0.001, 1e-4, 0.01, 0.005, 8192, UNBOUNDED, UNBOUNDED, 0, 0.0)
PINNED = """\
plugins: [{type: prefix-cache-scorer}, {type: active-request-scorer}]
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 8}
  - {pluginRef: active-request-scorer, weight: 0.125}
"""
GOAL = Goal("ttft_p95", (condition("errors <= base"),))


def traffic(count: int) -> World:
    """Returns traffic with one hot prefix: a picker that follows it sends all requests to one server, which has too many then."""
    requests = [asked(0.02 * at, 1, 2, 3, 4, *range(1000 * at + 9, 1000 * at + 15), output=40) for at in range(count)]
    return world(requests, [lifetime(slot) for slot in range(4)], [SPEED] * 4, open=True, clients=0)


def space(text: str) -> Space:
    return Space(Configuration("test", text, allow_experimental=False), text)


@pytest.fixture(scope="module")
def part() -> Part:
    return Part(traffic(240), 48)


def test_a_search_finds_weights_that_do_not_pin_a_hot_prefix_and_confirms_them(part: Part) -> None:
    made = space(PINNED)
    told: list[Progress] = []
    search = Search(part, made, GOAL, seed=1)
    best = search.best(12, 1e6, told.append)
    assert best.values and best.cost < 0.8 * GOAL.cost(search.base)
    assert [each.trial for each in told] == list(range(1, 13)) and any(each.improved for each in told)
    verdict = confirm(part, made.with_values({}), made.with_values(best.values), GOAL, seed=5)
    assert verdict.better and 0 < verdict.low <= verdict.gain <= verdict.high


def test_the_same_configuration_is_never_better(part: Part) -> None:
    made = space(PINNED).with_values({})
    verdict = confirm(part, made, made, GOAL, seed=5)
    assert not verdict.better and verdict.gain == 0


def test_a_candidate_that_breaks_a_condition_is_not_better(part: Part) -> None:
    made = space(PINNED)
    strict = Goal("ttft_p95", (condition("hit_rate >= base + 1"),))
    best = Search(part, made, strict, seed=1).best(3, 1e6, lambda _: None)
    assert not best.values


def test_an_interrupted_search_returns_the_best_result_so_far(part: Part) -> None:
    def interrupts(progress: Progress) -> None:
        if progress.trial == 6:
            raise KeyboardInterrupt

    search = Search(part, space(PINNED), GOAL, seed=1)
    best = search.best(1000, 1e6, interrupts)
    assert search.interrupted and search.tried == 6 and best.cost <= GOAL.cost(search.base)


def test_a_search_ends_when_its_time_is_over(part: Part) -> None:
    search = Search(part, space(PINNED), GOAL, seed=1)
    search.best(1000, 0.0, lambda _: None)
    assert search.tried == 0


def test_equal_seeds_find_equal_values(part: Part) -> None:
    one, two = (Search(part, space(PINNED), GOAL, seed=3).best(3, 1e6, lambda _: None) for _ in range(2))
    assert one.values == two.values


def test_more_cached_tokens_are_better() -> None:
    made = Part(traffic(60), 0)
    found = made.figures(made.run(space(PINNED).with_values({})))
    assert Goal("hit_rate", ()).cost(found) == -found.hit_rate
    assert np.isfinite(found.ttft_p95)
