"""The cost of waiting requests: `python -m tests.bench.waiting [--streams N] [--ids N] [--five-minutes] [--smoke] [--json]`.

memory: N ext_proc streams wait in a picker with four workers. Measures the cost of one more stream, as proportional memory of all its
processes, and the memory that remains after they have gone.
ids: N requests with N fairness ids, one in twenty of them after a wait. Measures memory and label tuples before and after, and the
latency of a steady tenant meanwhile.
five minutes: one request through Envoy waits that long, while a single answer keeps the only server busy, and is then served.
"""

import argparse
import asyncio
import http.client
import json
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop

from loadtest.demo.children import descendants
from tests.bench.overload_stack import WORKERS, config
from tests.bench.overload_traffic import percentile
from tests.e2e.cluster import COMPLETIONS, Cluster, Picker, completion
from tests.faults.waiting import Waiting, identified, request
from tests.faults.watch import proportional_kib

STREAMS = 2_000
IDS = 200_000  # about a minute; a million take five
SMOKE_STREAMS, SMOKE_IDS = 300, 3_000
WAIT_S = 300.0
SMOKE_WAIT_S = 3.0
AT_ONCE = 200  # requests with distinct ids
QUEUED_EVERY = 20  # one in so many rounds of AT_ONCE finds the pool full
STEADY_S = 0.01
PATIENCE_S = 60.0  # time that a client waits beyond the intended wait

Say = Callable[[str], None]


def flow(concurrency: int, **more: Any) -> dict[str, Any]:
    """Returns a flow control that lets `concurrency` requests per server pass, and has a queue without a time limit."""
    fairness = "token-weighted-fairness-policy"
    return {
        "featureGates": ["flowControl"],
        "plugins": [{"type": "concurrency-detector", "parameters": {"maxConcurrency": concurrency}}, {"type": fairness}],
        "flowControl": {
            "saturationDetector": {"pluginRef": "concurrency-detector"},
            "defaultRequestTTL": "0s",
            "defaultPriorityBand": {"fairnessPolicyRef": fairness, "maxRequests": 100_000},
            **more,
        },
    }


def memory_kib(picker: Picker) -> int:
    """Returns the proportional set size of all processes of the picker, in KiB."""
    return sum(proportional_kib(pid) for pid in (picker.child.pid, *descendants(picker.child.pid)))


def picker_of(cluster: Cluster, concurrency: int) -> Picker:
    fleet = cluster.fleet(1)
    return cluster.picker(fleet.file, workers=WORKERS, config_text=config(fleet.file, flow(concurrency)))


def per_stream(streams: int, say: Say) -> dict[str, float]:
    """Measures the KiB per waiting stream."""
    with Cluster() as cluster:
        picker = picker_of(cluster, 1)
        return uvloop.run(_per_stream(picker, streams, say))


async def _per_stream(picker: Picker, streams: int, say: Say) -> dict[str, float]:
    waiting = Waiting(picker.grpc)
    held = waiting.ask(request("held", {}), hold=True)
    await until(lambda: waiting.served == 1)
    for number in range(100):  # the first streams cost more than further ones
        waiting.ask(request(f"{number} first", {}))
    await asyncio.sleep(2)
    before = memory_kib(picker)
    for number in range(streams):
        waiting.ask(request(f"{number} waits" * 20, {}))
        if number % 50 == 0:
            await asyncio.sleep(0.01)
    say(f"  {waiting.open} streams are open, {waiting.served} of them served")
    await asyncio.sleep(3)
    during, begun = memory_kib(picker), time.monotonic()
    waiting.released.set()
    await held
    await until(lambda: not waiting.open, 60)
    drained = time.monotonic() - begun
    await asyncio.sleep(2)
    after = memory_kib(picker)
    endings = dict(waiting.endings)
    await waiting.close()
    say(f"  {endings}")
    return {
        "streams": streams,
        "before_mib": before / 1024,
        "during_mib": during / 1024,
        "after_mib": after / 1024,
        "kib_each": (during - before) / streams,
        "served_per_s": waiting.served / drained,
    }


def distinct_ids(ids: int, say: Say) -> dict[str, float]:
    """Measures memory and label tuples before and after requests with `ids` fairness ids."""
    with Cluster() as cluster:
        picker = picker_of(cluster, AT_ONCE)
        return uvloop.run(_distinct_ids(picker, ids, say))


