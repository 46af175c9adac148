"""The definition of a target: a function of bytes that raises nothing, returns soon and allocates little, whatever the bytes.

    input ─▶ run ─▶ returns           the bytes were handled: accepted, or refused with a declared exception
                          └▶ raises            a finding: an undeclared exception, or a broken invariant (`assert`)

A run is also a finding if it takes more than SECONDS_MAX of CPU time, or allocates more than ALLOCATED_PER_BYTE times the input plus
`allowance`. A target checks its invariants; `measure` checks the two limits. `parts` cuts an input into meaningful pieces, and `whole`
joins them with the right lengths. Mutations of such pieces pass the first checks of a parser.
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
ALLOWANCE = 1 << 20  # bytes that a run may allocate for any input: engines, tables, caches

Parts = Sequence[bytes]


class Finding(Exception):
    """A run was too slow or allocated too much."""


def one_part(data: bytes) -> list[bytes]:
    return [data]


def joined(parts: Parts) -> bytes:
    return b"".join(parts)


@dataclass(frozen=True)
class Target:
    """One function under test, and the data to make inputs for it."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Mapping[str, bytes]]
    parts: Callable[[bytes], list[bytes]] = one_part
    whole: Callable[[Parts], bytes] = joined
    words: Sequence[bytes] = ()  # meaningful pieces
    modules: Sequence[str] = ()  # their branches guide the search of atheris
    allowance: int = ALLOWANCE
    share: float = 1.0  # share of a campaign's inputs: slow targets get fewer
    bytes_max: int = 1 << 16
    library: list[bytes] = field(default_factory=list)  # parts of the seeds, filled by the mutator


class Cost(NamedTuple):
    """The cost of one run. `ratio` is the bytes allocated beyond the allowance per byte of input; -1: not measured."""

    seconds: float
    ratio: float = -1.0


def _overdue(_number: int, _frame: FrameType | None) -> None:
    raise Finding(f"a run took longer than {SECONDS_MAX} s")


def measure(target: Target, data: bytes, *, traced: bool) -> Cost:
    """Runs the target once and checks the limits. `traced` makes it five times slower. Call it in the main thread. Raises Finding."""
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
        raise Finding(f"{peak} bytes were allocated for an input of {len(data)} bytes")
    return Cost(0.0, ratio)


def borders(data: bytes, start: int = 0) -> list[bytes]:
    """`data` in a few chunks. The cuts depend only on the data."""
    rng = random.Random(len(data) * 65599 + sum(data[:64]))
    cuts = sorted(rng.randrange(start, len(data) + 1) for _ in range(rng.randrange(1, 6)))
    ends = [*cuts, len(data)]
    return [data[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
