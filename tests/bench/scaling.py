"""The cost of more workers and endpoints: `make bench-scaling`, or `python -m tests.bench.scaling [--workers 1,2] [--endpoints 8,100]`.

    workers     1, 2, 4, 8 workers in front of 8 endpoints
    endpoints   8, 100, 1,000 endpoints behind one worker; the scrape interval grows so that no run scrapes more than 2,000 pages/s

CPU is reported by process: *workers* is their time per request, *supervisor* its cores (scrapes, index). Requests per second are shown
only if the machine has a core for each worker; otherwise they would measure the machine. Then `epp size` is compared with runs: the
prediction for two loads at fixed rates, the measured figures, and the ratio. A difference of more than a factor of `FACTOR` is reported,
but is not a failure: the constants come from one machine, and this one may be slower or busy.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from loadtest.demo.children import ChildFailed
from loadtest.load.driver import CASES
from loadtest.sizing.model import Load, size
from tests.bench.throughput import NATIVE, TABLE_WIDTH, Run, all_ok, machine, measure, names, tell

WORKERS, ENDPOINTS = (1, 2, 4, 8), (8, 100, 1_000)
SCRAPES_PER_S: Final = 2_000
SCRAPE_S_MIN: Final = 0.05
FACTOR: Final = 2.0
CHECKED: Final = (  # loads that two cores can carry beside driver and servers; `--smoke` runs the first
    Load(requests=60, prompt_kb=8, endpoints=40, chunks=3_000, workers=2),
    Load(requests=300, prompt_kb=220, endpoints=100, chunks=5_100, workers=2),
)
CHECKED_PACE_MS: Final = 20
SETTLED_S: Final = 6.0  # least seconds of a check: the answers of its first requests take a second
WORKER, SUPERVISOR = "epp: worker", "epp: supervisor"


def configured(options: argparse.Namespace, endpoints: int, **more: Any) -> argparse.Namespace:
    """Returns the options of one run. `more`: options that replace those of the command line."""
    interval = max(SCRAPE_S_MIN, endpoints / SCRAPES_PER_S)
    flags = [f"--refresh-metrics-interval={round(1e3 * interval)}ms", *options.flag]
    settings = {
        "endpoints": endpoints,
        "flag": flags,
        "seconds": options.seconds,
        "rate": 0.0,
        "driver": [],
        "profile": "",
        "reference": "",
    }
    return argparse.Namespace(**{**settings, **more})


def scaled(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures the rows with more workers, then those with more endpoints."""
    first = options.endpoints[0]
    planned = [(workers, first) for workers in options.workers]
    planned += [(options.workers[0], endpoints) for endpoints in options.endpoints[1:]]
    rows = []
    for number, (workers, endpoints) in enumerate(planned, 1):
        tell(f"{number}/{len(planned)} {workers} worker{'s' * (workers > 1)}, {endpoints} endpoints")
        row = measure(Run(options.case, NATIVE, workers, False), configured(options, endpoints))
        rows.append({**row, "endpoints": endpoints, "throughput_counts": cores() >= workers})
    return rows


def cores() -> int:
    return len(os.sched_getaffinity(0))


