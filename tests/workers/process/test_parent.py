"""Tests of the parent with real forks. The children of `tests.faults.fake_picker` only start, wait and end."""

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.demo.children import python
from tests.waiting import wait_until
from tests.zygote import started

PATIENCE_S = 20.0
LISTED = "a request has ended two workers: if it is sent again, it gets 400"


def alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


class Picker:
    """One fake picker, its log and its files."""

    def __init__(self, run_dir: Path, mode: str = "normal", *, workers: int = 2, instance: str = "", port: int = 0) -> None:
        self.run_dir = run_dir
        self.instance = instance or f"test-{uuid.uuid4().hex[:8]}"
        self.log = run_dir / f"{self.instance}-{uuid.uuid4().hex[:4]}.log"
        with self.log.open("wb") as stderr:
            arguments = [str(run_dir), self.instance, str(workers), mode, *([str(port)] if port else [])]
            self.process = started(python("tests.faults.fake_picker", *arguments), stderr.fileno())

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = []
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line[line.index("{") :]))  # a dying child's stack dump may precede it
        return [line for line in lines if line["event"] == event]

    def pids(self, child: str) -> list[int]:
        """The pids of all children with this name that became ready, in order."""
        return [line["child_pid"] for line in self.events("child ready") if line["child"] == child]

    def cause_of_end(self, pid: int) -> str:
        (ended,) = [line for line in self.events("child ended") if line["child_pid"] == pid]
        return str(ended["cause"])

    def up(self, children: int = 3) -> "Picker":
        wait_until(lambda: len(self.events("child ready")) >= children, "all children ready")
        return self

    def all_pids(self) -> list[int]:
        return [self.process.pid, *(line["child_pid"] for line in self.events("child started"))]

    def segments(self) -> list[Path]:
        names = [line["segment"] for line in self.events("shared memory")]
        assert names
        return [Path(f"/dev/shm{name}") for name in names]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def nothing_left(self) -> bool:
        files = [*self.segments(), self.run_dir / f"{self.instance}.instance"]
        return not any(path.exists() for path in files) and not any(map(alive, self.all_pids()))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Picker]]:
    started: list[Picker] = []

    def begin(*args: Any, **kwargs: Any) -> Picker:
        started.append(Picker(tmp_path, *args, **kwargs))
        return started[-1]

    yield begin
    for picker in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(picker.process.pid, signal.SIGKILL)
        picker.process.wait()
        if picker.events("shared memory"):
            for path in picker.segments():
                path.unlink(missing_ok=True)


@pytest.mark.parametrize("part", range(2))
def test_a_truncated_segment_ends_the_picker_with_a_reason_and_leaves_nothing(start: Callable[..., Picker], part: int) -> None:
    picker = start().up()
    segment = picker.segments()[part]
    os.truncate(segment, 0)
    assert picker.process.wait(PATIENCE_S) == 1
    (gave_up,) = picker.events("giving up")
    assert gave_up["reason"].startswith(f"another program has truncated the shared memory /{segment.name}")
    assert picker.nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_after_a_stop_it_exits_0_and_leaves_no_segment_no_file_and_no_process(start: Callable[..., Picker], number: int) -> None:
    picker = start().up()
    assert picker.stop(number) == 0
    assert picker.nothing_left()


def test_signals_without_a_meaning_are_ignored_by_all_processes(start: Callable[..., Picker]) -> None:
    picker = start(workers=2).up(3)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        os.kill(picker.process.pid, number)
    assert picker.stop() == 0
    assert len(picker.events("child started")) == 3
    assert picker.nothing_left()


def test_children_get_no_successor_when_the_whole_group_is_stopped(start: Callable[..., Picker]) -> None:
    picker = start(workers=4).up(5)
    os.killpg(picker.process.pid, signal.SIGTERM)
    assert picker.process.wait(PATIENCE_S) == 0
    assert len(picker.events("child started")) == 5
    assert picker.nothing_left()


def test_a_stop_while_children_start_ends_them_too(start: Callable[..., Picker]) -> None:
    picker = start(workers=4)
    wait_until(lambda: picker.events("child started"), "the first fork")
    assert picker.stop() == 0
    assert picker.nothing_left()


