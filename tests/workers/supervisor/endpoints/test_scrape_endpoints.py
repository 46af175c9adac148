"""Endpoints come, change and leave: their slots, states, labels and documents in the table."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.plugins.extractors.core_metrics import Extracted
from shm.table import DOWN, State
from tests.waiting import turns
from tests.workers.supervisor.endpoints.tables import Shared, Supervisor, page, seen, spec
from workers.supervisor.endpoints.scrape import Failure


def test_an_endpoint_appears_unknown_becomes_fresh_then_stale_and_leaves() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"), spec("b", "10.0.0.2", role="decode"))
    assert seen(shared) == {"a": (0, State.UNKNOWN), "b": (1, State.UNKNOWN)}
    assert shared.view.current()[1].labels == {"role": "decode"}
    epoch = shared.reader.epoch()
    ours.table.scraped(ours.member("a"), page(3.0), 2, 100.1)
    ours.table.scraped(ours.member("b"), page(4.0), 0, 100.1)
    ours.flush()
    assert shared.reader.epoch() == epoch + 1
    copy = shared.reader.copy()
    assert copy.column(0).tolist() == [3.0, 4.0]
    assert (copy.inflight_at_scrape[0], copy.updated_at[0], copy.present[0]) == (2.0, 100.1, 3)
    ours.table.scraped(ours.member("b"), page(4.0), 0, 100.25)
    ours.member("a").target.under_way = True
    ours.table.sweep(100.31)
    assert seen(shared) == {"a": (0, State.FRESH), "b": (1, State.FRESH)}, "a scrape may still renew its values"
    ours.member("a").target.under_way = False
    ours.table.sweep(100.32)
    assert seen(shared) == {"a": (0, State.STALE), "b": (1, State.FRESH)}
    ours.apply(spec("b", "10.0.0.2", role="decode"))
    assert seen(shared) == {"b": (1, State.FRESH)}
    assert shared.owners.live == {2}


def test_after_a_failed_scrape_the_next_one_does_not_keep_the_values_fresh() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    ours.table.scraped(ours.member("a"), page(3.0), 2, 100.1)
    ours.table.failed(ours.member("a"), Failure("timeout", "no complete page within 1.0 s"), 100.2)
    ours.member("a").target.under_way = True
    ours.table.sweep(100.31)
    assert seen(shared) == {"a": (0, State.STALE)}


def test_two_refusals_mark_a_row_as_down_until_a_good_answer_and_keep_its_values() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    ours.table.scraped(ours.member("a"), page(3.0), 0, 100.1)
    for _ in range(2):
        assert not shared.reader.copy().flags[0]
        ours.table.failed(ours.member("a"), Failure("refused", "", True), 100.2)
    assert shared.reader.copy().flags[0] == DOWN
    assert shared.reader.copy().column(0)[0] == 3.0
    ours.table.scraped(ours.member("a"), page(1.0), 0, 100.3)
    assert not shared.reader.copy().flags[0]


def test_an_endpoint_whose_own_address_accepts_connections_is_down_no_longer() -> None:
    """Its metrics page is at another port, which still refuses."""
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    ours.table.scraped(ours.member("a"), page(3.0), 0, 100.1)
    for _ in range(2):
        ours.table.failed(ours.member("a"), Failure("refused", "", refused=True), 100.2)
    ours.table.sweep(100.4)
    assert (shared.reader.copy().flags[0], seen(shared)) == (DOWN, {"a": (0, State.STALE)})
    ours.table.failed(ours.member("a"), Failure("refused", "", serves=True), 100.5)
    ours.table.sweep(100.5)
    assert (shared.reader.copy().flags[0], seen(shared)) == (0, {"a": (0, State.STALE)})
    assert ours.log.events()[-2:] == ["endpoint down", "endpoint up"]


def test_an_endpoint_that_comes_back_without_its_metrics_page_is_down_no_longer() -> None:
    """A server was started again without --enable-metrics, or with another engine: it answers requests as before."""
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    for _ in range(2):
        ours.table.failed(ours.member("a"), Failure("refused", "", refused=True), 100.2)
    ours.table.failed(ours.member("a"), Failure("status", "the answer is 'HTTP/1.1 503', not 200"), 100.3)
    assert shared.reader.copy().flags[0] == DOWN
    ours.table.failed(ours.member("a"), Failure("status", "the answer is 'HTTP/1.1 404', not 200", serves=True), 100.4)
    assert (shared.reader.copy().flags[0], seen(shared)) == (0, {"a": (0, State.UNKNOWN)})


@pytest.mark.parametrize("failure", [Failure("timeout", ""), Failure("status", ""), Failure("refused", "", serves=True)])
def test_an_endpoint_whose_page_never_came_is_neither_idle_nor_down(failure: Failure) -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    for turn in range(100):
        ours.table.failed(ours.member("a"), failure, 100.1 + turn)
        ours.table.sweep(100.1 + turn)
    copy = shared.reader.copy()
    assert seen(shared) == {"a": (0, State.UNKNOWN)}
    assert (copy.flags[0], copy.present[0]) == (0, 0), "decisions take the mean of the others for its load"


def test_labels_change_in_place_but_a_new_address_is_a_new_endpoint() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    ours.apply(spec("a", role="prefill"))
    assert (shared.view.current()[0].labels, shared.view.current()[0].generation) == ({"role": "prefill"}, 1)
    assert shared.owners.live == {1}
    ours.apply(spec("a", "10.0.0.9"))
    assert (shared.view.current()[0].host, shared.view.current()[0].generation) == ("10.0.0.9", 2)
    assert shared.owners.live == {2}
    assert list(ours.scraper.targets.values()) == [(0, ("10.0.0.9", 8000))]


def test_a_slot_with_requests_in_flight_is_not_reused() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    shared.inflight[0] = 1
    ours.apply(spec("b"))
    assert seen(shared)["b"][0] == 1
    shared.inflight[0] = 0
    ours.apply(spec("b"), spec("c"))
    assert seen(shared)["c"][0] == 0


def test_with_a_full_table_an_endpoint_waits_is_reported_once_and_gets_the_next_free_slot() -> None:
    shared = Shared(slots=2)
    ours = Supervisor(shared)
    ours.apply(spec("a"), spec("b"), spec("c"))
    assert set(seen(shared)) == {"a", "b"}
    for n in range(10):
        ours.table.sweep(101.0 + n)
    assert ours.reports == [
        "endpoints wait for a slot count=1 endpoints=['c'] reason=all 2 slots of the table are taken; raise --max-endpoints"
    ]
    shared.inflight[0] = 1
    ours.apply(spec("b"), spec("c"))
    assert set(seen(shared)) == {"b"}
    shared.inflight[0] = 0
    ours.table.sweep(120.0)
    ours.flush()
    assert set(seen(shared)) == {"b", "c"}
    assert len(shared.owners.live) == 2


def test_an_endpoint_also_waits_if_there_is_no_free_owner_id() -> None:
    shared = Shared()
    shared.owners.limit = 1
    ours = Supervisor(shared)
    ours.apply(spec("a"), spec("b"))
    assert set(seen(shared)) == {"a"}
    assert ours.reports == ["endpoints wait for a slot count=1 endpoints=['b'] reason=all owner ids are taken"]


def test_adapters_are_written_to_their_document_when_they_change_and_removed_with_the_endpoint() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"), spec("b"))
    ours.table.scraped(ours.member("a"), page(1.0, "x", "y"), 0, 100.1)
    ours.table.sweep(100.1)
    assert shared.names.current() == {(0, 1): {"active_models": {"x", "y"}}}
    version = shared.document_reader.version(1)
    ours.table.scraped(ours.member("a"), page(1.0, "y", "x"), 0, 100.2)
    ours.table.sweep(100.2)
    assert shared.document_reader.version(1) == version
    ours.apply(spec("b"))
    ours.table.sweep(100.3)
    assert shared.names.current() == {}


def test_the_adapters_of_one_endpoint_do_not_hide_those_of_the_others() -> None:
    shared = Shared(slots=4, capacity=400)
    ours = Supervisor(shared)
    ours.apply(spec("a"), spec("b"), spec("many"))
    ours.table.scraped(ours.member("a"), page(1.0, "x"), 0, 100.1)
    ours.table.scraped(ours.member("many"), page(1.0, *(f"adapter-{n}" for n in range(99))), 0, 100.1)
    ours.table.sweep(100.1)
    assert shared.names.current() == {(0, 1): {"active_models": {"x"}}}
    for n in range(100):  # the adapters change with each page
        ours.table.scraped(ours.member("many"), page(1.0, *(f"adapter-{n}-{each}" for each in range(99))), 0, 100.2 + n / 10)
        ours.table.sweep(100.2 + n / 10)
    ours.table.scraped(ours.member("b"), page(1.0, "y"), 0, 111.0)
    ours.table.sweep(111.0)
    assert shared.names.current() == {(0, 1): {"active_models": {"x"}}, (1, 1): {"active_models": {"y"}}}
    (report,) = ours.reports
    assert report.startswith("adapters of endpoints are not known count=1 endpoints=['many'] reason=the names of all adapters")
    ours.table.scraped(ours.member("many"), page(1.0, "z"), 0, 112.0)
    ours.table.sweep(112.0)
    assert shared.names.current()[2, 1] == {"active_models": {"z"}}


def test_endpoints_with_labels_that_are_too_long_are_left_out_and_reported() -> None:
    shared = Shared(slots=8, capacity=400)
    ours = Supervisor(shared)
    small = [spec(f"endpoint-{n}") for n in range(5)]
    ours.apply(*small, spec("huge", label="x" * 1000))
    assert [e.name for e in shared.view.current()] == [each.name for each in small]
    ours.apply(*small[1:], spec("new"), spec("huge", label="x" * 1000))
    assert sorted(e.name for e in shared.view.current()) == [*(each.name for each in small[1:]), "new"]
    (report,) = ours.reports
    assert report.startswith("endpoints get no requests count=1 endpoints=['huge'] reason=all labels")
    ours.apply(*small[1:], spec("huge", label="x"))
    assert "huge" in [e.name for e in shared.view.current()]


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(20, 600))
def test_the_document_contains_as_many_endpoints_as_fit_for_any_labels(lengths: list[int], room: int) -> None:
    shared = Shared(slots=8, capacity=room)
    ours = Supervisor(shared)
    ours.apply(*(spec(f"e{n}", label="x" * length) for n, length in enumerate(lengths)))
    there = {e.name for e in shared.view.current()}
    left = [length for n, length in enumerate(lengths) if f"e{n}" not in there]
    kept = [length for n, length in enumerate(lengths) if f"e{n}" in there]
    assert not left or not kept or min(left) >= max(kept) - 4  # a longer length has a longer prefix
    assert bool(ours.reports) == bool(left)


@pytest.mark.parametrize("rounds", [50])
def test_added_and_removed_endpoints_leave_no_slot_and_no_owner(rounds: int) -> None:
    shared = Shared(slots=64)
    ours = Supervisor(shared)
    for n in range(rounds):
        ours.apply(*(spec(f"e{n}-{i}", f"10.0.{n}.{i}") for i in range(64)))
        assert len(seen(shared)) == 64
    ours.apply()
    assert (len(ours.table), seen(shared), shared.owners.live) == (0, {}, set())
    assert not ours.scraper.targets
    assert ours.reports == []


def test_all_scrapes_of_a_turn_of_the_loop_are_published_together() -> None:
    async def scenario() -> None:
        shared = Shared()
        ours = Supervisor(shared)
        ours.table._loop = asyncio.get_running_loop()
        ours.flush()
        ours.table.apply({spec("a"), spec("b")})
        await turns()
        epoch = shared.reader.epoch()
        for name in "ab":
            ours.table.scraped(ours.member(name), page(1.0), 0, 100.0)
        await turns()
        assert shared.reader.epoch() == epoch + 1

    asyncio.run(scenario())


def test_the_duration_of_the_last_scrape_is_known_by_name_after_the_first_scrape() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"), spec("b"))
    ours.member("a").target.seconds = 0.004
    assert ours.table.scrape_seconds() == {(0, "a"): 0.004}


def test_a_page_says_how_many_requests_the_server_has() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    member = ours.member("a")
    assert ours.table.scraped(member, page(3.0), 0, 100.1) == 3.0
    assert ours.table.scraped(member, Extracted((3.0, 0.5), 0b10, {}), 0, 100.2) is None, "the queue is not reported"


def test_a_page_of_a_surprising_endpoint_is_asked_for_at_once() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"), spec("b", "10.0.0.2"))
    ours.table.hasten(1)
    ours.table.hasten(3)
    assert [len(ours.member(name).target.pace.hastened) for name in "ab"] == [0, 1], "no endpoint has slot 3"
