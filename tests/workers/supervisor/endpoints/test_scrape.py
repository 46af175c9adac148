"""One scrape, with connections that the test answers: what a fault costs, what is retried, and what is left behind."""

import errno

import pytest

from epp.data import RUNNING, WAITING
from epp.plugins.extractors.core_metrics import Extracted
from tests.workers.supervisor.endpoints.scraping import EXTRACTOR, PAGE, Bench, FakeKnock, reader
from workers.supervisor.endpoints.http_answer import HttpError
from workers.supervisor.endpoints.http_client import CONNECT_S_MAX
from workers.supervisor.endpoints.scrape import PAUSE_S, REFUSALS_TO_PAUSE, SCRAPE_S_MAX, Failure
from workers.supervisor.endpoints.wheel import FLOOD_PAUSE_S, LARGE_PAGE_BYTES


def test_an_unanswered_connect_ends_after_200_ms_and_a_hanging_scrape_after_1_s() -> None:
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


def test_an_idle_connection_that_breaks_is_replaced_at_once_but_only_once_per_turn() -> None:
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


def test_a_request_on_a_closing_connection_is_sent_again_without_an_error() -> None:
    bench = Bench()
    _, connection = bench.up()
    bench.turn(10)
    connection.lose()
    bench.net.attempts[0].succeed().answer()
    assert (len(bench.seen.good), bench.seen.bad) == (2, [])


def test_a_connection_lost_inside_an_answer_is_an_error_and_is_retried_at_once() -> None:
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


@pytest.mark.parametrize(("code", "refused"), [(errno.ECONNREFUSED, True), (errno.EHOSTUNREACH, True), (errno.EMFILE, False)])
def test_some_connect_errors_count_as_refused(code: int, refused: bool) -> None:
    bench = Bench()
    bench.scraper.add("a", 1, ("10.0.0.1", 8000), reader())
    bench.turn()
    bench.net.attempts[0].fail(code)
    assert bench.seen.bad[0][2] is refused


PAGE_AT, OWN = ("10.0.0.1", 9400), ("10.0.0.1", 8000)


@pytest.mark.parametrize(
    ("own", "refused", "serves"), [(0, False, True), (errno.ECONNREFUSED, True, False), (errno.ENETUNREACH, False, False)]
)
def test_an_endpoint_refuses_only_if_its_own_address_does(own: int, refused: bool, serves: bool) -> None:
    bench = Bench()
    bench.scraper.add("a", 1, PAGE_AT, reader(), "", OWN)
    bench.turn()
    (attempt,) = bench.net.attempts
    assert attempt.address == PAGE_AT
    attempt.fail()
    assert not bench.seen.bad, "the own address is tried first"
    (attempt,) = bench.net.attempts
    assert attempt.address == OWN
    assert isinstance(attempt, FakeKnock)
    attempt.answer(own)
    (failure,) = bench.seen.failures
    assert (failure.cause, failure.refused, failure.serves) == ("refused", refused, serves)
    assert failure.text.startswith("10.0.0.1:9400: ")
    assert not bench.net.open and not bench.net.attempts
    assert bench.scraper.counters.poll_errors == {"refused": 1}


@pytest.mark.parametrize("own", [None, OWN])
@pytest.mark.parametrize(("answer", "serves"), [("other metrics", True), ("404", True), ("503", False)])
def test_an_address_that_has_no_such_page_serves_if_it_is_the_endpoints_own(own: tuple[str, int] | None, answer: str, serves: bool) -> None:
    bench = Bench()
    bench.scraper.add("a", 1, PAGE_AT, reader(), "", own)
    bench.turn()
    connection = bench.net.attempts[0].succeed()
    if answer == "other metrics":
        connection.answer(b"sglang:num_queue_reqs 1\n")
    else:
        connection.caller.garbled(connection, HttpError("status", answer, serves=serves))
    (failure,) = bench.seen.failures
    assert (failure.refused, failure.serves) == (False, serves and own is None)


def test_an_own_address_that_does_not_answer_ends_the_scrape_and_a_removed_endpoint_its_trial() -> None:
    bench = Bench()
    target = bench.scraper.add("a", 1, PAGE_AT, reader(), "", OWN)
    bench.turn()
    bench.net.attempts[0].fail()
    bench.turn(45)
    (failure,) = bench.seen.failures
    assert (failure.refused, failure.serves) == (False, False) and failure.text.startswith("10.0.0.1:9400: ")
    while not bench.net.attempts:
        bench.turn()
    bench.net.attempts[0].fail()
    bench.scraper.remove(target)
    assert not bench.net.attempts and len(bench.seen.bad) == 1


