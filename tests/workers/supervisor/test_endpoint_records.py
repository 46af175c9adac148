"""What a recording says about endpoints: who is there, what was scraped, and only what has changed."""

from types import SimpleNamespace
from typing import Any

from epp.recording.records import Member, Scraped, floats, ints
from shm.documents import DocumentSchema, DocumentWriter
from shm.segment import Region
from shm.table import DOWN, Handle, State, TableSchema, TableWriter
from workers.shared.documents import ENDPOINTS, EndpointRecord, encode
from workers.supervisor.endpoint_records import EndpointRecords

COLUMNS = ("running_requests", "waiting_requests")


class Site:
    """The memory of an instance, and the supervisor's writers of it."""

    def __init__(self) -> None:
        table, documents = TableSchema(COLUMNS, 4, 3), DocumentSchema((4096, 4096, 1, 1))
        memory = self.memory = SimpleNamespace(
            table=Region(memoryview(bytearray(table.bytes))), documents=Region(memoryview(bytearray(documents.bytes)))
        )
        instance: Any = SimpleNamespace(layout=SimpleNamespace(table=table, documents=documents), memory=memory, pools=())
        self.table = TableWriter(table, memory.table)
        self._documents = DocumentWriter(documents, memory.documents)
        self.records = EndpointRecords(instance)

    def publish(self, *names: str) -> None:
        records = [EndpointRecord("ns", name, "10.0.0.1", 80, {"a": "b"}, slot, 1, slot) for slot, name in enumerate(names)]
        self._documents.write(ENDPOINTS, encode(records))


def scrape(site: Site, handle: Handle, waiting: float, at: float) -> None:
    values = {"flags": 0, "updated_at": at, "inflight_at_scrape": 0.0, "values": [1.0, waiting], "present": 3}
    site.table.write(handle, state=State.FRESH, **values)  # type: ignore[arg-type]
    site.table.publish()


def test_endpoints_join_and_leave_once() -> None:
    site = Site()
    site.publish("one", "two")
    first = site.records.look(5.0)
    assert [(m.joined, m.name, m.address, m.labels) for m in first if isinstance(m, Member)] == [
        (True, "one", "10.0.0.1:80", {"a": "b"}),
        (True, "two", "10.0.0.1:80", {"a": "b"}),
    ]
    assert site.records.look(6.0) == []
    site.publish("one")
    (left,) = site.records.look(7.0)
    assert isinstance(left, Member) and (left.joined, left.name, left.at) == (False, "two", 7.0)
    site.records.again()
    (again,) = site.records.look(8.0)
    assert isinstance(again, Member) and again.name == "one"


def test_an_endpoint_that_joins_between_two_looks_is_described_at_once_and_only_once() -> None:
    site = Site()
    site.publish("one")
    assert [m.name for m in site.records.members(5.0) if isinstance(m, Member)] == ["one"]
    assert site.records.members(5.1) == site.records.look(6.0) == []


def test_only_rows_that_have_changed_are_described() -> None:
    site = Site()
    one, two = (site.table.take(owner, lambda slot: True) for owner in (1, 2))
    assert one is not None and two is not None
    for handle, waiting in ((one, 3.0), (two, 4.0)):
        scrape(site, handle, waiting, 10.0)
    (both,) = site.records.look(10.1)
    assert isinstance(both, Scraped) and both.columns == list(COLUMNS) and both.states == b"\1\1"
    assert ints(both.slots).tolist() == [0, 1]
    assert floats(both.values).reshape(2, 2).tolist() == [[1.0, 3.0], [1.0, 4.0]]
    assert site.records.look(10.2) == []
    scrape(site, two, 7.0, 10.3)
    (moved,) = site.records.look(10.4)
    assert isinstance(moved, Scraped) and moved.columns == []
    assert ints(moved.slots).tolist() == [1] and floats(moved.scraped_at).tolist() == [10.3]
    site.table.mark(one, flags=DOWN)
    site.table.publish()
    (down,) = site.records.look(10.5)
    assert isinstance(down, Scraped) and down.states[0] == 1 + 4


def test_columns_of_a_later_configuration_are_named_again() -> None:
    site = Site()
    handle = site.table.take(1, lambda slot: True)
    assert handle is not None
    scrape(site, handle, 3.0, 10.0)
    site.records.look(10.1)
    table = TableSchema((*COLUMNS, "kv_usage"), 4, site.table.schema.width)
    instance: Any = SimpleNamespace(layout=SimpleNamespace(table=table), memory=site.memory, pools=())
    site.records.use(instance)
    (again,) = site.records.look(10.2)
    assert isinstance(again, Scraped) and again.columns == [*COLUMNS, "kv_usage"]
