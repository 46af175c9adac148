"""The wheel of scrapes: each endpoint has its turn once per interval, and turns are spread."""

import errno
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from epp.plugins.extractors.core_metrics import Extracted
from tests.workers.supervisor.endpoints.scraping import Bench, reader
from workers.supervisor.endpoints.scrape import DIALS_PER_S_MAX
from workers.supervisor.endpoints.wheel import TOGETHER


def test_a_scrape_reports_the_load_in_flight_when_its_request_was_sent() -> None:
    bench = Bench()
    bench.scraper.add("a", 2, ("10.0.0.1", 8000), reader())
    bench.turn()
    bench.inflight = 7
    connection = bench.net.attempts[0].succeed()
    bench.inflight = 9
    connection.answer()
    assert bench.seen.good == [("a", Extracted((3.0,), 1, {}), 207, bench.time)]
    assert bench.scraper.counters.scrapes == 1


def test_without_a_data_source_endpoints_come_and_go_and_nothing_is_dialled() -> None:
    bench = Bench(scrapes=False)
    target = bench.scraper.add("a", 2, ("10.0.0.1", 8000), reader())
    bench.turn(40)
    bench.scraper.change(target, ("10.0.0.2", 8000), reader())
    bench.turn(40)
    bench.scraper.remove(target)
    assert (bench.net.dialled, bench.seen.sweeps, bench.scraper.counters.scrapes) == (0, 80, 0)


def test_each_endpoint_is_scraped_once_per_interval_and_scrapes_are_spread_over_it() -> None:
    bench = Bench()
    for n in range(10 * TOGETHER + 30):
        bench.scraper.add(n, n, ("10.0.0.1", n), reader())
    bench.connect_all()
    for _ in range(3):
        assert bench.per_tick() == [TOGETHER + 3] * 10


@pytest.mark.parametrize("buckets", range(2, 41))
def test_each_bucket_is_used_and_the_first_few_are_far_from_each_other(buckets: int) -> None:
    interval_s = buckets * 0.025
    bench = Bench(interval_s)
    for n in range(bench.buckets() * TOGETHER):
        bench.scraper.add(n, n, ("10.0.0.1", n), reader())
    bench.connect_all()
    assert bench.per_tick() == [TOGETHER] * bench.buckets()


@pytest.mark.parametrize(("endpoints", "ticks"), [(1, 1), (TOGETHER, 1), (TOGETHER + 1, 2), (5 * TOGETHER, 5)])
def test_few_endpoints_are_scraped_together_so_that_few_ticks_have_work(endpoints: int, ticks: int) -> None:
    bench = Bench()
    for n in range(endpoints):
        bench.scraper.add(n, n, ("10.0.0.1", n), reader())
    bench.connect_all()
    per_tick = bench.per_tick()
    assert sum(per_tick) == endpoints
    assert sum(map(bool, per_tick)) == ticks
    if ticks == 2:
        first, second = (tick for tick, scrapes in enumerate(per_tick) if scrapes)
        assert min((second - first) % 10, (first - second) % 10) >= 3


def test_the_timer_waits_for_the_next_tick_with_work_and_for_the_sweep_at_the_latest() -> None:
    bench = Bench()
    assert bench.scraper.ticks_to_wait() == 5  # of 5 ms: nothing to do but the sweep
    bench.up()
    scraped, swept = 0, bench.seen.sweeps
    for _ in range(30):
        bench.net.requested.clear()
        ticks = bench.scraper.ticks_to_wait()
        assert 1 <= ticks <= 5
        bench.turns += ticks
        bench.time += 0.005 * ticks
        bench.scraper.turn(bench.time, bench.turns)
        for connection in bench.net.requested:
            connection.answer()
            scraped += 1
            assert bench.turns % 10 == 1  # exactly at the tick of its bucket
    assert scraped == bench.scraper.counters.scrapes - 1 >= 9
    assert bench.seen.sweeps - swept == 30
    bench.scraper.add("new", 9, ("10.0.0.2", 8000), reader())
    assert bench.scraper.ticks_to_wait() == 1


def test_a_new_endpoint_is_dialled_at_the_next_tick_although_the_timer_waits_for_a_later_one() -> None:
    delays: list[float] = []

    class Loop:
        def call_later(self, delay: float, _act: Callable[[], None]) -> "Loop":
            delays.append(delay)
            return self

        def cancel(self) -> None:
            delays.append(-1.0)

    bench = Bench(loop=Loop())
    bench.scraper.start()
    bench.scraper.add("a", 1, ("10.0.0.1", 8000), reader())
    bench.scraper.add("b", 2, ("10.0.0.2", 8000), reader())
    assert delays == [pytest.approx(0.026), -1.0, 0.005]


def test_a_turn_during_a_scrape_starts_none_and_counts_as_late() -> None:
    bench = Bench()
    _, connection = bench.up()
    bench.net.requested.clear()
    bench.turn(10)
    assert len(bench.net.requested) == 1
    bench.turn(20)
    assert (len(bench.net.requested), bench.scraper.counters.late) == (1, 2)
    connection.answer()
    bench.turn(10)
    assert len(bench.net.requested) == 2


def test_after_a_stall_each_endpoint_is_scraped_once_and_not_for_every_missed_turn() -> None:
    bench = Bench()
    bench.up()
    bench.net.requested.clear()
    bench.time += 10.0
    bench.turns += 2000
    bench.scraper.turn(bench.time, bench.turns)
    assert len(bench.net.requested) == 1


def test_many_unreachable_servers_share_the_connection_attempts_and_do_not_delay_connected_ones() -> None:
    bench = Bench()
    _, connection = bench.up()
    for n in range(1000):
        bench.scraper.add(n, n, ("10.0.1.1", n), reader())
    bench.net.requested.clear()
    ticks, tried = 400, Counter[Any]()
    for _ in range(ticks):
        before = bench.net.dialled
        bench.turn()
        assert bench.net.dialled - before <= DIALS_PER_S_MAX * 0.005
        for attempt in list(bench.net.attempts):
            tried[attempt.caller.tag] += 1
            attempt.fail(errno.EHOSTUNREACH if attempt.caller.tag % 2 else errno.ENETUNREACH)
        for requested in bench.net.requested:
            requested.answer()
        bench.net.requested.clear()
    assert len(tried) == 1000
    assert max(tried.values()) - min(tried.values()) <= 2  # each is tried about 13 times
    assert connection.answers == 1 + ticks // 10


def test_a_stall_of_the_loop_counts_no_turn_as_late() -> None:
    bench = Bench()
    bench.up()
    bench.time += 10.0
    bench.turns += 2000
    bench.scraper.turn(bench.time, bench.turns)
    assert bench.scraper.counters.late == 0


def test_the_next_try_is_the_next_turn_of_the_target_or_the_first_turn_after_a_pause() -> None:
    bench = Bench()
    bench.scraper._started_at = bench.time
    target, connection = bench.up()
    for _ in range(3):
        bench.net.requested.clear()
        expected = bench.scraper.next_try_s(target, bench.time)
        since = bench.time
        while not bench.net.requested:
            bench.turn()
        assert bench.time - since == pytest.approx(expected)
        connection.answer()
    target.not_before = bench.time + 0.26
    expected, since, dialled = bench.scraper.next_try_s(target, bench.time), bench.time, len(bench.net.requested)
    while len(bench.net.requested) == dialled:
        bench.turn()
    assert bench.time - since == pytest.approx(expected)
    assert expected > 0.26
