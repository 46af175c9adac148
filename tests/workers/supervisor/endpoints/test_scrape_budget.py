"""Scrapes within a budget: few pages, and a dead server is noticed without one."""

import errno

import pytest

from epp.plugins.extractors.core_metrics import Extracted
from tests.workers.supervisor.endpoints.scraping import PAGE, Bench, FakeConnection, FakeKnock, Seen, reader
from workers.supervisor.endpoints.scrape import FIRST_TOKEN_S
from workers.supervisor.endpoints.wheel import Target

COST_S = 0.014
INTERVAL_TICKS = 10


class Loaded(Seen):
    """A sink that says how many requests a page shows."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: float | None = 3.0

    def scraped(self, tag: object, extracted: Extracted, inflight: int, now: float) -> float | None:
        super().scraped(tag, extracted, inflight, now)
        return self.requests


class Paced(Bench):
    """One server with a page of 14 ms, a budget of 1 %, and a clock of the test. The server is in slot 0."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = self.seen = Loaded()
        self.scraper = self.made(self.sink, budget=0.01)
        self.target: Target
        self.connection: FakeConnection

    def begin(self) -> None:
        self.target = self.scraper.add("a", 0, ("10.0.0.1", 8000), reader())
        self.turn()
        self.connection = self.net.attempts[0].succeed()
        self.answer()

    def answer(self) -> None:
        self.time += COST_S
        self.connection.answer(PAGE)
        self.net.requested.clear()

    def until_asked(self, limit_s: float = 5.0) -> float:
        """Turns until a page is asked for. Returns the time since the last page was."""
        for _ in range(round(limit_s / 0.005)):
            self.turn()
            if self.net.requested:
                since = self.time - self.asked_at
                self.asked_at = self.time
                self.answer()
                return since
        raise AssertionError(f"no page in {limit_s} s")

    asked_at = 100.0

    def close_after_answer(self) -> None:
        """Lets the server close its connection after the next page."""
        self.connection.usable = False
        self.until_asked()

    def quiet_for(self, seconds: float) -> None:
        """Turns for some time in which no page is asked for."""
        for _ in range(round(seconds / 0.005)):
            self.turn()
        assert not self.net.requested


@pytest.fixture
def paced() -> Paced:
    bench = Paced()
    bench.inflight = 3
    bench.begin()
    bench.until_asked()
    return bench


def test_a_page_of_14_ms_is_read_every_1_4_s(paced: Paced) -> None:
    assert [paced.until_asked() for _ in range(5)] == pytest.approx([1.4] * 5, abs=0.03)
    assert paced.scraper.counters.late == 0


def test_a_page_that_takes_long_makes_the_next_ones_rarer_and_none_late() -> None:
    bench = Paced()
    bench.begin()
    bench.turn()
    for _ in range(100):
        bench.turn()
    assert bench.scraper.counters.late == 0


def test_a_server_without_requests_is_read_every_2_s_and_soon_after_it_gets_one(paced: Paced) -> None:
    paced.inflight, paced.sink.requests = 0, 0.0
    paced.until_asked()
    assert [paced.until_asked() for _ in range(3)] == pytest.approx([2.0] * 3, abs=0.03)
    paced.quiet_for(0.5)
    paced.inflight = 1
    assert paced.until_asked() == pytest.approx(0.56 + FIRST_TOKEN_S, abs=0.03)


def test_a_server_whose_page_shows_requests_of_others_is_not_at_rest(paced: Paced) -> None:
    paced.inflight, paced.sink.requests = 0, 2.0
    paced.until_asked()
    assert paced.until_asked() == pytest.approx(1.4, abs=0.03)


def test_a_server_that_others_use_is_read_within_the_budget_for_half_a_minute_although_it_has_no_requests(paced: Paced) -> None:
    paced.sink.requests = 9.0
    paced.until_asked()
    paced.inflight, paced.sink.requests = 0, 0.0
    assert [paced.until_asked() for _ in range(20)] == pytest.approx([1.4] * 20, abs=0.03)
    for _ in range(4):
        paced.until_asked()
    assert paced.until_asked() == pytest.approx(2.0, abs=0.03)


def test_a_server_whose_page_shows_no_load_is_never_at_rest(paced: Paced) -> None:
    paced.inflight, paced.sink.requests = 0, None
    paced.until_asked()
    assert paced.until_asked() == pytest.approx(1.4, abs=0.03)


def test_a_killed_server_is_refused_twice_within_one_interval(paced: Paced) -> None:
    paced.quiet_for(0.5)
    paced.connection.lose()
    paced.net.attempts[0].fail()
    assert paced.seen.bad == [("a", "refused", True)]
    paced.turn(INTERVAL_TICKS)
    paced.net.attempts[0].fail()
    assert paced.seen.bad == [("a", "refused", True)] * 2


def test_a_server_that_is_back_is_read_at_the_next_turn(paced: Paced) -> None:
    paced.connection.lose()
    paced.net.attempts[0].fail()
    paced.turn(INTERVAL_TICKS)
    paced.connection = paced.net.attempts[0].succeed()
    assert paced.net.requested == [paced.connection]


