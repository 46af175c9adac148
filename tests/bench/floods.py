"""What attackers on the ext_proc port cost everybody else: a real picker, good traffic beside, one attack after the other.

    python -m tests.bench.floods [--seconds 5] [--workers 2] [--rate 100] [--only NAME ...] [--smoke] [--json]

Good traffic is open loop on loopback: whole exchanges at an even rate, timed from the moment each was due, every tenth on a
connection of its own. It runs alone, then beside an attacker in a process of its own that comes again whenever it is closed.
`control` is no attack: a process that uses a CPU and sends nothing, which is what an attacker on the same machine costs anyway;
read the other rows against it. Memory is the proportional set size of all processes of the picker. `closed after` is the
longest that one connection of the attacker lived; patient attacks (slow body) are ended by time limits of 30 s, and the zero
window by what one connection may hold.
"""

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from tests.e2e.cluster import Cluster, Picker
from tests.faults.attacks import ATTACKS
from tests.faults.client import Ending, Gateway
from workers.demo.children import descendants, python

SECONDS = 5.0
RATE = 100.0
SMOKE_SECONDS = 1.0
SETTLE_S = 1.0  # memory comes back, connections linger
OWN_CONNECTION_EVERY = 10
MEMORY_EVERY_S = 0.5
ANSWER_S = 10.0
EXTRAS = ("control", "connections")
SETTLED_S = {"slow body": 32.0}  # seconds that an attack needs at least, in a full run
WIDTH = 150
ABUSE = re.compile(r'^llm_d_epp_abuse_total\{cause="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass
class Row:
    """One attack."""

    attack: str
    connections: int = 0  # that the attacker made
    closed_after_s: float | None = None
    said: str = ""  # in the last GOAWAY
    counted: dict[str, int] = field(default_factory=dict)
    before_ms: tuple[float, float] = (0.0, 0.0)  # p50, p99
    during_ms: tuple[float, float] = (0.0, 0.0)
    good: int = 0
    errors: int = 0
    memory_mib: tuple[float, float, float] = (0.0, 0.0, 0.0)  # before, peak, after

    @property
    def ratio(self) -> float:
        return self.during_ms[1] / self.before_ms[1]


class Good:
    """Good traffic for a while."""

    def __init__(self, port: int, rate: float) -> None:
        self._port, self._rate = port, rate
        self._gateway = Gateway(port)
        self.took: list[float] = []
        self.errors = 0

    async def run(self, seconds: float) -> None:
        begun, tasks = time.monotonic(), []
        for number in range(int(seconds * self._rate)):
            due = begun + number / self._rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(self._one(number, due)))
        await asyncio.gather(*tasks)
        await self._gateway.close()

    async def _one(self, number: int, due: float) -> None:
        alone = number % OWN_CONNECTION_EVERY == 0
        gateway = Gateway(self._port) if alone else self._gateway
        try:
            async with asyncio.timeout(ANSWER_S):
                ending, _ = await gateway.exchange(number)
        except TimeoutError:
            ending = Ending.LOST
        if ending is Ending.OK:
            self.took.append(time.monotonic() - due)
        else:
            self.errors += 1
        if alone:
            await gateway.close()

    def percentiles_ms(self) -> tuple[float, float]:
        """p50 and p99."""
        if len(self.took) < 2:
            return (float("nan"), float("nan"))
        cuts = statistics.quantiles(self.took, n=100)
        return (cuts[49] * 1e3, cuts[98] * 1e3)


def pss_mib(pid: int) -> float:
    """Of a process and all below it."""
    kib = 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            kib += int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return kib / 1024


async def peak_memory(pid: int) -> float:
    """The largest seen until cancelled."""
    peak = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            peak = max(peak, await asyncio.to_thread(pss_mib, pid))
            await asyncio.sleep(MEMORY_EVERY_S)
    return peak


