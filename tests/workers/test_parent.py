"""The parent with real forks: children that do nothing but live and die (`tests.faults.fake_picker`)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 20.0
LISTED = "a request has ended two workers: whoever sends it again gets 400"


def until(happened: Callable[[], Any], what: str) -> Any:
    """What `happened` returns once it is true."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if found := happened():
            return found
        time.sleep(0.005)
    raise AssertionError(f"not within {PATIENCE_S} s: {what}")


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


class Picker:
    """One fake picker and everything it writes."""

    def __init__(
        self, run_dir: Path, mode: str = "normal", *, workers: int = 2, instance: str = "", port: int = 0
    ) -> None:
        self.run_dir = run_dir
        self.instance = instance or f"test-{uuid.uuid4().hex[:8]}"
        self.log = run_dir / f"{self.instance}-{uuid.uuid4().hex[:4]}.log"
        with self.log.open("wb") as stderr:
            command = [
                sys.executable,
                "-m",
                "tests.faults.fake_picker",
                str(run_dir),
                self.instance,
                str(workers),
                mode,
            ]
            self.process = subprocess.Popen(
                [*command, *([str(port)] if port else [])], stderr=stderr, start_new_session=True
            )

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = []
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line[line.index("{") :]))  # a dying child's stack dump may stand before it
        return [line for line in lines if line["event"] == event]

    def pids(self, child: str) -> list[int]:
        """All that were ever ready under this name, in order."""
        return [line["child_pid"] for line in self.events("child ready") if line["child"] == child]

    def up(self, children: int = 3) -> "Picker":
        until(lambda: len(self.events("child ready")) >= children, "all children ready")
        return self

    def everybody(self) -> list[int]:
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
        return not any(path.exists() for path in files) and not any(map(alive, self.everybody()))


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_exits_0_and_leaves_no_segment_no_file_and_no_process(
    start: Callable[..., Picker], number: int
) -> None:
    picker = start().up()
    assert picker.stop(number) == 0
    assert picker.nothing_left()


def test_a_whole_group_that_is_told_to_stop_is_not_respawned(start: Callable[..., Picker]) -> None:
    picker = start(workers=4).up(5)
    os.killpg(picker.process.pid, signal.SIGTERM)
    assert picker.process.wait(PATIENCE_S) == 0
    assert len(picker.events("child started")) == 5
    assert picker.nothing_left()


def test_a_stop_while_children_boot_ends_them_too(start: Callable[..., Picker]) -> None:
    picker = start(workers=4)
    until(lambda: picker.events("child started"), "the first fork")
    assert picker.stop() == 0
    assert picker.nothing_left()


def test_a_stop_before_the_parent_listens_is_heard_and_leaves_nothing(start: Callable[..., Picker]) -> None:
    picker = start("slow-start")
    until(lambda: len(picker.events("shared memory")) == 3, "the segments")
    assert picker.stop() == 0
    assert picker.events("child started") == []
    assert picker.nothing_left()


def test_a_refused_fork_is_tried_again_and_ends_nobody(start: Callable[..., Picker]) -> None:
    picker = start("refused-fork").up()
    (first,) = picker.pids("worker 0")
    os.kill(first, signal.SIGKILL)
    _, second = until(lambda: (found := picker.pids("worker 0"))[1:] and found, "a successor")
    assert [line["child"] for line in picker.events("child cannot be started")] == ["worker 0"] * 2
    assert alive(second)
    assert picker.stop() == 0
    assert picker.nothing_left()


def test_a_killed_worker_is_followed_within_a_second_and_only_after_it_was_reaped(start: Callable[..., Picker]) -> None:
    picker = start().up()
    (first,) = picker.pids("worker 0")
    killed_at = time.monotonic()
    os.kill(first, signal.SIGKILL)
    until(lambda: len(picker.pids("worker 0")) == 2, "a successor")
    assert time.monotonic() - killed_at < 5  # about 0.2 s on an idle machine
    log = picker.log.read_text()
    ended = log.index('"child ended"')
    assert ended < log.index('"child started"', ended)
    assert f"signal {int(signal.SIGKILL)}" in log
    assert picker.stop() == 0
    assert picker.nothing_left()


