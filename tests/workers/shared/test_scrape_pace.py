"""When the metrics page of a server is asked for: within the budget, at least once in 2 s, at once where it pays."""

import random
from itertools import pairwise

import pytest

from tests.cases import cases
from workers.shared.scrape_pace import LONGEST_S, Pace, Pacing

TURN_S = 0.05


class Server:
    """A server with pages that cost `cost_s`, and the pace at which they are read. Turns come every 50 ms."""

    def __init__(self, cost_s: float, budget: float | None = 0.01) -> None:
        self.pace = Pace(Pacing(TURN_S, budget))
        self.cost_s = cost_s
        self.now = 100.0
        self.asked: list[float] = []

    def turn(self) -> bool:
        self.now += TURN_S
        if not self.pace.due(self.now):
            return False
        self.pace.asked(self.now)
        self.pace.read(self.cost_s)
        self.asked.append(self.now)
        return True

    def run(self, seconds: float) -> list[float]:
        """Returns the gaps between the pages of this time."""
        first = len(self.asked)
        for _ in range(round(seconds / TURN_S)):
            self.turn()
        asked = self.asked[first:]
        return [after - before for before, after in pairwise(asked)]


@pytest.mark.parametrize(("cost_s", "gap_s"), [(0.0001, 0.05), (0.0005, 0.05), (0.001, 0.1), (0.014, 1.4), (0.02, 2.0), (0.5, 2.0)])
def test_pages_take_1_percent_of_a_servers_time_with_one_in_2_s_at_least(cost_s: float, gap_s: float) -> None:
    server = Server(cost_s)
    server.run(5.0)
    assert server.run(20.0) == pytest.approx([gap_s] * (round(20 / gap_s) - 1))


def test_without_a_budget_there_is_a_page_at_each_turn_whatever_it_costs() -> None:
    server = Server(0.5, budget=None)
    assert server.run(1.0) == pytest.approx([TURN_S] * 19)
    assert server.pace.cost_s == 0.5
    assert not server.pace.waits(server.now)


def test_the_cost_is_that_of_a_page_at_low_load_although_pages_are_slow_at_times() -> None:
    server = Server(0.1)
    server.run(3.0)
    server.cost_s = 0.001
    server.run(3.0)
    assert server.pace.cost_s == 0.001
    server.cost_s = 0.1
    for _ in range(10):
        server.pace.read(0.1)
    assert server.pace.cost_s < 0.0012
    server.run(600.0)
    assert server.pace.cost_s > 0.02, "a page that stays expensive is expensive"


def test_a_server_at_rest_is_asked_once_in_2_s_although_its_page_is_cheap() -> None:
    server = Server(0.001)
    for _ in range(200):
        if server.turn():
            server.pace.shows(0, 0, 0)
    gaps = [after - before for before, after in pairwise(server.asked)]
    assert gaps == pytest.approx([LONGEST_S] * len(gaps))
    assert len(gaps) == 4


def test_without_a_budget_a_server_without_requests_does_not_rest() -> None:
    pace = Pace(Pacing(TURN_S))
    pace.asked(1.0)
    pace.read(0.001)
    pace.shows(0, 0, 0)
    assert not pace.rests
    assert pace.due(1.0)


def pages(server: Server, seconds: float, shown: float) -> int:
    """Runs for some time in which each page shows so many requests and none is in flight. Returns the number of pages."""
    first = len(server.asked)
    for _ in range(round(seconds / TURN_S)):
        if server.turn():
            server.pace.shows(shown, 0, 0)
    return len(server.asked) - first


def test_a_server_to_which_others_send_does_not_rest_for_half_a_minute_although_it_has_no_requests() -> None:
    server = Server(0.001)
    assert pages(server, 20.0, 0) == 10
    assert pages(server, 1.0, 3) <= 10, "the rest before ends first"
    assert pages(server, 10.0, 3) == 100
    assert pages(server, 29.0, 0) == 290
    pages(server, 5.0, 0)
    assert pages(server, 20.0, 0) == 10


@pytest.mark.parametrize(
    ("pages", "differs"),
    [
        ([(3, 3, 3), (7, 7, 7), (0, 0, 0)], False),
        ([(5, 5, 8), (9, 6, 9), (0, 0, 2)], False),
        ([(0, 0, 0), (2, 0, 0), (0, 0, 0)], True),
        ([(4, 0, 0), (6, 2, 2), (0, 0, 0)], True),
        ([(5, 5, 5), (1, 5, 5), (0, 0, 0)], True),
        ([(40, 40, 40), (37, 40, 40), (0, 0, 0)], False),
    ],
)
def test_the_account_differs_if_more_requests_came_or_went_than_the_picker_knows(pages: list[tuple[int, int, int]], differs: bool) -> None:
    server = Server(0.001)
    for shown, asked, read in pages:
        while not server.turn():
            pass
        server.pace.shows(shown, asked, read)
    assert server.pace.rests != differs


