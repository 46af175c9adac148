"""What several pools in one picker cost: `make bench-pools`, or `python -m tests.bench.pools [--only idle,flood] [--smoke]`.

    idle      pools of four endpoints without requests: cores, memory, seconds to readiness; and what one more pool costs
    load      200 requests/s, spread over all pools, against one pool with all endpoints: CPU per request
    flood     one pool gets far more than its servers take: p99 of the picks of the others, against the same without the flood
    many      pools of two endpoints each

With `--reference BINARY`, four of another picker run idle with four endpoints each, and the figures are multiplied to the number of pools.
Compare ratios rather than times: servers, driver and picker share this machine's cores. A row that misses its goal is marked, but is no
failure.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from loadtest.load.process_group import cpu_seconds, memory_mib
from tests.bench.routing_zoo import FIELD_TEXT
from tests.bench.throughput import names, tell
from tests.e2e.cluster import Cluster, Picker

PARTS: Final = ("idle", "load", "flood", "many")
EACH: Final = 4
SETTLED_S: Final = 3.0
RATE: Final = 200
FLOOD: Final = 64  # streams of the flood at once


class Figure(NamedTuple):
    """One row of the table. `goal`: the most that the value should be."""

    what: str
    value: float
    unit: str
    goal: float


def pools_text(pools: int, addresses: Sequence[str], each: int) -> str:
    """Returns a pools file. Pool `i` has the authority `pool-i` and the next `each` of the addresses, in turn."""
    lines = ["pools:"]
    for pool in range(pools):
        mine = [addresses[(pool * each + at) % len(addresses)] for at in range(each)]
        lines.append(f"- {{name: pool-{pool}, authorities: [pool-{pool}], endpoints: {json.dumps(mine)}}}")
    return "\n".join(lines)


class Site:
    """A picker of some pools, with its servers."""

    def __init__(self, cluster: Cluster, pools: int, servers: int, each: int, *flags: str) -> None:
        fleet = cluster.fleet(servers, *flags)
        text = pools_text(pools, [f"{host}:{port}" for host, port in fleet.addresses], each)
        began = time.monotonic()
        self.picker: Picker = cluster.picker(fleet.file, workers=1, pools_text=text, ready=False)
        cluster.wait(self.picker.child, self.picker.ready)  # without the metrics page, which has 3 MB for a thousand pools
        self.ready_s = time.monotonic() - began

    @property
    def group(self) -> int:
        return self.picker.child.pid

    def idle(self, seconds: float) -> tuple[float, float]:
        """Returns cores and MiB while nothing happens."""
        time.sleep(SETTLED_S)
        before, began = sum(cpu_seconds(self.group).values()), time.monotonic()
        time.sleep(seconds)
        spent = sum(cpu_seconds(self.group).values()) - before
        return spent / (time.monotonic() - began), memory_mib(self.group)

    def drive(self, connections: int, seconds: float, *more: str, name: str = "pool-{}", first: int = 0) -> dict[str, Any]:
        """Drives the picker. `name`: the authority of the connections; {} stands for the number of each, which begin with `first`."""
        target = ["--target", f"127.0.0.1:{self.picker.grpc}", "--group", str(self.group), "--json", "--seconds", str(seconds)]
        pooled = ["--connections", str(connections), "--authority", name, "--first-authority", str(first)]
        command = [sys.executable, "-m", "loadtest.load.driver", *target, *pooled, *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 90, check=False)
        if not done.stdout:
            raise SystemExit(f"the driver failed: {done.stderr[-500:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def idle(options: argparse.Namespace) -> list[Figure]:
    found = []
    for pools in (1, options.pools):
        with Cluster() as cluster:
            site = Site(cluster, pools, options.pools * EACH, EACH)
            found.append((*site.idle(options.seconds), site.ready_s))
    (cores, mib, _), (all_cores, all_mib, ready_s) = found
    more = max(1, options.pools - 1)
    name = f"{options.pools} pools x {EACH} endpoints, idle"
    return [
        Figure(f"{name}: cores", all_cores, "", 0.06),
        Figure(f"{name}: memory", all_mib, "MiB", 200),
        Figure(f"{name}: start to readiness", ready_s, "s", 5),
        Figure("one more pool, idle: CPU in a second", 1e3 * (all_cores - cores) / more, "ms", 0.2),
        Figure("one more pool, idle: memory", (all_mib - mib) / more, "MiB", 0.4),
    ]


def load(options: argparse.Namespace) -> list[Figure]:
    spent = []
    for pools, each in ((1, options.pools * EACH), (options.pools, EACH)):
        with Cluster() as cluster:
            site = Site(cluster, pools, options.pools * EACH, each)
            name = "pool-{}" if pools > 1 else "pool-0"
            site.drive(options.pools, SETTLED_S, "--rate", str(RATE), name=name)  # each pool is loaded at its first request
            spent.append(site.drive(options.pools, options.seconds, "--rate", str(RATE), name=name))
            tell(f"{pools} pools: {json.dumps(spent[-1])}")
    one, every = (each["cpu_us_per_request"] for each in spent)
    return [Figure(f"{options.pools} pools, {RATE} requests/s: CPU per request, against one pool", every / one, "x", 1.15)]


def flood(options: argparse.Namespace) -> list[Figure]:
    with Cluster() as cluster:
        site = Site(cluster, options.pools, options.pools * EACH, EACH)
        others = options.pools - 1
        site.drive(options.pools, 4.0, "--rate", str(RATE))
        calm = site.drive(others, options.seconds, "--rate", str(RATE), first=1)
        flooding = threading.Thread(target=site.drive, args=(1, options.seconds + 2.0, "--concurrency", str(FLOOD)))
        flooding.start()
        time.sleep(1.0)
        flooded = site.drive(others, options.seconds, "--rate", str(RATE), first=1)
        flooding.join()
    tell(f"calm: {calm['pick_ms']}; flooded: {flooded['pick_ms']}, {flooded['endings']}")
    refused = sum(count for name, count in flooded["endings"].items() if name != "ok")
    return [
        Figure(
            f"one pool of {options.pools} is flooded: p99 of the others, against calm",
            flooded["pick_ms"]["p99"] / calm["pick_ms"]["p99"],
            "x",
            2,
        ),
        Figure("the same: requests of the others that are refused", refused, "", 0),
    ]


def many(options: argparse.Namespace) -> list[Figure]:
    with Cluster() as cluster:
        site = Site(cluster, options.many, 8, 2)
        cores, mib = site.idle(options.seconds)
    name = f"{options.many} pools x 2 endpoints"
    return [
        Figure(f"{name}: start to readiness", site.ready_s, "s", 30),
        Figure(f"{name}: memory", mib, "MiB", 600),
        Figure(f"{name}, idle: cores", cores, "", 1),
    ]


def reference(options: argparse.Namespace) -> list[Figure]:
    """Measures four pickers of another kind. Their figures count for as many as there are pools."""
    count = 4
    with Cluster() as cluster:
        pickers = [
            cluster.reference(options.reference, cluster.fleet(EACH).file, FIELD_TEXT, "--secure-serving=false") for _ in range(count)
        ]
        time.sleep(SETTLED_S)
        groups = [picker.child.pid for picker in pickers]
        before, began = sum(sum(cpu_seconds(group).values()) for group in groups), time.monotonic()
        time.sleep(options.seconds)
        cores = (sum(sum(cpu_seconds(group).values()) for group in groups) - before) / (time.monotonic() - began)
        mib = sum(memory_mib(group) for group in groups)
    times = options.pools / count
    name = f"{options.pools} pickers of the reference"
    return [Figure(f"{name}, idle: cores", times * cores, "", 0), Figure(f"{name}, idle: memory", times * mib, "MiB", 0)]


def table(figures: Sequence[Figure]) -> Table:
    """Returns the figures with their goals; `*` marks those that are missed."""
    shown = Table(title="several pools in one picker")
    for column, justify in (("", "left"), ("measured", "right"), ("goal", "right")):
        shown.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for what, value, unit, goal in figures:
        missed = "" if value <= goal or what.startswith("reference") else " *"
        shown.add_row(what, f"{value:.3g} {unit}{missed}", f"{goal:g} {unit}" if goal or not unit else "")
    return shown


MEASURES: Final[dict[str, Callable[[argparse.Namespace], list[Figure]]]] = {"idle": idle, "load": load, "flood": flood, "many": many}


def main() -> int:
    arguments = argparse.ArgumentParser(prog="pools", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", type=names, default=list(PARTS), help=f"comma-separated: {', '.join(PARTS)}")
    arguments.add_argument("--pools", type=int, default=100)
    arguments.add_argument("--many", type=int, default=1000, help="pools of the last part")
    arguments.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement")
    arguments.add_argument("--reference", default="", metavar="BINARY", help="path of another picker, to measure beside this one")
    arguments.add_argument("--smoke", action="store_true", help="few pools, short, to check that it works")
    options = arguments.parse_args()
    if unknown := {*options.only} - {*PARTS}:
        arguments.error(f"unknown: {', '.join(sorted(unknown))}; valid: {', '.join(PARTS)}")
    if options.smoke:
        options.pools, options.many, options.seconds = 5, 20, 1.0
    figures: list[Figure] = []
    for part in options.only:
        tell(part)
        figures += MEASURES[part](options)
    if options.reference:
        figures += reference(options)
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    console.print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
