"""Goodput under overload: `python -m tests.bench.overload [--smoke] [--seconds S] [--only PART ...] [--json]`.

The load goes through Envoy and a picker with four workers to simulated servers of a known size; see `overload_stack`. The load is
open-loop: requests start at the offered rate, whatever happens to earlier ones. 10 % have high priority, 60 % normal, 30 % are sheddable.

goodput: complete answers per second within SLO_S of the scheduled send time; clients give up after that.
capacity: the goodput while the offered load is a third more than the servers' computed maximum. 1x, 2x, 4x are multiples of it.
TTFT: time to first token, including the wait in the picker's queue. unloaded: at a fifth of the capacity. Servers are busy then, but no
request waits in a queue: a request that joins a running batch waits for the end of the current step, under any load.
recovered: seconds from the end of a burst of 2x until no request is refused any more and the p95 TTFT of every two seconds is at most
twice the p95 before the burst.

Parts: load (with flow control), burst, default (the built-in configuration), without (gate off), fairness (`tests.bench.fairness`), budgets
(`tests.bench.budgets`).
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from loadtest.demo.children import cpu_seconds, descendants
from tests.bench import budgets, fairness
from tests.bench.overload_stack import FAIR, SERVERS, WORKERS, Site, estimate, flow_control, site
from tests.bench.overload_traffic import Class, Generator, Result, between, firsts, percentile, plan, reasons
from tests.e2e.cluster import Cluster

SLO_S = 6.0
WARM_UP_S = 5.0  # without flow control the servers' queues take this long to reach the clients' patience
SECONDS = 10.0
SMOKE_SECONDS = 2.5
UNLOADED = 0.2
OVER = 4 / 3
BEFORE_BURST = 0.7
RECOVER_WITHIN_S = 60.0
BIN_S = 5.0
WATCH_S = 2.0
AS_BEFORE = 2.0  # times the p95 before the burst
HIGH, NORMAL, LOW = "high", "normal", "low"
MIX = (Class(HIGH, 0.1, HIGH), Class(NORMAL, 0.6, NORMAL, streamed=0.2), Class(LOW, 0.3, LOW, streamed=0.5))
ALL_STREAMED = tuple(Class(kind.name, kind.share, kind.objective) for kind in MIX)
PARTS = ("load", "burst", "default", "without", "fairness", "budgets")
CONFIGURATIONS: tuple[tuple[str, Mapping[str, Any] | None, str], ...] = (
    ("default", None, "built-in default configuration (flow control by the scraped load; requests may wait for a minute):"),
    ("without", {}, "without flow control (gate off; sheddable requests are refused while the pool is saturated):"),
)
TARGETS = {2.0: 95.0, 4.0: 85.0}
HIGH_TARGET = 1.3

Say = Callable[[str], None]


@dataclass(slots=True)
class Row:
    """The results of one load, per second and in seconds."""

    name: str
    offered: float
    goodput: float
    shed: dict[str, float]
    retry_after: float  # share of the refused requests
    high_p50: float
    high_p95: float
    low_p50: float
    low_p95: float
    cpu: float  # share of all cores that gateway, picker, servers and this process used together
    of_peak: float = 0.0


class Bench:
    """Makes the measurements at one gateway."""

    def __init__(self, cluster: Cluster, at: Site, say: Say, seconds: float, warm_up_s: float) -> None:
        self.at = at
        self._children = lambda: cluster.children.all
        self._say = say
        self._seconds = seconds
        self._warm_up_s = warm_up_s

    def load(self, name: str, rate: float, classes: Sequence[Class] = MIX, *, warm_up_s: float | None = None) -> Row:
        """Measures one row. All its requests have ended when this returns."""
        warm_up_s = self._warm_up_s if warm_up_s is None else warm_up_s
        results, cpu = self.run(name, plan(random.Random(name), classes, rate, warm_up_s + self._seconds))
        end = warm_up_s + self._seconds
        counted = between(results, warm_up_s, end)
        result = row(name, rate, counted, self._seconds, cpu)
        result.goodput = sum(good(r) and warm_up_s <= r.call.at + r.whole_s < end for r in results) / self._seconds
        if classes is ALL_STREAMED:  # no request waits, so classes do not differ, and each has few requests
            every = firsts(counted)
            result.high_p50, result.high_p95 = percentile(every, 0.5), percentile(every, 0.95)
        return result

    def run(self, name: str, calls: list[Any]) -> tuple[list[Result], float]:
        """Runs a plan. Returns the results and the used share of the machine's CPU."""
        generator = Generator(self.at.port, SLO_S)
        pids = [child.pid for child in self._children()]
        begun, at = cpu_seconds_of(pids), time.monotonic()
        total = calls[-1].at if calls else 0.0

        def watch(second: float, open_: int) -> None:
            if round(second) % 5 == 0:
                self._say(f"  {name}: {second:.0f} of {total:.0f} s, {open_} requests open")

        results = uvloop.run(generator.run(calls, watch))
        spent = cpu_seconds_of(pids) - begun
        return results, spent / (time.monotonic() - at) / (os.cpu_count() or 1)

    def burst(self, capacity: float, before_s: float, burst_s: float, after_s: float) -> tuple[float, list[str]]:
        """Sends a burst of 2x. Returns the seconds from its end to the usual state (infinite: never reached), and a line for each 5 s."""
        rng, parts, start = random.Random("burst"), [], 0.0
        for rate, seconds in ((BEFORE_BURST, before_s), (2.0, burst_s), (BEFORE_BURST, after_s)):
            parts += plan(rng, ALL_STREAMED, rate * capacity, seconds, start)
            start += seconds
        results, _ = self.run("burst", parts)
        usual = percentile(firsts(between(results, before_s / 3, before_s)), 0.95)
        lines, second = [], 0.0
        for phase, seconds in (("before", before_s), ("burst", burst_s), ("after", after_s)):
            end = second + seconds
            while second < end:
                some = between(results, second, min(end, second + BIN_S))
                shed, p95 = sum(reasons(some).values()), percentile(firsts(some), 0.95)
                lines.append(f"  {second:3.0f} s {phase:7} {len(some):4d} requests {shed:4d} refused {1000 * p95:6.0f} ms TTFT p95")
                second = min(end, second + BIN_S)
        return recovered(results, before_s + burst_s, start, AS_BEFORE * usual), lines


