"""Tests of finding an instance by its file, and of attaching to it read-only."""

import ctypes
import errno
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shm import observe
from shm.areas import Areas, AreaSchema
from shm.instance_lock import InstanceLock
from shm.layout import Plan
from shm.observe import LayoutError, Life
from shm.segment import Segment, SegmentError
from shm.series import SeriesSchema
from shm.table import TableSchema

NO_PID = 1 << 30  # larger than any process id of the kernel
AREAS = AreaSchema(4, ("streams",), ("requests",), (("wait_s", (0.5, 1.0)),), areas=3)
SERIES = SeriesSchema("errors", ("model",), ("running",), ("failed",), (("size", (1.0,)),), blocks=2, areas=2)
PLAN = Plan({"areas": AREAS, "errors": SERIES})


class Machine:
    """A run directory with instances that the test creates."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = str(run_dir)
        self._locks: list[InstanceLock] = []
        self._segments: list[Segment] = []

    def start(self, name: str, *, port: int, pid: int = NO_PID, heartbeat_age_s: float | None = 0.0, plan: Plan = PLAN) -> Segment:
        lock = InstanceLock.acquire(self.run_dir, name)
        self._locks.append(lock)
        lock.record(pid=pid, ports={"metrics": port})
        segment_name = f"/epp-test-{uuid.uuid4().hex[:8]}-areas"
        lock.record(segments=[segment_name])
        segment = Segment.create_planned(segment_name, plan)
        self._segments.append(segment)
        if heartbeat_age_s is not None:
            Areas(AREAS, segment.part(0, AREAS.bytes)).area(1).heartbeat(time.monotonic() - heartbeat_age_s)
        return segment

    def end(self) -> None:
        for segment in self._segments:
            segment.unlink()
        for lock in self._locks:
            lock.release()

    def refusal(self, **wanted: object) -> str:
        with pytest.raises(SegmentError) as refused:
            observe.find(self.run_dir, **wanted)  # type: ignore[arg-type]
        return str(refused.value)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "run")
    yield machine
    machine.end()


def test_an_instance_is_found_by_its_metrics_port_or_its_name(machine: Machine) -> None:
    machine.start("a", port=9090)
    segment = machine.start("b", port=9190)
    assert observe.find(machine.run_dir).name == "a"
    for found in (observe.find(machine.run_dir, metrics_port=9190), observe.find(machine.run_dir, name="b")):
        assert (found.name, found.pid, found.ports["metrics"]) == ("b", NO_PID, 9190)
        assert found.segments == (segment.name,)
        assert found.life is Life.RUNNING


def test_the_only_running_instance_is_found_without_its_name_or_port(machine: Machine) -> None:
    machine.start("dead", port=9090, heartbeat_age_s=60.0)
    machine.start("a", port=9190)
    assert observe.find(machine.run_dir).name == "a"
    machine.start("b", port=9290)
    text = machine.refusal()
    assert text.startswith("several instances in")
    assert text.endswith("--instance a")


def test_a_file_of_another_user_does_not_hide_the_others(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.start("a", port=9090)
    machine.start("b", port=9190)
    closed, opened = {"b.instance"}, os.open

    def refuse(path: str, *arguments: int) -> int:
        if os.path.basename(path) in closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    assert observe.find(machine.run_dir).name == "a"
    closed.add("a.instance")
    assert "run as the picker's user" in machine.refusal()


def test_of_several_running_instances_the_caller_may_ask_which(machine: Machine) -> None:
    asked = []

    def second(running: list[observe.Seen]) -> observe.Seen:
        asked.append([each.name for each in running])
        return running[1]

    machine.start("a", port=9090)
    assert observe.find(machine.run_dir, ask=second).name == "a"
    machine.start("b", port=9190)
    assert observe.find(machine.run_dir, ask=second).name == "b"
    assert observe.find(machine.run_dir, ask=second, name="a").name == "a"
    assert asked == [["a", "b"]]


def test_an_error_for_an_unknown_port_lists_the_instances_and_the_flags_to_give(machine: Machine) -> None:
    machine.start("a", port=9190)
    assert machine.refusal(metrics_port=9090) == (
        f"no instance with the metrics port 9090 in {machine.run_dir}; found a (pid {NO_PID}, metrics port 9190, running); "
        "name one with --metrics-port, or as --instance a"
    )


def test_an_error_for_an_empty_or_missing_run_directory_says_that_there_is_no_instance(machine: Machine) -> None:
    assert f"no instance in {machine.run_dir}: start a picker, or give the --run-dir" in machine.refusal()


def test_an_error_names_a_run_directory_that_cannot_be_read(machine: Machine) -> None:
    Path(machine.run_dir).write_text("")
    assert f"run directory {machine.run_dir} cannot be read" in machine.refusal()


def test_two_instances_with_the_same_port_are_an_error(machine: Machine) -> None:
    machine.start("a", port=9090)
    machine.start("b", port=9090)
    text = machine.refusal(metrics_port=9090)
    assert "several instances with the metrics port 9090" in text
    assert "a (pid" in text
    assert "b (pid" in text
    assert text.endswith("--instance a")


def test_a_dead_instance_is_reported_as_dead_and_does_not_hide_a_running_one(machine: Machine) -> None:
    machine.start("a", port=9090, heartbeat_age_s=60.0)
    text = machine.refusal()
    assert "instance a" in text
    assert "dead: no heartbeat for 5 s" in text
    machine.start("b", port=9090)
    assert observe.find(machine.run_dir).name == "b"


def test_many_instances_are_not_all_listed(machine: Machine) -> None:
    for n in range(10):
        machine.start(f"i{n}", port=9100 + n)
    assert "… and 2 more" in machine.refusal()


@pytest.mark.parametrize(
    ("pid", "heartbeat_age_s", "expected"),
    [
        (NO_PID, 1.0, Life.RUNNING),  # its process id belongs to another container
        (NO_PID, 60.0, Life.DEAD),
        (NO_PID, None, Life.DEAD),
        pytest.param(os.getpid(), 60.0, Life.SILENT, id="own-silent"),
        pytest.param(os.getpid(), None, Life.STARTING, id="own-starting"),
    ],
)
def test_heartbeats_decide_before_the_process_id_whether_an_instance_lives(
    machine: Machine, pid: int, heartbeat_age_s: float | None, expected: Life
) -> None:
    machine.start("a", port=9090, pid=pid, heartbeat_age_s=heartbeat_age_s)
    assert observe.instance(machine.run_dir, "a").life is expected  # type: ignore[union-attr]
    assert observe.instance(machine.run_dir, "b") is None


def test_a_running_instance_whose_names_were_removed_is_named_with_what_to_do(machine: Machine) -> None:
    segment = machine.start("a", port=9090, pid=os.getpid())
    segment.unlink()
    assert observe.instance(machine.run_dir, "a").life is Life.STARTING  # type: ignore[union-attr]
    before = time.time() - 60.0
    os.utime(f"{machine.run_dir}/a.instance", (before, before))
    assert "its names in /dev/shm were removed: it serves on, but no command can attach" in machine.refusal(name="a")
    os.unlink(f"{machine.run_dir}/a.instance")
    assert "restart one whose file there was removed" in machine.refusal(name="a")


def test_reading_takes_no_lock(machine: Machine) -> None:
    machine.start("a", port=9090, heartbeat_age_s=60.0)
    assert observe.instances(machine.run_dir)
    with open("/proc/self/fdinfo/" + str(machine._locks[0]._descriptor)) as info:
        locks = [line for line in info if line.startswith("lock:")]
    assert len(locks) == 1  # the lock of the instance itself


def test_parts_have_the_schemas_of_the_description(machine: Machine) -> None:
    segments, parts = observe.attach([machine.start("a", port=9090).name])
    assert list(parts) == ["areas", "errors"]
    assert parts["areas"].schema.layout_hash == AREAS.layout_hash  # type: ignore[union-attr]
    assert parts["errors"].schema.layout_hash == SERIES.layout_hash  # type: ignore[union-attr]
    for segment in segments:
        segment.close()


def described(name: str, plan: Plan, description: dict, layout_hash: int | None = None) -> str:
    segment = Segment.create(name, plan.bytes, layout_hash or plan.layout_hash, json.dumps(description).encode())
    segment.close()
    return name


@pytest.fixture
def name() -> Iterator[str]:
    name = f"/epp-test-{uuid.uuid4().hex[:8]}-areas"
    yield name
    Segment.attach(name, None, writable=False).unlink()


def test_another_layout_hash_is_an_error_that_names_the_segment(name: str) -> None:
    described(name, PLAN, json.loads(PLAN.description), layout_hash=0xABC)
    with pytest.raises(LayoutError, match=f"segment {name}: its layout is 0000000000000abc, this version expects"):
        observe.attach([name])


def test_another_size_of_a_part_is_an_error_that_names_it(name: str) -> None:
    description = json.loads(PLAN.description)
    description["areas"]["scalars"] = [f"gauge{n}" for n in range(50)]
    described(name, PLAN, description)
    with pytest.raises(LayoutError, match="part areas has"):
        observe.attach([name])


def test_a_description_with_other_keys_is_an_error_that_names_the_part(name: str) -> None:
    description = json.loads(PLAN.description)
    del description["areas"]["counters"]
    described(name, PLAN, description)
    with pytest.raises(LayoutError, match=r"part areas cannot be read \(.*counters"):
        observe.attach([name])


def test_a_part_of_an_unknown_kind_has_no_schema(name: str) -> None:
    description = json.loads(PLAN.description)
    description["errors"]["kind"] = "ring"
    described(name, PLAN, description)
    _, parts = observe.attach([name])
    assert parts["errors"].schema is None
    assert isinstance(parts["areas"].schema, AreaSchema)


def test_an_instance_of_another_version_is_found_and_then_refused_by_name(machine: Machine) -> None:
    other = Plan({"areas": TableSchema(("a",), 4)})
    segment = machine.start("a", port=9090, heartbeat_age_s=None, plan=other)
    described_as = described(segment.name + "2-areas", PLAN, json.loads(PLAN.description), layout_hash=1)
    machine._locks[0].record(segments=[described_as])
    found = observe.find(machine.run_dir)
    assert found.life is Life.FOREIGN
    with pytest.raises(LayoutError, match="the picker runs another version"):
        observe.attach(found.segments)
    Segment.attach(described_as, None, writable=False).unlink()


def test_attached_pages_are_read_only(machine: Machine) -> None:
    name = machine.start("a", port=9090).name
    machine._segments[0].close()
    segments, parts = observe.attach([name])
    with open("/proc/self/maps") as maps:
        rights = {line.split()[1] for line in maps if name in line}
    assert rights == {"r--s"}
    with pytest.raises(TypeError, match="read-only"):
        parts["areas"].region.words[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        parts["areas"].region.array("u8", 0, 1)[0] = 1
    assert ended_by_a_write(parts["areas"].region.bytes) == signal.SIGSEGV
    segments[0].close()


def ended_by_a_write(memory: memoryview) -> int:
    """The signal that kills a child which writes to `memory` without Python's checks."""
    address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.close(2)  # suppresses the stack trace of faulthandler
        ctypes.memset(address, 1, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status)
