"""`python -m loadtest.driver --target 127.0.0.1:9002 --case short`: drives a picker as Envoy does, without Envoy.

A closed loop keeps `--concurrency` streams open; an open loop (`--rate`) begins requests on schedule whatever the picker does, and counts
their latency from the intended time. *Pick* runs until the whole request came back, *full* until the stream's end. With
`--group` the CPU time and memory of the picker's process group are charged to the requests.

Each process has its own event loop and connections; their figures are merged.
"""

import argparse
import asyncio
import json
import math
import os
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import uvloop

from loadtest.exchange import Ending, Exchange, Messages, Shape
from loadtest.h2_client import ClientConnection, ClientStream
from loadtest.process_group import cpu_seconds, memory_mib

PATH: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
WARM_UP_S: Final = 1.0
CONNECT_S: Final = 5.0
LAST_ANSWERS_S: Final = 30.0  # for what is under way at the end
# Streams at once in one process: a picker that stands still must not take the machine along.
OPEN_LOOP_MAX: Final = 20_000
ERRORS_SHOWN: Final = 3


@dataclass(frozen=True)
class Case:
    """A workload: its requests, how many at once over how many connections, and the endpoints that it wants."""

    shape: Shape
    concurrency: int = 16
    connections: int = 2
    endpoints: int = 8


CASES: Final = {
    "short": Case(Shape()),
    "short-c64": Case(Shape(), concurrency=64, connections=4),
    "chat-8k": Case(Shape(prompt_bytes=8000, shared_bytes=4000)),
    "long": Case(Shape(prompt_bytes=400_000, piece_bytes=1_000_000), concurrency=8),
    "long-shared": Case(Shape(prompt_bytes=400_000, shared_bytes=360_000), concurrency=8),
    "sse": Case(Shape(chunks=200, streamed=True)),
    "sse-paced": Case(Shape(chunks=200, streamed=True, pace_s=0.04), concurrency=600, connections=8),
    "pods100": Case(Shape(), endpoints=100),
    "idle100": Case(Shape(), concurrency=0, endpoints=100),
}


@dataclass
class Tally:
    """What came of the requests; times in seconds."""

    endings: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    pick: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    late: int = 0  # of an open loop: not begun, since OPEN_LOOP_MAX were under way

    def add(self, other: "Tally") -> None:
        self.endings.update(other.endings)
        self.errors = (self.errors + other.errors)[:ERRORS_SHOWN]
        self.pick += other.pick
        self.full += other.full
        self.late += other.late


class Load:
    """One process's part: opens streams until `until`, then waits for the last answers."""

    def __init__(self, connections: Sequence[ClientConnection], messages: Messages, *, first: int) -> None:
        self._connections = connections
        self._messages = messages
        self._loop = asyncio.get_running_loop()
        self._number = first
        self._under_way = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.tally = Tally()

    async def closed(self, concurrency: int, until: float) -> None:
        for turn in range(concurrency):
            self._begin(self._connections[turn % len(self._connections)], time.monotonic(), until)
        await self._done(until)

    async def paced(self, rate: float, until: float) -> None:
        start = time.monotonic()
        for turn in range(math.ceil((until - start) * rate)):
            due = start + turn / rate
            wait = due - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            elif turn % 16 == 0:
                await asyncio.sleep(0)  # behind schedule: answers must be read all the same
            if self._under_way >= OPEN_LOOP_MAX:
                self.tally.late += 1
                continue
            self._begin(self._connections[turn % len(self._connections)], due, 0.0)
        await self._done(until)

    async def _done(self, until: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic()) + LAST_ANSWERS_S):
                await self._quiet.wait()
        except TimeoutError:
            self.tally.endings[Ending.FAILED.value] += self._under_way
            self.tally.errors.append(
                f"{self._under_way} streams had no end {LAST_ANSWERS_S:.0f} s after the last began"
            )

    def _begin(self, connection: ClientConnection, start: float, until: float) -> None:
        """Opens a stream; when it is over, the next one, while there is time."""
        self._under_way += 1
        self._quiet.clear()
        number = self._number = self._number + 1
        tally, picked_at = self.tally, 0.0

        def picked() -> None:
            nonlocal picked_at
            picked_at = time.monotonic()

        def over(ending: Ending, text: str) -> None:
            now = time.monotonic()
            tally.endings[ending.value] += 1
            if ending is Ending.OK:
                tally.pick.append(picked_at - start)
                tally.full.append(now - start)
            elif len(tally.errors) < ERRORS_SHOWN:
                tally.errors.append(f"{ending.value}: {text}")
            self._under_way -= 1
            if now < until:
                self._begin(connection, now, until)
            elif not self._under_way:
                self._quiet.set()

        exchange = Exchange(self._messages, picked, over, self._loop.call_later)
        opened = connection.open(exchange)
        if isinstance(opened, ClientStream):
            exchange.begin(opened, number)
        else:
            opened.add_done_callback(lambda future: self._opened(future, exchange, number))

    def _opened(self, future: asyncio.Future[ClientStream], exchange: Exchange, number: int) -> None:
        problem = future.exception()
        if problem is None:
            exchange.begin(future.result(), number)
        else:
            exchange.ended("14", str(problem))


