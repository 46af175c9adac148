"""`python -m loadtest.load.driver --target 127.0.0.1:9002 --case short`: drives a picker as Envoy does, without Envoy.

A closed loop keeps `--concurrency` streams open. An open loop (`--rate`) begins requests on schedule, however slow the picker is, and
measures latency from the scheduled time. *Pick* is the time until the picker has returned the whole request; *full* is the time until the
stream has ended. With `--group`, the report shows the memory of the picker's process group, and its CPU time per request.

Each driver process has its own event loop and connections. The figures of all driver processes are merged.
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

from loadtest.load.exchange import Ending, Exchange, Messages, Shape
from loadtest.load.h2_client import ClientConnection, ClientStream
from loadtest.load.process_group import cpu_seconds, memory_mib

PATH: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
WARM_UP_S: Final = 1.0
CONNECT_S: Final = 5.0
LAST_ANSWERS_S: Final = 30.0  # how long to wait at the end for requests in flight
# The most open streams of one process. The limit protects the machine's memory if the picker stops answering.
OPEN_LOOP_MAX: Final = 20_000
ERRORS_SHOWN: Final = 3


@dataclass(frozen=True)
class Case:
    """A workload: its requests, how many of them are open at once, over how many connections, and how many endpoints it needs."""

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
    """The results of requests. `pick`, `full`: times in seconds (see above) of the requests that succeeded."""

    endings: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    pick: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    late: int = 0  # requests of an open loop that were left out because OPEN_LOOP_MAX were in flight

    def add(self, other: "Tally") -> None:
        self.endings.update(other.endings)
        self.errors = (self.errors + other.errors)[:ERRORS_SHOWN]
        self.pick += other.pick
        self.full += other.full
        self.late += other.late


class LoadGenerator:
    """Makes the load of one process: opens streams until the monotonic time `until`, then waits for the last answers."""

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
                await asyncio.sleep(0)  # the generator is late, but the event loop must still read answers
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
            self.tally.errors.append(f"{self._under_way} streams did not end {LAST_ANSWERS_S:.0f} s after the last one began")

    def _begin(self, connection: ClientConnection, start: float, until: float) -> None:
        """Opens a stream. If the stream ends before `until`, opens the next one. `start`: the time from which latency is measured."""
        self._under_way += 1
        self._quiet.clear()
        number = self._number = self._number + 1
        tally, picked_at = self.tally, 0.0

        def picked() -> None:
            nonlocal picked_at
            picked_at = time.monotonic()

        def ended(ending: Ending, text: str) -> None:
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

        exchange = Exchange(self._messages, picked, ended, self._loop.call_later)
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
    """Makes the load of one driver process, after a warm-up. Returns the tally without the warm-up."""
    case = chosen(options)
    named = [options.authority.format(options.first_authority + number) for number in range(case.connections)]
    connections = [await connect(*options.target, tls=options.tls, authority=name) for name in named]
    messages = Messages(case.shape, f"{os.getpid()}-{time.time_ns()}")
    warm = LoadGenerator(connections, messages, first=0)
    await warm.closed(min(case.concurrency, 16), time.monotonic() + options.warm_up)
    load = LoadGenerator(connections, messages, first=1_000_000)
    until = time.monotonic() + options.seconds
    print("begun", flush=True)
    if not case.concurrency:  # without concurrency, a case measures the cost of an idle picker
        await asyncio.sleep(options.seconds)
    elif options.rate:
        await load.paced(options.rate, until)
    else:
        await load.closed(case.concurrency, until)
    for connection in connections:
        connection.close()
    return load.tally


async def connect(host: str, port: int, *, tls: bool, authority: str = "picker") -> ClientConnection:
    """Returns a connection that has received the peer's settings. Does not verify the certificate: pickers sign their own."""
    context = None
    if tls:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: ClientConnection(PATH, authority),
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
    """Returns the case that the options name, with this process's share of its streams and connections."""
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
    """Returns the usual quantiles in milliseconds. `values`: in seconds."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        name: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3, 3)
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }


def spread(arguments: Sequence[str], options: argparse.Namespace) -> tuple[Tally, float, dict[str, float]]:
    """Runs the driver processes. Returns the merged tally, how many seconds they ran, and the picker's CPU seconds by process name."""
    command = [sys.executable, "-m", "loadtest.load.driver", *arguments, "--part"]
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
            raise SystemExit(f"a driver process exited with code {child.returncode}")
        part = json.loads(output)
        part["endings"] = Counter(part["endings"])
        tally.add(Tally(**part))
    after = cpu_seconds(options.group) if options.group else {}
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    return tally, time.monotonic() - start, spent


