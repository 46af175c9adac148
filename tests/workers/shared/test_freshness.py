"""How long the values of an endpoint count as fresh, and when an endpoint is down."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shm.table import State
from tests.workers.supervisor.endpoints.scraping import never
from workers.shared.freshness import Freshness, fresh_for


def test_values_are_fresh_for_four_intervals_and_at_least_2_s_or_what_the_flag_says() -> None:
    assert fresh_for(0.05) == 2.0
    assert fresh_for(1.0) == 4.0
    assert fresh_for(1.0, 7.0) == 7.0
    assert fresh_for(1.0, 0.5) == 4.0


def test_a_scrape_that_is_under_way_keeps_the_last_values_fresh_until_it_ends() -> None:
    freshness: Freshness[str] = Freshness(2.0)
    under_way = {"a"}
    freshness.add("a"), freshness.add("b")
    freshness.good("a", 100.0), freshness.good("b", 100.1)
    assert freshness.newly_stale(102.5, under_way.__contains__) == ["b"]
    under_way.clear()
    assert freshness.newly_stale(102.6, under_way.__contains__) == ["a"]


def test_an_endpoint_is_unknown_then_fresh_then_stale_then_fresh() -> None:
    freshness: Freshness[str] = Freshness(0.2)
    health = freshness.add("a")
    assert (health.state, freshness.newly_stale(100.0, never)) == (State.UNKNOWN, [])
    freshness.good("a", 100.0)
    assert (health.state, freshness.newly_stale(100.19, never)) == (State.FRESH, [])
    assert (freshness.newly_stale(100.2, never), health.state) == (["a"], State.STALE)
    assert freshness.newly_stale(100.3, never) == []
    freshness.good("a", 101.0)
    assert health.state == State.FRESH


def test_two_refusals_in_a_row_make_an_endpoint_down_and_one_good_answer_ends_that() -> None:
    freshness: Freshness[str] = Freshness(0.2)
    health = freshness.add("a")
    assert not freshness.failed("a", refused=True)
    assert not freshness.failed("a", refused=False)
    assert not freshness.failed("a", refused=True)
    assert freshness.failed("a", refused=True)
    assert not freshness.failed("a", refused=True)
    assert not freshness.failed("a", refused=False)
    assert health.down
    freshness.good("a", 1.0)
    assert not health.down


def test_an_adopted_endpoint_keeps_its_values_until_the_limit_from_now() -> None:
    freshness: Freshness[str] = Freshness(0.2)
    assert freshness.adopt("a", scraped=True, down=True, now=5.0).down
    assert freshness.adopt("b", scraped=False, down=False, now=5.0).state == State.UNKNOWN
    assert freshness.newly_stale(5.2, never) == ["a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(("good", "failed", "refused", "forget", "sweep"))), max_size=60))
def test_an_endpoint_is_fresh_exactly_while_its_last_good_scrape_is_recent(steps: list[tuple[str, str]]) -> None:
    freshness: Freshness[str] = Freshness(0.5)
    health, last, refusals, now = {}, {}, Counter(), 0.0
    for name, step in steps:
        now += 0.1
        if name not in health:
            health[name] = freshness.add(name)
            last[name], refusals[name] = -1.0, 0
        if step == "good":
            freshness.good(name, now)
            last[name], refusals[name] = now, 0
        elif step in ("failed", "refused"):
            freshness.failed(name, refused=step == "refused")
            refusals[name] = refusals[name] + 1 if step == "refused" else 0
        elif step == "forget":
            freshness.forget(name)
            del health[name]
        freshness.newly_stale(now, never)
        for known, found in health.items():
            recent = now - last[known] < 0.5
            wanted = State.UNKNOWN if last[known] < 0 else State.FRESH if recent else State.STALE
            assert found.state == wanted
            assert found.down or refusals[known] < 2
    assert len(freshness) == len(health)
