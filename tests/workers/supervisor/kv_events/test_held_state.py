"""The snapshot of held blocks: what a restarted picker takes over, what it refuses and why, and when it is written."""

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shm.link_table import Links
from tests.examples import examples
from tests.workers.supervisor.kv_events.test_holdings import BLOCK, TOKENS, stored
from tests.workers.supervisor.kv_events.test_holdings import World as Blocks
from workers.shared.documents import Identity
from workers.supervisor.endpoints import snapshot_file
from workers.supervisor.endpoints.snapshot_file import AGE_MAX_S
from workers.supervisor.kv_events.held_state import EVERY_S, SNAPSHOT, HeldState, Loaded, SavedStream, Trailer
from workers.supervisor.kv_events.holdings import Holder

NAMES: list[Identity] = [("default", name, "10.0.0.1", 8000 + n, f"uid-{name}") for n, name in enumerate("abc")]
WALL = 1e9


class Life:
    """One run of a picker with the folder: three endpoints, their blocks, and the snapshot."""

    def __init__(
        self, folder: Path, *, blocks: int = 1 << 12, seed: int = 5, wall: float = WALL, tiers: Sequence[str] = ("gpu", "cpu", "other")
    ) -> None:
        self.blocks = Blocks(endpoints=0, blocks=blocks)
        self.state = HeldState(str(folder), self.blocks.writer, tiers, seed=seed, wall=lambda: wall)

    def fill(self) -> None:
        """The first endpoint holds 10 blocks, two of them also in the second tier; the second one 5; the third one none."""
        world = self.blocks
        world.holders = [Holder(world.holdings) for _ in NAMES]
        world.apply(stored(range(1, 11), None, TOKENS))
        world.apply(stored([1, 2], None, TOKENS[: 2 * BLOCK], BLOCK, None, "CPU"))
        world.apply(stored(range(1, 6), None, TOKENS[: 5 * BLOCK]), stored([1], None, TOKENS[:BLOCK]), at=1)

    def trailer(self) -> Trailer:
        kept = [SavedStream(holder.owners, 100 + at, 7, holder.block_tokens, None, "") for at, holder in enumerate(self.blocks.holders)]
        return Trailer(0.0, [], [11], list(zip(NAMES, kept, strict=True)))

    def save(self) -> None:
        self.state.close(self.trailer)

    def take_over(self) -> Loaded:
        """Fills the memory from the snapshot."""
        loaded = self.state.load()
        assert loaded is not None
        world = self.blocks
        world.holdings.restore([kept.owners for kept in loaded.streams.values()], loaded.links, 1)
        world.holders = [Holder(world.holdings, loaded.streams[name].owners) for name in NAMES]
        return loaded


def saved(folder: Path) -> None:
    life = Life(folder)
    life.fill()
    life.save()


def refusal(life: Life) -> str:
    """The log line that says why the snapshot is refused."""
    with capture_logs() as lines:
        assert life.state.load() is None
    (line,) = lines
    assert (line["log_level"], line["event"], line["part"]) == (
        "warning", "a part of the state starts empty", "the index of held blocks",
    )  # fmt: skip
    assert line["file"].endswith(SNAPSHOT)
    return str(line["why"])


