"""Cost and speed of a picker: `python -m tests.bench.throughput [--cases short,sse] [--workers 1,2] [--targets native,echo]`.

Each run starts a target with simulated model servers and drives it with `loadtest.load.driver`, on loopback:

    native      this picker, compiled if it was built
    interpreted the same, interpreted; only if `native` is compiled
    grpcio      this picker over grpc.aio
    echo        no picker: the same transport, answering without parsing or deciding
    reference   another picker with the same flags: the binary at the path in `--reference BINARY`

With `--reference` all pickers run the configuration that is common in the field (queue 2, KV cache 2, prefix 3).

Look at ratios before times: driver, servers and picker share this machine's cores. With more workers than cores, compare the CPU per
request rather than the requests per second. `--profile FILE` writes a flame graph (SVG) of the first worker of each run.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from compiled.finder import VARIABLE, choose
from loadtest.demo.children import ChildFailed, command_name, descendants, python
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import picker_config
from loadtest.load.driver import CASES
from tests.bench.routing_zoo import FIELD_TEXT
from tests.e2e.cluster import Cluster, Picker

ROOT = Path(__file__).resolve().parents[2]
NATIVE, INTERPRETED, GRPCIO, ECHO, REFERENCE = "native", "interpreted", "grpcio", "echo", "reference"
TARGETS = (NATIVE, INTERPRETED, GRPCIO, ECHO)
IDLE = [name for name, case in CASES.items() if not case.concurrency]
PROFILE_RATE = 400  # samples per second
DRIVERS_MAX = 2
TABLE_WIDTH = 132


class Run(NamedTuple):
    """One row of the table."""

    case: str
    target: str
    workers: int
    tls: bool

    @property
    def name(self) -> str:
        return f"{self.case}, {self.target}, {self.workers} worker{'s' if self.workers > 1 else ''}{', TLS' if self.tls else ''}"


def runs(options: argparse.Namespace) -> Iterator[Run]:
    targets = [*options.targets, *([REFERENCE] if options.reference else [])]
    for case, target, workers in itertools.product(options.cases, targets, options.workers):
        if target == ECHO and (workers > 1 or case in IDLE):
            continue  # it is one process, and it scrapes no servers
        if target == INTERPRETED and not choose().compiled:
            continue  # it would be the same as `native`
        if target == REFERENCE and workers != options.workers[0]:
            continue  # it has no workers
        yield Run(case, target, workers, options.tls)


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Starts the processes of a run, drives the target, and ends them. Raises ChildFailed."""
    with Cluster() as cluster:
        if run.target == ECHO:
            (port,) = free_ports(1)
            argv = python("tests.workers.transport.echo", str(port), *(["--tls"] if run.tls else []))
            child = cluster.children.start("echo", argv)
            cluster.wait(child, lambda: "up" in child.text())
        else:
            picker = started(cluster, run, options)
            child, port = picker.child, picker.grpc
        return drive(run, options, child.pid, port)


def started(cluster: Cluster, run: Run, options: argparse.Namespace) -> Picker:
    """Starts a picker and its servers."""
    endpoints = cluster.fleet(options.endpoints or CASES[run.case].endpoints).file
    usual = picker_config(endpoints, yaml.safe_load(FIELD_TEXT)) if options.reference else ""
    if run.target == REFERENCE:
        return cluster.reference(options.reference, endpoints, usual, *([] if run.tls else ["--secure-serving=false"]))
    transport = GRPCIO if run.target == GRPCIO else NATIVE
    flags = [f"--transport={transport}", f"--secure-serving={str(run.tls).lower()}", *options.flag]
    under = ("env", f"{VARIABLE}=0") if run.target == INTERPRETED else ()
    return cluster.picker(endpoints, *flags, workers=run.workers, config_text=usual, under=under)


