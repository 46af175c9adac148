"""Shares of time, and the order of acts, with a clock and a loop that the test turns."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.pages.turns import BURST_S, PERIOD_S, PROMPT_IN_A_ROW, SHARE, Share, Turns


class World:
    """A clock, and a loop with at most one planned call at a time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.planned: list[tuple[float, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> Any:
        return self.call_later(0.0, callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        self.planned.append((self.now + delay, callback))
        return self

    def cancel(self) -> None:
        self.planned.clear()

    def turn(self) -> None:
        (planned,) = self.planned
        self.planned.clear()
        self.now = max(self.now, planned[0])
        planned[1]()

    def work(self, seconds: float, done: list[str], name: str) -> Callable[[], None]:
        def act() -> None:
            self.now += seconds
            done.append(name)

        return act


@pytest.fixture
def world() -> World:
    return World()


def test_a_turn_runs_one_act_and_prompt_acts_overtake_patient_ones(world: World) -> None:
    turns, done = Turns(world, world.clock), []
    for number in range(2 * PROMPT_IN_A_ROW):
        turns.patient(world.work(0.0, done, "patient"))
        turns.prompt(world.work(0.0, done, f"prompt {number}"))
    for made in range(1, 4 * PROMPT_IN_A_ROW + 1):
        world.turn()
        assert len(done) == made
    assert not world.planned
    first = PROMPT_IN_A_ROW + 1
    assert done[: 2 * first].count("patient") == 2
    assert done.index("patient") == 0 or done[PROMPT_IN_A_ROW] == "patient"


def test_the_acts_of_hosts_take_turns(world: World) -> None:
    turns, done = Turns(world, world.clock), []
    for number in range(100):
        turns.prompt(world.work(0.0, done, f"flood {number}"), "127.0.0.1")
    turns.prompt(world.work(0.0, done, "probe"), "127.0.0.2")
    for _ in range(101):
        world.turn()
    assert done[:3] == ["flood 0", "probe", "flood 1"]
    assert done[-1] == "flood 99"
    assert not world.planned


@given(st.lists(st.floats(0.0, 0.02), min_size=50, max_size=200))
def test_acts_never_take_more_than_their_share_of_the_time(costs: list[float]) -> None:
    world = World()
    turns, done = Turns(world, world.clock), []
    for cost in costs:
        turns.prompt(world.work(cost, done, ""))
    begun, spent = world.now, 0.0
    for cost in costs:
        world.turn()
        spent += cost
        assert spent <= BURST_S + cost + SHARE * (world.now - begun) + 0.01


def test_the_host_that_takes_most_of_a_used_up_share_is_named_once_per_second(world: World) -> None:
    named: list[str] = []
    turns, done = Turns(world, world.clock, named.append), []
    begun = world.now
    while world.now < begun + 2.5 * PERIOD_S:
        turns.prompt(world.work(0.002, done, "scraper"), "127.0.0.2")
        for _ in range(3):
            turns.prompt(world.work(0.002, done, "flood"), "127.0.0.1")
        for _ in range(4):
            world.turn()
    assert named == ["127.0.0.1", "127.0.0.1"]


def test_nobody_is_named_while_the_share_is_not_used_up(world: World) -> None:
    named: list[str] = []
    turns, done = Turns(world, world.clock, named.append), []
    for _ in range(100):
        turns.prompt(world.work(0.01, done, "scraper"), "127.0.0.1")
        world.turn()
        world.now += 0.1
    assert not named


def test_an_act_that_raises_does_not_stop_the_others(world: World) -> None:
    def fails() -> None:
        raise ValueError

    turns, done = Turns(world, world.clock), []
    turns.prompt(fails)
    turns.prompt(world.work(0.0, done, "next"))
    with pytest.raises(ValueError):
        world.turn()
    world.turn()
    assert done == ["next"]


def test_no_act_runs_after_close(world: World) -> None:
    turns, done = Turns(world, world.clock), []
    turns.prompt(world.work(0.0, done, "late"))
    turns.close()
    assert not world.planned


def test_an_empty_share_says_when_it_has_something_again(world: World) -> None:
    share = Share(0.5, 1.0, world.clock)
    assert share.wait_s() == 0
    share.spend(2.0)
    wait_s = share.wait_s()
    assert 2.0 <= wait_s < 2.1
    world.now += wait_s
    assert share.wait_s() == 0