def test_the_first_request_of_a_server_at_rest_asks_for_a_page_at_the_next_turn() -> None:
    server = Server(0.014)
    server.turn()
    server.pace.shows(0, 0, 0)
    server.run(0.5)
    server.pace.hasten(server.now)
    assert server.turn()


def test_a_hastened_page_is_paid_for_by_the_next_one() -> None:
    server = Server(0.014)
    server.run(10.0)
    while not server.turn():
        pass
    before = server.now
    server.pace.hasten(server.now)
    assert server.turn()
    server.pace.hasten(server.now)
    assert not server.turn(), "the one before has to be paid for"
    while not server.turn():
        pass
    assert server.now - before == pytest.approx(1.4, abs=TURN_S), "hastened again, it comes as soon as the first one is paid for"


@cases("seed", range(20))
def test_however_often_pages_are_hastened_the_mean_stays_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    server = Server(rng.choice([0.001, 0.004, 0.014, 0.019]))
    for _ in range(4000):
        if rng.random() < 0.3:
            server.pace.hasten(server.now)
        if server.turn() and rng.random() < 0.3:
            server.pace.shows(0, 0, 0)
    spent = len(server.asked) * server.cost_s
    assert spent / (server.now - 100.0) <= 0.0105
    gaps = [after - before for before, after in pairwise(server.asked)]
    assert max(gaps) <= LONGEST_S + TURN_S


def test_a_failed_page_is_tried_again_at_the_next_turn() -> None:
    server = Server(0.014)
    server.run(3.0)
    server.turn()
    server.pace.retry()
    assert server.turn()


def test_a_page_is_missed_when_two_turns_have_passed_since_it_was_due() -> None:
    server = Server(0.014)
    server.turn()
    assert server.pace.waits(server.now + 1.45)
    assert not server.pace.waits(server.now + 1.6)


def test_an_interval_above_2_s_is_obeyed_with_a_budget() -> None:
    pace = Pace(Pacing(10.0, 0.01))
    pace.asked(100.0)
    pace.read(0.001)
    pace.shows(0, 0, 0)
    assert not pace.due(104.0)
    assert pace.due(110.0)


def test_a_replica_that_is_told_of_each_page_reads_none_itself() -> None:
    reader, told = Server(0.014), Server(0.014)
    told.run(5.0)
    reader.now = told.now
    before = len(told.asked)
    for _ in range(round(60.0 / TURN_S)):
        if reader.turn():
            told.pace.told(reader.now + 0.04, random.random())
        told.turn()
    assert len(told.asked) == before


@pytest.mark.parametrize(("cost_s", "gap_s"), [(0.001, 0.1), (0.014, 1.4), (0.5, 2.0)])
def test_a_replica_reads_itself_soon_after_the_pages_of_another_one_stop(cost_s: float, gap_s: float) -> None:
    server = Server(cost_s)
    server.run(5.0)
    for chance in (0.0, 1.0):
        server.now += gap_s
        server.pace.told(server.now, chance)
        told_at = server.now
        while not server.turn():
            pass
        assert gap_s < server.now - told_at <= 1.25 * gap_s + 3 * TURN_S
        assert server.run(10 * gap_s)[1:] == pytest.approx([gap_s] * 8)


@pytest.mark.parametrize("cost_s", [0.001, 0.014, 0.5])
def test_a_page_is_asked_for_at_once_however_many_pages_other_replicas_have_read(cost_s: float) -> None:
    server = Server(cost_s)
    server.run(10.0)
    for _ in range(100):
        server.now += 0.5
        server.pace.told(server.now, random.random())
    server.pace.hasten(server.now)
    assert server.turn()
    server.pace.hasten(server.now)
    assert server.turn() == (cost_s == 0.001), "the own one before has to be paid for"


def test_a_server_rests_by_the_page_of_another_replica_too() -> None:
    server = Server(0.001)
    server.run(1.0)
    told_at = server.now
    server.pace.told(told_at, 0.0)
    server.pace.shows(0, 0, 0)
    assert server.pace.rests
    while not server.turn():
        pass
    assert server.now - told_at > LONGEST_S