def abuse(picker: Picker) -> dict[str, int]:
    """What the picker has counted, by cause."""
    return {cause: int(float(value)) for cause, value in ABUSE.findall(picker.page())}


async def attack(name: str, port: int, seconds: float) -> list[dict[str, Any]]:
    """Run the attacker in a process of its own; how its connections ended."""
    argv = python("tests.faults.attacks", name, "--port", str(port), "--seconds", str(seconds))
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    ends: list[dict[str, Any]] = json.loads(told)
    return ends


async def measure(name: str, picker: Picker, seconds: float, rate: float) -> Row:
    """One row: good traffic alone, then beside the attack."""
    row, pid = Row(name), picker.child.pid
    alone, beside = Good(picker.grpc, rate), Good(picker.grpc, rate)
    await alone.run(seconds)
    counted, before = abuse(picker), pss_mib(pid)
    watching = asyncio.create_task(peak_memory(pid))
    attacking = asyncio.create_task(attack(name, picker.grpc, seconds + SETTLE_S))
    await asyncio.sleep(SETTLE_S)  # the attacker needs a moment to start
    await beside.run(seconds)
    ends = await attacking
    watching.cancel()
    await asyncio.sleep(SETTLE_S)
    row.memory_mib = (before, await watching, pss_mib(pid))
    row.connections = len(ends)
    lived = [end["after"] for end in ends if end["after"] is not None]
    row.closed_after_s = max(lived, default=None)
    row.said = next((end["text"] for end in reversed(ends) if end["text"]), "")
    row.counted = {cause: n - counted.get(cause, 0) for cause, n in abuse(picker).items() if n > counted.get(cause, 0)}
    row.before_ms, row.during_ms = alone.percentiles_ms(), beside.percentiles_ms()
    row.good, row.errors = len(beside.took), alone.errors + beside.errors
    return row


def table(rows: list[Row]) -> Table:
    shown = Table(
        "attack",
        "connections",
        "closed after",
        "good p50 ms",
        "good p99 ms",
        "ratio",
        "errors",
        "PSS MiB",
        "counted as",
    )
    for row in rows:
        closed = "-" if row.closed_after_s is None else f"{row.closed_after_s:.2f} s"
        shown.add_row(
            row.attack,
            str(row.connections),
            closed,
            f"{row.before_ms[0]:.1f} → {row.during_ms[0]:.1f}",
            f"{row.before_ms[1]:.1f} → {row.during_ms[1]:.1f}",
            f"{row.ratio:.1f}",
            f"{row.errors} of {row.good + row.errors}",
            " → ".join(f"{mib:.0f}" for mib in row.memory_mib),
            ", ".join(f"{cause} {count}" for cause, count in row.counted.items()),
        )
    return shown


def main() -> int:
    line = argparse.ArgumentParser(
        prog="floods", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    line.add_argument(
        "--seconds", type=float, default=SECONDS, help="of good traffic alone, and again beside each attack"
    )
    line.add_argument("--workers", type=int, default=2)
    line.add_argument("--rate", type=float, default=RATE, help="good exchanges a second")
    line.add_argument("--only", nargs="+", choices=[*EXTRAS, *ATTACKS], help="these attacks")
    line.add_argument("--smoke", action="store_true", help="in short, to see that it works")
    line.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = line.parse_args()
    rows = []
    console = Console(stderr=given.json, width=max(WIDTH, Console().width))
    with Cluster() as cluster:
        picker = cluster.picker(cluster.fleet(2).file, workers=given.workers)
        for name in given.only or [*EXTRAS, *ATTACKS]:
            seconds = SMOKE_SECONDS if given.smoke else max(given.seconds, SETTLED_S.get(name, 0.0))
            console.print(f"{name}: {2 * seconds:.0f} s", style="dim")
            rows.append(uvloop.run(measure(name, picker, seconds, given.rate)))
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        console.print(table(rows))
    return 1 if any(row.errors for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