def test_a_killed_supervisor_is_followed_while_workers_live_on(start: Callable[..., Picker]) -> None:
    picker = start().up()
    os.kill(picker.pids("supervisor")[0], signal.SIGKILL)
    until(lambda: len(picker.pids("supervisor")) == 2, "a successor")
    assert [len(picker.pids(f"worker {n}")) for n in (0, 1)] == [1, 1]
    assert all(alive(picker.pids(f"worker {n}")[0]) for n in (0, 1))
    assert picker.stop() == 0


def test_a_worker_that_is_told_to_stop_alone_drains_and_is_followed(start: Callable[..., Picker]) -> None:
    picker = start().up()
    os.kill(picker.pids("worker 1")[0], signal.SIGTERM)
    until(lambda: len(picker.pids("worker 1")) == 2, "a successor")
    assert picker.stop() == 0


def test_a_hanging_worker_prints_its_stack_dies_and_is_followed(start: Callable[..., Picker]) -> None:
    picker = start(workers=1).up(2)
    os.kill(picker.pids("worker 0")[0], signal.SIGUSR1)
    until(lambda: len(picker.pids("worker 0")) == 2, "a successor")
    log = picker.log.read_text()
    assert "its loop has not turned" in log
    assert "Fatal Python error: Aborted" in log
    assert "fake_picker.py" in log
    assert picker.stop() == 0


def test_a_stopped_worker_is_killed_although_it_cannot_abort(start: Callable[..., Picker]) -> None:
    picker = start(workers=1).up(2)
    os.kill(picker.pids("worker 0")[0], signal.SIGSTOP)
    until(lambda: len(picker.pids("worker 0")) == 2, "a successor")
    assert picker.events("child killed")
    assert picker.stop() == 0


def test_a_request_that_ends_two_workers_is_listed_once(start: Callable[..., Picker]) -> None:
    picker = start(mode="deciding", workers=1).up(2)
    for ended in (1, 2, 3):
        assert len(picker.events(LISTED)) == max(0, ended - 2)
        os.kill(picker.pids("worker 0")[-1], signal.SIGSEGV)
        until(lambda ended=ended: len(picker.pids("worker 0")) == ended + 1, "a successor")
    (first, second) = picker.events(LISTED)
    assert first["fingerprint"] == second["fingerprint"] == "0000000000005eed"


def test_a_request_that_hangs_is_a_suspect_and_one_at_hand_when_somebody_kills_the_worker_is_not(
    start: Callable[..., Picker],
) -> None:
    picker = start(mode="deciding", workers=1).up(2)
    ways = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1)
    for number, way in enumerate(ways, 2):
        assert not picker.events(LISTED)
        os.kill(picker.pids("worker 0")[-1], way)
        until(lambda number=number: len(picker.pids("worker 0")) == number, "a successor")
    assert picker.events(LISTED)


def test_when_the_parent_is_killed_its_children_end_and_remove_the_names(start: Callable[..., Picker]) -> None:
    picker = start().up()
    picker.process.kill()
    picker.process.wait()
    until(picker.nothing_left, "nothing left of a picker without parent")


def test_what_a_killed_tree_leaves_is_removed_at_the_next_start(start: Callable[..., Picker]) -> None:
    picker = start().up()
    left = picker.segments()
    os.killpg(picker.process.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, picker.everybody())), "the whole tree dead")
    assert all(path.exists() for path in left)
    successor = start().up()
    assert not any(path.exists() for path in left)
    assert {line["name"] for line in successor.events("removed what a killed instance had left")} > {
        f"/{path.name}" for path in left
    }
    assert successor.stop() == 0


