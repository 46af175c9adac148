"""Files and flags as written by people, names that resolve or do not, and files that change."""

import asyncio
import json
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
import yaml
from hypothesis import given
from hypothesis import strategies as st

from workers import discovery
from workers.discovery import Discovery, EndpointSpec, Entry, File, Names, diff, follow, parse_file, parse_flag
from workers.yaml_files import DiscoveryError

GOOD = b"""# the pool
endpoints:
- name: vllm-0
  address: "10.0.0.1"
  port: "8000"
  labels: {role: decode, gpu: 4}
  comment: [ignored, {too: 1}]
- name: vllm-1
  namespace: prod
  address: 2001:DB8::1
  port: 8001
- {name: vllm-2, address: vllm.example.com, port: 8000}
"""
ENTRIES = [
    Entry("default", "vllm-0", "10.0.0.1", 8000, (("gpu", "4"), ("role", "decode"))),
    Entry("prod", "vllm-1", "2001:db8::1", 8001),
    Entry("default", "vllm-2", "vllm.example.com", 8000),
]


def test_yaml_and_json_files_are_read_and_unknown_keys_ignored() -> None:
    assert parse_file(GOOD, "f")[:2] == (ENTRIES, [])
    as_json = json.dumps(yaml.safe_load(GOOD.replace(b"gpu: 4", b'gpu: "4"')), indent="\t")
    assert parse_file(as_json.encode(), "f")[:2] == (ENTRIES, [])
    assert parse_file(b"\xef\xbb\xbfendpoints: []", "f") == ([], [], [])
    assert parse_file(b"---\nendpoints: []\n---\n", "f") == ([], [], [])


def test_of_an_endpoint_given_twice_the_last_counts() -> None:
    entries = [f"- {{name: a, address: 10.0.0.{n}, port: {n}}}" for n in (1, 2)]
    parsed = parse_file("\n".join(["endpoints:", *entries]).encode(), "f")
    assert parsed.entries == [Entry("default", "a", "10.0.0.2", 2)]
    assert parsed.remarks == ["f:3: endpoint 'a' is given again, first in line 2; the last counts"]


def test_a_server_under_two_names_and_a_field_that_nobody_knows_are_said_and_both_endpoints_stay() -> None:
    entries = [
        "- {name: a, address: '::1', port: 1}",
        "- {name: b, address: '0::1', port: 1, lables: {x: y}, cached: 1}",
    ]
    parsed = parse_file("\n".join(["endpoints:", *entries]).encode(), "f")
    assert [entry.name for entry in parsed.entries] == ["a", "b"]
    assert parsed.remarks == [
        "f:3: field 'lables' of endpoint 'b' has no effect (did you mean 'labels'?)",
        "f:3: endpoint 'b' is where 'a' is: one server counts as two",
    ]


