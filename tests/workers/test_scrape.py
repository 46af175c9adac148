"""Freshness as pure code, the wheel over fake connections, and real servers that misbehave."""

import asyncio
import datetime
import errno
import ipaddress
import re
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from epp.data import WAITING
from epp.plugins.extractors.core_metrics import CoreMetricsExtractor, Extracted
from epp.plugins.extractors.metrics_source import MetricsDataSource
from shm.table import State
from workers.http_client import Connection, Dialer, HttpError
from workers.scrape import (
    CONNECT_S_MAX,
    DIALS_PER_S_MAX,
    FLOOD_PAUSE_S,
    LARGE_PAGE_BYTES,
    PAUSE_S,
    REFUSALS_TO_PAUSE,
    SCRAPE_S_MAX,
    Failure,
    Freshness,
    Scraper,
    Target,
    fresh_for,
    source_tls,
)

PAGE = b"vllm:num_requests_waiting 3\n"


def answer(page: bytes = PAGE, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (more, len(page), page)


EXTRACTOR = CoreMetricsExtractor("x", CoreMetricsExtractor.Params())


def reader() -> Any:
    return EXTRACTOR.extraction({}, (WAITING,))


# Freshness


def test_fresh_lasts_four_intervals_and_at_least_200_ms() -> None:
    assert fresh_for(0.05) == 0.2
    assert fresh_for(1.0) == 4.0


def test_an_endpoint_is_unknown_then_fresh_then_stale_then_fresh() -> None:
    freshness: Freshness[str] = Freshness(0.2)
    health = freshness.add("a")
    assert (health.state, freshness.newly_stale(100.0)) == (State.UNKNOWN, [])
    freshness.good("a", 100.0)
    assert (health.state, freshness.newly_stale(100.19)) == (State.FRESH, [])
    assert (freshness.newly_stale(100.2), health.state) == (["a"], State.STALE)
    assert freshness.newly_stale(100.3) == []
    freshness.good("a", 101.0)
    assert health.state == State.FRESH


def test_two_refusals_running_make_down_and_one_good_answer_ends_it() -> None:
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
    assert freshness.newly_stale(5.2) == ["a"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(("good", "failed", "refused", "forget", "sweep")),
        ),
        max_size=60,
    )
)
def test_a_member_is_fresh_exactly_while_its_last_good_scrape_is_young(
    steps: list[tuple[str, str]],
) -> None:
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
        freshness.newly_stale(now)
        for known, its in health.items():
            young = now - last[known] < 0.5
            wanted = State.UNKNOWN if last[known] < 0 else State.FRESH if young else State.STALE
            assert its.state == wanted
            assert its.down or refusals[known] < 2
    assert len(freshness) == len(health)


# The wheel, over connections that the test answers itself


class FakeConnection:
    def __init__(self, net: "FakeNet", caller: Any) -> None:
        self.net, self.caller = net, caller
        self.usable, self.started, self.answers, self.requests = True, False, 0, 0
        net.open.add(self)

    def get(self, request: bytes) -> None:
        self.requests += 1
        self.net.asked.append(self)

    def close(self) -> None:
        self.usable = False
        self.net.open.discard(self)

    def answer(self, page: bytes = PAGE) -> None:
        self.answers += 1
        self.caller.answered(self, page)

    def lose(self, failure: Exception | None = None) -> None:
        self.close()
        self.caller.lost(self, failure)


class FakeAttempt:
    def __init__(self, net: "FakeNet", caller: Any, address: tuple[str, int]) -> None:
        self.net, self.caller, self.address = net, caller, address
        net.attempts.append(self)

    def cancel(self) -> None:
        self.net.attempts.remove(self)

    def succeed(self) -> FakeConnection:
        self.net.attempts.remove(self)
        connection = FakeConnection(self.net, self.caller)
        self.caller.connected(connection)
        return connection

    def fail(self, code: int = errno.ECONNREFUSED) -> None:
        self.net.attempts.remove(self)
        self.caller.unreachable(OSError(code, "no"))


