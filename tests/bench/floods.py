"""What attacks on the ext_proc port cost all other clients: a real picker, good traffic beside it, one attack after the other.

    python -m tests.bench.floods [--seconds 5] [--workers 2] [--rate 100] [--only NAME ...] [--smoke] [--json]

Good traffic is an open loop on loopback: requests of 1, 60 and 400 KB and streamed answers at an even rate, each timed from its scheduled
start, every tenth on a new connection. It runs alone, then beside an attacker in a separate process that reconnects whenever the picker
closes its connection. `early aborts` are 400 a second on the one connection that good traffic uses. `connections` and
`TLS handshakes` come from another address than good traffic; the latter go to a picker with TLS. `pages:` attacks go to the metrics
port; during each attack /readyz is asked four times a second from another address (`probe` is its longest answer), and `scrapes missed`
is the share of scrapes that were skipped or failed; beside `endpoints file`, whose endpoints answer nothing, of those skipped.
`bad requests` are answered with 400 by every server, and must eject none. Beside a `black hole`, good traffic goes to four servers,
of which one fails requests at once: `percent` is its share from 3 s on, and its answers are no errors. For `usage lies`, two tenants keep
four servers busy, and one server reports a million tokens for each answer to the first tenant: good requests are those of this tenant,
and `percent` is its share of all answers, divided by its share without lies. The `label flood` makes up 3,000 models and fairness ids that
are served: then follow size and median time of a metrics page, and how many series it has of the good requests. For the `prefix flush`,
servers refuse 60 bodies of 1.4 MiB: `percent` is how many of 50 conversations, begun before it, continue at the same server after it.
`control` is not an attack: its process uses a CPU and sends nothing. Any attacker on the same machine costs at least that, so compare
the other rows with it. Memory is the proportional set size of all processes of the picker. `closed after` is the longest lifetime of
one connection of the attacker. The last two columns say how metrics and log name it: refused requests are counted, and no log has them.
`CPU` is how many cores all processes of the picker take, alone and beside the attack. On a busy machine it says more than times do:
whatever else the attack takes of the machine is the attacker's own.
Time limits of 30 s end slow attacks (slow body); the limit of unread bytes per connection ends the zero window.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from loadtest.demo.children import descendants, python
from loadtest.demo.stack import picker_config
from tests.bench.flood_traffic import Good, Tenants
from tests.bench.overload_stack import FAIR, config, flow_control
from tests.e2e.cluster import Cluster, Picker
from tests.faults.attacks import ATTACKS, LIMITED, SECURE, USAGE_LIES
from tests.faults.failing_servers import BLACK_HOLES, REQUEST_FLOODS, BlackHole, Conversations
from tests.faults.page_attacks import FILE_ATTACKS, PAGE_ATTACKS
from tests.tls_client import client_context

SECONDS = 5.0
RATE = 100.0
SMOKE_SECONDS = 1.0
SETTLE_S = 1.0  # memory is freed, connections linger
MEMORY_EVERY_S = 0.5
LABEL_FLOOD, PREFIX_FLUSH = "label flood", "prefix flush"
EXTRAS = ("control", "connections", "early aborts", *REQUEST_FLOODS, *BLACK_HOLES, USAGE_LIES)
NAMES = (*EXTRAS, *ATTACKS, *SECURE, *PAGE_ATTACKS, *FILE_ATTACKS)
ABORTS_PER_S = 400
PROBE_EVERY_S = 0.25
PROBE_S = 5.0
PROBE_FROM = "127.0.0.2"
LITTLE_MEMORY = "--worker-memory-limit=160M"
SECURE_SERVING = "--secure-serving"
OF_FOUR = (*BLACK_HOLES, USAGE_LIES, LABEL_FLOOD, PREFIX_FLUSH)  # these get four servers, and a picker of their own
SETTLED_S = {"slow body": 32.0, **dict.fromkeys((*BLACK_HOLES, USAGE_LIES), 10.0)}  # the least seconds of an attack in a full run
WIDTH = 200
LOGGED_CHARS = 80
ABUSE = re.compile(r'^llm_d_epp_abuse_total\{cause="(\w+)"\} (\S+)$', re.MULTILINE)
COUNTED = "metrics_port_abuse|refusals|endpoints_file_changes|endpoint_ejections"
COUNTERS = re.compile(rf"^llm_d_epp_({COUNTED})_total (\S+)$", re.MULTILINE)
KNOWN_SERIES = 'llm_d_epp_request_total{model_name="sim-model",target_model_name="sim-model",fairness_id="default-flow"'
PAGES = 5


@dataclass
class Row:
    """The results of one attack."""

    attack: str
    connections: int = 0  # opened by the attacker
    closed_after_s: float | None = None
    said: str = ""  # text of the last GOAWAY
    counted: dict[str, int] = field(default_factory=dict)
    logged: list[str] = field(default_factory=list)  # what the picker's log says of the attacker
    before_ms: tuple[float, float] = (0.0, 0.0)  # p50, p99
    during_ms: tuple[float, float] = (0.0, 0.0)
    good: int = 0
    errors: int = 0
    memory_mib: tuple[float, float, float] = (0.0, 0.0, 0.0)  # before, peak, after
    probe_s: float = 0.0  # the longest
    probes_failed: int = 0
    scrapes_missed: float = 0.0  # share
    cpu: tuple[float, float] = (0.0, 0.0)  # cores that the picker takes: before, during

    @property
    def ratio(self) -> float:
        return self.during_ms[1] / self.before_ms[1]


def pss_mib(pid: int) -> float:
    """Returns the proportional set size of a process and its children, in MiB."""
    kib = 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            kib += int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return kib / 1024


def cpu_s(pid: int) -> float:
    """Returns the seconds of CPU of a process and its children."""
    ticks = 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def cores(pid: int, work: Awaitable[None]) -> float:
    """Awaits `work`. Returns how many cores the picker took meanwhile."""
    begun, used = time.monotonic(), cpu_s(pid)
    await work
    return (cpu_s(pid) - used) / (time.monotonic() - begun)


async def peak_memory(pid: int) -> float:
    """Measures the memory until the task is cancelled. Returns the largest value in MiB."""
    peak = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            peak = max(peak, await asyncio.to_thread(pss_mib, pid))
            await asyncio.sleep(MEMORY_EVERY_S)
    return peak


def abuse(picker: Picker) -> dict[str, int]:
    """Reads the picker's counters of abuse by cause, and of refused requests."""
    until = time.monotonic() + PROBE_S
    while not (page := picker.page()) and time.monotonic() < until:  # an attack on its port may have left some connections
        time.sleep(PROBE_EVERY_S)
    counted = {cause: int(float(value)) for cause, value in ABUSE.findall(page)}
    return counted | {name: int(float(value)) for name, value in COUNTERS.findall(page)}