def test_a_restarted_picker_has_every_block_at_its_endpoint_and_in_its_tier(tmp_path: Path) -> None:
    saved(tmp_path)
    life = Life(tmp_path, wall=WALL + 100)
    with capture_logs() as lines:
        loaded = life.take_over()
    assert (lines[0]["blocks"], lines[0]["endpoints"], lines[0]["age_s"]) == (15, 3, 100.0)
    assert loaded.adapters == [11]
    assert loaded.streams[NAMES[1]] == SavedStream(life.blocks.holders[1].owners, 101, 7, BLOCK, None, "")
    assert life.blocks.held(TOKENS)[0] == [10, 5, 0]
    assert [holder.held for holder in life.blocks.holders] == [12, 5, 0]
    assert stat.S_IMODE((tmp_path / SNAPSHOT).stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [SNAPSHOT]


def test_events_go_on_after_a_restart_as_if_there_had_been_none(tmp_path: Path) -> None:
    """Parents are known, copies stay counted, and a removal finds its block."""
    saved(tmp_path)
    life = Life(tmp_path)
    life.take_over()
    world = life.blocks
    world.apply(stored([6], 5, TOKENS[5 * BLOCK : 6 * BLOCK]), ["BlockRemoved", [1]], at=1)
    assert world.held(TOKENS)[0] == [10, 6, 0]  # block 1 was stored twice
    world.apply(["BlockRemoved", [1]], at=1)
    world.apply(["BlockRemoved", [3]])
    assert world.held(TOKENS)[0] == [2, 0, 0]
    world.apply(["AllBlocksCleared"])
    assert world.held(TOKENS)[0] == [0, 0, 0]


def test_blocks_of_endpoints_that_the_snapshot_does_not_name_are_left_out(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.fill()
    life.state.close(lambda: Trailer(0.0, [], [], life.trailer().streams[1:]))
    second = Life(tmp_path)
    loaded = second.state.load()
    assert loaded is not None
    second.blocks.holdings.restore([kept.owners for kept in loaded.streams.values()], loaded.links, 1)
    assert second.blocks.writer.links.size == 5
    assert second.blocks.writer.size() == 5


def test_memory_in_use_is_not_overwritten(tmp_path: Path) -> None:
    saved(tmp_path)
    life = Life(tmp_path)
    life.fill()
    loaded = life.state.load()
    assert loaded is not None
    with pytest.raises(ValueError, match="unused"):
        life.blocks.holdings.restore([kept.owners for kept in loaded.streams.values()], loaded.links, 1)


def test_the_first_start_logs_nothing(tmp_path: Path) -> None:
    with capture_logs() as lines:
        assert Life(tmp_path).state.load() is None
    assert not lines


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 78}, "it was written with another prefix secret"),
        ({"blocks": 1 << 13}, "(--kv-index-blocks)"),
        ({"tiers": ("gpu", "disk", "other")}, "its tiers are gpu, cpu, other, and this picker's gpu, disk, other"),
        ({"wall": WALL + AGE_MAX_S + 100}, "it is 1.0 hours old"),
        ({"wall": WALL - 100}, "it was written 100 seconds in the future: the clock was set back"),
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path, change: dict[str, object], why: str) -> None:
    saved(tmp_path)
    assert why in refusal(Life(tmp_path, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: content[:-1], "it is truncated"),
        (lambda content: content[:20], "it is truncated"),
        (lambda content: b"", "it is not a snapshot of this kind"),
        (lambda content: b"EPPINDEX" + content[8:], "it is not a snapshot of this kind"),
        (lambda content: content[:8] + b"\x09" + content[9:], "it has version 9, and this picker reads version 1"),
        (lambda content: content[:100] + b"bad" + content[103:], "it is damaged: its checksum differs"),
        (lambda content: content + bytes(80 << 20), "it is damaged: it has"),
    ],
)
def test_a_foreign_or_damaged_snapshot_is_refused_with_the_reason(tmp_path: Path, damage: Callable[[bytes], bytes], why: str) -> None:
    saved(tmp_path)
    path = tmp_path / SNAPSHOT
    path.write_bytes(damage(path.read_bytes()))
    assert why in refusal(Life(tmp_path))


@given(st.data())
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_snapshot_with_any_changed_byte_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    path, good = tmp_path / SNAPSHOT, tmp_path / "good"
    if not good.exists():
        saved(tmp_path)
        path.rename(good)
    content = bytearray(good.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    refusal(Life(tmp_path))


def test_owner_ids_that_cannot_be_are_refused(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.fill()
    kept = SavedStream([2, 3, 4], 1, 1, BLOCK, None, "")  # one is missing
    life.state.close(lambda: Trailer(0.0, [], [], [(NAMES[0], kept)]))
    assert "its owner ids are not valid" in refusal(Life(tmp_path))


def test_it_is_saved_regularly_at_the_beginning_of_the_stop_and_at_the_end(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.fill()
    times: list[float] = []

    def trailer(now: float) -> Callable[[], Trailer]:
        def made() -> Trailer:
            times.append(now)
            return life.trailer()

        return made

    def look(now: float, *, stopping: bool = False) -> None:
        life.state.look(now, stopping, trailer(now))
        life.state.wait()

    look(1.0)
    look(EVERY_S)
    assert times == []
    look(EVERY_S + 1.0)
    look(2 * EVERY_S + 2.0)  # nothing has changed
    assert times == [EVERY_S + 1.0]
    life.blocks.writer.retire(life.blocks.holders[2].owners[0])
    look(2 * EVERY_S + 3.0, stopping=True)
    life.blocks.writer.retire(life.blocks.holders[1].owners[0])
    look(2 * EVERY_S + 4.0, stopping=True)
    assert times == [EVERY_S + 1.0, 2 * EVERY_S + 3.0]
    life.state.close(trailer(0.0))
    assert times[2:] == [0.0]
    second = Life(tmp_path).state.load()
    assert second is not None
    assert len(second.links.places) == 10


def test_a_failed_save_is_logged_once_and_so_is_the_next_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path / "state")
    life.fill()

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, capture_logs() as lines:
        patched.setattr(snapshot_file.os, "write", full)
        life.save()
        life.save()
    assert [line["log_level"] for line in lines] == ["warning"]
    assert "No space left on device" in lines[0]["why"]
    assert not os.listdir(tmp_path / "state")
    with capture_logs() as lines:
        life.save()
    assert ["saved again" in line["event"] for line in lines] == [True]
    assert Life(tmp_path / "state").state.load() is not None


def test_a_copy_does_not_change_with_the_table(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.fill()
    copy: Links = life.blocks.writer.links.copy()
    before = [column.copy() for column in copy]
    life.blocks.apply(["BlockRemoved", list(range(1, 11))])
    assert all(np.array_equal(one, other) for one, other in zip(copy, before, strict=True))
