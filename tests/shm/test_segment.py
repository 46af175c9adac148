"""Tests of segments and instances, with the real /dev/shm and real processes that are killed."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm import instance_lock
from shm import segment as segment_module
from shm.instance_lock import InstanceLock, sweep
from shm.layout import CACHE_LINE, H_CHECK, H_LAYOUT, H_MAGIC, HEADER_BYTES, Plan
from shm.segment import Segment, SegmentError, check_room, footprint
from shm.table import TableSchema

LAYOUT = 0x1234


@pytest.fixture
def name() -> Iterator[str]:
    name = f"/epp-test-{os.getpid()}-{os.urandom(4).hex()}"
    yield name
    segment_module.unlink_segment(name)


def exists(name: str) -> bool:
    return Path("/dev/shm" + name).exists()


def test_a_segment_is_zeroed_private_reserved_and_shared(name: str) -> None:
    segment = Segment.create(name, 5000, LAYOUT)
    status = os.stat("/dev/shm" + name)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 5000
    assert segment.size == 5056  # whole cache lines
    assert not any(segment.bytes)
    segment.words[3] = 7
    other = Segment.attach(name, LAYOUT, writable=True)
    other.words[4] = 8
    assert list(segment.words[3:5]) == list(other.words[3:5]) == [7, 8]
    segment.close()
    other.close()


def test_an_array_is_a_view_and_keeps_the_mapping_alive(name: str) -> None:
    segment = Segment.create(name, 4096, LAYOUT)
    view = segment.array(np.uint64, 64, (2, 3))
    segment.bytes[64] = 5
    assert view[0, 0] == 5
    segment.close()
    segment.close()
    view[1, 2] = 6
    assert view[1, 2] == 6


def test_a_part_is_bounded_by_its_region(name: str) -> None:
    segment = Segment.create(name, 4096, LAYOUT)
    part = segment.part(64, 128)
    part.words[0] = 9
    assert segment.words[8] == 9
    assert part.size == 128
    with pytest.raises(ValueError, match="is outside a region"):
        part.part(64, 128)


def test_a_reader_attaches_read_only(name: str) -> None:
    Segment.create(name, 4096, LAYOUT)
    reader = Segment.attach(name, LAYOUT, writable=False)
    with pytest.raises(TypeError, match="read-only"):
        reader.words[0] = 1
    assert not reader.array(np.uint64, 0, 4).flags.writeable


def test_a_planned_segment_describes_its_parts(name: str) -> None:
    plan = Plan({"one": TableSchema(("a",), 3), "two": TableSchema(("b",), 5)})
    segment = Segment.create_planned(name, plan, generation=4)
    assert segment.generation == 4
    assert list(json.loads(segment.description)) == ["one", "two"]
    one, two = segment.planned(plan, "one"), segment.planned(plan, "two")
    one.bytes[:] = b"\x01" * one.size
    assert not any(two.bytes)
    assert plan.offsets["two"] % CACHE_LINE == 0
    attached = Segment.attach(name, plan.layout_hash, writable=False)
    assert bytes(attached.planned(plan, "one").bytes) == b"\x01" * one.size


def test_a_name_in_use_is_refused(name: str) -> None:
    Segment.create(name, 64, LAYOUT)
    with pytest.raises(SegmentError, match=f"{name} exists already: .*remove /dev/shm{name}"):
        Segment.create(name, 64, LAYOUT)


@pytest.mark.parametrize("bad", ["/" + "x" * 300, "/a/b", "/a\0b", "/", "a", "/.", "/..", "/.a"])
def test_an_impossible_name_is_refused(bad: str) -> None:
    with pytest.raises(SegmentError, match="the name must be"):
        Segment.create(bad, 64, LAYOUT)
    with pytest.raises(SegmentError, match="the name must be"):
        Segment.attach(bad, LAYOUT, writable=False)


def test_an_error_says_that_dev_shm_is_not_writable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **options: object) -> None:
        raise PermissionError("No permission")

    monkeypatch.setattr(segment_module, "_opened", refused)
    with pytest.raises(SegmentError, match=r"No permission.*must be writable"):
        Segment.create(name, 64, LAYOUT)


def test_an_empty_segment_is_refused(name: str) -> None:
    with pytest.raises(SegmentError, match="the size must be above 0"):
        Segment.create(name, 0, LAYOUT)


def test_attaching_to_a_missing_segment_is_refused() -> None:
    with pytest.raises(SegmentError, match="/epp-none does not exist"):
        Segment.attach("/epp-none", LAYOUT, writable=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_attaching_as_another_user_is_refused_with_the_user_to_run_as(name: str) -> None:
    Segment.create(name, 64, LAYOUT)
    os.seteuid(65534)
    try:
        with pytest.raises(SegmentError, match="run as the user that created it"):
            Segment.attach(name, LAYOUT, writable=False)
    finally:
        os.seteuid(0)


def poke(name: str, index: int, value: int) -> None:
    with open("/dev/shm" + name, "r+b") as raw:
        raw.seek(index * 8)
        raw.write(value.to_bytes(8, "little"))


def resize(name: str, size: int) -> None:
    os.truncate("/dev/shm" + name, size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda name: poke(name, H_MAGIC, 1), "was not created by this program, or is incomplete"),
        (lambda name: poke(name, H_LAYOUT, 1), "the header's checksum is wrong"),
        (lambda name: poke(name, H_CHECK, 1), "the header's checksum is wrong"),
        (lambda name: resize(name, HEADER_BYTES + 64), r"has 128 bytes, its header says"),
        (lambda name: resize(name, 9000), r"has 9000 bytes, its header says"),
        (lambda name: resize(name, 10), "has no header"),
    ],
)
def test_attach_refuses_a_damaged_segment(name: str, damage: object, message: str) -> None:
    Segment.create(name, 4096, LAYOUT).close()
    damage(name)
    with pytest.raises(SegmentError, match=message):
        Segment.attach(name, LAYOUT, writable=True)


def test_attach_refuses_another_layout(name: str) -> None:
    Segment.create(name, 4096, LAYOUT)
    with pytest.raises(SegmentError, match=r"has layout 0+1234, this process expects 0+9999"):
        Segment.attach(name, 0x9999, writable=False)
    assert Segment.attach(name, None, writable=False).layout_hash == LAYOUT


def test_a_full_dev_shm_causes_a_clear_error_and_leaves_no_segment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SegmentError) as refusal:
        Segment.create(name, 3 << 20, LAYOUT)
    text = str(refusal.value)
    assert name in text
    assert "ENOSPC" in text
    assert "3.0 MiB needed" in text
    assert "MiB free" in text
    assert "sizeLimit" in text
    assert "--shm-size" in text
    assert not exists(name)


def file_system(monkeypatch: pytest.MonkeyPatch, *, size: int, free: int) -> None:
    """Let /dev/shm report this size and this free space, in bytes."""
    real = os.statvfs("/dev/shm")
    values = list(real)
    values[0:5] = [4096, 4096, size // 4096, free // 4096, free // 4096]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))


def test_room_for_all_segments_is_checked_before_the_first_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"state": 5 << 20, "areas": 22 << 20, "index": 6 << 20}
    file_system(monkeypatch, size=64 << 20, free=33 << 20)
    check_room(needs, "take less")
    file_system(monkeypatch, size=64 << 20, free=(33 << 20) - 4096)
    with pytest.raises(SegmentError) as refusal:
        check_room(needs, "take less")
    assert str(refusal.value) == (
        "shared memory does not fit into /dev/shm: 33.0 MiB needed (state 5.0 MiB, areas 22.0 MiB, index 6.0 MiB), "
        "33.0 MiB free of 64.0 MiB; give it 80 MiB (Kubernetes: an emptyDir with medium: Memory and sizeLimit: 80Mi mounted on "
        "/dev/shm, which counts towards the container's memory; docker run --shm-size=80m), or take less"
    )


def test_a_file_system_without_a_limit_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    file_system(monkeypatch, size=0, free=0)
    check_room({"index": 1 << 50}, "take less")


def test_a_footprint_is_what_the_segment_takes(name: str) -> None:
    plan = Plan({"one": TableSchema(("a",), 3), "two": TableSchema(("b",), 5000)})
    segment = Segment.create_planned(name, plan)
    assert footprint(plan) == os.stat(f"/dev/shm{name}").st_blocks * 512
    segment.unlink()


@pytest.mark.parametrize("size", [1 << 50, 1 << 62, 1 << 70])
def test_an_absurd_size_causes_a_clear_error_and_leaves_no_segment(name: str, size: int) -> None:
    with pytest.raises(SegmentError, match=r"does not fit into /dev/shm .* MiB needed"):
        Segment.create(name, size, LAYOUT)
    assert not exists(name)


def test_a_segment_without_a_name_is_copied_as_before_and_says_that_it_has_none(name: str) -> None:
    segment = Segment.create(name, 64, 1)
    assert not segment.is_removed()
    os.unlink(f"/dev/shm{name}")
    segment.words[0] = 7
    copy = segment.private_copy()
    copy.words[1] = 8
    assert (copy.words[0], segment.words[1]) == (7, 0)
    assert segment.is_removed()
    segment.close()
    segment.close()


def test_unlink_removes_the_name_once(name: str) -> None:
    segment = Segment.create(name, 64, LAYOUT)
    segment.unlink()
    segment.unlink()
    assert not exists(name)
    segment.words[0] = 1


CREATOR = r"""
import os, sys, time
from shm.instance_lock import InstanceLock
from shm.segment import Segment
run_dir, name, stage = sys.argv[1:]
lock = InstanceLock.acquire(run_dir, "one")
lock.record(segments=[name, name + "-later"], pid=os.getpid())
if stage != "recorded":
    Segment.create(name, 1 << 20, 1)