def good(result: Result) -> bool:
    return result.answered and result.whole_s <= SLO_S


def row(name: str, rate: float, results: Sequence[Result], seconds: float, cpu: float) -> Row:
    refused = [result for result in results if result.status not in (0, 200)]
    high, low = firsts(results, HIGH), firsts(results, LOW)
    return Row(
        name=name,
        offered=rate,
        goodput=0.0,
        shed={reason: count / seconds for reason, count in reasons(results).most_common()},
        retry_after=sum(result.retry_after for result in refused) / max(1, len(refused)),
        high_p50=percentile(high, 0.5),
        high_p95=percentile(high, 0.95),
        low_p50=percentile(low, 0.5),
        low_p95=percentile(low, 0.95),
        cpu=cpu,
    )


def recovered(results: Sequence[Result], burst_end: float, end: float, usual: float) -> float:
    """Returns the seconds from the end of the burst until the state stays usual, or infinity. `usual`: the p95 TTFT before it."""
    bad_until = second = burst_end
    while second < end:
        some = between(results, second, second + WATCH_S)
        if reasons(some) or percentile(firsts(some), 0.95) > usual:
            bad_until = second + WATCH_S
        second += WATCH_S
    return bad_until - burst_end if bad_until < end else float("inf")


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """Returns the CPU seconds of these processes, their children and this process."""
    every = [os.getpid(), *pids, *(child for pid in pids for child in descendants(pid))]
    return sum(map(cpu_seconds, every))


HEAD = (
    f"  {'load':14} {'offered':>8} {'goodput':>8} {'% peak':>7}  {'high TTFT p50/p95':>18} {'low TTFT p50/p95':>18} {'CPU':>5}  "
    "incomplete answers per second, by cause"
)


def text(result: Row) -> str:
    def pair(p50: float, p95: float) -> str:
        return "-" if p50 != p50 else f"{1000 * p50:.0f}/{1000 * p95:.0f} ms"

    shed = ", ".join(f"{reason} {rate:.1f}" for reason, rate in result.shed.items()) or "none"
    retry = f" (Retry-After on {100 * result.retry_after:.0f} %)" if result.retry_after else ""
    return (
        f"  {result.name:14} {result.offered:7.1f}/s {result.goodput:6.1f}/s {result.of_peak:6.1f}%  "
        f"{pair(result.high_p50, result.high_p95):>18} {pair(result.low_p50, result.low_p95):>18} {100 * result.cpu:4.0f}%  {shed}{retry}"
    )


def loads(bench: Bench, *, smoke: bool) -> tuple[float, list[Row], Row]:
    """Measures all loads. Returns the capacity, the rows under load, and the unloaded row."""
    guess = estimate()
    unloaded = bench.load("unloaded", UNLOADED * guess, ALL_STREAMED, warm_up_s=1.0)
    over = bench.load("over", OVER * guess)
    capacity = over.goodput
    rows = [bench.load(f"{times:g}x", times * capacity) for times in ((2.0,) if smoke else (1.0, 2.0, 4.0))]
    peak = max(result.goodput for result in (over, *rows))
    for result in (unloaded, over, *rows):
        result.of_peak = 100 * result.goodput / max(peak, 1e-9)
    return capacity, [over, *rows], unloaded


