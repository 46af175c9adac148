"""The snapshot of the prefix index: loading after a restart, refusals with their reasons, and unusable folders."""

import asyncio
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shm.index_capacity import WIDE
from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter
from tests.examples import examples
from tests.shm.memory import region_for
from tests.waiting import turns, until
from workers.process.prefix_secret import kept_secret
from workers.shared.bus import AGE_TICKS
from workers.shared.documents import Known
from workers.supervisor.endpoints import index_state
from workers.supervisor.endpoints.index_state import SNAPSHOT, SNAPSHOT_OF_POOLS, IndexState
from workers.supervisor.endpoints.snapshot_file import AGE_MAX_S

SEED = 77
NAMES: list[Known] = [("", ("default", name, "10.0.0.1", 8000 + n, f"uid-{name}")) for n, name in enumerate("abc")]


class Life:
    """One run of a picker with the folder: its index, clock and endpoints."""

    def __init__(self, folder: Path, *, entries: int = 100_000, seed: int = SEED, block_tokens: int = 64, wall: float = 1e9) -> None:
        schema = IndexSchema(entries)
        region = region_for(schema)
        self.writer, self.reader = IndexWriter(schema, region), IndexReader(schema, region)
        self.wall = wall
        self.ticks = 1000
        self.owners: dict[Known, int] = {}
        self.state = IndexState(
            str(folder), self.writer, seed=seed, block_tokens=lambda: {"": block_tokens}, ticks=lambda: self.ticks, wall=lambda: self.wall
        )

    def fill(self, count: int = 3000) -> dict[Known, np.ndarray]:
        rng = np.random.default_rng(1)
        held = {}
        for name in NAMES:
            self.owners[name] = self.writer.new_owner()
            held[name] = rng.integers(1, 2**64, count, dtype=np.uint64) & ~np.uint64(WIDE)
            self.writer.insert(held[name], self.owners[name], self.ticks)
        return held

    def save(self) -> None:
        asyncio.run(self.state.save(lambda: self.owners))


def saved(folder: Path) -> dict[Known, np.ndarray]:
    life = Life(folder)
    held = life.fill()
    life.save()
    return held


def refusal(life: Life) -> str:
    """The log line that says why the snapshot is refused. The index must be empty then."""
    with capture_logs() as lines:
        assert life.state.load() == {}
    assert life.writer.size() == 0 and life.writer.owners() == []
    (line,) = lines
    assert line["log_level"] == "warning"
    assert (line["event"], line["part"]) == ("a part of the state starts empty", "the prefix index")
    return str(line["why"])


