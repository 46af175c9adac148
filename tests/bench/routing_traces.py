"""Plays traces of real traffic in the routing benchmark, in all formats that `epp replay` reads.

Prompts have the lengths of the trace, and its prefixes if it has them. Their text is random. A run plays a part of the trace that follows
from its seed.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from epp.recording.imports import Arrival
from loadtest.sim.kv_pool import BYTES_PER_TOKEN
from tests.bench.routing_traffic import Session, Workload, single
from workers.shared.recording.reader import arrivals

NAME = "trace"


def name_of(path: str) -> str:
    """Returns the name of a trace: that of its file, without what follows the first dot."""
    return Path(path).name.partition(".")[0]


@cache
def sorted_arrivals(path: str) -> Sequence[Arrival]:
    """Reads a trace. Raises Unreadable."""
    return sorted(arrivals(path, lambda _: None), key=lambda arrival: arrival.at)


def traced(path: str, scale: float) -> Workload:
    """Returns the traffic of a trace, with `scale` times its requests per second. Raises Unreadable."""
    trace = sorted_arrivals(path)

    def make(rng: random.Random, seconds: float, _: float) -> list[Session]:
        start = rng.uniform(0.0, max(0.0, trace[-1].at - scale * seconds))
        part = [arrival for arrival in trace if start <= arrival.at < start + scale * seconds]
        blocks = {block: b"" for arrival in part for block in arrival.blocks}
        for arrival in part:
            for block in arrival.blocks:
                blocks[block] = blocks[block] or rng.randbytes(arrival.block_tokens * BYTES_PER_TOKEN)
        return [single((arrival.at - start) / scale, prompt(arrival, blocks, rng), max(1, arrival.output_tokens)) for arrival in part]

    return Workload(NAME, make, usual=False)


def prompt(arrival: Arrival, blocks: Mapping[int, bytes], rng: random.Random) -> bytes:
    """Returns a prompt of the length of the trace. `blocks`: their texts."""
    size = max(1, arrival.prompt_tokens) * BYTES_PER_TOKEN
    text = b"".join([blocks[block] for block in arrival.blocks])
    return text[:size] + rng.randbytes(max(0, size - len(text)))