class FakeNet:
    def __init__(self) -> None:
        self.open: set[FakeConnection] = set()
        self.attempts: list[FakeAttempt] = []
        self.asked: list[FakeConnection] = []
        self.dialled = 0

    def connect(self, host: str, port: int, caller: Any) -> FakeAttempt:
        self.dialled += 1
        return FakeAttempt(self, caller, (host, port))


class Seen:
    """A sink that keeps what it got."""

    def __init__(self) -> None:
        self.good: list[tuple[object, Extracted, int, float]] = []
        self.bad: list[tuple[object, str, bool]] = []
        self.failures: list[Failure] = []
        self.last: dict[object, float] = {}
        self.sweeps = 0

    def scraped(self, tag: object, extracted: Extracted, inflight: int, now: float) -> None:
        self.good.append((tag, extracted, inflight, now))
        self.last[tag] = now

    def failed(self, tag: object, failure: Failure, now: float) -> None:
        self.bad.append((tag, failure.cause, failure.refused))
        self.failures.append(failure)

    def sweep(self, now: float) -> None:
        self.sweeps += 1


class Bench:
    """A scraper whose time and connections are the test's."""

    def __init__(self, interval_s: float = 0.05) -> None:
        self.net, self.seen, self.time, self.turns = FakeNet(), Seen(), 100.0, 0
        self.inflight = 0
        self.spent = 0.0
        self.scraper = Scraper(
            None,  # type: ignore[arg-type]
            interval_s=interval_s,
            connect=self.net.connect,
            inflight=lambda slot: slot * 100 + self.inflight,
            sink=self.seen,
            now=lambda: self.time,
            spent=lambda: self.spent,
        )

    def turn(self, ticks: int = 1, tick_s: float = 0.005) -> None:
        for _ in range(ticks):
            self.time += tick_s
            self.turns += 1
            self.scraper.turn(self.time, self.turns)

    def up(self) -> tuple[Target, FakeConnection]:
        """An endpoint whose first scrape was answered."""
        target = self.scraper.add("a", 1, ("10.0.0.1", 8000), reader())
        self.turn()
        connection = self.net.attempts[0].succeed()
        connection.answer()
        return target, connection


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


def test_each_endpoint_is_scraped_once_per_interval_and_phases_are_spread() -> None:
    bench = Bench()
    for n in range(30):
        bench.scraper.add(n, n, ("10.0.0.1", n), reader())
    bench.turn()
    while bench.net.attempts:
        bench.net.attempts[0].succeed().answer()
    for _ in range(3):
        per_tick = []
        for _ in range(10):
            bench.net.asked.clear()
            bench.turn()
            per_tick.append(len(bench.net.asked))
            for connection in bench.net.asked:
                connection.answer()
        assert per_tick == [3] * 10


def test_a_scrape_under_way_makes_the_next_turn_skip_and_count() -> None:
    bench = Bench()
    _, connection = bench.up()
    bench.net.asked.clear()
    bench.turn(10)
    assert len(bench.net.asked) == 1
    bench.turn(20)
    assert (len(bench.net.asked), bench.scraper.counters.late) == (1, 2)
    connection.answer()
    bench.turn(10)
    assert len(bench.net.asked) == 2


def test_a_loop_that_was_stuck_sends_each_scrape_once_and_not_for_every_turn_missed() -> None:
    bench = Bench()
    bench.up()
    bench.net.asked.clear()
    bench.time += 10.0
    bench.turns += 2000
    bench.scraper.turn(bench.time, bench.turns)
    assert len(bench.net.asked) == 1


