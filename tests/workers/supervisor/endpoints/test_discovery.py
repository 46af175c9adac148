"""Discovery from flags and files: what a start refuses, and what a reload or a changed file does to the endpoints."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reports import Reports
from tests.waiting import turns, until
from tests.workers.supervisor.endpoints.endpoint_lists import ENTRIES, GOOD, run
from workers.host.yaml_files import DiscoveryError
from workers.supervisor.endpoints import endpoints_file
from workers.supervisor.endpoints.discovery import EndpointSpec, Entry, Parsed, diff, parse_flag
from workers.supervisor.endpoints.endpoints_file import LONG_BYTES, File, follow


def test_remarks_are_reported_once_and_do_not_refuse_the_file(tmp_path: Path) -> None:
    reports = Reports()
    path = tmp_path / "e.yaml"
    path.write_bytes(GOOD)
    file = File(str(path), reports)
    assert file.load() == ENTRIES
    assert reports == [
        f"finding in the endpoints file file={path} line=7 reason=field 'comment' of endpoint 'vllm-0' has no effect "
        "(known: address, labels, name, namespace, port)"
    ]
    path.write_bytes(GOOD + b"# touched\n")
    assert file.reload() == ENTRIES
    assert len(reports) == 1


def test_an_update_with_faults_and_no_valid_entry_keeps_the_last_endpoints(tmp_path: Path) -> None:
    reports = Reports()
    path = tmp_path / "e.yaml"
    path.write_text("endpoints: [{name: a, address: 10.0.0.1, port: 1}]\n")
    file = File(str(path), reports)
    assert len(file.load()) == 1
    path.write_text("endpoints:\n- {name: a, adress: 10.0.0.1, port: 1}\n- {name: b}\n")
    assert file.reload() is None
    assert [f" file={path} line={line} " in report for report, line in zip(reports, (2, 3), strict=True)] == [True] * 2
    assert all(report.endswith("; the last good endpoints stay, because no entry is valid") for report in reports)


def test_the_start_reports_all_faults_at_once(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("endpoints:\n" + "- {name: a, port: 1}\n" * 25)
    with pytest.raises(DiscoveryError) as failure:
        File(str(path), Reports()).load()
    assert len(failure.value.faults) == 25
    shown = str(failure.value).splitlines()
    assert (len(shown), shown[-1]) == (21, "and 5 more")
    assert shown[1].startswith(f"{path}:3: ")


def test_a_reload_leaves_out_bad_entries_keeps_the_last_endpoints_of_a_bad_file_and_reports_once(tmp_path: Path) -> None:
    reports = Reports()
    path = tmp_path / "e.yaml"
    good = GOOD.replace(b"  comment: [ignored, {too: 1}]\n", b"")
    path.write_bytes(good)
    file = File(str(path), reports)
    assert file.load() == ENTRIES
    assert file.reload() is None
    bad = good.replace(b'port: "8000"', b'port: "0"')
    path.write_bytes(bad)
    assert file.reload() == ENTRIES[1:]
    assert [f" file={path} line=5 " in report for report in reports] == [True]
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
    [("10.0.0.1:8000", [("10.0.0.1", 8000)]), ("[::1]:8000, vllm:80", [("::1", 8000), ("vllm", 80)]), ("a.b-c.d:1,", [("a.b-c.d", 1)])],
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
def test_a_wrong_endpoints_flag_is_refused_with_the_wrong_part(text: str, fault: str) -> None:
    with pytest.raises(DiscoveryError) as failure:
        parse_flag(text)
    assert fault in str(failure.value)


SPECS = st.builds(EndpointSpec, st.just("default"), st.sampled_from("abcd"), st.sampled_from(("10.0.0.1", "10.0.0.2")), st.integers(1, 2))


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


def rename(directory: Path, text: bytes) -> None:
    (directory / "next").write_bytes(text)
    os.replace(directory / "next", directory / "e.yaml")


def swap(directory: Path, text: bytes) -> None:
    """Changes the file as a mounted ConfigMap changes: the file stays a link, and the directory behind it is swapped."""
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
    monkeypatch.setattr(endpoints_file, "LOOK_EVERY_S", 60.0)  # so that only the watch can notice the change
    change(tmp_path, GOOD)
    file = File(str(tmp_path / "e.yaml"), Reports())
    published: list[list[Entry]] = []

    async def use(entries: list[Entry]) -> None:
        published.append(entries)

    async def scenario() -> None:
        file.load()
        following = asyncio.create_task(follow(file, use))
        await turns(2)  # the watch begins
        for port in (9000, 9001):
            seen = len(published)
            change(tmp_path, GOOD.replace(b"8001", b"%d" % port))
            await until(lambda before=seen: len(published) > before)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert len(published) >= 2
        assert {entry.port for entry in published[-1]} != {entry.port for entry in published[0]}

    run(scenario())


def test_a_change_that_the_watch_cannot_notice_is_found_by_reading_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_file, "LOOK_EVERY_S", 0.02)
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    elsewhere.mkdir()
    here.mkdir()
    rename(elsewhere, GOOD)
    os.symlink(elsewhere / "e.yaml", here / "e.yaml")
    file = File(str(here / "e.yaml"), Reports())
    published: list[list[Entry]] = []

    async def use(entries: list[Entry]) -> None:
        published.append(entries)

    async def scenario() -> None:
        file.load()
        following = asyncio.create_task(follow(file, use))
        await turns(2)  # the watch begins
        rename(elsewhere, b"endpoints: [{name: a, address: 10.0.0.1, port: 1}]")
        await until(lambda: published)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    run(scenario())
    assert published == [[Entry("default", "a", "10.0.0.1", 1)]]


def test_a_long_file_is_parsed_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e.yaml"
    path.write_bytes(b"endpoints: []\n")
    file = File(str(path), Reports())
    file.load()
    path.write_bytes(b"endpoints: []\n" + b"# long\n" * LONG_BYTES)
    turned, waited = threading.Event(), []

    def parse(text: bytes, path: str, *, clusters: bool = False) -> Parsed:
        waited.append(turned.wait(20.0))  # on the event loop, nothing could set it
        return Parsed([], [], [])

    async def scenario() -> list[Entry] | None:
        monkeypatch.setattr(endpoints_file, "parse_file", parse)
        reloading = asyncio.create_task(file.reload_beside())
        await turns()
        turned.set()
        return await reloading

    assert asyncio.run(scenario()) == []
    assert waited == [True]
    assert file.reload() is None, "the content was taken"
