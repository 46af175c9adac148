"""Shared memory -> candidates: epochs, freshness, subsets, documents."""

import random
from typing import Any

import pytest

from epp.candidates import Endpoint
from epp.data import ACTIVE_MODELS, INFLIGHT_REQUESTS, KV_USAGE, WAITING, Column
from epp.request import Subset
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.remote_area import RemoteArea, RemoteSchema
from shm.segment import Region
from shm.table import DOWN, DRAINING, FAILING_AT, Handle, State, TableReader, TableSchema, TableWriter
from tests.cases import cases
from tests.epp.plugins.calls import made
from tests.pair import areas
from tests.shm.memory import region_for
from workers.shared.documents import ENDPOINTS, NAMES, EndpointRecord, EndpointsView, NamesRecord, NamesView, encode
from workers.shared.freshness import Fresh
from workers.worker.extproc.pool import IGNORED, SUBSET_ENTRIES_MAX, SharedPool, subset_mask

COLUMNS: tuple[Column[Any], ...] = (WAITING, KV_USAGE, ACTIVE_MODELS)


class World:
    """The supervisor's side of a table, and a pool that reads it."""

    def __init__(self, count: int = 3, *, area: int = 0, paced: bool = False, fresh_for_s: float = 0.2) -> None:
        schema = TableSchema(("waiting_requests", "kv_cache_usage"), 8)
        documents = DocumentSchema((4096, 4096))
        table_region, document_region = (Region(memoryview(bytearray(schema.bytes))), Region(memoryview(bytearray(documents.bytes))))
        self.writer = TableWriter(schema, table_region)
        self.documents = DocumentWriter(documents, document_region)
        self.areas = areas(slots=8, workers=2)
        self.time = 1000.0
        self.handles = [self.take() for _ in range(count)]
        self.hosts = [f"10.0.0.{i + 1}" for i in range(count)]
        self.write_document()
        reader = DocumentReader(documents, document_region)
        self.pool = SharedPool(
            TableReader(schema, table_region),
            EndpointsView(reader),
            NamesView(reader),
            self.areas,
            columns=COLUMNS,
            fresh=Fresh(fresh_for_s, paced),
            now=lambda: self.time,
            failures=IGNORED,
            area=area,
        )

    def flag(self, index: int, flags: int) -> None:
        self.writer.mark(self.handles[index], flags=flags)
        self.writer.publish()

    def take(self) -> Handle:
        handle = self.writer.take(1, lambda slot: True)
        assert handle is not None
        return handle

    def write_document(self) -> None:
        records = [
            EndpointRecord("default", f"pod-{i}", host, 8000, {}, handle.slot, handle.generation, i + 1)
            for i, (host, handle) in enumerate(zip(self.hosts, self.handles, strict=True))
        ]
        self.documents.write(ENDPOINTS, encode(records))

    def scrape(self, index: int, waiting: float, kv: float, *, inflight: int = 0, present: int = 3, flags: int = 0) -> None:
        self.writer.write(
            self.handles[index],
            state=State.FRESH,
            flags=flags,
            updated_at=self.time,
            inflight_at_scrape=inflight,
            values=(waiting, kv),
            present=present,
        )
        self.writer.publish()

    def names(self, subset: Subset | None = None) -> list[str]:
        return [e.name for e in self.pool.candidates(subset).endpoints]


def test_a_pool_without_endpoints_has_no_candidates() -> None:
    assert len(World(0).pool.candidates(None)) == 0


def test_scraped_values_are_seen_after_the_epoch_has_moved() -> None:
    w = World()
    for i in range(3):
        w.scrape(i, i, i / 10)
    w.time += 0.01
    c = w.pool.candidates(None)
    assert (c[WAITING].tolist(), c[KV_USAGE].tolist()) == ([0, 1, 2], [0, 0.1, 0.2])
    w.scrape(0, 7, 0.5)
    w.time += 0.0005
    assert w.pool.candidates(None)[WAITING].tolist() == [0, 1, 2], "at most one copy per millisecond"
    w.time += 0.001
    assert w.pool.candidates(None)[WAITING].tolist() == [7, 1, 2]