def test_of_very_many_servers_that_cannot_be_reached_each_gets_its_turn_and_connected_ones_keep_theirs() -> None:
    bench = Bench()
    _, connection = bench.up()
    for n in range(1000):
        bench.scraper.add(n, n, ("10.0.1.1", n), reader())
    bench.net.asked.clear()
    ticks, tried = 400, Counter[Any]()
    for _ in range(ticks):
        before = bench.net.dialled
        bench.turn()
        assert bench.net.dialled - before <= DIALS_PER_S_MAX * 0.005
        for attempt in list(bench.net.attempts):
            tried[attempt.caller.tag] += 1
            attempt.fail(errno.EHOSTUNREACH if attempt.caller.tag % 2 else errno.ENETUNREACH)
        for asked in bench.net.asked:
            asked.answer()
        bench.net.asked.clear()
    assert len(tried) == 1000
    assert max(tried.values()) - min(tried.values()) <= 2  # of about 13
    assert connection.answers == 1 + ticks // 10


def test_an_unanswered_connect_is_given_up_after_200_ms_and_a_hanging_scrape_after_1_s() -> None:
    bench = Bench()
    bench.scraper.add("a", 1, ("10.0.0.1", 8000), reader())
    bench.turn()
    bench.turn(38)
    assert len(bench.net.attempts) == 1
    bench.turn(3)
    assert bench.seen.bad == [("a", "connect-timeout", False)]
    bench.turn(10)
    bench.net.attempts[0].succeed()
    bench.turn(190)
    assert len(bench.net.open) == 1
    bench.turn(20)
    assert bench.seen.bad[1:] == [("a", "timeout", False)]
    assert not bench.net.open
    assert bench.scraper.counters.poll_errors == {"connect-timeout": 1, "timeout": 1}


def test_a_kept_connection_that_goes_is_replaced_at_once_but_once_per_turn() -> None:
    bench = Bench()
    _, connection = bench.up()
    connection.lose()
    assert len(bench.net.attempts) == 1
    bench.net.attempts[0].fail()
    assert bench.seen.bad == [("a", "refused", True)]
    assert not bench.net.attempts
    bench.turn(10)
    bench.net.attempts[0].fail()
    assert bench.seen.bad[1:] == [("a", "refused", True)]


def test_a_request_that_met_a_closing_connection_is_sent_again_without_an_error() -> None:
    bench = Bench()
    _, connection = bench.up()
    bench.turn(10)
    connection.lose()
    bench.net.attempts[0].succeed().answer()
    assert (len(bench.seen.good), bench.seen.bad) == (2, [])


def test_a_connection_lost_inside_an_answer_is_an_error_and_asked_again_at_once() -> None:
    bench = Bench()
    _, connection = bench.up()
    bench.turn(10)
    connection.started = True
    connection.lose()
    assert bench.seen.bad == [("a", "closed", False)]
    assert len(bench.net.attempts) == 1


def test_only_a_reset_of_a_new_connection_counts_as_refused() -> None:
    for failure, refused in ((ConnectionResetError(), True), (None, False), (OSError(), False)):
        bench = Bench()
        bench.scraper.add("a", 1, ("10.0.0.1", 8000), reader())
        bench.turn()
        bench.net.attempts[0].succeed().lose(failure)
        assert bench.seen.bad == [("a", "refused" if refused else "closed", refused)]


@pytest.mark.parametrize(
    ("code", "refused"),
    [(errno.ECONNREFUSED, True), (errno.EHOSTUNREACH, True), (errno.EMFILE, False)],
)
def test_which_failures_to_connect_count_as_refused(code: int, refused: bool) -> None:
    bench = Bench()
    bench.scraper.add("a", 1, ("10.0.0.1", 8000), reader())
    bench.turn()
    bench.net.attempts[0].fail(code)
    assert bench.seen.bad[0][2] is refused


def test_a_server_that_refuses_for_long_is_asked_less_often_until_it_answers() -> None:
    bench = Bench()
    bench.scraper.add("a", 1, ("10.0.0.1", 8000), reader())
    for _ in range(400):
        bench.turn()
        while bench.net.attempts:
            bench.net.attempts[0].fail()
    expected = REFUSALS_TO_PAUSE + (2.0 - REFUSALS_TO_PAUSE * 0.05) / PAUSE_S
    assert abs(bench.net.dialled - expected) <= 2
    while not bench.net.attempts:
        bench.turn()
    bench.net.attempts[0].succeed().answer()
    bench.net.asked.clear()
    bench.turn(10)
    assert len(bench.net.asked) == 1