def test_a_server_that_keeps_refusing_is_tried_less_often_until_it_answers() -> None:
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
    bench.net.requested.clear()
    bench.turn(10)
    assert len(bench.net.requested) == 1


def test_a_server_that_sends_too_much_is_not_scraped_for_a_second() -> None:
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
def test_a_page_that_takes_long_to_parse_is_scraped_less_often(seconds: float, pause: float, page: bytes) -> None:
    bench = Bench()
    target, connection = bench.up()

    class Costly:
        def extract(self, page: bytes) -> Extracted:
            bench.spent += seconds
            return reader().extract(page)

    target.reader = Costly()
    bench.turn(10)
    bench.net.requested.clear()
    connection.answer(page + b"# nothing\n" * (LARGE_PAGE_BYTES // 10))
    bench.turn(int(pause / 0.005))
    assert bench.net.requested == []
    bench.turn(10)
    assert bench.net.requested == [connection]


def test_a_page_with_an_invalid_value_fails_with_the_name_of_the_metric_and_keeps_the_connection() -> None:
    bench = Bench()
    _, connection = bench.up()
    bench.turn(10)
    connection.answer(b"vllm:num_requests_waiting NaN\n")
    assert bench.seen.bad == [("a", "extract", False)]
    assert bench.scraper.counters.extract_errors == 1
    assert bench.seen.failures[0].text.startswith("vllm:num_requests_waiting: ")
    assert connection in bench.net.open


class Broken:
    def extract(self, page: bytes) -> Extracted:
        raise KeyError("power")


def test_a_fault_of_an_extractor_fails_the_page_and_keeps_the_connection() -> None:
    bench = Bench()
    bench.scraper.add("a", 1, ("10.0.0.1", 8000), Broken())
    bench.turn()
    connection = bench.net.attempts[0].succeed()
    for failed in (1, 2):
        connection.answer()
        assert bench.scraper.counters.extract_errors == failed
        bench.turn(10)
        assert bench.net.requested[failed:] == [connection]
    assert bench.seen.bad == [("a", "extract", False)] * 2
    assert "KeyError" in bench.seen.failures[0].text and connection in bench.net.open


def test_a_value_that_cannot_be_read_counts_once_while_it_lasts_and_the_page_is_taken() -> None:
    bench = Bench()
    target = bench.scraper.add("a", 1, ("10.0.0.1", 8000), EXTRACTOR.extraction({}, (WAITING, RUNNING)))
    bench.turn()
    connection = bench.net.attempts[0].succeed()
    good, bad = PAGE + b"vllm:num_requests_running 2\n", PAGE + b"vllm:num_requests_running %b\n"
    for page in (bad % b"NaN", bad % b"-1", bad % b"-2", PAGE, good, bad % b"NaN"):
        connection.answer(page)
        bench.turn(10)
    counters = bench.scraper.counters
    assert (counters.taken, counters.extract_errors, bench.seen.bad) == (6, 0, [])
    assert counters.unread == 3, "not a count, missing, and not a count again"
    assert all(extracted.values[0] == 3.0 for _, extracted, _, _ in bench.seen.good)
    assert list(target.problems.values()) == ["vllm:num_requests_running: nan is not a count of 0 or more"]


def test_every_scrape_counts_as_taken_or_as_one_error_and_late_turns_are_not_scrapes() -> None:
    bench = Bench()
    _, connection = bench.up()
    for page in (PAGE, b"vllm:num_requests_waiting NaN\n"):
        bench.turn(30)
        connection.answer(page)
    bench.turn(10)
    connection.caller.garbled(connection, HttpError("status", "the answer is 'HTTP/1.1 500', not 200"))
    counters = bench.scraper.counters
    assert (counters.scrapes, counters.taken, counters.extract_errors, counters.poll_errors) == (4, 2, 1, {"status": 1})
    assert counters.late == 4
    bench.turn(10)
    assert (counters.scrapes, counters.taken) == (5, 2)


def test_the_duration_of_the_last_scrape_is_known_for_good_and_failed_scrapes() -> None:
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


def test_a_failure_has_the_cause_and_whether_the_next_try_comes_at_once() -> None:
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


def test_a_new_address_closes_the_old_connection_and_is_scraped_at_once() -> None:
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


def test_ten_thousand_added_and_removed_endpoints_leave_nothing() -> None:
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
