"""Several pools in one endpoint table: each discovery changes its own pool only, and workers read each pool alone."""

from epp.candidates import Snapshot
from epp.data import INFLIGHT_REQUESTS
from tests.pair import areas
from tests.workers.supervisor.endpoints.tables import WANTED, Shared, Supervisor, page, spec
from workers.shared.documents import EndpointsView
from workers.shared.freshness import Fresh
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.worker.extproc.pool import IGNORED, SharedPool


def of(pool: int, *specs: EndpointSpec) -> set[EndpointSpec]:
    return {each._replace(pool=pool) for each in specs}


def owners(shared: Shared) -> dict[tuple[int, str], int]:
    """The slot of each endpoint, by pool and name."""
    return {(pool, e.name): e.slot for pool in range(3) for e in EndpointsView(shared.document_reader, pool).current()}


def test_a_server_in_two_pools_is_two_endpoints() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    for pool in (0, 1):
        ours.table.apply(of(pool, spec("a")), pool=pool)
    ours.flush()
    assert owners(shared) == {(0, "a"): 0, (1, "a"): 1}
    assert len(EndpointsView(shared.document_reader).current()) == 2


def test_a_pool_that_changes_or_goes_leaves_the_others_as_they_are() -> None:
    shared = Shared()
    ours = Supervisor(shared)
    ours.table.apply(of(0, spec("a"), spec("b", "10.0.0.2")))
    ours.table.apply(of(1, spec("a")), pool=1)
    ours.table.apply(of(0, spec("b", "10.0.0.2")))
    ours.table.apply((), pool=2)
    ours.flush()
    assert owners(shared) == {(0, "b"): 1, (1, "a"): 2}
    ours.table.apply((), pool=1)
    ours.flush()
    assert owners(shared) == {(0, "b"): 1}


def test_a_successor_releases_only_what_the_discovery_of_a_pool_does_not_name_again() -> None:
    shared = Shared()
    first = Supervisor(shared)
    first.table.apply(of(0, spec("a")))
    first.table.apply(of(1, spec("a"), spec("b", "10.0.0.2")), pool=1)
    first.flush()
    before = owners(shared)
    second = Supervisor(shared, now=101.0)
    assert [each.name for each in second.table.inherited(1)] == ["a", "b"]
    second.table.apply(of(1, spec("b", "10.0.0.2")), pool=1)
    second.flush()
    assert owners(shared) == {key: slot for key, slot in before.items() if key != (1, "a")}


def test_an_endpoint_that_waits_for_a_slot_gets_one_that_another_pool_frees() -> None:
    shared = Shared(slots=2)
    ours = Supervisor(shared)
    ours.table.apply(of(0, spec("a"), spec("b", "10.0.0.2")))
    ours.table.apply(of(1, spec("a")), pool=1)
    ours.table.apply(of(0, spec("a")))
    ours.flush()
    assert owners(shared) == {(0, "a"): 0, (1, "a"): 1}


def test_the_endpoints_of_each_pool_find_their_owners_in_the_snapshot_of_the_index() -> None:
    first = Supervisor(Shared())
    first.table.apply(of(0, spec("a")))
    first.table.apply(of(1, spec("a"), spec("b", "10.0.0.2")), pool=1)
    remembered = first.table.owners() | {("gone", ("default", "a", "10.0.0.1", 8000, "")): 7}
    shared = Shared()
    shared.owners.live, shared.owners.next = set(remembered.values()), 20
    second = Supervisor(shared, remembered=remembered)
    second.table.apply(of(0, spec("a")))
    assert set(second.table.index.remembered) == {known for known in remembered if known[0] == "pool 1"}, "this pool may still come"
    second.table.apply(of(1, spec("a")), pool=1)
    assert second.table.index.remembered == {}
    kept = {known: owner for known, owner in remembered.items() if known[0] != "gone" and known[1][1] == "a"}
    assert second.table.owners() == kept and shared.owners.owners() == sorted(kept.values())


