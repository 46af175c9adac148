"""CPU time and memory of a process group, as the kernel reports them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from loadtest.load.process_group import cpu_seconds, memory_mib

CODE = """
import os, time
open("/proc/self/comm", "w").write("busy 3")
child = os.fork()
if not child:
    open("/proc/self/comm", "w").write("busy 4")
while time.process_time() < 0.15:
    pass
if child:
    print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def group() -> Iterator[int]:
    """A group of two processes that have used CPU time."""
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process.pid
        os.killpg(process.pid, signal.SIGKILL)


def test_time_is_summed_by_name_without_numbers_and_memory_over_the_group(group: int) -> None:
    seconds = cpu_seconds(group)
    assert set(seconds) == {"busy"}
    assert seconds["busy"] >= 0.15
    assert memory_mib(group) > 1


def test_a_group_without_processes_costs_nothing() -> None:
    assert cpu_seconds(999_999_999) == {}
    assert memory_mib(999_999_999) == 0