def test_a_stop_before_the_parent_handles_signals_takes_effect_and_leaves_nothing(start: Callable[..., Picker]) -> None:
    picker = start("slow-start")
    wait_until(lambda: len(picker.events("shared memory")) == 3, "the segments")
    assert picker.stop() == 0
    assert picker.events("child started") == []
    assert picker.nothing_left()


def test_a_refused_fork_is_retried_and_ends_no_process(start: Callable[..., Picker]) -> None:
    picker = start("refused-fork").up()
    (first,) = picker.pids("worker 0")
    os.kill(first, signal.SIGKILL)
    _, second = wait_until(lambda: (found := picker.pids("worker 0"))[1:] and found, "a successor")
    assert [line["child"] for line in picker.events("child cannot be started")] == ["worker 0"] * 2
    assert alive(second)
    assert picker.stop() == 0
    assert picker.nothing_left()


def test_a_killed_worker_gets_a_successor_within_a_second_after_it_was_reaped(start: Callable[..., Picker]) -> None:
    picker = start().up()
    (first,) = picker.pids("worker 0")
    killed_at = time.monotonic()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(picker.pids("worker 0")) == 2, "a successor")
    assert time.monotonic() - killed_at < 5  # about 0.2 s on an idle machine
    log = picker.log.read_text()
    ended = log.index('"child ended"')
    assert ended < log.index('"child started"', ended)
    assert f"signal {int(signal.SIGKILL)}" in log
    assert picker.cause_of_end(first) == "signal"
    assert picker.stop() == 0
    assert picker.nothing_left()


def test_a_killed_supervisor_gets_a_successor_while_workers_continue(start: Callable[..., Picker]) -> None:
    picker = start().up()
    os.kill(picker.pids("supervisor")[0], signal.SIGKILL)
    wait_until(lambda: len(picker.pids("supervisor")) == 2, "a successor")
    assert [len(picker.pids(f"worker {n}")) for n in (0, 1)] == [1, 1]
    assert all(alive(picker.pids(f"worker {n}")[0]) for n in (0, 1))
    assert picker.stop() == 0


def test_a_worker_that_gets_sigterm_alone_drains_and_gets_a_successor(start: Callable[..., Picker]) -> None:
    picker = start().up()
    os.kill(picker.pids("worker 1")[0], signal.SIGTERM)
    wait_until(lambda: len(picker.pids("worker 1")) == 2, "a successor")
    assert picker.stop() == 0


def test_a_hanging_worker_prints_its_stack_ends_and_gets_a_successor(start: Callable[..., Picker]) -> None:
    picker = start(workers=1).up(2)
    os.kill(picker.pids("worker 0")[0], signal.SIGUSR1)
    wait_until(lambda: len(picker.pids("worker 0")) == 2, "a successor")
    log = picker.log.read_text()
    assert "its event loop has not turned" in log
    assert "Fatal Python error: Aborted" in log
    assert "fake_picker.py" in log
    assert picker.cause_of_end(picker.pids("worker 0")[0]) == "hung"
    assert picker.stop() == 0


def test_a_stopped_worker_is_killed_although_it_cannot_abort(start: Callable[..., Picker]) -> None:
    picker = start(workers=1).up(2)
    os.kill(picker.pids("worker 0")[0], signal.SIGSTOP)
    wait_until(lambda: len(picker.pids("worker 0")) == 2, "a successor")
    assert picker.events("child killed")
    assert picker.cause_of_end(picker.pids("worker 0")[0]) == "hung"
    assert picker.stop() == 0


def test_a_request_that_ends_two_workers_is_listed_once(start: Callable[..., Picker]) -> None:
    picker = start(mode="deciding", workers=1).up(2)
    for ended in (1, 2, 3):
        assert len(picker.events(LISTED)) == max(0, ended - 2)
        os.kill(picker.pids("worker 0")[-1], signal.SIGSEGV)
        wait_until(lambda ended=ended: len(picker.pids("worker 0")) == ended + 1, "a successor")
    (first, second) = picker.events(LISTED)
    assert first["fingerprint"] == second["fingerprint"] == "0000000000005eed"


def test_a_request_that_hangs_is_a_suspect_but_not_one_that_is_active_when_the_worker_is_killed_from_outside(
    start: Callable[..., Picker],
) -> None:
    picker = start(mode="deciding", workers=1).up(2)
    ways = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1)
    for number, way in enumerate(ways, 2):
        assert not picker.events(LISTED)
        os.kill(picker.pids("worker 0")[-1], way)
        wait_until(lambda number=number: len(picker.pids("worker 0")) == number, "a successor")
    assert picker.events(LISTED)


