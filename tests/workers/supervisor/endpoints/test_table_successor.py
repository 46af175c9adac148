"""A successor of the process that scrapes keeps slots, generations and owners of the endpoints."""

from typing import Any

from shm.table import DOWN, State
from tests.workers.supervisor.endpoints.tables import Shared, Supervisor, page, seen, spec
from workers.supervisor.endpoints.scrape import Failure


def test_a_successor_keeps_slots_generations_and_owners() -> None:
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
    assert [flags for flags in shared.reader.copy().flags[:3].tolist() if flags] == [DOWN]
    assert seen(shared)["a"] == (0, State.FRESH)
    second.table.sweep(101.3)
    assert seen(shared)["a"] == (0, State.STALE)
    second.apply(spec("a"), spec("b", "10.0.0.2"), spec("c", "10.0.0.33"))
    assert sorted(e.host for e in shared.view.current()) == ["10.0.0.1", "10.0.0.2", "10.0.0.33"]
    assert shared.owners.live == {owner for _, _, owner in after.values()}


def test_a_successor_frees_slots_that_a_killed_predecessor_taken_without_a_record() -> None:
    shared = Shared()
    first = Supervisor(shared)
    first.apply(spec("a"))
    first.table.apply({spec("a"), spec("b")})  # killed before its flush
    second = Supervisor(shared)
    assert shared.owners.live == {1}
    second.apply(spec("a"), spec("c"))
    assert set(seen(shared)) == {"a", "c"}


def test_a_successor_that_resumes_scrapes_before_discovery_has_found_anything() -> None:
    shared = Shared()
    known = [spec(name, host, a="x", b="y")._replace(uid=name * 3) for name, host in (("a", "10.0.0.1"), ("b", "10.0.0.2"))]
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


def test_a_server_with_another_uid_is_another_endpoint_even_with_the_same_name() -> None:
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


def test_an_owner_id_from_a_snapshot_is_kept_only_for_the_same_uid() -> None:
    a, b = spec("a")._replace(uid="first"), spec("b", "10.0.0.2")._replace(uid="second")
    before = Supervisor(Shared())
    before.apply(a, b)
    remembered = before.table.owners()
    shared = Shared()
    shared.owners.live, shared.owners.next = set(remembered.values()), 10
    after = Supervisor(shared, remembered=remembered)
    after.apply(a, b._replace(uid="another"))
    owners = {server[-1]: owner for (_, server), owner in after.table.owners().items()}
    assert owners == {"first": remembered["", ("default", "a", "10.0.0.1", 8000, "first")], "another": 10}
    assert shared.owners.owners() == sorted(owners.values())