async def _distinct_ids(picker: Picker, ids: int, say: Say) -> dict[str, float]:
    waiting, steady = Waiting(picker.grpc), Waiting(picker.grpc)
    waiting.released.set()
    for _ in range(10):
        await round_of(waiting, [f"warm-{n}" for n in range(AT_ONCE)], queued=True)
    before, series_before = memory_kib(picker), series(picker)
    first, later = [], []
    reported = done = 0
    begun = time.monotonic()
    while done < ids:
        queued = (done // AT_ONCE) % QUEUED_EVERY == 0
        names = [f"tenant-{done + n}" for n in range(min(AT_ONCE, ids - done))]
        took = await asyncio.gather(round_of(waiting, names, queued=queued), timed(steady))
        if not queued:
            (first if done < ids / 4 else later).append(took[1])
        done += len(names)
        if done * 10 // ids > reported:
            reported = done * 10 // ids
            say(f"  {done} of {ids} ids, {done / (time.monotonic() - begun):.0f}/s, {memory_kib(picker) / 1024:.0f} MiB")
    await asyncio.sleep(1)
    result = {
        "ids": ids,
        "before_mib": before / 1024,
        "after_mib": memory_kib(picker) / 1024,
        "series_before": series_before,
        "series_after": series(picker),
        "steady_first_quarter_ms": 1000 * percentile(first, 0.5),
        "steady_later_ms": 1000 * percentile(later, 0.5),
        "served": waiting.endings["served"],
        "other": sum(waiting.endings.values()) - waiting.endings["served"],
    }
    await waiting.close()
    await steady.close()
    return result


async def round_of(waiting: Waiting, names: list[str], *, queued: bool) -> None:
    """Sends one request per name. With `queued`, the pool is full at first, so that the requests wait."""
    held = []
    if queued:
        waiting.released.clear()
        want = waiting.served + AT_ONCE
        held = [waiting.ask(request("held", {}), hold=True) for _ in range(AT_ONCE)]
        await until(lambda: waiting.served >= want)
    calls = [waiting.ask(request("x", identified(tenant=name))) for name in names]
    if queued:
        await asyncio.sleep(0.2)
        waiting.released.set()
    await asyncio.gather(*held, *calls)


async def timed(steady: Waiting) -> float:
    """Returns the latency of one request of the steady tenant."""
    await asyncio.sleep(STEADY_S)
    begun = time.monotonic()
    await steady.ask(request("steady", identified(tenant="steady")))
    return time.monotonic() - begun


def series(picker: Picker) -> float:
    """Returns the number of label tuples in all tables."""
    return sum(map(float, re.findall(r"^llm_d_epp_series_blocks_used\{[^}]*\} (\S+)$", picker.page(), re.MULTILINE)))


async def until(happened: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not happened():
            await asyncio.sleep(0.01)


def queued_for(seconds: float, say: Say) -> dict[str, float]:
    """Sends one request through Envoy that waits for `seconds`. Returns the figures."""
    with Cluster() as cluster, ThreadPoolExecutor(1) as pool:
        fleet = cluster.fleet(1, "--decode-ms", "1000")
        picker = cluster.picker(fleet.file, workers=WORKERS, config_text=config(fleet.file, flow(1)))
        port = cluster.envoy(picker)
        held = pool.submit(answered, port, "held", round(seconds), seconds + PATIENCE_S)
        cluster.wait(picker.child, lambda: fleet.stats()[0]["running"] == 1)
        begun = time.monotonic()
        say(f"  a request waits for {seconds:.0f} s")
        status = answered(port, "waits", 1, seconds + PATIENCE_S)
        return {"seconds": seconds, "waited_s": time.monotonic() - begun, "status": status, "held": held.result()}


def answered(port: int, prompt: str, tokens: int, patience_s: float) -> int:
    """Sends one request. Returns the status of its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s)
    try:
        body = completion(prompt, max_tokens=tokens)
        connection.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def main() -> int:
    line = argparse.ArgumentParser(prog="waiting", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--streams", type=int, help=f"streams that wait at once (default {STREAMS}; 0: leave out)")
    line.add_argument("--ids", type=int, help=f"distinct fairness ids (default {IDS}; 0: leave out)")
    line.add_argument("--five-minutes", action="store_true", help="one request waits for five minutes")
    line.add_argument("--smoke", action="store_true", help="a small run of each, to check that it works")
    line.add_argument("--json", action="store_true")
    options = line.parse_args()
    streams = options.streams if options.streams is not None else SMOKE_STREAMS if options.smoke else STREAMS
    ids = options.ids if options.ids is not None else SMOKE_IDS if options.smoke else IDS
    wait_s = SMOKE_WAIT_S if options.smoke else WAIT_S if options.five_minutes else 0.0
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:4.0f} s] {text}", file=sys.stderr, flush=True)

    parts: list[tuple[str, Callable[[], dict[str, float]]]] = []
    if streams:
        parts.append(("memory", lambda: per_stream(streams, say)))
    if ids:
        parts.append(("ids", lambda: distinct_ids(ids, say)))
    if wait_s:
        parts.append(("long wait", lambda: queued_for(wait_s, say)))
    out = {}
    for name, measure in parts:
        out[name] = result = measure()
        if not options.json:
            print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in result.items()), flush=True)
    if options.json:
        json.dump(out, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