def test_a_server_that_floods_is_left_alone_for_a_second() -> None:
    bench = Bench()
    _, connection = bench.up()
    bench.turn(10)
    connection.caller.garbled(connection, HttpError("too-large", ""))
    dialled = bench.net.dialled
    bench.turn(int(FLOOD_PAUSE_S / 0.005) - 20)
    assert bench.net.dialled == dialled
    bench.turn(40)
    assert bench.net.dialled == dialled + 1


@pytest.mark.parametrize("page", [PAGE, b"vllm:num_requests_waiting NaN\n"])
@pytest.mark.parametrize(("seconds", "pause"), [(0.01, 0.0), (0.03, 0.3), (5.0, FLOOD_PAUSE_S)])
def test_a_page_that_takes_long_to_read_is_read_less_often(seconds: float, pause: float, page: bytes) -> None:
    bench = Bench()
    target, connection = bench.up()

    class Costly:
        def extract(self, page: bytes) -> Extracted:
            bench.spent += seconds
            return reader().extract(page)

    target.reader = Costly()
    bench.turn(10)
    bench.net.asked.clear()
    connection.answer(page + b"# nothing\n" * (LARGE_PAGE_BYTES // 10))
    bench.turn(int(pause / 0.005))
    assert bench.net.asked == []
    bench.turn(10)
    assert bench.net.asked == [connection]


def test_a_page_that_cannot_be_taken_names_its_family_and_keeps_the_connection() -> None:
    bench = Bench()
    _, connection = bench.up()
    bench.turn(10)
    connection.answer(b"vllm:num_requests_waiting NaN\n")
    assert bench.seen.bad == [("a", "extract", False)]
    assert bench.scraper.counters.extract_errors == 1
    assert bench.seen.failures[0].text.startswith("vllm:num_requests_waiting: ")
    assert connection in bench.net.open


def test_every_scrape_ends_as_taken_or_as_one_kind_of_error_and_turns_left_out_are_no_scrapes() -> None:
    bench = Bench()
    _, connection = bench.up()
    for page in (PAGE, b"vllm:num_requests_waiting NaN\n"):
        bench.turn(30)
        connection.answer(page)
    bench.turn(10)
    connection.caller.garbled(connection, HttpError("status", "the answer is 'HTTP/1.1 500', not 200"))
    counted = bench.scraper.counters
    assert (counted.scrapes, counted.taken, counted.extract_errors, counted.poll_errors) == (4, 2, 1, {"status": 1})
    assert counted.late == 4
    bench.turn(10)
    assert (counted.scrapes, counted.taken) == (5, 2)


def test_a_loop_that_was_stuck_counts_no_scrape_as_late() -> None:
    bench = Bench()
    bench.up()
    bench.time += 10.0
    bench.turns += 2000
    bench.scraper.turn(bench.time, bench.turns)
    assert bench.scraper.counters.late == 0


def test_the_last_scrape_s_time_is_known_of_good_ones_and_of_failed_ones() -> None:
    bench = Bench()
    target = bench.scraper.add("a", 1, ("10.0.0.1", 8000), reader())
    assert target.seconds < 0.0
    bench.turn()
    bench.time += 0.03
    connection = bench.net.attempts[0].succeed()
    connection.answer()
    assert target.seconds == pytest.approx(0.03)
    bench.turn(250)
    assert bench.seen.bad == [("a", "timeout", False)]
    assert target.seconds == pytest.approx(SCRAPE_S_MAX, abs=0.006)
    while not bench.net.attempts:
        bench.turn()
    bench.turn(45)
    assert target.seconds == pytest.approx(CONNECT_S_MAX, abs=0.006)


def test_a_failure_says_what_went_wrong_and_whether_it_is_tried_again_at_once() -> None:
    bench = Bench()
    _, connection = bench.up()
    bench.turn(10)
    connection.started = True
    connection.lose(ConnectionResetError("reset by peer"))
    bench.net.attempts[0].fail()
    bench.turn(60)
    assert bench.seen.failures == [
        Failure("closed", "the connection ended inside the answer: reset by peer", again=True),
        Failure("refused", "[Errno 111] no", refused=True),
        Failure("connect-timeout", "no connection within 0.2 s"),
    ]


def test_the_next_try_is_the_target_s_next_turn_or_the_first_one_after_a_pause() -> None:
    bench = Bench()
    bench.scraper._started_at = bench.time
    target, connection = bench.up()
    for _ in range(3):
        bench.net.asked.clear()
        expected = bench.scraper.next_try_s(target, bench.time)
        since = bench.time
        while not bench.net.asked:
            bench.turn()
        assert bench.time - since == pytest.approx(expected)
        connection.answer()
    target.not_before = bench.time + 0.26
    expected, since, dialled = bench.scraper.next_try_s(target, bench.time), bench.time, len(bench.net.asked)
    while len(bench.net.asked) == dialled:
        bench.turn()
    assert bench.time - since == pytest.approx(expected)
    assert expected > 0.26


def test_a_change_of_address_drops_the_old_connection_and_scrapes_the_new_one_at_once() -> None:
    bench = Bench()
    target, connection = bench.up()
    bench.scraper.change(target, ("10.0.0.2", 9000), reader())
    assert connection not in bench.net.open
    bench.turn()
    assert [attempt.address for attempt in bench.net.attempts] == [("10.0.0.2", 9000)]


def test_nothing_is_reported_or_left_open_after_removal_in_any_phase() -> None:
    bench = Bench()
    for phase in ("new", "connecting", "waiting", "idle"):
        target = bench.scraper.add(phase, 1, ("10.0.0.1", 8000), reader())
        if phase != "new":
            bench.turn()
        if phase in ("waiting", "idle"):
            connection = bench.net.attempts[0].succeed()
            if phase == "idle":
                connection.answer()
        bench.seen.good.clear()
        bench.scraper.remove(target)
        bench.turn(30)
        assert not (bench.net.open or bench.net.attempts or bench.seen.good or bench.seen.bad)
        assert len(bench.scraper) == 0


def test_ten_thousand_endpoints_coming_and_going_leave_nothing() -> None:
    bench = Bench()
    for start in range(0, 10_000, 500):
        targets = [bench.scraper.add(n, n, ("10.0.0.1", n % 60_000), reader()) for n in range(start, start + 500)]
        bench.turn(9)
        for number, attempt in enumerate(list(bench.net.attempts)):
            if number % 3 == 0:
                attempt.fail()
            elif number % 3 == 1:
                attempt.succeed().answer()
        for target in targets:
            bench.scraper.remove(target)
        bench.turn()
    assert len(bench.scraper) == 0
    assert not (bench.net.open or bench.net.attempts)
    assert not (bench.scraper._under_way or bench.scraper._connecting or bench.scraper._to_dial)


# Real servers on loopback

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, 20))


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not within 5 s: {what}")