def test_what_is_odd_in_a_file_is_said_when_it_is_new_and_holds_up_nothing(tmp_path: Path) -> None:
    reports: list[str] = []
    path = tmp_path / "e.yaml"
    path.write_bytes(GOOD)
    file = File(str(path), reports.append)
    assert file.load() == ENTRIES
    assert reports == [
        f"{path}:7: field 'comment' of endpoint 'vllm-0' has no effect (known: address, labels, name, namespace, port)"
    ]
    path.write_bytes(GOOD + b"# touched\n")
    assert file.reload() == ENTRIES
    assert len(reports) == 1


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["name: a", "port: 1"], "f:2: endpoint 'a': no address"),
        (
            ["name: a", "address: 10.0.0.300", "port: 1"],
            "f:3: endpoint 'a': address '10.0.0.300' is",
        ),
        (["name: a", "address: a b", "port: 1"], "f:3: endpoint 'a': address 'a b' is neither"),
        (["name: a", "address: 'fe80::1%eth0'", "port: 1"], "f:3: endpoint 'a': address"),
        (["name: a", "address: -x.y", "port: 1"], "f:3: endpoint 'a': address '-x.y'"),
        (["name: a", "address: 10.0.0.1", "port: 0"], "f:4: endpoint 'a': port '0' is not"),
        (["name: a", "address: 10.0.0.1", "port: 65536"], "f:4: endpoint 'a': port '65536'"),
        (["name: a", "address: 10.0.0.1", "port: 8e3"], "f:4: endpoint 'a': port '8e3'"),
        (["name: a", "address: 10.0.0.1"], "f:2: endpoint 'a': port ''"),
        (["name: [a]", "address: 10.0.0.1", "port: 1"], "f:2: name must be a text"),
        (
            ["name: a", "address: 10.0.0.1", "port: 1", "labels: [x]"],
            "f:5: labels must be a mapping",
        ),
        (["name: a", "address: 10.0.0.1", "port: 1", "labels: {x: [y]}"], "f:5: x must be a text"),
    ],
)
def test_a_bad_entry_is_named_by_its_line_and_the_others_stay(lines: list[str], fault: str) -> None:
    text = "endpoints:\n- " + "\n  ".join(lines) + "\n- {name: b, address: 10.0.0.2, port: 1}\n"
    parsed = parse_file(text.encode(), "f")
    assert [entry.name for entry in parsed.entries] == ["b"]
    assert len(parsed.faults) == 1
    assert parsed.faults[0].startswith(fault)


def test_a_text_in_place_of_an_endpoint_is_named_by_its_line() -> None:
    assert parse_file(b"endpoints:\n- a\n- 10.0.0.1:80\n", "f").faults[1].startswith("f:3: an endpoint")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "f:1: no list 'endpoints'"),
        (b"a: 1\nb: 2\n", "f:1: no list 'endpoints'"),
        (b"a: 1\nendpoints: 5\n", "f:2: no list 'endpoints'"),
        (b"- a\n", "f:1: no list 'endpoints'"),
        (b"endpoints:\n- {a: 1\n- b\n", "f:4: neither YAML nor JSON"),
        (b'{"endpoints": [}', "f:1: neither YAML nor JSON"),
        (b"endpoints: \xff", "f: not UTF-8 at byte 11"),
        (b"endpoints: \x00", "f: neither YAML nor JSON"),
        (b"a: &a [1]\nendpoints: *a\n", "f:2: alias *a: aliases are not supported"),
        (b"[" * 500_000, "f:1: nested deeper than 16"),
        (b"- " * 300_000, "f:1: nested deeper than 16"),
        (b"endpoints: []\n---\nendpoints: []\n", "f:3: a second document; write all endpoints into one list"),
        (b"endpoints: []\nendpoints: []\n", "f:2: 'endpoints' is given twice; first in line 1"),
        (b"endpoints:\n- {name: a,\n   name: b}\n", "f:3: 'name' is given twice; first in line 2"),
    ],
)
def test_a_file_that_is_no_list_of_endpoints_is_refused_by_its_line(text: bytes, fault: str) -> None:
    with pytest.raises(DiscoveryError) as failure:
        parse_file(text, "f")
    assert str(failure.value).startswith(fault)


@given(st.binary(max_size=100) | st.text("[]{}:,-&*a \n\"'1", max_size=60).map(str.encode))
def test_any_bytes_are_entries_or_a_discovery_error(noise: bytes) -> None:
    for text in (noise, b"endpoints:\n" + noise, b"endpoints:\n- name: a\n  address: " + noise):
        try:
            parse_file(text, "f")
        except DiscoveryError as failure:
            assert failure.faults


def test_a_file_over_one_mebibyte_or_a_missing_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    with pytest.raises(DiscoveryError, match="cannot be read: No such file"):
        File(str(path), print).load()
    path.write_bytes(b"endpoints: []\n" + b"#" * (1 << 20))
    with pytest.raises(DiscoveryError, match="larger than 1048576 bytes"):
        File(str(path), print).load()