def named(log: str) -> list[str]:
    """Returns the details of the warnings and errors in the log: about peers, clients of the metrics port, and files.

    Lines that name most come last.
    """
    lines = (json.loads(line) for line in log.splitlines() if line.startswith("{") and line.endswith("}"))
    warnings = [line for line in lines if line.get("level") in ("warning", "error")]
    warnings.sort(key=lambda line: sum(name in line for name in ("last", "file", "reads")))
    return [str(line.get("last", f"{line['event']} {line.get('file', line.get('why', ''))}".strip())) for line in warnings]


def probe(port: int) -> bool:
    """Asks for /readyz from an address that no attacker has. Returns whether there was an answer."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PROBE_S, source_address=(PROBE_FROM, 0))
    try:
        client.request("GET", "/readyz")
        return client.getresponse().status == 200
    except OSError:
        return False
    finally:
        client.close()


async def probes(port: int, row: Row) -> None:
    """Probes until the task is cancelled."""
    while True:
        begun = time.monotonic()
        if not await asyncio.to_thread(probe, port):
            row.probes_failed += 1
        row.probe_s = max(row.probe_s, time.monotonic() - begun)
        await asyncio.sleep(PROBE_EVERY_S)


def scrapes(picker: Picker, *, invented: bool) -> tuple[float, float]:
    """Returns how many scrapes were made, and how many were missed. `invented`: failed ones do not count, see above."""
    skipped = picker.counter("scrapes_skipped_total")
    missed = skipped if invented else skipped + picker.counter("datalayer_poll_errors_total")
    return picker.counter("scrapes_total"), missed


async def attack(name: str, picker: Picker, file: Path, seconds: float) -> list[dict[str, Any]]:
    """Runs the attacker in a separate process. Returns how its connections ended."""
    ports = ("--port", str(picker.grpc), "--pages", str(picker.metrics), "--file", str(file))
    argv = python("tests.faults.attacks", name, *ports, "--seconds", str(seconds))
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    ends: list[dict[str, Any]] = json.loads(output)
    return ends


def good_traffic(name: str, port: int, rate: float, black_hole: BlackHole | None) -> tuple[Good, Good]:
    """Returns the good traffic alone, and beside an attack."""
    if name == USAGE_LIES:
        return Tenants(port, lies=False), Tenants(port, lies=True)
    shared, context = name == "early aborts", client_context() if name in SECURE else None
    aborts = ABORTS_PER_S if shared else 0
    alone = Good(port, rate, shared=shared, context=context)
    return alone, Good(port, rate, shared=shared, aborts_per_s=aborts, context=context, servers=black_hole)


def page_figures(picker: Picker) -> dict[str, int]:
    """Returns the size of the metrics page, how long it takes, and whether it has the series of good requests."""
    took, page = [], ""
    for _ in range(PAGES):
        begun = time.monotonic()
        page = picker.page()
        took.append(time.monotonic() - begun)
    return {"page KiB": len(page.encode()) >> 10, "page ms": round(1e3 * statistics.median(took)), "known series": page.count(KNOWN_SERIES)}


def picker_of(name: str, file: Path, cluster: Cluster, workers: int) -> Picker:
    """Starts the picker that a row needs."""
    flags = (LITTLE_MEMORY,) if name in LIMITED else (SECURE_SERVING,) if name in SECURE else ()
    text = picker_config(file, watch=name in FILE_ATTACKS)
    if name == USAGE_LIES:
        flow = flow_control(FAIR, ttl="30s") | {"filters": ()}
        flags, text = ("--allow-experimental-plugins",), config(file, flow)
    return cluster.picker(file, *flags, workers=workers, config_text=text)


async def measure(name: str, picker: Picker, file: Path, seconds: float, rate: float) -> Row:
    """Measures one row: good traffic alone, then beside the attack. `file` has the endpoints."""
    row, pid = Row(name), picker.child.pid
    black_hole = BlackHole(name) if name in BLACK_HOLES else None
    conversations = Conversations(picker.grpc) if name == PREFIX_FLUSH else None
    alone, beside = good_traffic(name, picker.grpc, rate, black_hole)
    before_cores = await cores(pid, alone.run(seconds))
    if conversations is not None:
        await conversations.speak()
    said = picker.child.log.stat().st_size
    counted, before, scraped = abuse(picker), pss_mib(pid), scrapes(picker, invented=name in FILE_ATTACKS)
    watching = asyncio.create_task(peak_memory(pid))
    probing = asyncio.create_task(probes(picker.metrics, row))
    attacking = asyncio.create_task(attack(name, picker, file, seconds + SETTLE_S))
    await asyncio.sleep(SETTLE_S)  # the attacker takes a moment to start
    row.cpu = (before_cores, await cores(pid, beside.run(seconds)))
    ends = await attacking
    watching.cancel()
    probing.cancel()
    await asyncio.sleep(SETTLE_S)
    after = abuse(picker)
    made, missed = (after - before for before, after in zip(scraped, scrapes(picker, invented=name in FILE_ATTACKS), strict=True))
    row.scrapes_missed = missed / max(1.0, made + missed)
    row.memory_mib = (before, await watching, pss_mib(pid))
    row.connections = len(ends)
    lived = [end["after"] for end in ends if end["after"] is not None]
    row.closed_after_s = max(lived, default=None)
    row.said = next((end["text"] for end in reversed(ends) if end["text"]), "")
    row.counted = {cause: n - counted.get(cause, 0) for cause, n in after.items() if n > counted.get(cause, 0)}
    if black_hole is not None:
        row.counted["percent"] = black_hole.percent
    if conversations is not None:
        await conversations.speak()
        row.counted["percent"] = conversations.percent
    if isinstance(alone, Tenants) and isinstance(beside, Tenants):
        row.counted["percent"] = round(100 * beside.share / max(1e-9, alone.share))
    if name == LABEL_FLOOD:
        row.counted |= page_figures(picker)
    with picker.child.log.open("rb") as log:
        log.seek(said)
        row.logged = named(log.read().decode(errors="replace"))
    row.before_ms, row.during_ms = alone.percentiles_ms(), beside.percentiles_ms()
    row.good, row.errors = len(beside.took), alone.errors + beside.errors
    return row


def table(rows: list[Row]) -> Table:
    columns = Table(
        "attack",
        "connections",
        "closed after",
        "good p50 ms",
        "good p99 ms",
        "ratio",
        "CPU",
        "errors",
        "probe",
        "scrapes missed",
        "PSS MiB",
        "counted as",
        "logged as",
    )
    for row in rows:
        closed = "-" if row.closed_after_s is None else f"{row.closed_after_s:.2f} s"
        columns.add_row(
            row.attack,
            str(row.connections),
            closed,
            f"{row.before_ms[0]:.1f} → {row.during_ms[0]:.1f}",
            f"{row.before_ms[1]:.1f} → {row.during_ms[1]:.1f}",
            f"{row.ratio:.1f}",
            f"{row.cpu[0]:.2f} → {row.cpu[1]:.2f}",
            f"{row.errors} of {row.good + row.errors}",
            f"{row.probe_s:.2f} s" + (f", {row.probes_failed} failed" if row.probes_failed else ""),
            f"{row.scrapes_missed:.1%}",
            " → ".join(f"{mib:.0f}" for mib in row.memory_mib),
            ", ".join(f"{cause} {count}" for cause, count in row.counted.items()),
            row.logged[-1][:LOGGED_CHARS] if row.logged else "",
        )
    return columns


def main() -> int:
    line = argparse.ArgumentParser(prog="floods", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--seconds", type=float, default=SECONDS, help="seconds of good traffic alone, and again beside each attack")
    line.add_argument("--workers", type=int, default=2)
    line.add_argument("--rate", type=float, default=RATE, help="good exchanges per second")
    line.add_argument("--only", nargs="+", choices=NAMES, help="run only these attacks")
    line.add_argument("--smoke", action="store_true", help="a short run of each, to check that it works")
    line.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = line.parse_args()
    rows = []
    console = Console(stderr=options.json, width=max(WIDTH, Console().width))
    with Cluster() as cluster:
        files = {False: cluster.fleet(2).file, True: cluster.fleet(4).file}
        pickers: dict[object, Picker] = {}
        for name in options.only or NAMES:
            file = files[name in OF_FOUR]
            kinds = (LIMITED, SECURE, FILE_ATTACKS)
            key = name if name in OF_FOUR else tuple(name in kind for kind in kinds)  # other rows share a picker by kind
            if key not in pickers:
                pickers[key] = picker_of(name, file, cluster, options.workers)
            seconds = SMOKE_SECONDS if options.smoke else max(options.seconds, SETTLED_S.get(name, 0.0))
            console.print(f"{name}: {2 * seconds:.0f} s", style="dim")
            rows.append(uvloop.run(measure(name, pickers[key], file, seconds, options.rate)))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        console.print(table(rows))
    return 1 if any(row.errors or row.probes_failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