def serving(*pieces: bytes, then: str = "keep", pause_s: float = 0.0) -> Serve:
    """A server that answers every request with these pieces."""

    async def serve(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        try:
            while await incoming.readuntil(b"\r\n\r\n"):
                for piece in pieces:
                    out.write(piece)
                    await asyncio.sleep(pause_s)
                if then == "close":
                    break
                if then == "hang":
                    await asyncio.sleep(3600)
                while then == "flood":
                    out.write(b"x" * 65536)
                    await out.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            out.close()

    return serve


class Servers:
    """Servers on free ports, and a scraper that reads them all."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.servers: list[asyncio.Server] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        loop = asyncio.get_running_loop()
        self.scraper = Scraper(
            loop,
            interval_s=0.05,
            connect=Dialer(loop).dial,
            inflight=lambda slot: 0,
            sink=self.seen,
        )
        self.scraper.start()

    async def add(self, tag: str, serve: Serve) -> asyncio.Server:
        async def tracked(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self.tasks.add(task)
            await serve(incoming, out)

        server = await asyncio.start_server(tracked, "127.0.0.1", 0)
        self.servers.append(server)
        self.scraper.add(tag, 0, server.sockets[0].getsockname()[:2], reader())
        return server

    def good(self, tag: str) -> int:
        return sum(entry[0] == tag for entry in self.seen.good)

    def causes(self, tag: str) -> set[str]:
        return {cause for name, cause, _ in self.seen.bad if name == tag}

    async def close(self) -> None:
        self.scraper.close()
        for server in self.servers:
            server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(0.02)
        assert asyncio.all_tasks() == {asyncio.current_task()} | {
            task for task in asyncio.all_tasks() if "wait_for" in repr(task)
        }


EVIL = {
    "slow": (serving(*(answer()[i : i + 9] for i in range(0, 69, 9)), pause_s=0.3), "timeout"),
    "hanging": (serving(then="hang"), "timeout"),
    "half a page": (serving(answer()[:-10], then="hang"), "timeout"),
    "cut": (serving(answer()[:-10], then="close"), "closed"),
    "longer than it says": (serving(answer() + b"more"), "length"),
    "flooding": (serving(b"HTTP/1.1 200 OK\r\n\r\n", then="flood"), "too-large"),
    "vanishing": (serving(then="close"), "closed"),
    "NaN": (serving(answer(b"vllm:num_requests_waiting NaN\n")), "extract"),
    "negative": (serving(answer(b"vllm:num_requests_waiting -1\n")), "extract"),
    "empty": (serving(answer(b"")), "extract"),
    "redirecting": (serving(b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n"), "status"),
}


def test_evil_servers_change_nothing_for_the_others() -> None:
    async def scenario() -> None:
        servers = Servers()
        for n in range(5):
            await servers.add(f"good {n}", serving(answer()))
        await servers.add("closing", serving(answer(more=b"Connection: close\r\n"), then="close"))
        for tag, (serve, _) in EVIL.items():
            await servers.add(tag, serve)
        await until(
            lambda: all(cause in servers.causes(tag) for tag, (_, cause) in EVIL.items()),
            "each evil server is found out",
        )
        before = {f"good {n}": servers.good(f"good {n}") for n in range(5)}
        await asyncio.sleep(0.5)
        for tag, count in before.items():
            assert servers.good(tag) > count
            assert not servers.causes(tag)
        assert servers.good("closing")
        assert not servers.causes("closing")
        assert not any(servers.good(tag) for tag in EVIL)
        assert not any(refused for _, _, refused in servers.seen.bad)
        await servers.close()

    run(scenario())


def test_a_killed_server_is_refused_twice_at_once_and_its_first_good_answer_brings_it_back() -> None:
    async def scenario() -> None:
        servers = Servers()
        server = await servers.add("a", serving(answer()))
        port = server.sockets[0].getsockname()[1]
        await until(lambda: servers.good("a") > 3, "scrapes")
        server.close()
        for task in servers.tasks:
            task.cancel()
        await until(lambda: sum(refused for _, _, refused in servers.seen.bad) >= 2, "refusals")
        assert not servers.causes("a") - {"refused", "closed"}
        count = servers.good("a")
        again = await asyncio.start_server(serving(answer()), "127.0.0.1", port)
        await until(lambda: servers.good("a") > count, "it is back")
        again.close()
        await servers.close()

    run(scenario())


@pytest.mark.parametrize("turns", range(12))
def test_an_attempt_that_was_given_up_says_nothing_more_at_whatever_turn_of_the_loop_that_was(turns: int) -> None:
    calls: list[str] = []

    class Heard:
        """A caller."""

        def connected(self, _connection: Connection) -> None:
            calls.append("connected")

        def unreachable(self, failure: OSError) -> None:
            calls.append(str(failure))

        def lost(self, _connection: Connection, failure: Exception | None) -> None:
            calls.append(f"lost {failure}")

        answered = garbled = lost

    async def scenario() -> None:
        server = await asyncio.start_server(serving(then="hang"), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        caller: Any = Heard()
        attempt = Dialer(asyncio.get_running_loop()).dial(host, port, caller)
        for _ in range(turns):
            await asyncio.sleep(0)
        before = list(calls)
        attempt.cancel()
        await asyncio.sleep(0.02)
        server.close()
        await asyncio.sleep(0.02)
        assert calls == before

    run(scenario())


def test_hundreds_of_real_endpoints_coming_and_going_leave_no_socket_and_no_task() -> None:
    async def scenario() -> None:
        servers = Servers()
        server = await servers.add("a", serving(answer()))
        refusing = socket.socket()
        refusing.bind(("127.0.0.1", 0))
        places = [server.sockets[0].getsockname()[:2], refusing.getsockname()]
        for _ in range(3):
            targets = [servers.scraper.add(n, 0, places[n % 4 == 0], reader()) for n in range(200)]
            await asyncio.sleep(0.08)
            for target in targets:
                servers.scraper.remove(target)
        assert len(servers.scraper) == 1
        refusing.close()
        await servers.close()

    run(scenario())


def test_https_pages_are_scraped_with_and_without_verification(tmp_path: Any) -> None:
    certificate, key = _certificate(tmp_path)

    async def scenario() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server = await asyncio.start_server(serving(answer()), "127.0.0.1", 0, ssl=context)
        address = server.sockets[0].getsockname()[:2]
        loop = asyncio.get_running_loop()
        seen: dict[str, Seen] = {}
        scrapers = []
        for name, params in (
            ("any", {}),
            ("known", {"insecure_skip_verify": False, "ca_cert_path": str(certificate)}),
            ("unknown", {"insecure_skip_verify": False}),
        ):
            params = MetricsDataSource.Params(scheme="https", **params)  # type: ignore[arg-type]
            source = MetricsDataSource("s", params)
            seen[name] = Seen()
            scraper = Scraper.of(
                source, loop, interval_s=0.05, tls=source_tls(source), inflight=lambda slot: 0, sink=seen[name]
            )
            scraper.start()
            scraper.add("a", 0, address, reader())
            scrapers.append(scraper)
        await until(lambda: bool(seen["any"].good and seen["known"].good and seen["unknown"].bad), "pages")
        assert not seen["any"].bad
        assert not seen["known"].bad
        assert {entry[1] for entry in seen["unknown"].bad} == {"unreachable"}
        for scraper in scrapers:
            scraper.close()
        server.close()
        await asyncio.sleep(0.05)

    run(scenario())


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (
            {"insecure_skip_verify": False, "ca_cert_path": "/nowhere/ca.pem"},
            "caCertPath /nowhere/ca.pem: not usable (No such file",
        ),
        (
            {"client_cert_path": "/nowhere/c", "client_key_path": "/nowhere/k"},
            "clientCertPath /nowhere/c, clientKeyPath /nowhere/k: ",
        ),
        (
            {"insecure_skip_verify": False, "ca_cert_path": __file__},
            f"caCertPath {__file__}: not usable (NO_CERTIFICATE",
        ),
    ],
)
def test_certificates_for_https_pages_that_cannot_be_used_are_refused_by_name(
    params: dict[str, Any], named: str
) -> None:
    source = MetricsDataSource("metrics", MetricsDataSource.Params(scheme="https", **params))
    with pytest.raises(ValueError, match=re.escape(f"plugin 'metrics': {named}")):
        source_tls(source)


def _certificate(directory: Any) -> tuple[Any, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pod")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    (directory / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (directory / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return directory / "cert.pem", directory / "key.pem"