async def drive(options: argparse.Namespace) -> Tally:
    """One process's whole run, the warm-up not counted."""
    case = chosen(options)
    connections = [await connect(*options.target, tls=options.tls) for _ in range(case.connections)]
    messages = Messages(case.shape, f"{os.getpid()}-{time.time_ns()}")
    warm = Load(connections, messages, first=0)
    await warm.closed(min(case.concurrency, 16), time.monotonic() + options.warm_up)
    load = Load(connections, messages, first=1_000_000)
    until = time.monotonic() + options.seconds
    print("begun", flush=True)
    if not case.concurrency:  # what it costs to do nothing
        await asyncio.sleep(options.seconds)
    elif options.rate:
        await load.paced(options.rate, until)
    else:
        await load.closed(case.concurrency, until)
    for connection in connections:
        connection.close()
    return load.tally


async def connect(host: str, port: int, *, tls: bool) -> ClientConnection:
    """A connection whose settings are known. Certificates are not checked: pickers make their own."""
    context = None
    if tls:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: ClientConnection(PATH, "picker"),
        host,
        port,
        ssl=context,
        server_hostname="picker" if tls else None,
        ssl_handshake_timeout=CONNECT_S if tls else None,
    )
    async with asyncio.timeout(10):
        await connection.opened
    return connection


