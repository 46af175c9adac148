"""All figures of this tree: `make bench`, or `python -m tests.bench [--only micro|requests] [--cases short,sse] [--json]`.

    micro      the parts: parsers, hashing, index, decision, scrape, flow control, each in microseconds a call
    requests   whole requests: this picker, the same over grpc.aio, and a bare echo on the same transport (`tests.bench.throughput`)

With `--json` one object with both, the machine and the commit, to be kept and compared. Against another commit: `tests.bench.against`.
"""

import json
import subprocess
import sys

from tests.bench import micro, throughput
from tests.bench.throughput import ROOT, tell
from workers.demo.children import ChildFailed

MICRO, REQUESTS = "micro", "requests"


def commit() -> str:
    """What is measured; a tree without git says so."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> int:
    made = throughput.parser()
    made.prog, made.description = "bench", __doc__
    made.add_argument("--only", choices=(MICRO, REQUESTS), default="", help="one of the two parts")
    made.add_argument("--match", default="", metavar="TEXT", help="micro-benchmarks whose name contains it")
    options = made.parse_args()
    throughput.checked(options, made.error)
    small: dict[str, float] = {}
    large = []
    if options.only != REQUESTS:
        small = micro.measured(match=options.match, smoke=options.smoke, shown=not options.json)
        if options.match and not small:
            made.error(f"no micro-benchmark's name contains '{options.match}'")
    try:
        if options.only != MICRO:
            large = throughput.measured(options)
    except ChildFailed as error:
        tell(f"error: {error}")
        return 2
    about = {"commit": commit(), **throughput.machine()}
    if options.json:
        json.dump({"about": about, MICRO: small, REQUESTS: large}, sys.stdout, indent=1)
    else:
        if large:
            throughput.shown(large)
        print(", ".join(f"{name} {value}" for name, value in about.items()))
    return 0 if throughput.well(large) else 1


if __name__ == "__main__":
    sys.exit(main())