if stage == "forked":
    child = os.fork()
    if child:
        os.write(1, b"%d\n" % child)  # one write: both processes write to the same pipe
os.write(1, b"ready\n")
time.sleep(60)
"""


def start_creator(run_dir: Path, name: str, stage: str) -> tuple[subprocess.Popen, list[str]]:
    process = subprocess.Popen([sys.executable, "-c", CREATOR, str(run_dir), name, stage], stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline().strip() for _ in range(3 if stage == "forked" else 1)]
    return process, lines


@pytest.mark.timeout(30)
@pytest.mark.parametrize("stage", ["recorded", "created"])
def test_a_sweep_removes_everything_that_a_killed_creator_left(tmp_path: Path, name: str, stage: str) -> None:
    process, _ = start_creator(tmp_path, name, stage)
    assert sweep(str(tmp_path)) == []
    assert exists(name) == (stage == "created")
    process.kill()
    process.wait()
    process.stdout.close()
    removed = sweep(str(tmp_path))
    assert (name in removed) == (stage == "created")
    assert not exists(name)
    assert list(tmp_path.iterdir()) == []
    assert sweep(str(tmp_path)) == []


@pytest.mark.timeout(30)
def test_a_surviving_child_keeps_the_instance_from_being_swept(tmp_path: Path, name: str) -> None:
    process, lines = start_creator(tmp_path, name, "forked")
    child = int(next(line for line in lines if line != "ready"))
    process.kill()
    process.wait()
    assert sweep(str(tmp_path)) == []
    assert exists(name)
    os.kill(child, signal.SIGKILL)
    process.stdout.read()  # returns when the child has ended
    process.stdout.close()
    assert name in sweep(str(tmp_path))
    assert not exists(name)


@pytest.mark.timeout(30)
def test_a_new_instance_of_the_same_name_removes_the_leftovers(tmp_path: Path, name: str) -> None:
    process, _ = start_creator(tmp_path, name, "created")
    with pytest.raises(SegmentError, match="instance one is running"):
        InstanceLock.acquire(str(tmp_path), "one")
    process.kill()
    process.wait()
    process.stdout.close()
    lock = InstanceLock.acquire(str(tmp_path), "one")
    assert not exists(name)
    assert lock.info == {"segments": []}
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_records_add_segments_and_replace_other_facts(tmp_path: Path) -> None:
    lock = InstanceLock.acquire(str(tmp_path / "run"), "one")
    lock.record(segments=["/a"], port=1)
    lock.record(segments=["/a", "/b"], port=2)
    descriptor = os.open(lock.path, os.O_RDONLY)
    assert instance_lock._recorded(descriptor) == lock.info
    os.close(descriptor)
    assert lock.info == {"segments": ["/a", "/b"], "port": 2}
    lock.release()


@pytest.mark.parametrize("written", [None, 3])
def test_a_full_run_directory_causes_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int | None
) -> None:
    def full(_descriptor: int, _line: bytes) -> int:
        if written is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    lock = InstanceLock.acquire(str(tmp_path), "one")
    with monkeypatch.context() as patched, pytest.raises(SegmentError, match=r"one\.instance cannot be written \(No space left"):
        patched.setattr(os, "write", full)
        lock.record(port=1)
    lock.release()


def test_a_record_torn_by_a_kill_does_not_hide_the_earlier_ones(tmp_path: Path, name: str) -> None:
    Segment.create(name, 64, LAYOUT)
    whole = json.dumps({"segments": [name]})
    (tmp_path / "one.instance").write_text(f'{whole}\n{{"segments": ["/epp-ot')
    (tmp_path / "notes.txt").write_text("not ours")
    assert sweep(str(tmp_path)) == [name, str(tmp_path / "one.instance")]
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_sweep_of_a_missing_directory_finds_nothing(tmp_path: Path) -> None:
    assert sweep(str(tmp_path / "none")) == []


@pytest.mark.parametrize("bad", ["", "a/b"])
def test_an_instance_name_is_a_plain_file_name(tmp_path: Path, bad: str) -> None:
    with pytest.raises(SegmentError, match="must be a file name without '/'"):
        InstanceLock.acquire(str(tmp_path), bad)


def test_a_sweep_skips_files_that_it_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "one.instance").write_text("")
    assert sweep(str(tmp_path / "one.instance")) == []
    monkeypatch.setattr(instance_lock.os, "open", refused)
    assert sweep(str(tmp_path)) == []
    monkeypatch.setattr(instance_lock.os, "listdir", refused)
    assert sweep(str(tmp_path)) == []


def test_an_error_names_a_run_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SegmentError, match=r"file/run/one\.instance cannot be written \(Not a directory\): choose"):
        InstanceLock.acquire(str(tmp_path / "file" / "run"), "one")


def test_acquire_survives_a_sweep_between_open_and_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = instance_lock._take
    removed = []

    def removed_before_taken(descriptor: int) -> bool:
        if len(removed) < 2:
            removed.append(min(tmp_path.iterdir()))
            removed[-1].unlink()
        return take(descriptor)

    monkeypatch.setattr(instance_lock, "_take", removed_before_taken)
    lock = InstanceLock.acquire(str(tmp_path), "one")
    assert len(removed) == 2
    assert Path(lock.path).exists()
    lock.release()


def test_acquire_gives_up_when_its_file_is_removed_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_lock, "_is_at", lambda descriptor, path: False)
    with pytest.raises(SegmentError, match=r"removed .* 8 times in a row"):
        InstanceLock.acquire(str(tmp_path), "one")