def test_values_become_stale_when_the_supervisor_writes_nothing() -> None:
    w = World()
    for i in range(3):
        w.scrape(i, i, 0)
    w.time += 0.1
    w.scrape(2, 9, 0)
    w.time += 0.15
    assert w.pool.candidates(None).fresh.tolist() == [False, False, True]


def test_a_snapshot_has_the_age_of_each_endpoints_values_for_plugins_with_another_limit() -> None:
    w = World(2)
    w.areas.area(1).inflight[w.handles[0].slot] = 4
    w.scrape(0, 1, 0, inflight=4)
    w.time += 0.25
    w.scrape(1, 1, 0)
    w.time += 0.1
    snapshot = w.pool.candidates(None).snapshot
    assert snapshot.ages == pytest.approx([0.35, 0.1])
    assert snapshot.fresh.tolist() == [False, True]
    w.time += 0.3
    late = w.pool.candidates(None).snapshot
    assert late.ages == pytest.approx([0.65, 0.4])
    assert (late.counted_at_scrape.tolist(), late.inflight_at_scrape.tolist()) == ([4, 0], [pytest.approx(1.75), 0])
    w.time += 0.6
    faded = w.pool.candidates(None).snapshot
    assert faded.inflight_at_scrape.tolist() == [0, 0]


def test_values_at_a_pace_of_their_own_have_no_age_until_a_page_is_missing() -> None:
    w = World(2, paced=True)
    w.scrape(0, 1, 0)
    w.time += 0.15
    assert w.pool.candidates(None).snapshot.ages.tolist()[:1] == [0.0]
    w.time += 0.1
    assert w.pool.candidates(None).snapshot.ages.tolist()[:1] == pytest.approx([0.25])


def test_between_two_pages_a_load_is_what_was_read_plus_what_was_sent_minus_what_has_ended() -> None:
    w = World(2, fresh_for_s=2.0)
    slot = w.handles[0].slot
    area = w.areas.area(1)
    area.inflight[slot] = 5
    w.scrape(0, 3, 0.5, inflight=5)
    w.scrape(1, 0, 0.0)
    w.time += 0.01
    area.inflight[slot] = 9
    assert w.pool.candidates(None)[WAITING].tolist() == [7, 0]
    w.time += 0.1
    assert w.pool.candidates(None)[WAITING].tolist() == [7, 0]
    area.inflight[slot] = 3
    w.time += 0.06
    assert w.pool.candidates(None)[WAITING].tolist() == [7, 0], "what has ended counts within a tenth of a second"
    w.time += 0.06
    assert w.pool.candidates(None)[WAITING].tolist() == [1, 0]


def test_a_burst_between_two_pages_spreads_evenly() -> None:
    w = World(4, fresh_for_s=2.0)
    for i in range(4):
        w.scrape(i, 2, 0)
    area, sent = w.areas.area(1), [0] * 4
    for _ in range(200):
        w.time += 0.005
        least = int(w.pool.candidates(None)[WAITING].argmin())
        area.inflight[w.handles[least].slot] += 1
        sent[least] += 1
    assert sent == [50] * 4


@pytest.mark.parametrize("parameters", [{}, {"metricsStalenessThreshold": "200ms"}, {"metricsStalenessThreshold": "1m"}])
def test_without_scrapes_a_detector_counts_what_is_in_flight_and_blocks_nothing(parameters: dict[str, str]) -> None:
    """The last scrapes show full servers. Then the scrapes stop."""
    w, detector = World(2), made("utilization-detector", **parameters)
    for index in range(2):
        w.scrape(index, 50, 0.99)
    w.time += 0.01
    assert detector.saturation(w.pool.candidates(None)) > 1.0
    w.time += 120.0
    area = w.areas.area(1)
    seen = []
    for sent in range(11):
        seen.append(detector.saturation(w.pool.candidates(None)))
        area.inflight[w.handles[sent % 2].slot] += 1
    assert seen == pytest.approx([sent / 10 for sent in range(11)]), "5 per endpoint are full"
    assert detector.stale(w.pool.candidates(None)) == 2