def test_when_the_parent_is_killed_its_children_end_and_remove_the_names(start: Callable[..., Picker]) -> None:
    picker = start().up()
    picker.process.kill()
    picker.process.wait()
    wait_until(picker.nothing_left, "nothing left of a picker without parent")


def test_the_next_start_removes_what_a_killed_process_tree_left(start: Callable[..., Picker]) -> None:
    picker = start().up()
    left = picker.segments()
    os.killpg(picker.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, picker.all_pids())), "the whole tree dead")
    assert all(path.exists() for path in left)
    successor = start().up()
    assert not any(path.exists() for path in left)
    assert {line["name"] for line in successor.events("removed a file or segment of a killed instance")} > {
        f"/{path.name}" for path in left
    }
    assert successor.stop() == 0


def test_the_error_for_a_port_in_use_names_the_port_and_the_flag(start: Callable[..., Picker]) -> None:
    picker = start().up()
    info = [json.loads(line) for line in (picker.run_dir / f"{picker.instance}.instance").read_text().splitlines()]
    (port,) = [line["ports"]["grpc"] for line in info if "ports" in line]
    second = start(port=port)
    assert second.process.wait(PATIENCE_S) == 1
    log = second.log.read_text()
    assert f"port {port} (--grpc-port) is in use" in log
    assert not (picker.run_dir / f"{second.instance}.instance").exists()
    assert picker.stop() == 0


def test_a_second_picker_of_the_same_name_is_refused(start: Callable[..., Picker]) -> None:
    picker = start().up()
    second = start(instance=picker.instance)
    assert second.process.wait(PATIENCE_S) == 1
    assert f"instance {picker.instance} is running" in second.log.read_text()
    assert all(path.exists() for path in picker.segments())
    assert picker.stop() == 0


def test_a_child_that_cannot_start_ends_the_picker_and_its_report_is_logged(start: Callable[..., Picker]) -> None:
    picker = start("cannot-start")
    assert picker.process.wait(PATIENCE_S) == 1
    (halt,) = picker.events("giving up")
    assert halt["reason"].endswith("cannot start: the sky is not blue")
    assert picker.nothing_left()


def test_workers_that_keep_dying_during_their_start_end_the_picker(start: Callable[..., Picker]) -> None:
    picker = start("dies-booting", workers=1)
    assert picker.process.wait(PATIENCE_S) == 1
    assert len([line for line in picker.events("child started") if line["child"] == "worker 0"]) == 5
    assert "signal 11" in picker.events("giving up")[0]["reason"]
    assert picker.nothing_left()


def test_a_worker_that_does_not_drain_is_killed_at_the_deadline(start: Callable[..., Picker]) -> None:
    picker = start("ignores-term").up()
    assert picker.stop() == 0
    assert len(picker.events("worker did not drain in time, it gets SIGKILL")) == 2
    assert picker.nothing_left()


def test_after_a_second_signal_to_stop_it_does_not_wait_for_the_deadline(start: Callable[..., Picker]) -> None:
    picker = start("ignores-term").up()
    picker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: picker.events("stopping: workers drain"), "the first signal handled")
    assert picker.stop() == 0
    assert picker.events("second signal to stop: open streams are cut")
    assert picker.nothing_left()


def workers_of(picker: Picker) -> list[str]:
    """The names of the workers that run, according to the log."""
    running = {line["child_pid"]: line["child"] for line in picker.events("child ready")}
    for line in picker.events("child ended"):
        running.pop(line["child_pid"], None)
    return sorted(name for name in running.values() if name != "supervisor")


def test_sigttin_adds_a_worker_and_sigttou_removes_the_highest(start: Callable[..., Picker]) -> None:
    picker = start(workers=1).up(2)
    picker.process.send_signal(signal.SIGTTIN)
    wait_until(lambda: workers_of(picker) == ["worker 0", "worker 1"], "a second worker")
    picker.process.send_signal(signal.SIGTTOU)
    wait_until(lambda: workers_of(picker) == ["worker 0"], "the second worker gone")
    assert picker.events("child gets SIGTERM: it drains")[0]["child"] == "worker 1"
    assert picker.stop() == 0
    assert picker.nothing_left()


