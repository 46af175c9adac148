"""All benchmarks of this tree: `make bench`, or `python -m tests.bench [--only micro|requests] [--cases short,sse] [--json]`.

    micro      the parts: parsers, hashing, index, decision, scrape, flow control; microseconds per call, compiled and interpreted
    requests   whole requests: this picker, compiled and interpreted, this picker over grpc.aio, and a bare echo on the same
               transport (`tests.bench.throughput`)

With `--json` the output is one object with both parts, the machine and the commit. To compare with another commit: `tests.bench.against`.
"""

import json
import subprocess
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from compiled.finder import VARIABLE, choose
from loadtest.demo.children import ChildFailed, environment
from tests.bench import micro, throughput
from tests.bench.against import MICRO_S_MAX
from tests.bench.throughput import ROOT, tell

MICRO, REQUESTS = "micro", "requests"


def commit() -> str:
    """Returns the commit of this tree, or "unknown" without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def interpreted(match: str, *, smoke: bool) -> dict[str, float]:
    """Runs the micro-benchmarks in a process that runs interpreted. Returns {} if this process runs interpreted. Raises ChildFailed."""
    if not choose().compiled:
        return {}
    tell("the micro-benchmarks, interpreted")
    command = [sys.executable, "-P", "-m", "tests.bench.micro", "--json", *(["--smoke"] if smoke else [])]
    command += ["--match", match] if match else []
    done = subprocess.run(command, env={**environment(), VARIABLE: "0"}, capture_output=True, text=True, timeout=MICRO_S_MAX, check=False)
    if done.returncode:
        raise ChildFailed(f"the micro-benchmarks failed when interpreted: {done.stderr.strip()[-500:]}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def side_by_side(compiled: Mapping[str, float], plain: Mapping[str, float]) -> Table:
    """Returns a table of the micro-benchmarks in both modes, with the ratio of the compiled to the interpreted time."""
    table = Table(title="parts, microseconds per call")
    table.add_column("part")
    for column in ("compiled", "interpreted", "ratio"):
        table.add_column(column, justify="right")
    for name, value in compiled.items():
        table.add_row(name, f"{value:,.2f}", f"{plain[name]:,.2f}", f"{value / plain[name]:.2f}")
    return table


def main() -> int:
    arguments = throughput.parser()
    arguments.prog, arguments.description = "bench", __doc__
    arguments.add_argument("--only", choices=(MICRO, REQUESTS), default="", help="one of the two parts")
    arguments.add_argument("--match", default="", metavar="TEXT", help="only micro-benchmarks with this text in their name")
    options = arguments.parse_args()
    throughput.check_options(options, arguments.error)
    small: dict[str, float] = {}
    large = []
    if options.only != REQUESTS:
        small = micro.measure_all(match=options.match, smoke=options.smoke, show=not options.json)
        if options.match and not small:
            arguments.error(f"no micro-benchmark has '{options.match}' in its name")
    plain: dict[str, float] = {}
    try:
        if small:
            plain = interpreted(options.match, smoke=options.smoke)
        if options.only != MICRO:
            large = throughput.measure_all(options)
    except ChildFailed as error:
        tell(f"error: {error}")
        return 2
    about = {"commit": commit(), "code": str(choose()), **throughput.machine()}
    if options.json:
        json.dump({"about": about, MICRO: small, f"{MICRO}_interpreted": plain, REQUESTS: large}, sys.stdout, indent=1)
    else:
        if plain:
            Console(width=throughput.TABLE_WIDTH, highlight=False).print(side_by_side(small, plain))
        if large:
            throughput.show(large)
        print(", ".join(f"{name} {value}" for name, value in about.items()))
    return 0 if throughput.all_ok(large) else 1


if __name__ == "__main__":
    sys.exit(main())
