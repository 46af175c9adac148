"""Runs the tests of the parts below under coverage, and fails where a part is covered less than its floor.

`make coverage` prints the table; `ARGS=--html` also writes `.cache/coverage/index.html`. The figures count lines and branches of
code that runs inside pytest's process: interpreted, and without forked children. A tenth of the generated examples reaches the
same lines as all of them, and the same examples each time.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from coverage import Coverage

from tests.tools import CACHE

TESTS: Final = (
    "tests/epp/flow",
    "tests/contract/test_flow_queues.py",
    "tests/epp/protocol",
    "tests/shm",
    "tests/workers/replicas",
    "tests/workers/supervisor/endpoints/test_index_state.py",
    "tests/workers/worker/extproc",
    "tests/workers/supervisor/kv_events",
    "tests/workers/process/test_restart.py",
    "tests/workers/process/test_rollout.py",
)
SLOW: Final = (  # more than half of the time, and they reach 2 lines that the others do not
    "tests/epp/flow/test_simulation.py",
    "tests/shm/test_hammer.py",  # in processes that are not measured
    "tests/shm/test_index_capacity.py",
    "tests/workers/replicas/test_exchange.py::test_updates_that_nobody_takes_are_bounded_and_the_oldest_are_dropped",
)
FLOORS: Final = {  # per cent; raise a floor when the tests get better
    "epp/flow/*": 98.5,
    "epp/protocol/*": 94.0,
    "shm/*": 96.0,
    "workers/process/restart.py": 100.0,
    "workers/process/rollout.py": 100.0,
}
DATA: Final = CACHE / "coverage.data"
SETTINGS: Final = {"COVERAGE_FILE": str(DATA), "EPP_COMPILED": "0", "EXAMPLES": "0.1", "CI": "1"}


def main() -> int:
    """Prints the coverage of every part and returns the number of parts below their floor, or pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--html", action="store_true", help="also write .cache/coverage/index.html")
    parser.add_argument("--jobs", default="2", help="number of pytest processes (default: 2)")
    args = parser.parse_args()
    CACHE.mkdir(exist_ok=True)
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        args.jobs,
        "--cov",
        "--cov-report=",
        *(f"--deselect={name}" for name in SLOW),
        *TESTS,
    ]
    run = subprocess.run(pytest, env=os.environ | SETTINGS, check=False)
    if run.returncode:
        return run.returncode
    data = Coverage(data_file=str(DATA), config_file=str(Path(__file__).parent.parent / "pyproject.toml"))
    data.load()
    missed = 0
    for part, floor in FLOORS.items():
        print(f"\n{part}: the floor is {floor:g} %")
        missed += data.report(include=[part], show_missing=True, skip_covered=True) < floor
    if args.html:
        data.html_report(directory=str(CACHE / "coverage"))
    print(f"\n{len(FLOORS) - missed} of {len(FLOORS)} parts reach their floor")
    return missed


if __name__ == "__main__":
    sys.exit(main())