def drive(run: Run, options: argparse.Namespace, group: int, port: int) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "loadtest.load.driver", "--target", f"127.0.0.1:{port}", "--case", run.case, "--json"]
    command += ["--seconds", str(options.seconds), "--warm-up", str(min(1.0, options.seconds)), "--group", str(group)]
    command += ["--processes", str(max(1, min(DRIVERS_MAX, cores // 2, run.workers)))]
    command += ["--tls"] if run.tls else []
    command += ["--rate", str(options.rate)] if options.rate else []
    command += options.driver
    with profiled(run, options, group):
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds + 90, check=False)
    if not done.stdout:
        raise ChildFailed(f"the driver of '{run.name}' failed: {done.stderr[-500:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return {"run": run._asdict(), **figures}


class profiled:
    """Samples the first worker while the driver runs, if `--profile` is given. Raises ChildFailed at the end if the sampling failed."""

    def __init__(self, run: Run, options: argparse.Namespace, group: int) -> None:
        self._thread: threading.Thread | None = None
        self._problem = ""
        if not options.profile:
            return
        workers = [pid for pid in descendants(group) if "worker" in command_name(pid)] or [group]
        file = Path(options.profile)
        output = file.with_stem(f"{file.stem}-{run.case}-{run.target}") if options.several else file
        command = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(min(workers))]
        command += ["--rate", str(PROFILE_RATE), "--duration", str(max(1, int(options.seconds)))]
        command += ["--native"] if run.target == NATIVE and choose().compiled else []  # most frames are of C code then
        command += ["--output", str(output), "--format", "flamegraph"]
        self._thread = threading.Thread(target=self._record, args=(command, output))

    def _record(self, command: Sequence[str], file: Path) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self._problem = f"py-spy wrote no flame graph: {done.stderr.partition('Stack backtrace')[0].strip()}"
        else:
            tell(f"the flame graph is in {file}")

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_exception: object) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._problem:
            raise ChildFailed(self._problem)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table of the rows, with ratios to the other targets of the same case, if these were measured."""
    beside = [target for target in (ECHO, INTERPRETED, REFERENCE) if any(row["run"]["target"] == target for row in rows)]
    spent = {(row["run"]["target"], row["run"]["case"]): row["cpu_us_per_request"] for row in rows}
    columns = Table(title="requests through a picker")
    for column in ("case", "target", "workers"):
        columns.add_column(column, no_wrap=True)
    ratios = [f"÷ {target}" for target in beside]
    for column in ("CPU / request", *ratios, "requests/s", "pick p50", "pick p99", "memory", "not ok"):
        columns.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        run, pick = Run(**row["run"]), row["pick_ms"]
        compared = [spent.get((target, run.case)) for target in beside]
        bad = sum(count for name, count in row["endings"].items() if name != "ok")
        columns.add_row(
            run.case + (" (TLS)" if run.tls else ""),
            run.target,
            str(run.workers),
            f"{row['cpu_us_per_request']:,.0f} µs" if pick else f"{row['cores']:.2f} cores",
            *[f"{row['cpu_us_per_request'] / other:.2f}" if other else "" for other in compared],
            f"{row['requests_per_s']:,.0f}",
            f"{pick['p50']:.2f} ms" if pick else "",
            f"{pick['p99']:.2f} ms" if pick else "",
            f"{row['memory_mib']:.0f} MiB",
            str(bad),
        )
    return columns


def machine() -> dict[str, Any]:
    """Describes the machine, the versions and the date, which every published figure needs."""
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 1),  # of the last minute, at the end of the runs
    }


def names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cases", type=names, default=["short", "chat-8k", "long", "sse"], help=f"comma-separated: {', '.join(CASES)}")
    arguments.add_argument("--targets", type=names, default=list(TARGETS))
    arguments.add_argument("--reference", default="", metavar="BINARY", help="path of another picker, to measure beside this one")
    arguments.add_argument("--workers", type=lambda text: [int(part) for part in names(text)], default=[1])
    arguments.add_argument("--endpoints", type=int, default=0, help="simulated servers (default: the case's)")
    arguments.add_argument("--seconds", type=float, default=4.0, help="seconds of each run")
    arguments.add_argument("--rate", type=float, default=0.0, help="open loop: requests per second")
    arguments.add_argument("--tls", action="store_true")
    arguments.add_argument("--flag", action="append", default=[], help="a flag of `epp serve`, e.g. --flag=--plugin-metrics=false")
    arguments.add_argument("--driver", action="append", default=[], help="an argument of the driver, e.g. --driver=--prompt-kb=220")
    arguments.add_argument("--profile", default="", metavar="FILE", help="write a flame graph of a worker")
    arguments.add_argument("--smoke", action="store_true", help="one short run per target, to check that it works")
    arguments.add_argument("--json", action="store_true")
    return arguments


def check_options(options: argparse.Namespace, refuse: Callable[[str], object]) -> None:
    """Refuses unknown names, and applies `--smoke`."""
    unknown = {*options.cases} - CASES.keys() | {*options.targets} - {*TARGETS}
    if unknown:
        refuse(f"unknown: {', '.join(sorted(unknown))}; valid cases: {', '.join(CASES)}; valid targets: {', '.join(TARGETS)}")
    if options.smoke:
        options.cases, options.seconds = ["short"], 0.5


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Does all runs, one after the other. Returns their rows."""
    planned = list(runs(options))
    options.several = len(planned) > 1
    cores = len(os.sched_getaffinity(0))
    if max(options.workers) >= cores:
        tell(f"{cores} cores for up to {max(options.workers)} workers, the driver and the servers: compare CPU per request")
    rows = []
    for number, run in enumerate(planned, 1):
        tell(f"{number}/{len(planned)} {run.name}")
        rows.append(measure(run, options))
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows as a table on stdout."""
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table(rows))


def all_ok(rows: Sequence[dict[str, Any]]) -> bool:
    """Returns whether every request got its whole answer."""
    return all(row["endings"].keys() <= {"ok"} for row in rows)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    line = parser()
    options = line.parse_args()
    check_options(options, line.error)
    try:
        rows = measure_all(options)
    except ChildFailed as error:
        tell(f"error: {error}")
        return 2
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
    else:
        show(rows)
    return 0 if all_ok(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
