"""Deterministic simulation of flow control: `python -m tests.epp.flow.simulation [--seeds N] [--first S] [--jobs J] [--trace]`.

One seed is one world: a plan, several shards with the real controllers, gates and policies, a pool of servers, and a virtual
clock. A seeded scheduler chooses the next event: requests arrive with TTLs, clients leave, decisions take time, responses end,
servers come and go, wakes are late, shards stall, die and get successors, bands come and go, a policy raises. Shards also act
*in the middle* of a call of another shard, wherever that call reads or writes shared words, because there processes race. After
each step the simulation checks the invariants:

    outcomes: each request ends exactly once, and is not let through after its end
    counters equal contents: bands, totals, areas, gauges per flow; each queued request has a caller that waits for it
    limits: queued requests and bytes stay within them, except for one request per other shard and for outstanding demands
    the gate: no more requests in flight than fit, except for one request per other shard
    order of bands: strict within a shard; no shard dispatches a request while a more important one waits elsewhere for 100 ms
    order of claims: no shard dispatches a request while an earlier claim of the same band is shown elsewhere for 100 ms
    work conserving: while there is room, a request does not wait for long
    displacement: only for a more important request, and within 10 ms
    TTLs: no request waits more than 100 ms longer than its TTL

The same seed gives the same trace. The checksum of the trace is part of the result.
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import patch

from tests.epp.flow.simulated_shards import ClaimedBand
from tests.epp.flow.simulated_world import Result, World


def simulate(seed: int, trace: list[str] | None = None) -> Result:
    """Runs one seed."""
    with patch("epp.flow.registry.Band", ClaimedBand):
        return World(seed, trace).run()


def simulate_block(first: int, count: int) -> list[Result]:
    """Runs several seeds. Returns the results of those that failed, and a last result with the sums."""
    steps = checksum = 0
    bad, outcomes = [], dict[str, int]()
    for seed in range(first, first + count):
        result = simulate(seed)
        steps += result.steps
        checksum ^= result.trace
        for name, n in result.outcomes:
            outcomes[name] = outcomes.get(name, 0) + n
        if result.problem:
            bad.append(result)
    return [*bad, Result(first, steps, checksum, "", tuple(sorted(outcomes.items())))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Deterministic simulation of flow control.")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many worlds (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--trace", action="store_true", help="print all events; for one seed")
    options = parser.parse_args()
    if options.trace:
        lines: list[str] = []
        result = simulate(options.first, lines)
        print("\n".join(lines))
        print(result.problem or f"seed {result.seed}: {result.steps} steps, trace {result.trace:08x}, all invariants hold")
        return bool(result.problem)
    return report(options)


def report(options: argparse.Namespace) -> int:
    """Runs blocks of seeds and prints the progress."""
    begin, size = time.monotonic(), 250
    firsts = range(options.first, options.first + options.seeds, size)
    counts = [min(size, options.first + options.seeds - first) for first in firsts]
    done = steps = failures = 0
    totals: dict[str, int] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for count, results in zip(counts, pool.map(simulate_block, firsts, counts), strict=True):
            *bad, summed = results
            done += count
            steps += summed.steps
            failures += len(bad)
            for name, n in summed.outcomes:
                totals[name] = totals.get(name, 0) + n
            for each in bad:
                print(f"\nseed {each.seed}: {each.problem}")
                print(f"  replay: python -m tests.epp.flow.simulation --first {each.seed} --trace", flush=True)
            print(f"\r{done} of {options.seeds} seeds, {steps} steps, {failures} failures, {time.monotonic() - begin:.0f} s", end="")
            sys.stdout.flush()
    print(f"\n{totals}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
