"""Tests with real processes on shared memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import number

READS = number(500_000)
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(60 + READS // 20_000)
@pytest.mark.parametrize("structure", ["table", "documents", "index"])
def test_no_read_is_torn_stale_or_false_while_another_process_writes(structure: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.shm.hammer", "--only", structure, "--reads", str(READS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.removeprefix(structure))
    assert result["reads"] >= READS - 1
    assert result.get("writes", result.get("evictions")) > 0