def test_a_pipe_in_place_of_a_file_is_refused_and_nobody_waits_for_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    os.mkfifo(path)
    with pytest.raises(DiscoveryError, match="is a pipe or a device; it is read again and again, so give a file"):
        File(str(path), print).load()
    with pytest.raises(DiscoveryError, match="cannot be read: Is a directory"):
        File(str(tmp_path), print).load()


def test_at_start_all_faults_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("endpoints:\n" + "- {name: a, port: 1}\n" * 25)
    with pytest.raises(DiscoveryError) as failure:
        File(str(path), print).load()
    assert len(failure.value.faults) == 25
    shown = str(failure.value).splitlines()
    assert (len(shown), shown[-1]) == (21, "and 5 more")
    assert shown[1].startswith(f"{path}:3: ")


def test_a_reload_leaves_out_bad_entries_keeps_the_set_of_a_bad_file_and_reports_once(
    tmp_path: Path,
) -> None:
    reports: list[str] = []
    path = tmp_path / "e.yaml"
    good = GOOD.replace(b"  comment: [ignored, {too: 1}]\n", b"")
    path.write_bytes(good)
    file = File(str(path), reports.append)
    assert file.load() == ENTRIES
    assert file.reload() is None
    bad = good.replace(b'port: "8000"', b'port: "0"')
    path.write_bytes(bad)
    assert file.reload() == ENTRIES[1:]
    assert [f"{path}:5: " in report for report in reports] == [True]
    assert reports[0].endswith("this endpoint is left out")
    path.write_bytes(bad + b"# touched\n")
    assert file.reload() == ENTRIES[1:]
    assert len(reports) == 1
    path.write_bytes(b"endpoints: [")
    assert file.reload() is None
    path.unlink()
    assert file.reload() is None
    assert file.reload() is None
    assert [report.endswith("the last good endpoints stay") for report in reports[1:]] == [True] * 2
    path.write_bytes(GOOD)
    assert file.reload() == ENTRIES


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("10.0.0.1:8000", [("10.0.0.1", 8000)]),
        ("[::1]:8000, vllm:80", [("::1", 8000), ("vllm", 80)]),
        ("a.b-c.d:1,", [("a.b-c.d", 1)]),
    ],
)
def test_the_endpoints_flag_takes_addresses_and_names(text: str, hosts: list[tuple[str, int]]) -> None:
    assert [(entry.host, entry.port) for entry in parse_flag(text)] == hosts
    assert [entry.name for entry in parse_flag(text)] == [part.strip() for part in text.split(",") if part]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no endpoint given"),
        ("10.0.0.1", "'10.0.0.1': write host:port"),
        ("::1:8000", "'::1:8000': write host:port"),
        ("a:b", "'a:b': write host:port"),
        ("a:70000", "'a:70000': port '70000' is not a number from 1 to 65535"),
        ("[x]:1,10.0.0.1:0", "'10.0.0.1:0': port '0'"),
        (":80", "':80': no address"),
        ("http://a:80", "'http://a:80': write"),
        ("[::1]:1,b:2,[0:0::1]:1", "'[0:0::1]:1': is given twice"),
    ],
)
def test_a_wrong_endpoints_flag_is_refused_by_its_part(text: str, fault: str) -> None:
    with pytest.raises(DiscoveryError) as failure:
        parse_flag(text)
    assert fault in str(failure.value)


SPECS = st.builds(
    EndpointSpec,
    st.just("default"),
    st.sampled_from("abcd"),
    st.sampled_from(("10.0.0.1", "10.0.0.2")),
    st.integers(1, 2),
)


@given(st.sets(SPECS, max_size=6), st.sets(SPECS, max_size=6))
def test_applying_a_difference_gives_the_next_set(before: set[EndpointSpec], after: set[EndpointSpec]) -> None:
    changes = diff(before, after)
    have = {spec.identity: spec for spec in before}
    for spec in changes.gone:
        del have[spec.identity]
    for old, new in changes.changed:
        assert have[old.identity] == old != new
        have[new.identity] = new
    for spec in changes.appeared:
        assert spec.identity not in have
        have[spec.identity] = spec
    assert have == {spec.identity: spec for spec in after}


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, 15))