class Workers:
    """A supervisor with two pools whose rows lie between each other, and the views of a worker."""

    def __init__(self, *, paced: bool = False) -> None:
        self.now = 100.0
        self.paced = paced
        self.shared = Shared(slots=8)
        self.supervisor = Supervisor(self.shared)
        self.supervisor.table.apply(of(0, spec("a")))
        self.supervisor.table.apply(of(1, spec("b"), spec("c", "10.0.0.3")), pool=1)
        self.supervisor.table.apply(of(2, spec("d")), pool=2)
        self.supervisor.flush()
        self.areas = areas(slots=8, workers=1)
        self.pools = [self.view(pool) for pool in range(3)]

    def view(self, pool: int) -> SharedPool:
        shared = self.shared
        return SharedPool(
            shared.reader,
            EndpointsView(shared.document_reader, pool),
            shared.names,
            self.areas,
            columns=WANTED[:2] if self.paced else WANTED,  # without names of adapters
            fresh=Fresh(10.0, self.paced),
            now=lambda: self.now,
            failures=IGNORED,
        )

    def snapshot(self, pool: int) -> Snapshot:
        self.now += 0.002
        return self.pools[pool].candidates(None).snapshot

    def names(self, pool: int) -> list[str]:
        self.now += 0.002
        return [e.name for e in self.pools[pool].candidates(None).endpoints]

    def waiting(self, pool: int) -> list[float]:
        self.now += 0.002
        return self.pools[pool].candidates(None).snapshot.values["waiting_requests"].tolist()


def test_a_view_has_the_endpoints_the_values_and_the_load_of_its_pool_only() -> None:
    w = Workers()
    for number, name in enumerate("abcd"):
        w.supervisor.table.scraped(w.supervisor.member(name), page(float(number)), 0, w.now)
        w.areas.area(1).inflight[number] = 10 + number
    w.areas.set_serving(1, True)
    w.supervisor.flush()
    assert [w.names(pool) for pool in range(3)] == [["a"], ["b", "c"], ["d"]]
    assert [w.waiting(pool) for pool in range(3)] == [[0.0], [1.0, 2.0], [3.0]]
    found = [w.pools[pool].candidates(None) for pool in range(3)]
    assert [each[INFLIGHT_REQUESTS].tolist() for each in found] == [[10], [11, 12], [13]]
    assert w.pools[1].reloaded(found[1])[INFLIGHT_REQUESTS].tolist() == [11, 12]


def test_a_snapshot_stays_while_only_rows_of_other_pools_change() -> None:
    w = Workers()
    w.names(1)
    before = w.pools[1].candidates(None).snapshot
    w.supervisor.table.scraped(w.supervisor.member("a"), page(5.0), 0, w.now)
    w.supervisor.flush()
    w.names(1)
    assert w.pools[1].candidates(None).snapshot is before
    w.supervisor.table.scraped(w.supervisor.member("c"), page(5.0), 0, w.now)
    w.supervisor.flush()
    assert w.waiting(1)[1] == 5.0


def test_an_endpoint_that_joins_a_pool_is_seen_within_a_millisecond_wherever_its_row_is() -> None:
    w = Workers()
    w.names(1)
    w.supervisor.table.apply(of(1, spec("b"), spec("c", "10.0.0.3"), spec("e", "10.0.0.5")), pool=1)
    w.supervisor.flush()
    assert [w.names(pool) for pool in range(3)] == [["a"], ["b", "c", "e"], ["d"]]
    w.supervisor.table.apply((), pool=1)
    w.supervisor.flush()
    assert w.names(1) == []


def test_a_snapshot_of_an_idle_pool_stays_while_its_pages_are_fresh() -> None:
    w = Workers(paced=True)
    for name in "bc":
        w.supervisor.table.scraped(w.supervisor.member(name), page(1.0), 0, w.now)
    w.supervisor.flush()
    w.areas.set_serving(1, True)
    before = w.snapshot(1)
    w.now += 5.0
    assert w.snapshot(1) is before
    w.areas.area(1).inflight[1] = 1
    w.now += 0.1
    busy = w.snapshot(1)
    assert busy is not before
    w.now += 0.1
    assert w.snapshot(1) is not busy, "its loads are carried on"
    w.areas.area(1).inflight[1] = 0
    w.now += 6.0
    late = w.snapshot(1)
    assert not late.fresh.any()
