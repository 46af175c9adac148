"""What is fuzzed: a target is a function of bytes that raises nothing, returns soon and takes little, whatever the bytes.

    input ─▶ run ─▶ returns           the bytes were handled: accepted, or refused by a declared exception
                 └▶ raises            a finding: an exception that nobody declared, or a broken invariant (`assert`)

A finding is also what takes more than SECONDS_MAX of CPU time, or allocates more than ALLOCATED_PER_BYTE times the input and `allowance`.
A target checks its own invariants; `measured` holds it to the two limits. `parts` and `whole` say how an input is cut into pieces
that mean something and put together again (with its lengths right): mutations of those pieces get past the first check.
"""

import random
import signal
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

SECONDS_MAX = 1.0
ALLOCATED_PER_BYTE = 100
ALLOWANCE = 1 << 20  # what a run may allocate whatever its input: engines, tables, caches

Parts = Sequence[bytes]


class Finding(Exception):
    """A run was too slow, or took too much."""


def one_part(data: bytes) -> list[bytes]:
    return [data]


def joined(parts: Parts) -> bytes:
    return b"".join(parts)


@dataclass(frozen=True)
class Target:
    """One function under test, and what is needed to make inputs for it."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Mapping[str, bytes]]
    parts: Callable[[bytes], list[bytes]] = one_part
    whole: Callable[[Parts], bytes] = joined
    words: Sequence[bytes] = ()  # pieces that mean something
    modules: Sequence[str] = ()  # whose branches guide the search, where it is guided
    allowance: int = ALLOWANCE
    share: float = 1.0  # of a campaign's inputs: slow targets get fewer
    bytes_max: int = 1 << 16
    library: list[bytes] = field(default_factory=list)  # parts of the seeds, filled by the mutator


class Cost(NamedTuple):
    """What one run took; `ratio` is bytes allocated per byte of input beyond the allowance, -1: it was not measured."""

    seconds: float
    ratio: float = -1.0


def _overdue(_number: int, _frame: FrameType | None) -> None:
    raise Finding(f"a run takes longer than {SECONDS_MAX} s")


def measured(target: Target, data: bytes, *, traced: bool) -> Cost:
    """One run, held to the limits. `traced` slows it down five times. Call it in a main thread."""
    signal.signal(signal.SIGVTALRM, _overdue)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_MAX * (5 if traced else 1))
    if traced:
        tracemalloc.start()
    begun = time.thread_time()
    try:
        target.run(data)
        seconds = time.thread_time() - begun
        peak = tracemalloc.get_traced_memory()[1] if traced else 0
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        tracemalloc.stop()
    if not traced:
        return Cost(seconds)
    ratio = max(0.0, (peak - target.allowance) / max(1, len(data)))
    if ratio > ALLOCATED_PER_BYTE:
        raise Finding(f"{peak} bytes were allocated for an input of {len(data)}")
    return Cost(0.0, ratio)


def borders(data: bytes, start: int = 0) -> list[bytes]:
    """`data` in a few chunks, cut at places that depend on nothing but the data."""
    rng = random.Random(len(data) * 65599 + sum(data[:64]))
    cuts = sorted(rng.randrange(start, len(data) + 1) for _ in range(rng.randrange(1, 6)))
    ends = [*cuts, len(data)]
    return [data[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