def test_a_value_that_is_not_present_counts_as_the_mean() -> None:
    w = World()
    w.scrape(0, 1, 0.2)
    w.scrape(1, 1, 0.4)
    w.scrape(2, 1, 0.0, present=1)
    w.time += 0.01
    assert w.pool.candidates(None)[KV_USAGE].tolist() == pytest.approx([0.2, 0.4, 0.3])


def test_load_in_flight_of_all_serving_workers_counts_at_once() -> None:
    w = World()
    for i in range(3):
        w.scrape(i, 1, 0, inflight=1)
    w.time += 0.01
    w.pool.candidates(None)
    w.areas.area(1).inflight[w.handles[1].slot] += 2
    w.areas.area(2).inflight[w.handles[1].slot] += 3
    assert w.pool.candidates(None)[WAITING].tolist() == [1, 5, 1]
    w.areas.set_serving(2, False)
    assert w.pool.candidates(None)[WAITING].tolist() == [1, 2, 1]


def test_load_in_flight_of_other_replicas_counts_while_it_is_fresh() -> None:
    w = World()
    schema = RemoteSchema(8, 1)
    remote = w.areas.remote = RemoteArea(schema, region_for(schema))
    for i in range(3):
        w.scrape(i, 1, 0, inflight=1)
    remote.set(w.handles[1].slot, 4, 400)
    remote.heartbeat(w.time, 1)
    w.time += 0.01
    before = w.pool.candidates(None)
    assert before[WAITING].tolist() == [1, 1, 1]
    assert before.of_others is None
    w.areas.add_remote(w.time)
    w.areas.area(1).inflight[w.handles[1].slot] += 2
    seen = w.pool.candidates(None)
    assert seen[WAITING].tolist() == [1, 6, 1]
    assert seen.of_others is not None
    assert seen.of_others.tolist() == [0, 4, 0]
    w.areas.add_remote(w.time + 1.5)
    assert w.pool.candidates(None)[WAITING].tolist() == [1, 2, 1]


def test_an_endpoint_is_no_candidate_after_another_one_took_over_its_row() -> None:
    w = World()
    w.writer.release(w.handles[0])
    w.take()
    w.writer.publish()
    w.time += 0.1
    assert w.names() == ["pod-1", "pod-2"]


def test_draining_endpoints_are_removed_and_endpoints_that_are_down_are_marked() -> None:
    w = World()
    w.scrape(0, 0, 0, flags=DRAINING)
    w.scrape(1, 0, 0, flags=DOWN)
    w.scrape(2, 0, 0)
    w.time += 0.1
    assert w.names() == ["pod-1", "pod-2"]
    assert [e.name for e in w.pool.candidates(None).without_down().endpoints] == ["pod-2"]


def test_a_removed_endpoint_in_the_middle_leaves_the_others_values_in_place() -> None:
    w = World()
    for i in range(3):
        w.scrape(i, i + 1, 0)
    w.writer.release(w.handles.pop(1))
    w.hosts.pop(1)
    w.write_document()
    w.writer.publish()
    w.time += 0.01
    c = w.pool.candidates(None)
    assert c[WAITING].tolist() == [1, 3]
    w.areas.area(1).inflight[w.handles[1].slot] += 4
    assert w.pool.candidates(None)[WAITING].tolist() == [1, 7]


def test_adapter_names_come_from_their_document() -> None:
    w = World()
    record = NamesRecord(w.handles[1].slot, w.handles[1].generation, {"active_models": ["a", "b"]})
    w.documents.write(NAMES, encode([record]))
    w.time += 0.1
    assert w.pool.candidates(None)[ACTIVE_MODELS] == [frozenset(), frozenset({"a", "b"}), frozenset()]