def test_a_restarted_picker_has_every_block_at_its_endpoint(tmp_path: Path) -> None:
    held = saved(tmp_path)
    life = Life(tmp_path, wall=1e9 + 100)
    with capture_logs() as lines:
        owners = life.state.load()
    assert lines[0]["event"] == "prefix index taken over" and lines[0]["entries"] == 9000
    assert sorted(life.writer.owners()) == sorted(owners.values())
    for name in NAMES:
        assert life.reader.match(held[name]) == {owners[name]: 3000}
        assert life.writer.held(owners[name]) == 3000
    assert stat.S_IMODE((tmp_path / SNAPSHOT).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [SNAPSHOT]


def test_ages_continue_by_the_wall_clock(tmp_path: Path) -> None:
    saved(tmp_path)
    life = Life(tmp_path, wall=1e9 + 100)
    life.ticks = 5  # the machine was restarted
    life.state.load()
    ages = life.writer._flat_ages[life.writer._entries != 0]
    assert set((np.uint32(5) - ages).tolist()) == {100 * AGE_TICKS}


def test_a_snapshot_leaves_out_an_endpoint_that_changed_its_owner_id_during_the_save(tmp_path: Path) -> None:
    life = Life(tmp_path)
    held = life.fill()
    owners = iter([dict(life.owners), {**life.owners, NAMES[0]: 999}])
    asyncio.run(life.state.save(lambda: next(owners)))
    second = Life(tmp_path)
    assert list(second.state.load()) == NAMES[1:]
    assert second.reader.match(held[NAMES[0]]) == {}
    assert second.writer.size() == 6000


def test_no_snapshot_is_written_while_the_index_does_not_change(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.save()
    assert not os.listdir(tmp_path)
    life.fill()
    life.save()
    first = (tmp_path / SNAPSHOT).stat()
    life.save()
    assert (tmp_path / SNAPSHOT).stat().st_ino == first.st_ino
    life.writer.forget(np.array([1], dtype=np.uint64), 2)
    life.save()
    assert (tmp_path / SNAPSHOT).stat().st_ino != first.st_ino


def test_a_successor_saves_the_entries_that_its_predecessor_did_not_save(tmp_path: Path) -> None:
    life = Life(tmp_path)
    held = life.fill()
    state = IndexState(str(tmp_path), life.writer, seed=SEED, block_tokens=lambda: {"": 64}, ticks=lambda: 1, wall=lambda: 1e9)
    asyncio.run(state.save(lambda: life.owners))
    second = Life(tmp_path)
    assert second.reader.match(held[NAMES[1]]) == {} and second.state.load() == life.owners
    assert second.reader.match(held[NAMES[1]]) == {life.owners[NAMES[1]]: 3000}


def test_the_first_start_logs_nothing(tmp_path: Path) -> None:
    with capture_logs() as lines:
        assert Life(tmp_path).state.load() == {}
    assert not lines


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 78}, "it was written with another prefix secret"),
        ({"entries": 50_000}, "it has 100000 entries, and this picker's index 50000 (--index-entries)"),
        ({"block_tokens": 128}, "its blocks have 64 tokens, and this picker's 128 (blockSizeTokens)"),
        ({"wall": 1e9 + AGE_MAX_S + 100}, "it is 1.0 hours old"),
        ({"wall": 1e9 - 100}, "it was written 100 seconds in the future: the clock was set back"),
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path, change: dict[str, float], why: str) -> None:
    saved(tmp_path)
    assert why in refusal(Life(tmp_path, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: content[:-1], "it is truncated"),
        (lambda content: content[: len(content) // 2], "it is truncated"),
        (lambda content: content[:20], "it is truncated"),
        (lambda content: b"", "it is not a snapshot of this kind"),
        (lambda content: b"x" * len(content), "it is not a snapshot of this kind"),
        (lambda content: content[:8] + b"\x09" + content[9:], "it has version 9, and this picker reads version 2"),
        (lambda content: content[:7000] + b"bad" + content[7003:], "it is damaged: its checksum differs"),
        (lambda content: content + bytes(80 << 20), "it is damaged: it has"),
    ],
)
def test_a_truncated_or_damaged_snapshot_is_refused_with_the_reason(tmp_path: Path, damage, why: str) -> None:
    saved(tmp_path)
    path = tmp_path / SNAPSHOT
    path.write_bytes(damage(path.read_bytes()))
    assert why in refusal(Life(tmp_path))


@given(st.data())
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_snapshot_with_any_changed_byte_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / SNAPSHOT
    if not path.exists():
        saved(tmp_path)
        path.rename(tmp_path / "good")
    content = bytearray((tmp_path / "good").read_bytes())
    at = data.draw(st.integers(0, len(content) - 1) | st.integers(len(content) - 200, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    refusal(Life(tmp_path))


def test_a_snapshot_that_is_a_pipe_or_a_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SNAPSHOT)
    assert "it is not a snapshot" in refusal(Life(tmp_path))
    os.unlink(tmp_path / SNAPSHOT)
    os.mkdir(tmp_path / SNAPSHOT)
    assert "Is a directory" in refusal(Life(tmp_path))


def test_a_failed_save_is_logged_once_and_so_is_the_next_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path / "state")
    life.fill()

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, capture_logs() as lines:
        patched.setattr(index_state.os, "write", full)
        life.save()
        life.save()
    assert [line["log_level"] for line in lines] == ["warning"]
    assert "No space left on device" in lines[0]["why"]
    assert not os.listdir(tmp_path / "state")
    with capture_logs() as lines:
        life.save()
    assert ["saved again" in line["event"] for line in lines] == [True]
    assert Life(tmp_path / "state").state.load()


def test_a_folder_that_cannot_be_created_only_causes_log_lines(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    life = Life(tmp_path / "file" / "state")
    life.fill()
    with capture_logs() as lines:
        assert life.state.load() == {}
        life.save()
        life.save()
        assert len(kept_secret(str(tmp_path / "file" / "state"))) >= 32
    assert ["Not a directory" in line["why"] for line in lines] == [True] * 3


def test_a_writer_that_was_killed_leaves_the_last_complete_snapshot(tmp_path: Path) -> None:
    held = saved(tmp_path)
    (tmp_path / f"{SNAPSHOT}.tmp").write_bytes(b"half of a later one")
    life = Life(tmp_path)
    owners = life.state.load()
    assert life.reader.match(held[NAMES[0]]) == {owners[NAMES[0]]: 3000}
    life.writer.forget(held[NAMES[0]], owners[NAMES[0]])
    life.owners = owners
    life.save()
    assert os.listdir(tmp_path) == [SNAPSHOT]
    assert Life(tmp_path).state.load() == owners


def test_the_event_loop_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path)
    life.fill()
    turned, write, main = threading.Event(), os.write, threading.get_ident()

    def slow(descriptor: int, data: bytes) -> int:
        assert threading.get_ident() != main
        assert turned.wait(10)
        return write(descriptor, data)

    async def scenario() -> None:
        monkeypatch.setattr(index_state.os, "write", slow)
        saving = asyncio.ensure_future(life.state.save(lambda: life.owners))
        await turns(50)
        assert not saving.done()
        turned.set()
        await saving

    asyncio.run(scenario())
    assert Life(tmp_path).state.load()


def test_snapshots_are_saved_when_the_picker_begins_to_stop_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path)
    life.fill()
    path = tmp_path / SNAPSHOT
    stopping, looks = False, 0
    monkeypatch.setattr(index_state, "LOOK_S", 0.001)

    def stops() -> bool:
        nonlocal looks
        looks += 1
        return stopping

    def owners() -> Mapping[Known, int]:
        return life.owners

    async def scenario() -> None:
        nonlocal stopping
        running = asyncio.ensure_future(life.state.run(owners, stops))
        await until(lambda: looks >= 10)
        assert not path.exists()
        stopping = True
        await until(path.exists)
        first = path.stat().st_ino
        life.writer.retire(life.owners[NAMES[0]])
        # There is no more look that could be counted.
        await asyncio.sleep(0.02)
        assert path.stat().st_ino == first
        await life.state.close(owners)
        assert path.stat().st_ino != first
        running.cancel()

    asyncio.run(scenario())


