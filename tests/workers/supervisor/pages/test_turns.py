"""Shares of time, and the order of acts, with clocks and a loop that the test turns."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.supervisor.kv_events.costs import Costs
from workers.supervisor.pages.turns import BURST_S, PERIOD_S, PROMPT_IN_A_ROW, SHARE, URGENT_SHARE, Act, HostQueues, Listener, Share, Turns


class World:
    """A clock, a clock of CPU time, and a loop with at most one planned call at a time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.busy = 5.0
        self.planned: list[tuple[float, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def turns(self, on_used_up: Callable[[str], None] = lambda host: None) -> Turns:
        return Turns(self, self.clock, on_used_up, lambda: self.busy)

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

    def work(self, seconds: float, done: list[str], name: str, *, frozen: float = 0.0) -> Act:
        """An act that uses the CPU for `seconds`. During it, the process is frozen for `frozen` seconds."""

        def act() -> None:
            self.now += seconds + frozen
            self.busy += seconds
            done.append(name)

        return act


@pytest.fixture
def world() -> World:
    return World()


def test_a_turn_runs_one_act_and_prompt_acts_overtake_patient_ones(world: World) -> None:
    turns, done = world.turns(), []
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


def test_hosts_take_turns_and_a_host_that_is_named_keeps_its_place() -> None:
    queues = HostQueues[int]()
    for host, one in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("a", 5)):
        queues.add(host, one)
    assert queues.take("a") == ("a", 1)
    assert [queues.take() for _ in range(4)] == [("a", 2), ("b", 4), ("a", 3), ("a", 5)]
    assert not queues.counts()


def test_the_acts_of_hosts_take_turns(world: World) -> None:
    turns, done = world.turns(), []
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
    turns, done = world.turns(), []
    for cost in costs:
        turns.prompt(world.work(cost, done, ""))
    begun, spent = world.now, 0.0
    for cost in costs:
        world.turn()
        spent += cost
        assert spent <= BURST_S + cost + SHARE * (world.now - begun) + 0.01


def test_the_host_that_takes_most_of_a_used_up_share_is_named_once_per_second(world: World) -> None:
    named: list[str] = []
    turns, done = world.turns(named.append), []
    begun = world.now
    while world.now < begun + 2.5 * PERIOD_S:
        turns.prompt(world.work(0.002, done, "scraper"), "127.0.0.2")
        for _ in range(3):
            turns.prompt(world.work(0.002, done, "flood"), "127.0.0.1")
        for _ in range(4):
            world.turn()
    assert named == ["127.0.0.1", "127.0.0.1"]


@pytest.mark.parametrize("frozen", [0.009, 3.0])
def test_time_in_which_the_process_was_frozen_or_waited_for_a_core_is_charged_to_nobody(world: World, frozen: float) -> None:
    named: list[str] = []
    turns, done = world.turns(named.append), []
    for number in range(1000):
        turns.prompt(world.work(0.0001, done, "scraper", frozen=frozen), "127.0.0.1")
        before = world.now
        world.turn()
        assert world.now - before == pytest.approx(0.0001 + frozen), f"act {number} did not wait"
    assert not named


@pytest.mark.parametrize("kind", [Turns, Listener, Costs])
def test_unless_told_otherwise_the_cpu_time_of_the_thread_is_charged(kind: type) -> None:
    assert inspect.signature(kind).parameters["cpu"].default is time.thread_time


def test_a_host_is_not_named_if_pages_of_others_have_used_up_the_share(world: World) -> None:
    named: list[str] = []
    turns, done = world.turns(named.append), []
    begun = world.now
    while world.now < begun + 2.5 * PERIOD_S:
        turns.prompt(world.work(0.0005, done, "top"), "127.0.0.1")
        turns.patient(world.work(0.005, done, "page of another"))
        world.turn()
        world.turn()
    assert not named


def test_urgent_acts_run_next_though_the_share_is_used_up(world: World) -> None:
    turns, done = world.turns(), []
    turns.share.spend(10.0)
    turns.prompt(world.work(0.001, done, "scraper"), "127.0.0.1")
    turns.patient(world.work(0.001, done, "page"))
    for _ in range(3):
        begun = world.now
        turns.urgent(world.work(0.001, done, "probe"), "127.0.0.2")
        world.turn()
        assert world.now == pytest.approx(begun + 0.001)
    assert done == ["probe"] * 3
    world.turn()
    assert done[3:] == ["scraper"] and world.now > begun + 10.0


def test_urgent_acts_keep_to_a_share_of_their_own_and_are_prompt_acts_beyond_it(world: World) -> None:
    turns, done = world.turns(), []
    begun, spent, asked = world.now, 0.0, 0
    while world.now < begun + 10.0:
        turns.urgent(world.work(0.002, done, "flood"), "127.0.0.1")
        asked += 1
        world.turn()
        spent += 0.002
        assert spent <= 2 * (BURST_S + 0.01) + (SHARE + URGENT_SHARE) * (world.now - begun)
    turns.urgent(world.work(0.002, done, "probe"), "127.0.0.2")
    world.turn()
    assert done[-1] == "probe" and len(done) == asked + 1


def test_what_an_urgent_act_causes_is_charged_to_the_urgent_share(world: World) -> None:
    turns, done = world.turns(), []

    def handshake() -> None:
        turns.charge(BURST_S)
        done.append("handshake")

    turns.urgent(handshake)
    world.turn()
    turns.urgent(world.work(0.0, done, "next"))
    turns.share.spend(1.0)
    turns.prompt(world.work(0.0, done, "other"))
    begun = world.now
    world.turn()
    assert world.now == begun and done == ["handshake", "next"], "it was queued as a prompt act before the share was used up"


def test_nobody_is_named_while_the_share_is_not_used_up(world: World) -> None:
    named: list[str] = []
    turns, done = world.turns(named.append), []
    for _ in range(100):
        turns.prompt(world.work(0.01, done, "scraper"), "127.0.0.1")
        world.turn()
        world.now += 0.1
    assert not named


def test_an_act_that_raises_does_not_stop_the_others(world: World) -> None:
    def fails() -> None:
        raise ValueError

    turns, done = world.turns(), []
    turns.prompt(fails)
    turns.prompt(world.work(0.0, done, "next"))
    with pytest.raises(ValueError):
        world.turn()
    world.turn()
    assert done == ["next"]


def test_no_act_runs_after_close(world: World) -> None:
    turns, done = world.turns(), []
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