class FakeNames:
    """Stands in for the loop's resolver."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.held: asyncio.Event | None = None  # answers come when it is set
        self.waiting = 0
        outer = self

        class Loop(asyncio.SelectorEventLoop):
            async def getaddrinfo(self, host: str, port: Any, **options: Any) -> Any:
                if outer.held is not None:
                    outer.waiting += 1
                    await outer.held.wait()
                found = outer.addresses.get(host)
                if not found:
                    raise socket.gaierror(-2, "Name or service not known")
                kinds = [socket.AF_INET6 if ":" in a else socket.AF_INET for a in found]
                return [(kind, 1, 6, "", (a, 0)) for kind, a in zip(kinds, found, strict=True)]

        self.loop = Loop

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=self.loop) as runner:
            runner.run(test)


def test_each_address_of_a_name_is_an_endpoint_and_failures_keep_the_last_ones() -> None:
    names = FakeNames()
    told: list[set[EndpointSpec]] = []
    reports: list[str] = []
    found = Discovery(told.append, reports.append)

    async def scenario() -> None:
        await found.use([Entry("default", "pool", "vllm", 8000), Entry("default", "x", "10.9.9.9", 1)])
        assert {spec.name for spec in told[-1]} == {"x"}
        assert not found.complete
        names.addresses["vllm"] = ["10.0.0.2", "10.0.0.1", "::5"]
        await found.resolve()
        assert {(s.name, s.host) for s in told[-1]} == {
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
        assert {spec.name for spec in told[-1]} == {"x", "pool-10.0.0.2"}
        names.addresses["vllm"] = ["::5"]
        await found.resolve()
        assert {spec.host for spec in told[-1]} == {"10.9.9.9", "::5"}

    names.run(scenario())
    assert len(told) == 4
    assert [report.partition("; ")[2] for report in reports] == [
        "0 addresses kept",
        "2 addresses kept",
    ]


def test_a_successor_takes_names_to_be_where_its_predecessor_found_them_until_they_are_resolved() -> None:
    names = FakeNames()
    told: list[set[EndpointSpec]] = []
    reports: list[str] = []
    pool, new = Entry("default", "pool", "vllm", 8000), Entry("default", "new", "other", 8000)
    gone = Entry("default", "gone", "vllm", 8000)
    before = {pool.at("10.0.0.1"), pool.at("::5")}
    found = Discovery(told.append, reports.append)

    async def scenario() -> None:
        found.resume([pool, new], [*before, gone.at("10.0.0.7")])
        assert told == [before]
        await found.use([pool, new])
        assert not found.complete
        names.addresses = {"vllm": ["10.0.0.1"], "other": ["10.0.0.2"]}
        await found.resolve()
        assert found.complete

    names.run(scenario())
    assert told == [before, {pool.at("10.0.0.1"), new.at("10.0.0.2")}]
    assert sorted(report.partition("; ")[2] for report in reports) == ["0 addresses kept", "2 addresses kept"]


def test_a_name_that_is_no_longer_asked_for_is_forgotten() -> None:
    fake = FakeNames()
    fake.addresses["a"] = ["10.0.0.1"]
    names = Names(print)

    async def scenario() -> None:
        assert await names.resolve(["a"])
        assert not await names.resolve(["a"])
        names.keep([])
        assert names.known("a") == ()

    fake.run(scenario())


def test_a_look_at_the_old_names_that_ends_late_does_not_forget_the_new_ones() -> None:
    fake = FakeNames()
    fake.addresses = {"old": ["10.0.0.1"], "new": ["10.0.0.2"]}
    told: list[set[EndpointSpec]] = []
    found = Discovery(told.append, print)
    old, new = Entry("default", "old", "old", 1), Entry("default", "new", "new", 1)

    async def scenario() -> None:
        await found.use([old])
        fake.held = asyncio.Event()
        late = asyncio.create_task(found.resolve())
        while not fake.waiting:
            await asyncio.sleep(0)
        held, fake.held = fake.held, None
        await found.use([old, new])
        fake.addresses["old"] = ["10.0.0.3"]
        held.set()
        await late
        assert told[-1] == {old.at("10.0.0.3"), new.at("10.0.0.2")}

    fake.run(scenario())


def test_a_name_without_an_answer_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "RESOLVE_S_MAX", 0.01)
    fake = FakeNames()
    fake.held = asyncio.Event()
    reports: list[str] = []

    async def scenario() -> None:
        await Names(reports.append).resolve(["a"])

    fake.run(scenario())
    assert reports == ["name 'a' cannot be resolved (no answer within 0.01 s); 0 addresses kept"]


def test_a_resolver_that_hangs_holds_up_the_other_changes_of_a_file_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "NAMES_S_MAX", 0.01)
    fake = FakeNames()
    fake.held = asyncio.Event()
    told: list[set[EndpointSpec]] = []
    found = Discovery(told.append, print)
    here = Entry("default", "here", "10.0.0.1", 1)

    async def scenario() -> None:
        await found.use([here, Entry("default", "new", "new", 1)])
        assert told == [{here.at("10.0.0.1")}]
        assert not found.complete

    fake.run(scenario())


def rename(directory: Path, text: bytes) -> None:
    (directory / "next").write_bytes(text)
    os.replace(directory / "next", directory / "e.yaml")


def swap(directory: Path, text: bytes) -> None:
    """As a mounted ConfigMap changes: the file stays a link, a directory behind it is swapped."""
    version = directory / f"..{len(list(directory.iterdir()))}"
    version.mkdir()
    (version / "e.yaml").write_bytes(text)
    os.symlink(version.name, directory / "..next")
    os.replace(directory / "..next", directory / "..data")
    if not (directory / "e.yaml").is_symlink():
        os.symlink("..data/e.yaml", directory / "e.yaml")


@pytest.mark.parametrize("change", [rename, swap])
def test_a_file_renamed_into_place_and_a_swapped_link_are_followed(
    tmp_path: Path, change: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "LOOK_EVERY_S", 60.0)  # only the watch can see it
    change(tmp_path, GOOD)
    file = File(str(tmp_path / "e.yaml"), print)
    told: list[list[Entry]] = []

    async def use(entries: list[Entry]) -> None:
        told.append(entries)

    async def scenario() -> None:
        file.load()
        following = asyncio.create_task(follow(file, use))
        for n in range(200):
            if n % 20 == 5:  # the watch may not have begun when the first change happens
                change(tmp_path, GOOD.replace(b"8001", b"%d" % (9000 + n)))
            if len(told) >= 2:
                break
            await asyncio.sleep(0.02)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert len(told) >= 2
        assert {entry.port for entry in told[-1]} != {entry.port for entry in told[0]}

    run(scenario())


def test_a_change_that_the_watch_cannot_see_is_found_by_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "LOOK_EVERY_S", 0.02)
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    elsewhere.mkdir()
    here.mkdir()
    rename(elsewhere, GOOD)
    os.symlink(elsewhere / "e.yaml", here / "e.yaml")
    file = File(str(here / "e.yaml"), print)
    told: list[list[Entry]] = []

    async def use(entries: list[Entry]) -> None:
        told.append(entries)

    async def scenario() -> None:
        file.load()
        following = asyncio.create_task(follow(file, use))
        await asyncio.sleep(0.05)
        rename(elsewhere, b"endpoints: []")
        for _ in range(200):
            if told:
                break
            await asyncio.sleep(0.02)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    run(scenario())
    assert told == [[]]