def verdicts(rows: Sequence[Row], unloaded: Row) -> list[str]:
    lines = []
    by_name = {result.name: result for result in rows}
    for times, target in TARGETS.items():
        if result := by_name.get(f"{times:g}x"):
            lines.append(f"  goodput at {times:g}x: {result.of_peak:.1f} % of peak (target {target:.0f})")
    if result := by_name.get("2x"):
        ratio = result.high_p95 / unloaded.high_p95
        lines.append(f"  high priority at 2x: p95 TTFT {1000 * result.high_p95:.0f} ms, {ratio:.2f} times unloaded (target {HIGH_TARGET})")
    return lines


def with_flow_control(options: argparse.Namespace, say: Say, seconds: float, warm_up_s: float) -> dict[str, Any]:
    out: dict[str, Any] = {}
    with Cluster() as cluster:
        say("starting servers, a picker with flow control, and Envoy")
        bench = Bench(cluster, site(cluster, flow_control(FAIR)), say, seconds, warm_up_s)
        capacity, rows, unloaded = loads(bench, smoke=options.smoke)
        out["peak"] = max(result.goodput for result in rows)
        out["capacity"], out["load"], out["unloaded"] = capacity, [asdict(result) for result in rows], asdict(unloaded)
        if not options.json:
            print(f"flow control on: capacity {capacity:.1f} requests/s (computed maximum {estimate():.1f} with every place taken)")
            print("\n".join([HEAD, *(text(result) for result in (unloaded, *rows)), *verdicts(rows, unloaded)]), flush=True)
        if "burst" in options.only:
            after = 6.0 if options.smoke else 25.0
            seconds_after, lines = bench.burst(capacity, *((3.0, 2.0) if options.smoke else (8.0, 12.0)), after)
            out["recovered_s"] = seconds_after
            if not options.json:
                print("\n".join(["a burst of 2x:", *lines]))
                when = f"{seconds_after:.0f} s" if seconds_after <= after else f"not within the observed {after:.0f} s"
                print(f"  recovered {when} after it (target {RECOVER_WITHIN_S:.0f} s)", flush=True)
    return out


def with_configuration(
    options: argparse.Namespace, say: Say, seconds: float, known: Mapping[str, Any], flow: Mapping[str, Any] | None
) -> list[Row]:
    """Measures overload with another configuration. `known`: the capacity and the peak to which the loads are relative.

    `flow`: see `overload_stack.config`.
    """
    capacity = known.get("capacity", estimate())
    with Cluster() as cluster:
        say("starting the same stack with another configuration")
        bench = Bench(cluster, site(cluster, flow), say, seconds, WARM_UP_S)
        rows = [bench.load(f"{times:g}x", times * capacity) for times in ((2.0,) if options.smoke else (2.0, 4.0))]
    for result in rows:
        result.of_peak = 100 * result.goodput / known.get("peak", capacity)
    return rows


def parser() -> argparse.ArgumentParser:
    line = argparse.ArgumentParser(prog="overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--smoke", action="store_true", help="a few seconds of 2x and of a burst, to check that it works")
    line.add_argument("--seconds", type=float, help=f"seconds of each load, after the warm-up (default {SECONDS:.0f})")
    line.add_argument("--only", action="append", choices=PARTS, help="run only this part; repeatable")
    line.add_argument("--json", action="store_true", help="print one JSON object; progress still goes to stderr")
    return line


def main() -> int:
    options = parser().parse_args()
    options.only = options.only or (["load", "burst"] if options.smoke else list(PARTS))
    seconds = options.seconds or (SMOKE_SECONDS if options.smoke else SECONDS)
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun:4.0f} s] {line}", file=sys.stderr, flush=True)

    out: dict[str, Any] = {"servers": SERVERS, "workers": WORKERS, "slo_s": SLO_S}
    if {"load", "burst"} & set(options.only):
        out |= with_flow_control(options, say, seconds, 2.0 if options.smoke else WARM_UP_S)
    for part, flow, title in CONFIGURATIONS:
        if part in options.only:
            rows = with_configuration(options, say, seconds, out, flow)
            out[part] = [asdict(result) for result in rows]
            if not options.json:
                print("\n".join([title, HEAD, *map(text, rows)]), flush=True)
    if "fairness" in options.only:
        out["fairness"] = fairness.report(say, seconds, out.get("capacity", estimate()), quiet=options.json)
    if "budgets" in options.only:
        out["budgets"] = budgets.report(say, options.seconds or budgets.SECONDS, quiet=options.json)
    if options.json:
        json.dump(out, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
