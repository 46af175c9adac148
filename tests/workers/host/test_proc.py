"""What a process uses, read from /proc and from files that a test writes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workers.host.proc import PAGE, TICKS_PER_S, data_bytes, process_use


def stat(directory: Path, text: str) -> None:
    (directory / "7").mkdir()
    (directory / "7" / "stat").write_text(text)


def test_memory_and_cpu_are_read_past_a_name_with_blanks_and_brackets(tmp_path: Path) -> None:
    fields = ["S"] + ["0"] * 30
    fields[11], fields[12], fields[21] = "300", "150", "42"
    stat(tmp_path, f"7 (epp: (worker) 0) {' '.join(fields)}\n")
    assert process_use(7, tmp_path) == (42 * PAGE, 450 / TICKS_PER_S)


@pytest.mark.parametrize("text", ["", "7 (a) S 1", "7 (a) S " + "x " * 30, "7 (a) Z " + "1 " * 30])
def test_a_file_without_figures_and_a_process_that_has_ended_give_none(tmp_path: Path, text: str) -> None:
    stat(tmp_path, text)
    assert process_use(7, tmp_path) is None


def test_a_process_that_is_not_there_gives_none(tmp_path: Path) -> None:
    assert process_use(7, tmp_path) is None


def test_this_process_has_the_cpu_time_that_the_kernel_accounts_to_it() -> None:
    before = time.process_time()
    use = process_use(os.getpid())
    assert use is not None and use.resident_bytes > 1 << 20
    assert before - 2 / TICKS_PER_S <= use.cpu_s <= time.process_time() + 2 / TICKS_PER_S


def test_a_child_that_was_not_reaped_yet_gives_none() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_use(child.pid) is None
    finally:
        child.wait()


def test_the_data_of_a_process_is_read_in_bytes_and_0_if_it_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    assert data_bytes(tmp_path) == 0
    (tmp_path / "self" / "status").write_text("Name:\ta\nVmData:\t    2048 kB\nThreads:\t1\n")
    assert data_bytes(tmp_path) == 2 << 20
    assert data_bytes() > 1 << 20
