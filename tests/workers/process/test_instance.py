"""Tests of the creation of an instance: it creates everything or nothing."""

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from epp.config.load import load
from shm.instance_lock import InstanceLock
from shm.segment import SegmentError
from tests.workers.instances import made, options
from workers.process import StartError
from workers.process.instance import Instance
from workers.process.sockets import listen


def test_an_instance_has_all_parts_and_records_them(tmp_path: Path) -> None:
    with made(tmp_path, workers=3) as instance:
        # One ordinal for the supervisor, and by default twice as many for workers as run at the start.
        assert instance.memory.areas.schema.areas == instance.layout.ordinals == 1 + 2 * 3
        assert instance.layout.table.columns == (
            "cache_block_size",
            "cache_tokens",
            "kv_cache_usage",
            "running_requests",
            "waiting_requests",
        )
        assert set(instance.layout.measures) == {
            ("approx-prefix-cache-producer", "prefix_indexer_hit_ratio"),
            ("approx-prefix-cache-producer", "prefix_indexer_hit_bytes"),
        }
        assert len(instance.pipes.bus) == len(instance.pipes.wakeups) == 6
        info: dict = {}
        segments: list[str] = []
        for line in (tmp_path / f"{instance.options.instance}.instance").read_text().splitlines():
            info |= json.loads(line)
            segments += json.loads(line).get("segments", [])
        assert info["ports"]["grpc"] == instance.sockets.ext_proc.getsockname()[1]
        assert [f"/dev/shm{name}" for name in segments] == [path for name in segments if os.path.exists(path := f"/dev/shm{name}")]
        assert all(stat.S_IMODE(os.stat(f"/dev/shm{name}").st_mode) == 0o600 for name in segments)
    assert not any(os.path.exists(f"/dev/shm{name}") for name in segments)
    assert os.listdir(tmp_path) == []


def test_too_little_shared_memory_is_an_error_that_names_the_flags_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = list(os.statvfs("/dev/shm"))
    values[0:5] = [4096, 4096, 256, 256, 256]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    with pytest.raises(
        SegmentError, match=r"1\.0 MiB free of 1\.0 MiB.*--workers-max, --max-endpoints, --index-entries or --kv-index-blocks"
    ):
        Instance.create(options(tmp_path), load(None, "test"))
    assert os.listdir(tmp_path) == []


def test_replicas_have_different_identities_even_if_their_pods_have_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "epp-5d-x7")
    with made(tmp_path) as one, made(tmp_path) as two:
        assert one.identity != two.identity
        assert one.identity.startswith("epp-5d-x7_")


def test_a_worker_closes_the_descriptors_of_other_processes(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        closed = instance.not_for(1)
        assert instance.pipes.bus[0].writer not in closed
        assert instance.pipes.bus[1].writer in closed
        assert instance.pipes.parent_pipe.writer in closed and instance.pipes.parent_pipe.reader not in closed
        assert instance.pipes.workers_pipe.writer not in closed
        assert instance.sockets.ext_proc.fileno() not in closed


def test_the_supervisor_does_not_hold_the_writing_ends_of_life_and_family(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        closed = instance.not_for(0)
        assert {instance.pipes.parent_pipe.writer, instance.pipes.workers_pipe.writer} <= set(closed)
        assert not {instance.pipes.parent_pipe.reader, instance.pipes.workers_pipe.reader, *instance.pipes.bus_readers} & set(closed)


def test_an_instance_that_cannot_be_created_leaves_nothing(tmp_path: Path) -> None:
    with listen(0, "--x") as holder:
        before = set(os.listdir("/dev/shm"))
        port_in_use = options(tmp_path, metrics_port=holder.getsockname()[1])
        with pytest.raises(StartError, match="--metrics-port"):
            Instance.create(port_in_use, load(None, ""))
        assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(port_in_use.instance)]
        assert os.listdir(tmp_path) == []


def test_an_instance_that_a_full_run_directory_cannot_record_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_lock: InstanceLock, **_info: object) -> None:
        raise SegmentError("the run directory is full")

    monkeypatch.setattr(InstanceLock, "record", full)
    with pytest.raises(SegmentError, match="the run directory is full"):
        Instance.create(options(tmp_path), load(None, ""))
    assert os.listdir(tmp_path) == []


def test_a_second_picker_with_the_same_state_folder_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with made(tmp_path, state_dir=state) as first:
        second = options(tmp_path, state_dir=state)
        with pytest.raises(StartError, match=f"--state-dir {state} is used by {first.options.instance} on .*is held"):
            Instance.create(second, load(None, "test"))
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(second.instance)]
        with made(tmp_path, state_dir=str(tmp_path / "another")):
            pass
    with made(tmp_path, state_dir=state):
        pass


def test_a_state_folder_is_free_when_the_processes_of_its_picker_have_ended_however_they_did(tmp_path: Path) -> None:
    with made(tmp_path, state_dir=str(tmp_path)) as first:
        child = os.fork()
        if child == 0:
            signal.pause()
        assert first.state_lock is not None
    try:
        with pytest.raises(StartError, match="is used by"):
            Instance.create(options(tmp_path, state_dir=str(tmp_path)), load(None, "test"))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with made(tmp_path, state_dir=str(tmp_path)):
        pass


def test_a_picker_starts_with_a_state_folder_that_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with made(tmp_path, state_dir=str(tmp_path / "file")) as instance:
        assert instance.state_lock is None