def chosen(options: argparse.Namespace) -> Case:
    """The case, changed as the options say, with this process's share of streams and connections."""
    case = CASES[options.case]
    shape = case.shape
    if options.prompt_kb is not None:
        size = round(1000 * options.prompt_kb)
        shape = replace(shape, prompt_bytes=size, shared_bytes=min(shape.shared_bytes, size))
    if options.chunks is not None:
        shape = replace(shape, chunks=options.chunks, streamed=options.chunks > 1)
    if options.pace_ms is not None:
        shape = replace(shape, pace_s=options.pace_ms / 1e3)
    concurrency = options.concurrency or case.concurrency
    connections = options.connections or case.connections
    share = options.processes
    return replace(case, shape=shape, concurrency=-(-concurrency // share), connections=max(1, connections // share))


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """Milliseconds at the usual places."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        name: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3, 3)
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }


def spread(arguments: Sequence[str], options: argparse.Namespace) -> tuple[Tally, float, dict[str, float]]:
    """Runs the processes; their merged tally, the seconds, and the CPU seconds of the picker's processes meanwhile."""
    command = [sys.executable, "-m", "loadtest.driver", *arguments, "--part"]
    if options.rate:
        command += ["--rate", str(options.rate / options.processes)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(options.processes)]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()  # "begun"
    start, before = time.monotonic(), cpu_seconds(options.group) if options.group else {}
    tally = Tally()
    for child in children:
        output, _ = child.communicate()
        if child.returncode:
            raise SystemExit(f"a driver process ended with {child.returncode}")
        part = json.loads(output)
        part["endings"] = Counter(part["endings"])
        tally.add(Tally(**part))
    after = cpu_seconds(options.group) if options.group else {}
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    return tally, time.monotonic() - start, spent


def report(options: argparse.Namespace, tally: Tally, seconds: float, spent: dict[str, float]) -> dict[str, Any]:
    ok, cpu = tally.endings[Ending.OK.value], sum(spent.values())
    found: dict[str, Any] = {
        "case": options.case,
        "requests_per_s": round(ok / seconds, 1),
        "endings": dict(tally.endings),
        "pick_ms": quantiles(tally.pick),
        "full_ms": quantiles(tally.full),
    }
    if tally.late:
        found["not_begun"] = tally.late
    if options.group:
        found["cpu_us_per_request"] = round(cpu * 1e6 / ok, 1) if ok else 0.0
        found["cores"] = round(cpu / seconds, 3)
        found["cores_by_process"] = {name: round(each / seconds, 3) for name, each in sorted(spent.items()) if each}
        found["memory_mib"] = round(memory_mib(options.group), 1)
    if tally.errors:
        found["errors"] = tally.errors
    return found


def show(found: dict[str, Any]) -> None:
    endings = ", ".join(f"{count} {name}" for name, count in found["endings"].items()) or "no requests"
    pick, full = ("  ".join(f"{k} {v:g}" for k, v in found[name].items()) for name in ("pick_ms", "full_ms"))
    print(f"{found['case']}: {found['requests_per_s']:,.0f} requests/s ({endings})")
    print(f"  pick  {pick} ms\n  full  {full} ms")
    if "cpu_us_per_request" in found:
        print(
            f"  picker  {found['cpu_us_per_request']:,.0f} us CPU per request, {found['cores']:.2f} cores, {found['memory_mib']:.0f} MiB"
        )
    for error in found.get("errors", ()):
        print(f"  error  {error}")


def address(text: str) -> tuple[str, int]:
    """host:port, an IPv6 address in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not host:port")
    return host.strip("[]"), int(port)


def amount(kind: type[int] | type[float], least: float = 0) -> Callable[[str], float]:
    """Numbers from `least` on."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(
                f"'{text}' is not {'a count' if kind is int else 'a number'} from {least:g}"
            )
        return value

    return read


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="driver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--target", type=address, required=True, help="the picker's ext_proc address, host:port")
    made.add_argument("--case", choices=CASES, default="short")
    made.add_argument("--prompt-kb", type=amount(float, 0.1), help="size of the prompt (default: the case's)")
    made.add_argument(
        "--chunks", type=amount(int, 1), help="chunks of the answer; above 1 it is streamed (default: the case's)"
    )
    made.add_argument("--pace-ms", type=amount(float), help="between chunks (default: the case's)")
    made.add_argument("--seconds", type=amount(float, 0.1), default=5.0)
    made.add_argument("--warm-up", type=amount(float), default=WARM_UP_S, help="seconds before that, not counted")
    made.add_argument(
        "--processes", type=amount(int, 1), default=1, help="driver processes; streams and connections are shared out"
    )
    made.add_argument("--concurrency", type=amount(int), default=0, help="streams at once (default: the case's)")
    made.add_argument("--connections", type=amount(int), default=0, help="connections (default: the case's)")
    made.add_argument("--rate", type=amount(float), default=0.0, help="open loop: requests per second")
    made.add_argument("--tls", action="store_true")
    made.add_argument("--group", type=int, default=0, help="process group of the picker, to be charged")
    made.add_argument("--json", action="store_true")
    made.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    return made


def hint(options: argparse.Namespace) -> str:
    """What to try next."""
    return "without --tls, perhaps?" if options.tls else "a picker speaks TLS unless --secure-serving=false: --tls"


def main() -> int:
    options = parser().parse_args()
    if options.part:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                tally = runner.run(drive(options))
        except OSError as failure:  # of a connection that is new; what ends later is counted
            sys.exit(
                f"{options.target[0]}:{options.target[1]} does not answer as a picker does: {failure}; {hint(options)}"
            )
        json.dump(vars(tally), sys.stdout)
        return 0
    try:
        socket.create_connection(options.target, CONNECT_S).close()
    except OSError as error:
        host, port = options.target
        print(f"no picker answers at {host}:{port}: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return 2
    tally, seconds, cpu = spread([a for a in sys.argv[1:] if a != "--json"], options)
    found = report(options, tally, seconds, cpu)
    if options.json:
        json.dump(found, sys.stdout, indent=1)
    else:
        show(found)
    return 0 if set(tally.endings) <= {Ending.OK.value} else 1


if __name__ == "__main__":
    sys.exit(main())
