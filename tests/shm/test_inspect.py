"""Tests of the list of segments."""

import os
import subprocess
import sys

from shm.segment import SHM_DIRECTORY, Segment


def test_the_segments_of_pickers_are_listed_by_name() -> None:
    segment = Segment.create(f"/epp-test-inspect-{os.getpid()}", 64, 0xABC)
    foreign = f"{SHM_DIRECTORY}/epp-test-foreign-{os.getpid()}"
    with open(foreign, "wb") as file:
        file.write(b"x" * 64)
    command = [sys.executable, "-m", "shm.inspect", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    segment.unlink()
    os.unlink(foreign)
    assert segment.name in done.stdout.split("\n") and "foreign" not in done.stdout
