"""The endpoint table over real shared-memory structures in plain memory, with a faked scraper."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.data import ACTIVE_MODELS, KV_USAGE, WAITING
from epp.plugins.extractors.core_metrics import CoreMetricsExtractor, Extracted
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.prefix_index import OwnersExhausted
from shm.segment import Region
from shm.table import DOWN, State, TableReader, TableSchema, TableWriter
from tests.workers.recorder import Recorder
from workers.discovery import EndpointSpec
from workers.documents import EndpointsView, NamesView, decode_endpoints
from workers.endpoint_log import EndpointLog
from workers.endpoints import EndpointTable
from workers.scrape import Failure

WANTED = (WAITING, KV_USAGE, ACTIVE_MODELS)
EXTRACTOR = CoreMetricsExtractor("x", CoreMetricsExtractor.Params())


def spec(name: str, host: str = "10.0.0.1", port: int = 8000, **labels: str) -> EndpointSpec:
    return EndpointSpec("default", name, host, port, tuple(labels.items()))


def page(waiting: float, *names: str) -> Extracted:
    return Extracted((waiting, 0.5), 3, {"active_models": frozenset(names)})


class FakeLoop:
    def __init__(self) -> None:
        self.soon: list[Any] = []

    def call_soon(self, callback: Any) -> None:
        self.soon.append(callback)


class FakeTarget:
    def __init__(self, tag: Any) -> None:
        self.tag, self.seconds = tag, -1.0


class FakeScraper:
    def __init__(self) -> None:
        self.targets: dict[Any, tuple[int, tuple[str, int]]] = {}

    def add(self, tag: Any, slot: int, address: tuple[str, int], reader: Any) -> Any:
        self.targets[tag] = slot, address
        return FakeTarget(tag)

    def change(self, target: Any, address: tuple[str, int], reader: Any) -> None:
        self.targets[target.tag] = self.targets[target.tag][0], address

    def remove(self, target: Any) -> None:
        del self.targets[target.tag]

    def next_try_s(self, target: Any, now: float) -> float:
        return 0.04


class FakeOwners:
    def __init__(self) -> None:
        self.live: set[int] = set()
        self.next = 1
        self.limit = 60_000

    def new_owner(self) -> int:
        if self.next > self.limit:
            raise OwnersExhausted("all owner ids are taken")
        self.live.add(self.next)
        self.next += 1
        return self.next - 1

    def retire(self, owner: int) -> None:
        self.live.remove(owner)

    def owners(self) -> list[int]:
        return sorted(self.live)


class Shared:
    """What outlives a supervisor, and what workers see of it."""

    def __init__(self, slots: int = 4, capacity: int = 4096) -> None:
        self.schema = TableSchema(("waiting_requests", "kv_cache_usage"), slots)
        self.region = Region(memoryview(bytearray(self.schema.bytes)))
        self.document_schema = DocumentSchema((capacity, capacity))
        self.documents = Region(memoryview(bytearray(self.document_schema.bytes)))
        self.owners = FakeOwners()
        self.inflight: dict[int, int] = {}
        self.reader = TableReader(self.schema, self.region)
        self.document_reader = DocumentReader(self.document_schema, self.documents)
        self.view = EndpointsView(self.document_reader)
        self.names = NamesView(self.document_reader)

    def predecessor(self) -> Any:
        found = self.document_reader.read(0)
        return decode_endpoints(found[1]) if found else []


class Supervisor:
    def __init__(
        self, shared: Shared, now: float = 100.0, *, debug: bool = False, remembered: Mapping[Any, int] | None = None
    ) -> None:
        self.shared, self.reports = shared, []
        self.log = Recorder()
        self.loop, self.scraper = FakeLoop(), FakeScraper()
        self.table = EndpointTable(
            self.loop,  # type: ignore[arg-type]
            table=TableWriter(shared.schema, shared.region),
            documents=DocumentWriter(shared.document_schema, shared.documents),
            owners=shared.owners,
            slot_inflight=lambda slot: shared.inflight.get(slot, 0),
            extractor=EXTRACTOR,
            wanted=WANTED,
            fresh_for_s=0.2,
            report=self.reports.append,
            log=EndpointLog(debug=debug, log=self.log),
            remembered=remembered,
        )
        self.table.start(
            self.scraper,  # type: ignore[arg-type]
            predecessor=shared.predecessor(),
            copy=shared.reader.copy(),
            now=now,
        )

    def flush(self) -> None:
        while self.loop.soon:
            self.loop.soon.pop(0)()

    def apply(self, *specs: EndpointSpec, complete: bool = True) -> None:
        self.table.apply(set(specs), complete=complete)
        self.flush()

    def member(self, name: str) -> Any:
        return next(tag for tag in self.scraper.targets if tag.spec.name == name)


def seen(shared: Shared) -> dict[str, tuple[int, State]]:
    """Name -> (slot, state) of what a worker would take for an endpoint."""
    copy = shared.reader.copy()
    endpoints = shared.view.current()
    return {
        e.name: (e.slot, State(int(copy.state[e.slot])))
        for e in endpoints
        if e.slot < len(copy.rows) and copy.generation[e.slot] == e.generation and copy.state[e.slot]
    }


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
    ours.table.sweep(100.31)
    assert seen(shared) == {"a": (0, State.STALE), "b": (1, State.FRESH)}
    assert ours.table.counts() == {State.UNKNOWN: 0, State.FRESH: 1, State.STALE: 1}
    ours.apply(spec("b", "10.0.0.2", role="decode"))
    assert seen(shared) == {"b": (1, State.FRESH)}
    assert shared.owners.live == {2}


def test_two_refusals_mark_a_row_as_down_and_keep_its_values_until_a_good_answer() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    ours.table.scraped(ours.member("a"), page(3.0), 0, 100.1)
    for _ in range(2):
        assert not shared.reader.copy().flags[0]
        ours.table.failed(ours.member("a"), Failure("refused", "", True), 100.2)
    assert shared.reader.copy().flags[0] == DOWN
    assert shared.reader.copy().column(0)[0] == 3.0
    assert ours.table.down() == 1
    ours.table.scraped(ours.member("a"), page(1.0), 0, 100.3)
    assert not shared.reader.copy().flags[0]


def test_labels_change_in_place_but_a_new_address_is_a_new_endpoint() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    ours.apply(spec("a", role="prefill"))
    assert (shared.view.current()[0].labels, shared.view.current()[0].generation) == (
        {"role": "prefill"},
        1,
    )
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


def test_with_a_full_table_an_endpoint_waits_is_named_once_and_gets_the_next_free_slot() -> None:
    shared = Shared(slots=2)
    ours = Supervisor(shared)
    ours.apply(spec("a"), spec("b"), spec("c"))
    assert set(seen(shared)) == {"a", "b"}
    for n in range(10):
        ours.table.sweep(101.0 + n)
    assert ours.reports == ["1 endpoints wait (c): all 2 slots of the table are taken; raise --max-endpoints"]
    shared.inflight[0] = 1
    ours.apply(spec("b"), spec("c"))
    assert set(seen(shared)) == {"b"}
    shared.inflight[0] = 0
    ours.table.sweep(120.0)
    ours.flush()
    assert set(seen(shared)) == {"b", "c"}
    assert len(shared.owners.live) == 2


def test_without_owner_ids_an_endpoint_waits_too() -> None:
    shared = Shared()
    shared.owners.limit = 1
    ours = Supervisor(shared)
    ours.apply(spec("a"), spec("b"))
    assert set(seen(shared)) == {"a"}
    assert ours.reports == ["1 endpoints wait (b): all owner ids are taken"]


def test_adapters_reach_their_document_when_they_change_and_leave_with_the_endpoint() -> None:
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


def test_endpoints_whose_labels_take_the_room_of_others_are_left_out_and_named() -> None:
    shared = Shared(slots=8, capacity=400)
    ours = Supervisor(shared)
    small = [spec(f"endpoint-{n}") for n in range(5)]
    ours.apply(*small, spec("huge", label="x" * 1000))
    assert [e.name for e in shared.view.current()] == [each.name for each in small]
    ours.apply(*small[1:], spec("new"), spec("huge", label="x" * 1000))
    assert sorted(e.name for e in shared.view.current()) == [*(each.name for each in small[1:]), "new"]
    (said,) = ours.reports
    assert said.startswith("1 endpoints get no requests (huge)")
    ours.apply(*small[1:], spec("huge", label="x"))
    assert "huge" in [e.name for e in shared.view.current()]


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(20, 600))
def test_whatever_the_labels_are_as_many_endpoints_as_have_room_are_there(lengths: list[int], room: int) -> None:
    shared = Shared(slots=8, capacity=room)
    ours = Supervisor(shared)
    ours.apply(*(spec(f"e{n}", label="x" * length) for n, length in enumerate(lengths)))
    there = {e.name for e in shared.view.current()}
    left = [length for n, length in enumerate(lengths) if f"e{n}" not in there]
    kept = [length for n, length in enumerate(lengths) if f"e{n}" in there]
    assert not left or not kept or min(left) >= max(kept) - 4  # a longer length has a longer prefix
    assert bool(ours.reports) == bool(left)


def test_a_successor_goes_on_with_the_same_slots_generations_and_owners() -> None:
    shared = Shared()
    first = Supervisor(shared)
    first.apply(spec("a"), spec("b", "10.0.0.2"), spec("c", "10.0.0.3"))
    first.table.scraped(first.member("a"), page(3.0), 0, 100.0)
    first.table.failed(first.member("b"), Failure("refused", "", True), 100.0)
    first.table.failed(first.member("b"), Failure("refused", "", True), 100.0)
    before = {e.name: (e.slot, e.generation, e.owner) for e in shared.view.current()}
    second = Supervisor(shared, now=101.0)
    second.flush()
    assert set(seen(shared)) == {"a", "b", "c"}
    second.apply(spec("a"), spec("b", "10.0.0.2"), spec("c", "10.0.0.33"), complete=False)
    after = {e.name: (e.slot, e.generation, e.owner) for e in shared.view.current() if e.host != "10.0.0.3"}
    assert {name: after[name] for name in "ab"} == {name: before[name] for name in "ab"}
    assert after["c"] != before["c"]
    assert second.table.down() == 1
    assert seen(shared)["a"] == (0, State.FRESH)
    second.table.sweep(101.3)
    assert seen(shared)["a"] == (0, State.STALE)
    second.apply(spec("a"), spec("b", "10.0.0.2"), spec("c", "10.0.0.33"))
    assert sorted(e.host for e in shared.view.current()) == ["10.0.0.1", "10.0.0.2", "10.0.0.33"]
    assert shared.owners.live == {owner for _, _, owner in after.values()}


def test_a_successor_frees_what_a_killed_predecessor_claimed_but_did_not_write_down() -> None:
    shared = Shared()
    first = Supervisor(shared)
    first.apply(spec("a"))
    first.table.apply({spec("a"), spec("b")})  # killed before its flush
    second = Supervisor(shared)
    assert shared.owners.live == {1}
    second.apply(spec("a"), spec("c"))
    assert set(seen(shared)) == {"a", "c"}


def test_a_successor_that_resumes_goes_on_scraping_before_discovery_says_anything() -> None:
    shared = Shared()
    known = [
        spec(name, host, a="x", b="y")._replace(uid=name * 3) for name, host in (("a", "10.0.0.1"), ("b", "10.0.0.2"))
    ]
    Supervisor(shared).apply(*known)
    before = seen(shared)
    second = Supervisor(shared)
    second.table.resume()
    second.flush()
    assert seen(shared) == before
    assert sorted(address for _, address in second.scraper.targets.values()) == [("10.0.0.1", 8000), ("10.0.0.2", 8000)]
    second.log.events()
    second.apply(*known)
    assert (seen(shared), second.log.events()) == (before, [])
    second.apply(known[0])
    assert set(seen(shared)) == {"a"}


def test_a_server_with_another_uid_is_another_server_whatever_it_is_called() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a")._replace(uid="first"))
    (first,) = shared.view.current()
    shared.inflight[first.slot] = 1
    ours.apply(spec("a")._replace(uid="second"))
    (second,) = shared.view.current()
    assert (second.slot, second.owner) != (first.slot, first.owner)
    (third,) = successor(shared, uid="third")
    assert third.owner != second.owner
    (fourth,) = successor(shared, uid="third")
    assert (fourth.slot, fourth.generation, fourth.owner) == (third.slot, third.generation, third.owner)


def successor(shared: Shared, uid: str) -> Any:
    ours = Supervisor(shared)
    ours.apply(spec("a")._replace(uid=uid))
    return shared.view.current()


def test_what_a_snapshot_holds_of_a_server_goes_with_its_uid() -> None:
    a, b = spec("a")._replace(uid="first"), spec("b", "10.0.0.2")._replace(uid="second")
    before = Supervisor(Shared())
    before.apply(a, b)
    remembered = before.table.owners()
    shared = Shared()
    shared.owners.live, shared.owners.next = set(remembered.values()), 10
    after = Supervisor(shared, remembered=remembered)
    after.apply(a, b._replace(uid="another"))
    owners = {address[-1]: owner for address, owner in after.table.owners().items()}
    assert owners == {"first": remembered["default", "a", "10.0.0.1", 8000, "first"], "another": 10}
    assert shared.owners.owners() == sorted(owners.values())


@pytest.mark.parametrize("rounds", [50])
def test_endpoints_coming_and_going_leave_no_slot_and_no_owner(rounds: int) -> None:
    shared = Shared(slots=64)
    ours = Supervisor(shared)
    for n in range(rounds):
        ours.apply(*(spec(f"e{n}-{i}", f"10.0.{n}.{i}") for i in range(64)))
        assert len(seen(shared)) == 64
    ours.apply()
    assert (len(ours.table), seen(shared), shared.owners.live) == (0, {}, set())
    assert not ours.scraper.targets
    assert ours.reports == []


def test_the_real_loop_publishes_once_for_all_scrapes_of_a_turn() -> None:
    async def scenario() -> None:
        shared = Shared()
        ours = Supervisor(shared)
        ours.table._loop = asyncio.get_running_loop()
        ours.flush()
        ours.table.apply({spec("a"), spec("b")})
        await asyncio.sleep(0)
        epoch = shared.reader.epoch()
        for name in "ab":
            ours.table.scraped(ours.member(name), page(1.0), 0, 100.0)
        await asyncio.sleep(0)
        assert shared.reader.epoch() == epoch + 1

    asyncio.run(scenario())


# What is told


def told(ours: Supervisor, now: float) -> list[tuple[str, str, dict[str, Any]]]:
    """The lines that are written at this time."""
    ours.log.lines.clear()
    ours.table.sweep(now)
    return ours.log.lines


A = {"endpoint": "default/a", "address": "10.0.0.1:8000"}
REFUSED = Failure("refused", "[Errno 111] Connection refused", refused=True)


def test_each_change_is_told_with_the_condition_before_how_long_it_lasted_and_why() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"))
    a = ours.member("a")
    assert told(ours, 100.0) == [("info", "endpoint appeared", A)]
    ours.table.scraped(a, page(1.0), 0, 100.5)
    assert told(ours, 100.5) == [("info", "endpoint fresh", A | {"previous": "unknown", "lasted_s": 0.5})]
    ours.table.failed(a, Failure("timeout", "no whole page within 1.0 s"), 100.6)
    assert told(ours, 100.7) == [
        (
            "warning",
            "endpoint stale",
            A | {"previous": "fresh", "lasted_s": 0.2, "cause": "timeout", "why": "no whole page within 1.0 s"},
        )
    ]
    for now in (101.0, 101.7):
        ours.table.failed(a, REFUSED, now)
    assert told(ours, 101.7) == [
        ("warning", "endpoint down", A | {"previous": "stale", "lasted_s": 1.0, "cause": "refused"})
    ]
    ours.table.scraped(a, page(1.0), 0, 104.2)
    assert told(ours, 104.2) == [("info", "endpoint up", A | {"previous": "down", "lasted_s": 2.5, "cause": "refused"})]
    assert told(ours, 104.3) == []
    ours.apply()
    assert told(ours, 104.3) == [("info", "endpoint left", A | {"previous": "fresh", "lasted_s": 0.1})]


def test_a_server_whose_page_could_never_be_read_is_told_once_with_what_is_wrong_with_it() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"))
    told(ours, 100.0)
    for _ in range(100):
        ours.table.failed(ours.member("a"), Failure("status", "status 404 instead of 200"), 101.0)
    why = {"cause": "status", "why": "status 404 instead of 200"}
    assert told(ours, 101.0) == [
        ("warning", "endpoint not readable", A | {"previous": "unknown", "lasted_s": 1.0} | why)
    ]


def test_an_endpoint_that_is_down_is_not_told_to_be_stale_too() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"))
    ours.table.scraped(ours.member("a"), page(1.0), 0, 100.0)
    for _ in range(2):
        ours.table.failed(ours.member("a"), REFUSED, 100.1)
    ours.table.sweep(101.0)
    assert ours.table.counts()[State.STALE] == 1
    assert ours.log.events() == ["endpoint appeared", "endpoint fresh", "endpoint down"]


def test_a_single_failed_scrape_that_changes_nothing_is_not_told_and_not_blamed_later() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"))
    ours.table.scraped(ours.member("a"), page(1.0), 0, 100.0)
    told(ours, 100.0)
    ours.table.failed(ours.member("a"), REFUSED, 100.05)
    ours.table.scraped(ours.member("a"), page(1.0), 0, 100.1)
    assert told(ours, 100.1) == []
    ((_, event, fields),) = told(ours, 100.31)
    assert (event, "cause" in fields) == ("endpoint stale", False)


def test_a_thousand_endpoints_come_answer_and_go_in_a_handful_of_lines() -> None:
    ours = Supervisor(Shared(slots=1000, capacity=1 << 18))
    specs = [spec(f"e{n:03}", f"10.0.{n // 250}.{n % 250}") for n in range(1000)]
    ours.apply(*specs)
    ((level, event, fields),) = told(ours, 100.0)
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
    assert [event for _, event, _ in told(ours, 101.1)] == ["endpoints left"]


def test_an_endpoint_that_flaps_ten_times_a_second_gets_few_lines_that_count_the_others() -> None:
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
        assert len(lines) + sum(line.get("suppressed", 0) for line in lines) == (
            600 if event == "endpoint down" else 599
        )
    assert len(ours.log.lines) < 140


def test_an_endpoint_that_leaves_with_requests_in_flight_is_told_again_when_they_have_ended() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    told(ours, 100.0)
    shared.inflight[0] = 3
    ours.apply()
    assert [fields["in_flight"] for _, _, fields in told(ours, 100.1)] == [3]
    assert told(ours, 102.0) == []
    shared.inflight[0] = 0
    assert told(ours, 104.0) == [("info", "endpoint drained", A | {"lasted_s": 4.0})]
    assert told(ours, 105.0) == []


def test_a_slot_that_is_taken_anew_has_been_drained() -> None:
    shared = Shared(slots=1)
    ours = Supervisor(shared)
    ours.apply(spec("a"))
    shared.inflight[0] = 3
    ours.apply()
    told(ours, 100.0)
    shared.inflight[0] = 0
    ours.apply(spec("b"))
    shared.inflight[0] = 1
    told(ours, 101.0)
    assert ours.log.events() == ["endpoint drained", "endpoint appeared"]


def test_a_successor_tells_what_it_took_over_and_what_only_its_predecessor_knew() -> None:
    shared = Shared()
    first = Supervisor(shared)
    first.apply(spec("a"), spec("b", "10.0.0.2"))
    first.table.scraped(first.member("a"), page(3.0), 0, 100.0)
    second = Supervisor(shared, now=101.0)
    second.apply(spec("a"))
    assert told(second, 101.1) == [
        ("info", "endpoint taken over", A | {"previous": "fresh"}),
        ("info", "endpoint left", {"endpoint": "default/b", "address": "10.0.0.2:8000"}),
    ]
    assert told(second, 101.3) == [("warning", "endpoint stale", A | {"previous": "fresh"})]


def test_each_failed_scrape_is_told_at_debug_and_none_of_them_otherwise() -> None:
    for debug in (True, False):
        ours = Supervisor(Shared(), debug=debug)
        ours.apply(spec("a"))
        told(ours, 100.0)
        ours.table.failed(ours.member("a"), Failure("extract", "vllm:x: nan is not a finite number"), 100.1)
        ours.table.failed(ours.member("a"), Failure("closed", "x" * 10_000, again=True), 100.2)
        lines = ours.log.of("scrape failed")
        if not debug:
            assert lines == []
            continue
        assert lines[0] == A | {
            "cause": "extract",
            "text": "vllm:x: nan is not a finite number",
            "failures": 1,
            "next_try_s": 0.04,
        }
        assert (lines[1]["failures"], lines[1]["next_try_s"], len(lines[1]["text"])) == (2, 0.0, 400)


def test_the_time_of_the_last_scrape_is_known_by_name_once_there_was_one() -> None:
    ours = Supervisor(Shared())
    ours.apply(spec("a"), spec("b"))
    ours.member("a").target.seconds = 0.004
    assert ours.table.scrape_seconds() == {"a": 0.004}
