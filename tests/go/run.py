"""Conformance tests of the ext_proc port with foreign programs: h2spec, and a client of grpc-go and Go's HTTP/2 frames.

    python -m tests.go.run [--json]

There are four targets: the transport alone (an echo) and a real picker with simulated servers, each with TLS and without. h2spec runs
all its cases, including the strict ones, against all targets. The cases of the client (`client/`) run against the pickers. Then the
pickers get SIGTERM while the client holds a stream. `go.mod` pins both programs with their checksums; they are built into
`.cache/go-bin`. Exit status 0: every case passed, except those in EXCEPTIONS.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from loadtest.demo.children import Child, python
from loadtest.demo.ports import free_ports
from tests.e2e.cluster import Cluster, Picker
from tests.tools import GO, provide

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BINARIES = ROOT / ".cache" / "go-bin"
PROGRAMS = ("./client", "github.com/summerwind/h2spec/cmd/h2spec")
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
H2SPEC_CASES = 146
H2SPEC_S = 60.0
CLIENT_S = 120.0
EXCEPTIONS: Mapping[str, str] = {}  # name of a case -> why it may fail; at most three

console = Console()


class Target(NamedTuple):
    """A server under test."""

    name: str
    port: int
    secure: bool
    picker: Picker | None = None


class Outcome(NamedTuple):
    """The results of one program at one target."""

    program: str
    target: str
    cases: int
    failed: list[str]
    seconds: float


def build() -> None:
    """Builds the programs. Exits with instructions if that fails."""
    provide(GO)
    BINARIES.mkdir(parents=True, exist_ok=True)
    built = subprocess.run(["go", "build", "-buildvcs=false", "-o", f"{BINARIES}{os.sep}", *PROGRAMS], cwd=HERE, check=False)
    if built.returncode:
        sys.exit(f"go build failed in {HERE}: see above (it downloads the modules in go.sum)")


def targets(cluster: Cluster) -> Iterator[Target]:
    """Starts the targets one after the other. Yields each when it is ready."""
    for secure in (False, True):
        (port,) = free_ports(1)
        flags = ("--tls",) if secure else ()
        echo: Child = cluster.children.start(f"echo {port}", python("tests.workers.transport.echo", str(port), *flags))
        cluster.wait(echo, lambda echo=echo: "up" in echo.text())  # type: ignore[misc]
        yield Target("transport", port, secure)
    fleet = cluster.fleet(2)
    for secure in (False, True):
        picker = cluster.picker(fleet.file, f"--secure-serving={secure}".lower(), workers=2)
        yield Target("picker", picker.grpc, secure, picker)


def h2spec(target: Target, report: Path) -> Outcome:
    """Runs all cases of h2spec, including the strict ones."""
    flags = ["-t", "-k"] if target.secure else []
    argv = [BINARIES / "h2spec", "-p", str(target.port), "-P", METHOD, "-S", "-j", report, *flags]
    begun = time.monotonic()
    run = subprocess.run(argv, capture_output=True, text=True, timeout=H2SPEC_S, check=False)
    seconds = time.monotonic() - begun
    if not report.exists():
        sys.exit(f"h2spec did not run against {named(target)}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [f"{c.get('package')}: {c.get('classname')}" for c in cases if len(c)]
    if len(cases) != H2SPEC_CASES:
        failed.append(f"ran {len(cases)} cases, not {H2SPEC_CASES}")
    return Outcome("h2spec", named(target), len(cases), failed, seconds)


def client(target: Target) -> Outcome:
    """Runs the cases of `client/`, and the stream that outlives the picker's SIGTERM."""
    begun = time.monotonic()
    argv = [str(BINARIES / "client"), "-addr", f"127.0.0.1:{target.port}", *(["-tls"] if target.secure else [])]
    lines = subprocess.run(argv, capture_output=True, text=True, timeout=CLIENT_S, check=False).stdout.splitlines()
    lines += leave(target, argv)
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    cases = sum(line.startswith("ok ") for line in lines) + len(failed)
    if not cases:
        failed.append("the client ran no case")
    return Outcome("grpc client", named(target), cases, failed, time.monotonic() - begun)


def leave(target: Target, argv: list[str]) -> list[str]:
    """Sends SIGTERM to the picker while the client holds a stream. Returns the client's output."""
    assert target.picker is not None
    child = target.picker.child
    with subprocess.Popen([*argv, "-drain"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout is not None
        if (first := held.stdout.readline().strip()) != "open":
            held.kill()
            return [first]
        child.signal(signal.SIGTERM)
        time.sleep(0.5)
        output, _ = held.communicate("go on\n", timeout=CLIENT_S)
    return output.splitlines()


def named(target: Target) -> str:
    return f"{target.name}, {'TLS' if target.secure else 'plaintext'}"


def table(outcomes: list[Outcome]) -> Table:
    columns = Table("program", "target", "cases", "failed", "seconds")
    for outcome in outcomes:
        cells = (outcome.program, outcome.target, str(outcome.cases), str(len(outcome.failed)), f"{outcome.seconds:.1f}")
        columns.add_row(*cells, style="red" if outcome.failed else None)
    return columns


def main() -> int:
    line = argparse.ArgumentParser(prog="tests.go.run", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = line.parse_args()
    begun = time.monotonic()
    build()
    built = time.monotonic() - begun
    outcomes = []
    with Cluster() as cluster:
        for target in targets(cluster):
            outcomes.append(h2spec(target, cluster.directory / f"h2spec-{target.port}.xml"))
            if target.picker is not None:
                outcomes.append(client(target))
                cluster.forget(target.picker.child)
    if options.json:
        print(json.dumps({"build_s": round(built, 1), "outcomes": [outcome._asdict() for outcome in outcomes]}))
    else:
        console.print(table(outcomes))
        console.print(f"built in {built:.1f} s; all in {time.monotonic() - begun:.1f} s")
    failed = [f"{o.program}, {o.target}: {name}" for o in outcomes for name in o.failed if name not in EXCEPTIONS]
    for name in failed:
        console.print(f"FAILED {name}", markup=False, soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