def test_a_second_picker_on_a_port_is_refused_with_its_number_and_flag(start: Callable[..., Picker]) -> None:
    picker = start().up()
    info = [json.loads(line) for line in (picker.run_dir / f"{picker.instance}.instance").read_text().splitlines()]
    (port,) = [line["ports"]["grpc"] for line in info if "ports" in line]
    second = start(port=port)
    assert second.process.wait(PATIENCE_S) == 1
    said = second.log.read_text()
    assert f"port {port} (--grpc-port) is in use" in said
    assert not (picker.run_dir / f"{second.instance}.instance").exists()
    assert picker.stop() == 0


def test_a_second_picker_of_the_same_name_is_refused(start: Callable[..., Picker]) -> None:
    picker = start().up()
    second = start(instance=picker.instance)
    assert second.process.wait(PATIENCE_S) == 1
    assert f"instance {picker.instance} is running" in second.log.read_text()
    assert all(path.exists() for path in picker.segments())
    assert picker.stop() == 0


def test_a_child_that_cannot_start_ends_the_picker_with_its_words(start: Callable[..., Picker]) -> None:
    picker = start("cannot-start")
    assert picker.process.wait(PATIENCE_S) == 1
    (halt,) = picker.events("giving up")
    assert halt["reason"].endswith("cannot start: the sky is not blue")
    assert picker.nothing_left()


def test_workers_that_die_booting_end_the_picker_after_some_tries(start: Callable[..., Picker]) -> None:
    picker = start("dies-booting", workers=1)
    assert picker.process.wait(PATIENCE_S) == 1
    assert len([line for line in picker.events("child started") if line["child"] == "worker 0"]) == 5
    assert "signal 11" in picker.events("giving up")[0]["reason"]
    assert picker.nothing_left()


def test_a_worker_that_does_not_drain_is_killed_at_the_deadline(start: Callable[..., Picker]) -> None:
    picker = start("ignores-term").up()
    assert picker.stop() == 0
    assert len(picker.events("worker did not drain in time, it is killed")) == 2
    assert picker.nothing_left()


def test_told_twice_it_does_not_wait_for_the_deadline(start: Callable[..., Picker]) -> None:
    picker = start("ignores-term").up()
    picker.process.send_signal(signal.SIGTERM)
    until(lambda: picker.events("stopping: workers drain"), "the first signal heard")
    assert picker.stop() == 0
    assert picker.events("told to stop again: open streams are cut")
    assert picker.nothing_left()


def workers_of(picker: Picker) -> list[str]:
    """Names of the workers that run, by the log."""
    running = {line["child_pid"]: line["child"] for line in picker.events("child ready")}
    for line in picker.events("child ended"):
        running.pop(line["child_pid"], None)
    return sorted(name for name in running.values() if name != "supervisor")


def test_sigttin_adds_a_worker_and_sigttou_takes_the_highest_away(start: Callable[..., Picker]) -> None:
    picker = start(workers=1).up(2)
    picker.process.send_signal(signal.SIGTTIN)
    until(lambda: workers_of(picker) == ["worker 0", "worker 1"], "a second worker")
    picker.process.send_signal(signal.SIGTTOU)
    until(lambda: workers_of(picker) == ["worker 0"], "the second worker gone")
    assert picker.events("child told to leave")[0]["child"] == "worker 1"
    assert picker.stop() == 0
    assert picker.nothing_left()


def test_at_its_limits_the_number_of_workers_stays_and_the_log_says_why(start: Callable[..., Picker]) -> None:
    picker = start(workers=1).up(2)
    picker.process.send_signal(signal.SIGTTOU)
    until(lambda: "the last worker stays" in picker.log.read_text(), "an answer to SIGTTOU")
    for workers in (2, 2):
        picker.process.send_signal(signal.SIGTTIN)
        until(lambda wanted=workers: len(workers_of(picker)) == wanted, "a second worker")
    until(lambda: "there are 2 workers already, and --workers-max allows no more" in picker.log.read_text(), "a no")
    assert picker.stop() == 0


