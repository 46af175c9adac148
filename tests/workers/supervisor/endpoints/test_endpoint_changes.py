"""What the log says of endpoints: each change with its cause, and few lines however much changes."""

from typing import Any

from shm.table import EJECTED, FAILING_AT, FAILING_MASK, State
from tests.workers.shared.outlier_world import Pool, failing
from tests.workers.supervisor.endpoints.tables import Shared, Supervisor, page, spec
from workers.supervisor.endpoints.scrape import Failure


def logged(ours: Supervisor, now: float) -> list[tuple[str, str, dict[str, Any]]]:
    """The lines that are logged at this time."""
    ours.log.lines.clear()
    ours.table.sweep(now)
    return ours.log.lines


A = {"endpoint": "default/a", "address": "10.0.0.1:8000"}
REFUSED = Failure("refused", "[Errno 111] Connection refused", refused=True)


def test_each_change_is_logged_with_the_condition_before_its_duration_and_the_cause() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"))
    a = ours.member("a")
    assert logged(ours, 100.0) == [("info", "endpoint appeared", A)]
    ours.table.scraped(a, page(1.0), 0, 100.5)
    assert logged(ours, 100.5) == [("info", "endpoint fresh", A | {"previous": "unknown", "lasted_s": 0.5})]
    ours.table.failed(a, Failure("timeout", "no complete page within 1.0 s"), 100.6)
    assert logged(ours, 100.7) == [
        (
            "warning",
            "endpoint stale",
            A | {"previous": "fresh", "lasted_s": 0.2, "cause": "timeout", "why": "no complete page within 1.0 s"},
        )
    ]
    for now in (101.0, 101.7):
        ours.table.failed(a, REFUSED, now)
    assert logged(ours, 101.7) == [("warning", "endpoint down", A | {"previous": "stale", "lasted_s": 1.0, "cause": "refused"})]
    ours.table.scraped(a, page(1.0), 0, 104.2)
    assert logged(ours, 104.2) == [("info", "endpoint up", A | {"previous": "down", "lasted_s": 2.5, "cause": "refused"})]
    assert logged(ours, 104.3) == []
    ours.apply()
    assert logged(ours, 104.3) == [("info", "endpoint left", A | {"previous": "fresh", "lasted_s": 0.1})]


def test_a_server_with_a_page_that_was_never_readable_is_logged_once_with_the_cause() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"))
    logged(ours, 100.0)
    for _ in range(100):
        ours.table.failed(ours.member("a"), Failure("status", "status 404 instead of 200"), 101.0)
    why = {"cause": "status", "why": "status 404 instead of 200"}
    assert logged(ours, 101.0) == [("warning", "endpoint not readable", A | {"previous": "unknown", "lasted_s": 1.0} | why)]


def test_values_that_cannot_be_read_are_logged_when_a_cause_appears_and_shown_while_it_lasts() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"))
    a = ours.member("a")
    ours.table.scraped(a, page(1.0), 0, 100.0)
    logged(ours, 100.0)
    bad = page(1.0)._replace(problems={"x rule": "x: nan is not a count"})
    ours.table.scraped(a, bad, 0, 100.1)
    why = {"cause": "extract", "why": "x: nan is not a count"}
    assert logged(ours, 100.1) == [("warning", "endpoint partly readable", A | why)]
    ours.table.scraped(a, bad._replace(problems={"x rule": "x: -1.0 is not a count"}), 0, 100.2)
    assert logged(ours, 100.2) == []
    assert ours.table.troubles() == {"default/a 10.0.0.1:8000": "its metrics page has values that cannot be read: x: -1.0 is not a count"}
    ours.table.scraped(a, page(1.0), 0, 100.3)
    assert logged(ours, 100.3) == [] and ours.table.troubles() == {}