def test_a_server_that_has_closed_an_idle_connection_is_read_at_once_as_it_may_be_a_new_one(paced: Paced) -> None:
    paced.quiet_for(0.5)
    paced.connection.lose()
    paced.connection = paced.net.attempts[0].succeed()
    assert paced.net.requested == [paced.connection]


def test_a_server_that_closes_connections_after_a_page_is_tried_at_each_turn_and_read_within_the_budget(paced: Paced) -> None:
    paced.close_after_answer()
    pages = tries = 0
    for _ in range(round(20.0 / 0.005)):
        for attempt in list(paced.net.attempts):
            if isinstance(attempt, FakeKnock):
                tries += 1
                attempt.answer(0)
            else:
                paced.connection = attempt.succeed()
                paced.connection.usable = False
                paced.answer()
                pages += 1
        paced.turn()
    assert pages <= 20 / 1.4 + 2
    assert 300 < tries < 420
    assert not paced.seen.bad


def test_a_server_that_closes_idle_connections_gets_new_ones_and_is_read_within_the_budget(paced: Paced) -> None:
    pages = opened = 0
    for turns in range(round(20.0 / 0.005)):
        if paced.connection.usable and turns % 20 == 0:
            paced.connection.lose()
        paced.turn()
        for attempt in list(paced.net.attempts):
            paced.connection = attempt.succeed()
            opened += 1
        if paced.net.requested:
            paced.answer()
            pages += 1
    assert pages <= 20 / 1.4 + 2
    assert 180 < opened < 220
    assert not paced.seen.bad


def test_a_killed_server_is_refused_twice_within_one_interval_although_its_connection_was_never_used(paced: Paced) -> None:
    paced.target.pace.told(paced.time, 0.0)
    paced.connection.lose()
    paced.connection = paced.net.attempts[0].succeed()
    paced.quiet_for(0.1)
    paced.connection.lose()
    paced.net.attempts[0].fail()
    paced.turn(INTERVAL_TICKS)
    paced.net.attempts[0].fail()
    assert paced.seen.bad == [("a", "refused", True)] * 2


def test_a_server_without_kept_connections_is_known_to_be_dead_after_two_turns(paced: Paced) -> None:
    paced.close_after_answer()
    paced.turn(INTERVAL_TICKS)
    (attempt,) = paced.net.attempts
    assert isinstance(attempt, FakeKnock)
    attempt.answer(errno.ECONNREFUSED)
    assert paced.seen.bad == [("a", "refused", True)]
    paced.turn(INTERVAL_TICKS)
    paced.net.attempts[0].fail()
    assert paced.seen.bad == [("a", "refused", True)] * 2


def test_a_try_without_an_answer_fails_as_a_connection_does(paced: Paced) -> None:
    paced.close_after_answer()
    paced.turn(INTERVAL_TICKS)
    assert isinstance(paced.net.attempts[0], FakeKnock)
    paced.turn(50)
    assert [cause for _, cause, _ in paced.seen.bad] == ["connect-timeout"]


def test_a_page_is_asked_for_at_once_on_request_and_values_wait_for_it_meanwhile(paced: Paced) -> None:
    paced.quiet_for(0.5)
    assert paced.target.waits(paced.time)
    paced.target.pace.hasten(paced.time)
    assert paced.until_asked() == pytest.approx(0.56, abs=0.03)


def test_a_slow_page_is_late_only_when_the_next_one_is_due(paced: Paced) -> None:
    while not paced.net.requested:
        paced.turn()
    paced.turn(180)
    assert paced.scraper.counters.late == 0, "the next page is not due yet"


@pytest.mark.parametrize(("shown", "in_flight", "foreign"), [(3, 3, 0), (9, 3, 1), (7, 3, 0), (30, 30, 0), (60, 30, 1)])
def test_pages_with_far_more_requests_than_are_in_flight_there_are_counted(paced: Paced, shown: int, in_flight: int, foreign: int) -> None:
    paced.until_asked()
    paced.sink.requests, paced.inflight = float(shown), in_flight
    before = paced.scraper.counters.foreign
    paced.until_asked()
    assert paced.scraper.counters.foreign - before == foreign


def test_costs_are_learned_with_and_without_a_budget(paced: Paced) -> None:
    assert paced.scraper.wheel.costs() == pytest.approx([COST_S])
    bench = Bench()
    bench.up()
    assert len(bench.scraper.wheel.costs()) == 0, "the fake server of this test takes no time"


def test_a_quiet_pool_wakes_up_only_for_sweeps_and_reads_its_page_once_in_two_seconds_all_the_same() -> None:
    bench = Paced()
    bench.sink.requests = 0.0
    bench.begin()
    bench.until_asked()
    assert bench.target.pace.rests
    pages = 0
    while bench.turns < 1600:  # of 5 ms: 8 s
        ticks = bench.scraper.ticks_to_wait()
        assert ticks == 5
        bench.turns += ticks
        bench.time += 0.005 * ticks
        bench.scraper.turn(bench.time, bench.turns)
        pages += len(bench.net.requested)
        if bench.net.requested:
            bench.answer()
    assert 3 <= pages <= 4
    bench.scraper.change(bench.target, ("10.0.0.1", 8001), reader())
    assert bench.scraper.ticks_to_wait() == 1