def test_a_storm_of_both_signals_ends_with_a_number_between_the_limits_and_everybody_stops(
    start: Callable[..., Picker],
) -> None:
    picker = start(workers=2).up()
    for _ in range(100):
        picker.process.send_signal(signal.SIGTTIN)
        picker.process.send_signal(signal.SIGTTOU)
    for _ in range(100):
        picker.process.send_signal(signal.SIGTTIN)
        time.sleep(0.001)
    until(lambda: len(workers_of(picker)) == 4, "as many workers as there can be")
    for _ in range(100):
        picker.process.send_signal(signal.SIGTTOU)
        time.sleep(0.001)
    until(lambda: workers_of(picker) == ["worker 0"], "the last worker")
    assert not [line for line in picker.events("child ended") if not line["ending"].startswith("exit code 0")]
    assert picker.stop() == 0
    assert picker.nothing_left()


def test_a_recycled_worker_is_followed_in_another_seat_before_it_ends(start: Callable[..., Picker]) -> None:
    picker = start(workers=2).up()
    (old,) = picker.pids("worker 0")
    os.kill(old, signal.SIGUSR2)
    until(lambda: workers_of(picker) == ["worker 1", "worker 2"], "a successor in a third seat")
    (ended,) = [line for line in picker.events("child ended") if line["child_pid"] == old]
    assert ended["ending"] == "exit code 75 (RECYCLED)"
    assert ended["level"] == "info"
    log = picker.log.read_text()
    assert log.index('"worker 2"') < log.index("RECYCLED")
    assert picker.stop() == 0


def test_an_added_worker_that_cannot_start_does_not_end_the_picker(start: Callable[..., Picker]) -> None:
    picker = start(workers=1).up(2)
    (picker.run_dir / "cannot-start").touch()
    picker.process.send_signal(signal.SIGTTIN)
    until(lambda: len([e for e in picker.events("child ended") if "(BOOT_FAILED)" in e["ending"]]) >= 2, "two tries")
    assert workers_of(picker) == ["worker 0"]
    (picker.run_dir / "cannot-start").unlink()
    until(lambda: workers_of(picker) == ["worker 0", "worker 1"], "a third try that works")
    assert picker.stop() == 0


def test_a_hundred_stops_in_a_moment_are_one_drain_or_a_hurried_one(start: Callable[..., Picker]) -> None:
    picker = start("slow-drain", workers=2).up()
    for _ in range(100):
        with contextlib.suppress(ProcessLookupError):
            picker.process.send_signal(signal.SIGTERM)
    assert picker.process.wait(PATIENCE_S) == 0
    assert len(picker.events("stopping: workers drain")) == 1
    assert len(picker.events("told to stop again: open streams are cut")) <= 1
    assert picker.nothing_left()


def test_sighup_says_that_it_does_nothing_and_the_picker_goes_on(start: Callable[..., Picker]) -> None:
    picker = start().up()
    picker.process.send_signal(signal.SIGHUP)
    until(lambda: "SIGHUP is reserved" in picker.log.read_text(), "an answer to SIGHUP")
    assert all(alive(picker.pids(f"worker {n}")[0]) for n in (0, 1))
    assert picker.stop() == 0


def test_children_hold_only_their_own_descriptors_however_often_they_are_followed(start: Callable[..., Picker]) -> None:
    picker = start().up()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{picker.pids('worker 0')[-1]}/fd"))

    first = descriptors()
    for generation in range(2, 5):
        os.kill(picker.pids("worker 0")[-1], signal.SIGKILL)
        until(lambda wanted=generation: len(picker.pids("worker 0")) == wanted, "a successor")
        assert descriptors() == first
    assert picker.stop() == 0