class Pools(Life):
    """One run of a picker of several pools. `tokens`: those of a block of each pool."""

    def __init__(self, folder: Path, tokens: Mapping[str, int]) -> None:
        super().__init__(folder)
        self.state = IndexState(
            str(folder), self.writer, seed=SEED, block_tokens=lambda: tokens, ticks=lambda: self.ticks, wall=lambda: self.wall, several=True
        )

    def keep(self, pool: str) -> np.ndarray:
        """Gives a pool one server with some blocks."""
        owner = self.owners[pool, NAMES[0][1]] = self.writer.new_owner()
        held = np.random.default_rng(owner).integers(1, 2**64, 99, dtype=np.uint64) & ~np.uint64(WIDE)
        self.writer.insert(held, owner, self.ticks)
        return held


def test_several_pools_share_a_file_and_one_whose_blocks_have_become_others_starts_empty(tmp_path: Path) -> None:
    life = Pools(tmp_path, {"a": 64, "b": 64, "gone": 64})
    held = {pool: life.keep(pool) for pool in ("a", "b", "gone")}
    life.save()
    assert [path.name for path in tmp_path.iterdir()] == [SNAPSHOT_OF_POOLS]
    later = Pools(tmp_path, {"a": 64, "b": 32, "new": 64})
    found = later.state.load()
    assert set(found) == {("a", NAMES[0][1]), ("gone", NAMES[0][1])}, "the table retires what is gone"
    assert later.writer.size() == len(held["a"]) + len(held["gone"])


def test_one_pool_and_several_pools_do_not_read_each_others_files(tmp_path: Path) -> None:
    saved(tmp_path)
    assert Pools(tmp_path, {"a": 64}).state.load() == {}
    life = Pools(tmp_path, {"a": 64})
    life.keep("a")
    life.save()
    assert len(Life(tmp_path).state.load()) == len(NAMES)


def test_the_secret_is_created_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    secret = kept_secret(str(folder))
    assert len(secret) == 64
    assert kept_secret(str(folder)) == secret
    path = folder / "prefix-secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    path.chmod(0o644)
    assert kept_secret(str(folder)) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_secret_is_used_even_if_its_mode_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = kept_secret(str(tmp_path))
    (tmp_path / "prefix-secret").chmod(0o640)

    def refused(descriptor: int, mode: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(index_state.os, "fchmod", refused)
    assert kept_secret(str(tmp_path)) == secret


def test_an_invalid_secret_is_replaced_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "prefix-secret").write_text("short\n")
    with capture_logs() as lines:
        secret = kept_secret(str(tmp_path))
    assert [line["size"] for line in lines] == [5]
    assert kept_secret(str(tmp_path)) == secret


def test_a_secret_of_16_bytes_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "prefix-secret").write_text("0123456789abcdef\n")
    with capture_logs() as lines:
        assert kept_secret(str(tmp_path)) == b"0123456789abcdef"
    assert lines == []
