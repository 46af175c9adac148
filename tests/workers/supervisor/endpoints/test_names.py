"""Names of endpoints that are resolved: their addresses come and go, and failures keep the last ones."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reports import Reports
from tests.waiting import until
from tests.workers.supervisor.endpoints.endpoint_lists import CLUSTERS, FakeNames
from workers.supervisor.endpoints import discovery, names
from workers.supervisor.endpoints.discovery import SLICE, Discovery, EndpointSpec, Entry, parse_file
from workers.supervisor.endpoints.names import Names, address_of, is_address


def test_each_address_of_a_name_is_an_endpoint_and_failures_keep_the_last_ones() -> None:
    names = FakeNames()
    published: list[set[EndpointSpec]] = []
    reports = Reports()
    found = Discovery(published.append, reports)

    async def scenario() -> None:
        await found.use([Entry("default", "pool", "vllm", 8000), Entry("default", "x", "10.9.9.9", 1)])
        assert {spec.name for spec in published[-1]} == {"x"}
        assert not found.complete
        names.addresses["vllm"] = ["10.0.0.2", "10.0.0.1", "::5"]
        await found.resolve()
        assert {(s.name, s.host) for s in published[-1]} == {
            ("x", "10.9.9.9"),
            ("pool-10.0.0.1", "10.0.0.1"),
            ("pool-10.0.0.2", "10.0.0.2"),
        }
        assert found.complete
        names.addresses["vllm"] = []
        await found.resolve()
        await found.resolve()
        names.addresses["vllm"] = ["10.0.0.2"]
        await found.resolve()
        assert {spec.name for spec in published[-1]} == {"x", "pool-10.0.0.2"}
        names.addresses["vllm"] = ["::5"]
        await found.resolve()
        assert {spec.host for spec in published[-1]} == {"10.9.9.9", "::5"}

    names.run(scenario())
    assert len(published) == 4
    assert [report.rpartition(" ")[2] for report in reports] == ["addresses_kept=0", "addresses_kept=2"]


@pytest.mark.parametrize("nowhere", ["0.0.0.0", "::", "224.0.0.1", "ff02::1"])
def test_an_address_that_no_server_has_is_no_endpoint_and_keeps_the_last_ones(nowhere: str) -> None:
    """Some DNS servers answer 0.0.0.0 for a name that they block or do not know."""
    fake = FakeNames()
    reports = Reports()
    names = Names(reports)

    async def scenario() -> None:
        for addresses, known in (
            ([nowhere], ()),
            ([nowhere, "10.0.0.1"], ("10.0.0.1",)),
            ([nowhere, "::5"], ("::5",)),
            ([nowhere], ("::5",)),
        ):
            fake.addresses["vllm"] = addresses
            await names.resolve(["vllm"])
            assert names.known("vllm") == known

    fake.run(scenario())
    assert [report.rpartition(" reason=")[2] for report in reports] == [
        f"no server can have its addresses: {nowhere} addresses_kept={kept}" for kept in (0, 1)
    ]


def test_a_successor_uses_the_addresses_of_its_predecessor_until_names_are_resolved() -> None:
    names = FakeNames()
    published: list[set[EndpointSpec]] = []
    reports = Reports()
    pool, new = Entry("default", "pool", "vllm", 8000), Entry("default", "new", "other", 8000)
    gone = Entry("default", "gone", "vllm", 8000)
    before = {pool.at("10.0.0.1"), pool.at("::5")}
    found = Discovery(published.append, reports)

    async def scenario() -> None:
        found.resume([pool, new], [*before, gone.at("10.0.0.7")])
        assert published == [before]
        await found.use([pool, new])
        assert not found.complete
        names.addresses = {"vllm": ["10.0.0.1"], "other": ["10.0.0.2"]}
        await found.resolve()
        assert found.complete

    names.run(scenario())
    assert published == [before, {pool.at("10.0.0.1"), new.at("10.0.0.2")}]
    assert sorted(report.rpartition(" ")[2] for report in reports) == ["addresses_kept=0", "addresses_kept=2"]


def test_a_name_that_is_not_needed_any_more_is_forgotten() -> None:
    fake = FakeNames()
    fake.addresses["a"] = ["10.0.0.1"]
    names = Names(Reports())

    async def scenario() -> None:
        assert await names.resolve(["a"])
        assert not await names.resolve(["a"])
        names.keep([])
        assert names.known("a") == ()

    fake.run(scenario())


def test_a_late_answer_about_old_names_does_not_remove_new_names() -> None:
    fake = FakeNames()
    fake.addresses = {"old": ["10.0.0.1"], "new": ["10.0.0.2"]}
    published: list[set[EndpointSpec]] = []
    found = Discovery(published.append, Reports())
    old, new = Entry("default", "old", "old", 1), Entry("default", "new", "new", 1)

    async def scenario() -> None:
        await found.use([old])
        fake.held = asyncio.Event()
        late = asyncio.create_task(found.resolve())
        await until(lambda: fake.waiting)
        held, fake.held = fake.held, None
        await found.use([old, new])
        fake.addresses["old"] = ["10.0.0.3"]
        held.set()
        await late
        assert published[-1] == {old.at("10.0.0.3"), new.at("10.0.0.2")}

    fake.run(scenario())


def test_a_name_without_an_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "RESOLVE_S_MAX", 0.01)
    fake = FakeNames()
    fake.held = asyncio.Event()
    reports = Reports()

    async def scenario() -> None:
        await Names(reports).resolve(["a"])

    fake.run(scenario())
    assert reports == ["name cannot be resolved name=a reason=no answer within 0.01 s addresses_kept=0"]


def test_a_resolver_that_hangs_delays_the_other_changes_of_a_file_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "NAMES_S_MAX", 0.01)
    fake = FakeNames()
    fake.held = asyncio.Event()
    published: list[set[EndpointSpec]] = []
    found = Discovery(published.append, Reports())
    here = Entry("default", "here", "10.0.0.1", 1)

    async def scenario() -> None:
        await found.use([here, Entry("default", "new", "new", 1)])
        assert published == [{here.at("10.0.0.1")}]
        assert not found.complete

    fake.run(scenario())


def test_names_of_pages_are_resolved_too_and_are_the_names_in_the_certificates() -> None:
    fake = FakeNames()
    fake.addresses = {"east.example.com": ["10.0.0.1"]}
    published: list[set[EndpointSpec]] = []

    async def scenario() -> None:
        found = Discovery(published.append, Reports())
        await found.use(parse_file(CLUSTERS, "f", clusters=True).entries)
        east = next(spec for spec in published[-1] if spec.name.startswith("east"))
        assert (east.host, east.page, east.server) == ("10.0.0.1", None, "metrics.east.example.com")
        fake.addresses["metrics.east.example.com"] = ["10.0.0.8"]
        await found.resolve()
        east, north, west = sorted(published[-1], key=lambda spec: spec.name)
        assert (east.page, east.server) == (("10.0.0.8", 9090), "metrics.east.example.com")
        assert (west.page, west.server) == (("10.0.0.9", 443), "")
        assert (north.page, north.server) == (None, "")

    fake.run(scenario())


def test_a_long_list_becomes_endpoints_in_slices_between_which_the_event_loop_turns() -> None:
    entries = [Entry("default", f"e{n}", f"10.0.{n >> 8}.{n & 255}", 80) for n in range(10 * SLICE)]
    published: list[tuple[int, int]] = []  # number of endpoints, turns of the loop

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        turned = 0

        def turn() -> None:
            nonlocal turned
            turned += 1
            loop.call_soon(turn)

        found = Discovery(lambda endpoints: published.append((len(endpoints), turned)), Reports())
        loop.call_soon(turn)
        await found.use(entries)
        assert found.endpoints() == {entry.at(entry.host) for entry in entries}
        await asyncio.gather(found.use(entries[:SLICE]), found.use(entries[:1]))
        assert found.endpoints() == {entries[0].at("10.0.0.0")}  # the later list wins

    asyncio.run(scenario())
    assert [number for number, _ in published] == [10 * SLICE, SLICE, 1]
    assert published[0][1] >= 10


@given(st.ip_addresses().map(str) | st.from_regex(r"[a-z0-9][a-z0-9-]{0,8}[a-z0-9](\.[a-z0-9]{1,4}){0,4}\.?", fullmatch=True))
def test_an_accepted_host_is_known_to_be_an_address_without_parsing_it(text: str) -> None:
    try:
        host = discovery._host(text)
    except ValueError:
        return
    assert is_address(host) == (address_of(host) is not None)