def test_at_its_limits_the_number_of_workers_stays_and_the_log_says_why(start: Callable[..., Picker]) -> None:
    picker = start(workers=1).up(2)
    picker.process.send_signal(signal.SIGTTOU)
    wait_until(lambda: "the last worker stays" in picker.log.read_text(), "a log line about SIGTTOU")
    for workers in (2, 2):
        picker.process.send_signal(signal.SIGTTIN)
        wait_until(lambda wanted=workers: len(workers_of(picker)) == wanted, "a second worker")
    wait_until(lambda: "--workers-max allows no more" in picker.log.read_text(), "a warning")
    assert picker.stop() == 0


def signal_often(picker: Picker, number: signal.Signals) -> None:
    for _ in range(100):
        picker.process.send_signal(number)
        # The kernel joins equal signals that come together.
        time.sleep(0.001)


def test_many_signals_of_both_kinds_keep_the_number_of_workers_within_its_limits(start: Callable[..., Picker]) -> None:
    picker = start(workers=2).up()
    for _ in range(100):
        picker.process.send_signal(signal.SIGTTIN)
        picker.process.send_signal(signal.SIGTTOU)
    signal_often(picker, signal.SIGTTIN)
    wait_until(lambda: len(workers_of(picker)) == 4, "as many workers as there can be")
    signal_often(picker, signal.SIGTTOU)
    wait_until(lambda: workers_of(picker) == ["worker 0"], "the last worker")
    assert not [line for line in picker.events("child ended") if not line["ending"].startswith("exit code 0")]
    assert picker.stop() == 0
    assert picker.nothing_left()


def test_a_recycled_worker_gets_a_successor_in_another_ordinal_before_it_ends(start: Callable[..., Picker]) -> None:
    picker = start(workers=2).up()
    (old,) = picker.pids("worker 0")
    os.kill(old, signal.SIGUSR2)
    wait_until(lambda: workers_of(picker) == ["worker 1", "worker 2"], "a successor in a third ordinal")
    (ended,) = [line for line in picker.events("child ended") if line["child_pid"] == old]
    assert ended["ending"] == "exit code 75 (RECYCLED)"
    assert (ended["level"], ended["cause"]) == ("info", "memory")
    log = picker.log.read_text()
    assert log.index('"worker 2"') < log.index("RECYCLED")
    assert picker.stop() == 0


def test_an_added_worker_that_cannot_start_does_not_end_the_picker(start: Callable[..., Picker]) -> None:
    picker = start(workers=1).up(2)
    (picker.run_dir / "cannot-start").touch()
    picker.process.send_signal(signal.SIGTTIN)
    wait_until(lambda: len([e for e in picker.events("child ended") if "(BOOT_FAILED)" in e["ending"]]) >= 2, "two tries")
    assert workers_of(picker) == ["worker 0"]
    (picker.run_dir / "cannot-start").unlink()
    wait_until(lambda: workers_of(picker) == ["worker 0", "worker 1"], "a third try that works")
    assert picker.stop() == 0


def test_a_hundred_signals_to_stop_at_once_cause_one_drain_or_a_hurried_one(start: Callable[..., Picker]) -> None:
    picker = start("slow-drain", workers=2).up()
    for _ in range(100):
        with contextlib.suppress(ProcessLookupError):
            picker.process.send_signal(signal.SIGTERM)
    assert picker.process.wait(PATIENCE_S) == 0
    assert len(picker.events("stopping: workers drain")) == 1
    assert len(picker.events("second signal to stop: open streams are cut")) <= 1
    assert picker.nothing_left()


def test_sighup_ends_nobody(start: Callable[..., Picker]) -> None:
    picker = start().up()
    picker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "SIGHUP" in picker.log.read_text(), "a log line about SIGHUP")
    assert all(alive(picker.pids(f"worker {n}")[0]) for n in (0, 1))
    assert picker.stop() == 0


def test_children_hold_only_their_own_descriptors_after_any_number_of_restarts(start: Callable[..., Picker]) -> None:
    picker = start().up()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{picker.pids('worker 0')[-1]}/fd"))

    first = descriptors()
    for generation in range(2, 5):
        os.kill(picker.pids("worker 0")[-1], signal.SIGKILL)
        wait_until(lambda wanted=generation: len(picker.pids("worker 0")) == wanted, "a successor")
        assert descriptors() == first
    assert picker.stop() == 0
