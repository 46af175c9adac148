"""An endpoints file that is suddenly empty or cut off: what is known stays, and only an empty list is believed after a while."""

import asyncio
from pathlib import Path

import pytest

from tests.reports import Reports
from tests.waiting import until
from tests.workers.supervisor.endpoints.endpoint_lists import ENTRIES, GOOD, run
from workers.host.directory import LOOK_EVERY_S
from workers.supervisor.endpoints.discovery import HOLD_S, Entry
from workers.supervisor.endpoints.endpoints_file import File, follow

WAIT_S = 20.0
EMPTY = b"endpoints: []\n"
SUDDENLY = "the endpoints file is suddenly empty: the last endpoints stay for a while"


class World:
    """A file of two endpoints, read by a picker that runs."""

    def __init__(self, folder: Path, *, expects: bool = False) -> None:
        self.path = folder / "e.yaml"
        self.time = 100.0
        self.reports = Reports()
        self.file = File(str(self.path), self.reports, expects=expects, now=lambda: self.time)
        if not expects:
            self.path.write_bytes(GOOD)
            assert self.file.load() == ENTRIES
            self.reports.clear()

    def reads(self, text: bytes, at: float = 0.0) -> list[Entry] | None:
        self.path.write_bytes(text)
        self.time = 100.0 + at
        return self.file.reload()


def test_a_list_that_is_suddenly_empty_is_kept_named_and_then_believed(tmp_path: Path) -> None:
    w = World(tmp_path)
    assert w.reads(EMPTY) is None
    assert w.reports == [f"{SUDDENLY} file={w.path} kept_s={HOLD_S}"]
    assert w.reads(EMPTY, HOLD_S - 0.1) is None
    assert w.file.holds and w.file.wait_s() == pytest.approx(0.1)
    assert w.reads(EMPTY, HOLD_S) == []
    assert len(w.reports) == 1 and not w.file.holds and w.file.wait_s() == LOOK_EVERY_S
    assert w.reads(EMPTY, HOLD_S + 5) is None, "unchanged"


def test_a_list_that_was_empty_before_is_believed_at_once(tmp_path: Path) -> None:
    w = World(tmp_path)
    w.path.write_bytes(EMPTY)
    assert w.file.load() == []
    assert w.reads(b"# still none\n" + EMPTY) == []
    assert w.reports == []


def test_entries_that_come_back_in_time_end_the_doubt_and_the_next_empty_list_begins_a_new_one(tmp_path: Path) -> None:
    w = World(tmp_path)
    assert w.reads(EMPTY) is None
    assert w.reads(GOOD, HOLD_S - 1) == ENTRIES
    assert w.reads(EMPTY, HOLD_S + 1) is None
    assert w.reads(EMPTY, 2 * HOLD_S) is None
    assert w.reads(EMPTY, 2 * HOLD_S + 1) == []


@pytest.mark.parametrize("text", [b"", b"\n", b"# endpoints\n", b"endpoints:\n", b"endpoints: ["])
def test_a_file_without_a_list_keeps_the_endpoints_for_as_long_as_it_has_none(tmp_path: Path, text: bytes) -> None:
    w = World(tmp_path)
    assert [w.reads(text, at) for at in (0, HOLD_S, 10 * HOLD_S)] == [None] * 3
    (report,) = w.reports
    assert report.startswith(f"finding in the endpoints file file={w.path} line=")
    assert report.endswith("the last good endpoints stay")
    assert w.reads(EMPTY, 11 * HOLD_S) is None
    assert w.reads(b"", 11.5 * HOLD_S) is None
    assert w.reads(EMPTY, 12 * HOLD_S) is None, "it was not empty all the time: for a moment, nobody knew"
    assert w.reads(EMPTY, 13 * HOLD_S) == []


@pytest.mark.parametrize("text", [GOOD, b'{"endpoints": [{"name": "a", "address": "10.0.0.1", "port": "1"}]}'])
def test_no_beginning_of_a_file_that_is_being_written_empties_the_pool(tmp_path: Path, text: bytes) -> None:
    w = World(tmp_path)
    for size in range(len(text)):
        entries = w.reads(text[:size], size * HOLD_S)
        assert entries is None or entries, f"after {size} bytes"


def test_the_endpoints_of_a_predecessor_stay_for_a_while_if_the_file_is_empty(tmp_path: Path) -> None:
    w = World(tmp_path, expects=True)
    assert w.reads(EMPTY) is None
    assert w.reads(EMPTY, HOLD_S) == []


@pytest.mark.parametrize("watch", [True, False])
def test_a_follower_of_the_file_believes_its_empty_list_after_a_while(tmp_path: Path, watch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.supervisor.endpoints.discovery.HOLD_S", 0.2)
    path = tmp_path / "e.yaml"
    path.write_bytes(EMPTY)
    file = File(str(path), Reports(), expects=True)
    used: list[list[Entry]] = []

    async def use(entries: list[Entry]) -> None:
        used.append(entries)

    async def scenario() -> None:
        assert file.reload() is None
        following = asyncio.create_task(follow(file, use, watch=watch))
        await until(lambda: used)
        ended, _ = await asyncio.wait([following], timeout=0.1 if watch else WAIT_S)
        assert bool(ended) is not watch
        following.cancel()

    run(scenario())
    assert used == [[]]
