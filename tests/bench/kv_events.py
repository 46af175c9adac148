"""KV events: `python -m tests.bench.kv_events [--smoke] [--only PART ...]`.

    exact     after a million events of simulated engines in all dialects, the index equals their pools
    garbage   the decoder takes a million mutated messages, and never fails in another way than it says
    look-up   the time of a look-up
    memory    the table of links
    publish   100 publishers with 100 messages a second each: the cost of the kv-events process, and of its neighbours

Each part prints figures beside their limits. Exit code 1 if a limit is exceeded; times are no failure with --smoke.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from epp.prefix.kv_events import MalformedBatch, decode
from shm.held_blocks import HeldReader, HeldWriter, Owners, schemas
from shm.segment import Region
from tests.bench.kv_fleet import KvFleet
from tests.bench.kv_publishers import publish

ROUNDS = 30
EVENTS = 1_000_000
LINKS = 5_000_000
LINKS_MIB = 150.0
LOOK_UPS = ((2_000, 150.0), (25, 12.0))  # blocks, microseconds
ENDPOINTS = 8
SMOKE_EVENTS = 5_000
SEED_BYTES_MAX = 4_000
MIB = 1 << 20

Figure = tuple[str, float, float, bool]  # what, value, limit, whether it is a time
Rows = Iterator[Figure]


def exact(smoke: bool) -> Rows:
    """Applies the events of simulated engines, and compares index and pools."""
    fleet, wanted, steps, spent = KvFleet(1), SMOKE_EVENTS if smoke else EVENTS, 0, 0.0
    while fleet.events < wanted:
        steps += 1
        place, message = fleet.step()
        if message:
            began = time.perf_counter()
            fleet.apply(place, message, steps)
            spent += time.perf_counter() - began
    counts = fleet.holdings.counts
    print(f"  {fleet.events:,} events in {steps:,} messages, {counts.stored:,} blocks stored, {counts.removed:,} removed")
    print(f"  {spent / steps * 1e6:.0f} µs per message, {spent / fleet.events * 1e6:.1f} µs per event")
    yield "differences between index and pools", fleet.differences(), 0, False
    yield "malformed or skipped", counts.malformed_events + counts.stores_skipped + counts.removals_skipped, 0, False


def garbage(smoke: bool) -> Rows:
    """Decodes messages in which bytes were changed, removed, repeated or cut off."""
    fleet, rng = KvFleet(2), random.Random(2)
    seeds = [message for _ in range(40) if 0 < len(message := fleet.step()[1]) < SEED_BYTES_MAX]
    refused = failed = 0
    for _ in range(SMOKE_EVENTS if smoke else EVENTS):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data) or 1)
            data[at : at + rng.choice((0, 1, 1, 8))] = rng.randbytes(rng.choice((0, 1, 1, 8)))
        if rng.random() < 0.2:
            del data[rng.randrange(len(data) + 1) :]
        try:
            decode(bytes(data))
        except MalformedBatch:
            refused += 1
        except Exception as problem:
            failed += 1
            print(f"  {type(problem).__name__}: {problem} for {bytes(data)!r}")
    print(f"  {refused:,} refused as a whole")
    yield "other failures of the decoder", failed, 0, False


def look_up(smoke: bool) -> Rows:
    """Looks prompts up that all endpoints hold."""
    index, links = schemas(1 << 19)
    memory, linked = (Region(memoryview(bytearray(schema.bytes))) for schema in (index, links))
    writer, reader = HeldWriter(index, memory, links, linked), HeldReader(index, memory)
    rng = np.random.default_rng(1)
    owners = Owners(ENDPOINTS)
    ids = [writer.new_owner() for _ in range(ENDPOINTS)]
    for row, owner in enumerate(ids):
        owners.add(owner, row, 1000)
    for blocks, limit in LOOK_UPS:
        prompts = [_keys(rng, blocks) for _ in range(3)]
        for prompt in prompts:
            for owner in ids:
                writer.insert(prompt, owner, 1)
        whole = [prompt for prompt in prompts if reader.held(prompt, owners)[0] == [blocks] * ENDPOINTS]
        times = [_timed(lambda prompt=prompt: reader.held(prompt, owners)) for _ in range(ROUNDS) for prompt in whole]  # type: ignore[misc]
        best = min(times)
        yield f"look-up of {blocks:,} blocks, {ENDPOINTS} endpoints hold all, µs", best * 1e6, limit, True


def memory(smoke: bool) -> Rows:
    """Measures the size of the table of links."""
    _, links = schemas(LINKS)
    yield f"{LINKS:,} links, MiB", links.bytes / MIB, LINKS_MIB, False
    blocks = 20_000 if smoke else 200_000
    index, small = schemas(blocks)
    writer = HeldWriter(index, Region(memoryview(bytearray(index.bytes))), small, Region(memoryview(bytearray(small.bytes))))
    owner = writer.new_owner()
    rng = np.random.default_rng(2)
    keys = _keys(rng, blocks)
    _, refused = writer.links.store(keys, owner, 0, keys)
    yield f"refused of {blocks:,} links in a table for them", refused, 0, False


def _keys(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, 2**63, count, dtype=np.uint64) << np.uint64(1) & np.uint64(~(1 << 16) & (2**64 - 1))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


PARTS: dict[str, Callable[[bool], Rows]] = {"exact": exact, "garbage": garbage, "look-up": look_up, "memory": memory, "publish": publish}


def main() -> int:
    parser = argparse.ArgumentParser(prog="kv_events", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small part of each, to check that it works")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; repeatable")
    options = parser.parse_args()
    failed = False
    for name in options.only or PARTS:
        print(name, flush=True)
        for what, value, limit, timed in PARTS[name](options.smoke):
            over = value > limit
            failed |= over and not (timed and options.smoke)
            print(f"  {what:64} {value:10.2f}   limit {limit:g}{'   EXCEEDED' if over else ''}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
