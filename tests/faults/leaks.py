"""`python -m tests.faults.leaks --streams 200000 --cancelled 0.1 [--transport grpcio]`: what a picker keeps of ended streams.

A real picker gets streams; the client cancels a part of them half way. The test compares, before and after and without load: the memory
and descriptors of each process, the gauges of open streams and connections, and the load in flight in the areas. All except memory must
be equal. Memory may grow by `KIB_PER_1000` for every thousand streams, after a warm-up that fills the caches. It counts over all
processes together, because they share pages.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from typing import NamedTuple

from tests.e2e.cluster import Cluster, write_endpoints
from tests.faults.client import Ending, Gateway
from tests.faults.watch import Watched, descriptors, links, proportional_kib, until
from workers.shared.recording.files import SUFFIX

CLIENTS = 32
WARM_UP_MIN = 2_000
WARM_UP_SHARE = 0.1
KIB_FREE = 4096  # KiB of growth that are always allowed: an allocator's arenas, a larger table
KIB_PER_1000 = 2.0
QUIET_S = 20.0
HOLD_S = 0.001


class Held(NamedTuple):
    """The resources of a picker's processes without load."""

    kib: dict[str, int]
    descriptors: dict[str, int]
    streams: int
    connections: int
    in_flight: int


def held(watched: Watched) -> Held:
    """Waits until the picker is quiet and returns its resources. Returns them after QUIET_S even if it is not quiet."""
    gauges = lambda: sum(watched.gauges("streams")) + sum(watched.gauges("connections")) + watched.in_flight()  # noqa: E731
    until(lambda: gauges() == 0, QUIET_S)
    time.sleep(0.5)  # sockets are closed shortly after the gauges change
    names = {"parent": watched.pid} | {_name(ordinal): pid for ordinal, pid in sorted(watched.children().items())}
    return Held(
        {name: proportional_kib(pid) for name, pid in names.items()},
        {name: descriptors(pid) for name, pid in names.items()},
        sum(watched.gauges("streams")),
        sum(watched.gauges("connections")),
        watched.in_flight(),
    )


def _name(ordinal: int) -> str:
    return f"worker {ordinal - 1}" if ordinal else "supervisor"


def _records(watched: Watched) -> bool:
    """Returns whether the supervisor holds the file of a recording."""
    return any(name.endswith(SUFFIX) for name in links(watched.children()[0]))


async def streams(port: int, count: int, cancelled: float, rng: random.Random) -> Counter[Ending]:
    """Runs `count` streams with clients that share connections. Returns the endings."""
    gateway, endings, numbers = Gateway(port), Counter[Ending](), iter(range(count))

    async def client() -> None:
        for number in numbers:
            leaves = rng.random() < cancelled
            ending, _ = await gateway.exchange(number, hold_s=HOLD_S if leaves else 0.0, cancelled=leaves)
            endings[ending] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    await gateway.close()
    return endings


def leaks(count: int, cancelled: float, *, transport: str = "native", workers: int = 2, seed: int = 0) -> int:
    """Runs the whole test. Returns 0 if nothing leaks."""
    rng = random.Random(seed)
    with Cluster() as cluster:
        endpoints = write_endpoints(cluster.directory / "nowhere.yaml", [("127.0.0.1", 1)])
        picker = cluster.picker(endpoints, f"--transport={transport}", workers=workers)
        watched = Watched(picker.child.pid, picker.instance, picker.grpc)
        asyncio.run(streams(picker.grpc, max(WARM_UP_MIN, int(count * WARM_UP_SHARE)), cancelled, rng))
        until(lambda: _records(watched), QUIET_S)  # the file of the first sample stays open
        picker.page()
        before, begun = held(watched), time.monotonic()
        endings = asyncio.run(streams(picker.grpc, count, cancelled, rng))
        seconds = time.monotonic() - begun
        picker.page()
        after = held(watched)
        print(f"{count} streams in {seconds:.1f} s: " + ", ".join(f"{e.value} {n}" for e, n in endings.items()))
        return verdict(before, after, endings, count)


def verdict(before: Held, after: Held, endings: Counter[Ending], count: int) -> int:
    """Prints the table. Returns the exit code."""
    allowed = KIB_FREE + KIB_PER_1000 * count / 1000
    wrong = [f"{endings[e]} streams {e.value}" for e in (Ending.LOST, Ending.REFUSED) if endings[e]]
    print(f"{'':12} {'PSS KiB':>20} {'descriptors':>16}")
    for name in before.kib:
        grown = after.kib[name] - before.kib[name]
        print(
            f"{name:12} {before.kib[name]:8} {grown:+11} {before.descriptors[name]:8} "
            f"{after.descriptors[name] - before.descriptors[name]:+7}"
        )
        if after.descriptors[name] != before.descriptors[name]:
            wrong.append(f"{name} had {before.descriptors[name]} descriptors and now has {after.descriptors[name]}")
    grown = sum(after.kib.values()) - sum(before.kib.values())
    print(f"{'all':12} {sum(before.kib.values()):8} {grown:+11}, at most {allowed:+.0f}")
    if grown > allowed:
        wrong.append(f"memory grew by {grown} KiB, but only {allowed:.0f} are allowed")
    print(f"streams {after.streams}, connections {after.connections}, in flight {after.in_flight}")
    if after[2:] != (0, 0, 0):
        wrong.append("streams, connections or load in flight remain")
    for text in wrong:
        print(f"WRONG: {text}")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.leaks", description=__doc__)
    parser.add_argument("--streams", type=int, default=200_000)
    parser.add_argument("--cancelled", type=float, default=0.1)
    parser.add_argument("--transport", choices=("native", "grpcio"), default="native")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return leaks(options.streams, options.cancelled, transport=options.transport, workers=options.workers, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