def test_endpoints_that_fail_more_than_the_others_are_logged_with_cause_and_evidence_and_told_to_the_pages() -> None:
    world = Pool(4)
    ours = Supervisor(Shared(slots=8), ejections=world.ejections)
    ours.apply(*(spec(name, f"10.0.0.{at}") for at, name in enumerate("abcd", 1)))
    for name in "abcd":
        ours.table.scraped(ours.member(name), page(1.0), 0, world.now)
    logged(ours, world.now)
    bad = ours.member("b").handle.slot
    while not (lines := [line for line in logged(ours, world.now) if line[1] == "endpoint ejected"]):
        world.now += 0.1
        for _ in range(4):
            world.send(failing(bad))
    ((level, _, fields),) = lines
    assert (level, fields["endpoint"], fields["cause"]) == ("warning", "default/b", "404")
    assert fields["why"].startswith("100% of its last ")
    assert ours.table.failing() == {(0, "b", "404"): 1.0}
    assert ours.table.troubles() == {"default/b 10.0.0.2:8000": fields["why"]}
    assert int(ours.shared.reader.copy().flags[bad]) == EJECTED
    assert ours.member("b").target.pace.hastened, "its page is asked for at once"


def test_an_endpoint_that_fails_a_part_of_its_requests_is_logged_once_and_marked_for_the_workers() -> None:
    world = Pool(4)
    ours = Supervisor(Shared(slots=8), ejections=world.ejections)
    ours.apply(*(spec(name, f"10.0.0.{at}") for at, name in enumerate("abcd", 1)))
    for name in "abcd":
        ours.table.scraped(ours.member(name), page(1.0), 0, world.now)
    bad, events = ours.member("b").handle.slot, []
    for _ in range(200):
        world.now += 0.1
        for _ in range(4):
            world.send()
            world.send(failing(bad), model="x") if world.rng.random() < 0.4 else None
        events += [(event, fields) for _, event, fields in logged(ours, world.now) if event != "endpoint stale"]
    ((_, fields),) = [each for each in events if each[0] == "endpoint failing"]
    assert (fields["endpoint"], fields["cause"]) == ("default/b", "404")
    assert 0.1 < ours.table.failing()[(0, "b", "404")] < 0.6
    assert int(ours.shared.reader.copy().flags[bad]) >> FAILING_AT & FAILING_MASK


def test_an_endpoint_that_is_down_is_not_also_logged_as_stale() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"))
    ours.table.scraped(ours.member("a"), page(1.0), 0, 100.0)
    for _ in range(2):
        ours.table.failed(ours.member("a"), REFUSED, 100.1)
    ours.table.sweep(101.0)
    assert ours.member("a").health.state is State.STALE
    assert ours.log.events() == ["endpoint appeared", "endpoint fresh", "endpoint down"]
    assert ours.log.pool == ["no endpoint is healthy: all are stale or down, and get requests all the same: see their lines for the causes"]


def test_a_single_failed_scrape_without_consequence_is_not_logged_and_is_not_a_cause_later() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"))
    ours.table.scraped(ours.member("a"), page(1.0), 0, 100.0)
    logged(ours, 100.0)
    ours.table.failed(ours.member("a"), REFUSED, 100.05)
    ours.table.scraped(ours.member("a"), page(1.0), 0, 100.1)
    assert logged(ours, 100.1) == []
    ((_, event, fields),) = logged(ours, 100.31)
    assert (event, fields["cause"]) == ("endpoint stale", "pending")


def test_a_thousand_endpoints_that_appear_answer_and_leave_cause_few_lines() -> None:
    ours = Supervisor(Shared(slots=1000, capacity=1 << 18))
    specs = [spec(f"e{n:03}", f"10.0.{n // 250}.{n % 250}") for n in range(1000)]
    ours.apply(*specs)
    ((level, event, fields),) = logged(ours, 100.0)
    assert (level, event, fields["endpoints"]) == ("info", "endpoints appeared", 1000)
    assert fields["first"] == [f"default/e{n:03}" for n in range(8)]
    members = list(ours.scraper.targets)
    ours.log.lines.clear()
    for tick in range(16):
        now = 100.0 + tick * 0.005
        for member in members[tick * 64 : tick * 64 + 64]:
            ours.table.scraped(member, page(1.0), 0, now)
        ours.table.sweep(now)
    for tick in range(10):
        for member in members:
            ours.table.scraped(member, page(1.0), 0, 100.1 + tick * 0.1)
        ours.table.sweep(100.1 + tick * 0.1)
    fresh = ours.log.of("endpoints fresh")
    assert [line["endpoints"] for line in fresh] == [64, 936]
    assert fresh[1]["previous"] == {"unknown": 936}
    assert len(ours.log.lines) == 2
    ours.apply()
    assert [event for _, event, _ in logged(ours, 101.1)] == ["endpoints left"]