def scaling_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="more workers, more endpoints")
    for column in ("workers", "endpoints", "CPU / request", "workers / request", "supervisor", "pick p50", "memory", "requests/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        rate, spent = row["requests_per_s"], row["cores_by_process"]
        table.add_row(
            str(row["run"]["workers"]),
            f"{row['endpoints']:,}",
            f"{row['cpu_us_per_request']:,.0f} µs",
            f"{1e6 * spent.get(WORKER, 0.0) / max(rate, 1):,.0f} µs",
            f"{spent.get(SUPERVISOR, 0.0):.2f} cores",
            f"{row['pick_ms'].get('p50', 0):.2f} ms",
            f"{row['memory_mib']:.0f} MiB",
            f"{rate:,.0f}" if row["throughput_counts"] else "fewer cores",
        )
    return table


def described(load: Load) -> str:
    return f"{load.requests:g} requests/s of {load.prompt_kb:g} KB, {load.chunks:g} chunks/s, {load.endpoints} endpoints"


def check(options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Compares `epp size` with a run. Returns name -> predicted figure, measured figure, and their ratio."""
    tell(f"epp size against a run: {described(load)}")
    seconds = max(options.seconds, SETTLED_S)
    chunks = round(load.chunks / load.requests)
    driver = ["--prompt-kb", str(load.prompt_kb), "--chunks", str(chunks), "--pace-ms", str(CHECKED_PACE_MS)]
    run = configured(options, load.endpoints, rate=load.requests, seconds=seconds, driver=driver)
    row = measure(Run("short", NATIVE, load.workers, False), run)
    predicted, spent = size(load), row["cores_by_process"]
    pairs = {
        "worker cores": (predicted.worker_cores, spent.get(WORKER, 0.0)),
        "supervisor cores": (predicted.supervisor_cores, spent.get(SUPERVISOR, 0.0)),
        "memory (MiB)": (predicted.memory_mib, row["memory_mib"]),
    }
    figures = {
        name: {"predicted": round(ours, 3), "measured": measured, "ratio": round(ours / measured, 2) if measured else 0.0}
        for name, (ours, measured) in pairs.items()
    }
    return {"load": vars(load), "figures": figures, "run": row}


def fits(result: dict[str, Any]) -> bool:
    return all(1 / FACTOR <= figure["ratio"] <= FACTOR for figure in result["figures"].values())


def check_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"epp size: {described(Load(**result['load']))}", min_width=TABLE_WIDTH - 20)
    table.add_column("figure", no_wrap=True)
    for column in ("predicted", "measured", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, figure in result["figures"].items():
        table.add_row(name, *(f"{figure[column]:,.2f}" for column in ("predicted", "measured", "ratio")))
    return table


def numbers(text: str) -> list[int]:
    return [int(part) for part in names(text)]


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--workers", type=numbers, default=list(WORKERS))
    arguments.add_argument("--endpoints", type=numbers, default=list(ENDPOINTS))
    arguments.add_argument("--case", choices=[name for name, case in CASES.items() if case.concurrency], default="short")
    arguments.add_argument("--seconds", type=float, default=4.0, help="seconds of each run")
    arguments.add_argument("--flag", action="append", default=[], help="a flag of `epp serve`")
    arguments.add_argument("--only", choices=("scaling", "size"), default="", help="run only one of the two parts")
    arguments.add_argument("--smoke", action="store_true", help="one short run of each, to check that it works")
    arguments.add_argument("--json", action="store_true")
    return arguments


def main() -> int:
    line = parser()
    options = line.parse_args()
    if not options.workers or not options.endpoints or min(*options.workers, *options.endpoints) < 1:
        line.error("--workers and --endpoints must be numbers of 1 or more, separated by commas")
    if options.smoke:
        options.workers, options.endpoints, options.seconds = options.workers[:1], options.endpoints[:2], 0.5
    if options.only != "size" and max(options.workers) > cores():
        tell(f"this machine has {cores()} cores: with more workers compare CPU per request; requests/s are not shown")
    try:
        rows = [] if options.only == "size" else scaled(options)
        loads = CHECKED[: 0 if options.only == "scaling" else 1 if options.smoke else None]
        checks = [check(options, load) for load in loads]
    except ChildFailed as error:
        tell(f"error: {error}")
        return 2
    if options.json:
        json.dump({"about": machine(), "scaling": rows, "size": checks}, sys.stdout, indent=1)
    else:
        console = Console(highlight=False)
        console.width = max(console.width, TABLE_WIDTH)
        for table in ([scaling_table(rows)] if rows else []) + [check_table(result) for result in checks]:
            console.print(table)
    if not all(map(fits, checks)):
        tell(f"epp size is off by more than a factor of {FACTOR:g}: its constants are of another machine, or this machine is busy")
    return 0 if all_ok([*rows, *(result["run"] for result in checks)]) else 1


if __name__ == "__main__":
    sys.exit(main())