def report(options: argparse.Namespace, tally: Tally, seconds: float, spent: dict[str, float]) -> dict[str, Any]:
    ok, cpu = tally.endings[Ending.OK.value], sum(spent.values())
    result: dict[str, Any] = {
        "case": options.case,
        "requests_per_s": round(ok / seconds, 1),
        "endings": dict(tally.endings),
        "pick_ms": quantiles(tally.pick),
        "full_ms": quantiles(tally.full),
    }
    if tally.late:
        result["not_begun"] = tally.late
    if options.group:
        result["cpu_us_per_request"] = round(cpu * 1e6 / ok, 1) if ok else 0.0
        result["cores"] = round(cpu / seconds, 3)
        result["cores_by_process"] = {name: round(each / seconds, 3) for name, each in sorted(spent.items()) if each}
        result["memory_mib"] = round(memory_mib(options.group), 1)
    if tally.errors:
        result["errors"] = tally.errors
    return result


def show(result: dict[str, Any]) -> None:
    endings = ", ".join(f"{count} {name}" for name, count in result["endings"].items()) or "no requests"
    pick, full = ("  ".join(f"{k} {v:g}" for k, v in result[name].items()) for name in ("pick_ms", "full_ms"))
    print(f"{result['case']}: {result['requests_per_s']:,.0f} requests/s ({endings})")
    print(f"  pick  {pick} ms\n  full  {full} ms")
    if "cpu_us_per_request" in result:
        print(
            f"  picker  {result['cpu_us_per_request']:,.0f} us CPU per request, {result['cores']:.2f} cores, {result['memory_mib']:.0f} MiB"
        )
    for error in result.get("errors", ()):
        print(f"  error  {error}")


def address(text: str) -> tuple[str, int]:
    """Parses host:port; an IPv6 address stands in brackets. Raises ArgumentTypeError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not host:port")
    return host.strip("[]"), int(port)


def amount(kind: type[int] | type[float], least: float = 0) -> Callable[[str], float]:
    """Returns an argument parser for numbers from `least` on."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"'{text}' is not {'a count' if kind is int else 'a number'} of at least {least:g}")
        return value

    return read


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="driver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--target", type=address, required=True, help="the picker's ext_proc address, host:port")
    arguments.add_argument("--case", choices=CASES, default="short")
    arguments.add_argument("--prompt-kb", type=amount(float, 0.1), help="size of the prompt (default: the case's)")
    arguments.add_argument("--chunks", type=amount(int, 1), help="chunks of the answer; above 1 it is streamed (default: the case's)")
    arguments.add_argument("--pace-ms", type=amount(float), help="time between chunks (default: the case's)")
    arguments.add_argument("--seconds", type=amount(float, 0.1), default=5.0)
    arguments.add_argument("--warm-up", type=amount(float), default=WARM_UP_S, help="seconds of load before that, left out of the figures")
    arguments.add_argument("--processes", type=amount(int, 1), default=1, help="driver processes, which share the streams and connections")
    arguments.add_argument("--concurrency", type=amount(int), default=0, help="streams at once (default: the case's)")
    arguments.add_argument("--connections", type=amount(int), default=0, help="connections (default: the case's)")
    arguments.add_argument("--authority", default="picker", help="the :authority of the streams; {} stands for the connection's number")
    arguments.add_argument("--first-authority", type=amount(int), default=0, help="the number of the first connection")
    arguments.add_argument("--rate", type=amount(float), default=0.0, help="open loop: requests per second")
    arguments.add_argument("--tls", action="store_true")
    arguments.add_argument("--group", type=int, default=0, help="process group of the picker: report its CPU time and memory")
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    return arguments


def hint(options: argparse.Namespace) -> str:
    """Returns what to try after a failed connection."""
    return "try it without --tls" if options.tls else "a picker speaks TLS unless it has --secure-serving=false: try --tls"


def main() -> int:
    options = parser().parse_args()
    if options.part:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                tally = runner.run(drive(options))
        except OSError as failure:  # an exception here comes from connecting; a connection that breaks later is counted
            sys.exit(f"{options.target[0]}:{options.target[1]} does not answer like a picker: {failure}; {hint(options)}")
        json.dump(vars(tally), sys.stdout)
        return 0
    try:
        socket.create_connection(options.target, CONNECT_S).close()
    except OSError as error:
        host, port = options.target
        print(f"no picker answers at {host}:{port}: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return 2
    tally, seconds, cpu = spread([a for a in sys.argv[1:] if a != "--json"], options)
    result = report(options, tally, seconds, cpu)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
    else:
        show(result)
    return 0 if set(tally.endings) <= {Ending.OK.value} else 1


if __name__ == "__main__":
    sys.exit(main())