def test_an_endpoint_that_flaps_ten_times_a_second_gets_few_lines_that_count_all_changes() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"))
    a = ours.member("a")
    for flap in range(600):
        now = 100.0 + flap * 0.1
        ours.table.scraped(a, page(1.0), 0, now)
        for step in (1, 2):
            ours.table.failed(a, REFUSED, now + step * 0.02)
        for tick in range(20):
            ours.table.sweep(now + tick * 0.005)
    ours.table.sweep(162.0)
    for event in ("endpoint down", "endpoint up"):
        lines = ours.log.of(event)
        assert len(lines) <= 5 + 61
        assert len(lines) + sum(line.get("suppressed", 0) for line in lines) == (600 if event == "endpoint down" else 599)
    assert len(ours.log.lines) < 140


def test_an_endpoint_that_left_with_requests_in_flight_is_logged_again_when_they_have_ended() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    logged(ours, 100.0)
    shared.inflight[0] = 3
    ours.apply()
    assert [fields["in_flight"] for _, _, fields in logged(ours, 100.1)] == [3]
    assert logged(ours, 102.0) == []
    shared.inflight[0] = 0
    assert logged(ours, 104.0) == [("info", "endpoint drained", A | {"lasted_s": 4.0})]
    assert logged(ours, 105.0) == []


def test_a_slot_that_is_taken_again_counts_as_drained() -> None:
    shared = Shared(slots=1)
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    shared.inflight[0] = 3
    ours.apply()
    logged(ours, 100.0)
    shared.inflight[0] = 0
    ours.apply(spec("b"))
    shared.inflight[0] = 1
    logged(ours, 101.0)
    assert ours.log.events() == ["endpoint drained", "endpoint appeared"]


def test_a_successor_logs_the_endpoints_that_it_takes_over_and_those_that_have_left() -> None:
    shared = Shared()
    first = Supervisor(shared)
    first.apply(spec("a"), spec("b", "10.0.0.2"))
    first.table.scraped(first.member("a"), page(3.0), 0, 100.0)
    second = Supervisor(shared, now=101.0)
    second.apply(spec("a"))
    assert logged(second, 101.1) == [
        ("info", "endpoint taken over", A | {"previous": "fresh"}),
        ("info", "endpoint left", {"endpoint": "default/b", "address": "10.0.0.2:8000"}),
    ]
    assert logged(second, 101.3) == [
        ("warning", "endpoint stale", A | {"previous": "fresh", "cause": "pending", "why": "the scrape under way has had no answer yet"})
    ]


def test_failed_scrapes_are_logged_at_debug_only() -> None:
    for debug in (True, False):
        ours = Supervisor(Shared(), debug=debug)
        ours.apply(spec("a"))
        logged(ours, 100.0)
        ours.table.failed(ours.member("a"), Failure("extract", "vllm:x: nan is not a finite number"), 100.1)
        ours.table.failed(ours.member("a"), Failure("closed", "x" * 10_000, again=True), 100.2)
        lines = ours.log.of("scrape failed")
        if not debug:
            assert lines == []
            continue
        assert lines[0] == A | {"cause": "extract", "text": "vllm:x: nan is not a finite number", "failures": 1, "next_try_s": 0.04}
        assert (lines[1]["failures"], lines[1]["next_try_s"], len(lines[1]["text"])) == (2, 0.0, 400)