@cases(
    ("entries", "expected"),
    [
        (["10.0.0.2"], ["pod-1"]),
        (["10.0.0.2:8000", "10.0.0.3"], ["pod-1", "pod-2"]),
        (["10.0.0.2:8001"], []),
        ([], []),
        (["nonsense:", "[", ""], []),
        (["fd00::1"], ["pod-0"]),
        (["[fd00::1]:8000"], ["pod-0"]),
        (["[fd00::1]:9"], []),
        (["FD00:0:0::1"], ["pod-0"]),
        (["[fd00:0::0:1]:8000"], ["pod-0"]),
        (["[fd00::1]"], ["pod-0"]),
        ([" 10.0.0.2:8000 "], ["pod-1"]),
        (["10.0.0.2:", "10.0.0.2:abc", "10.0.0.2:" + "8" * 5000, "10.0.0.2:8000:8000", "10.0.0.2/32", "0.0.0.0"], []),
        (["[fd00::1", "[fd00::1]x", "[fd00::1]:", "fd00::1:8000", "::"], []),
        (["10.0.0.9:8000"], []),
    ],
)
def test_a_subset_entry_matches_by_address_and_by_port_if_it_has_one(entries: list[str], expected: list[str]) -> None:
    w = World()
    w.hosts[0] = "fd00::1"
    w.write_document()
    w.time += 0.1
    assert w.names(Subset(entries)) == expected


def test_the_cache_of_subsets_is_bounded_by_its_total_number_of_entries() -> None:
    w = World()
    for n in range(6):
        long = [f"10.{n + 1}.{m >> 8}.{m & 255}" for m in range(SUBSET_ENTRIES_MAX // 4)]
        assert w.names(Subset(["10.0.0.2:8000", *long])) == ["pod-1"]
        assert sum(map(len, w.pool._subsets)) <= SUBSET_ENTRIES_MAX
    longest = [f"10.0.{m >> 8}.{m & 255}" for m in range(1, SUBSET_ENTRIES_MAX + 2)]
    assert w.names(Subset(longest)) == ["pod-0", "pod-1", "pod-2"]
    assert len(w.pool._subsets) == 1


def test_no_subset_allows_an_endpoint_that_it_does_not_name() -> None:
    rng = random.Random(5)
    hosts = ["10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"]
    pool = [
        Endpoint(name=f"{host} {port}", namespace="d", host=host, port=port, labels=None, slot=0, owner=1)
        for host in hosts
        for port in (8000, 8001)
    ]
    for _ in range(10_000):
        named: set[tuple[str, int | None]] = set()
        entries = []
        for _ in range(rng.randrange(4)):
            host, port = rng.choice([*hosts, "10.0.0.3", "fd00::3"]), rng.choice([8000, 8001, 9, None])
            bracketed = f"[{host}]" if ":" in host else host
            if rng.random() < 0.3:  # an address near it
                junk = rng.choice(["{}:x", "{}:", ":{}", "{}:80000000", "{},10.0.0.1", "http://{}", "{}/24", "*"])
                entries.append(junk.format(bracketed))
            else:
                named.add((host, port))
                entries.append(f"{bracketed}:{port}" if port is not None else host)
        allowed = subset_mask(Subset(entries), pool).tolist()
        assert allowed == [(e.host, e.port) in named or (e.host, None) in named for e in pool], entries


def test_an_endpoint_that_fails_requests_looks_as_busy_as_the_others() -> None:
    w = World()
    for index in range(3):
        w.scrape(index, 0, 0)
    w.areas.set_serving(1, True)
    area = w.areas.area(1)
    area.inflight[1], area.inflight[2] = 6, 4
    w.time += 0.01
    assert w.pool.candidates(None)[INFLIGHT_REQUESTS].tolist() == [0, 6, 4]
    w.flag(0, 15 << FAILING_AT)
    w.time += 0.01
    candidates = w.pool.candidates(None)
    assert candidates[INFLIGHT_REQUESTS].tolist() == [6, 6, 4]
    assert candidates[WAITING].tolist() == [6, 6, 4]
    assert w.pool.reloaded(candidates)[INFLIGHT_REQUESTS].tolist() == [6, 6, 4]
    assert w.areas.inflight(3).tolist() == [0, 6, 4], "the counts themselves stay as they are"
    w.flag(0, 0)
    w.time += 0.01
    assert w.pool.candidates(None)[INFLIGHT_REQUESTS].tolist() == [0, 6, 4]
