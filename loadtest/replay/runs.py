"""Runs: blocks of prompts that occur only together. The caches and counts of a replay store runs, because there are far fewer runs than
blocks.

    prompts   a b c d e      a b c x y      runs   abc, de, xy

The runs of all prompts are a radix tree. A block hash stands for all blocks before it, too, so the hash of a run's first block identifies
the run.
"""

from collections.abc import Sequence
from typing import Final

HASH_BYTES: Final = 8


class Run:
    """Blocks that follow each other in every prompt that has one of them. `blocks`: their number; `hashes`: the hash of each block."""

    __slots__ = ("blocks", "hashes")

    def __init__(self, hashes: bytes) -> None:
        self.hashes = hashes
        self.blocks = len(hashes) // HASH_BYTES


class Runs:
    """The runs of the prompts that were added. Prompts are given as the hashes of their blocks, HASH_BYTES each."""

    def __init__(self) -> None:
        self._runs: dict[bytes, Run] = {}  # by the hash of the first block

    def add(self, hashes: bytes) -> list[int]:
        """Adds a prompt. Returns 0 and the ends, in blocks, of the runs that the prompt shares with earlier prompts."""
        at, ends = 0, [0]
        while at < len(hashes):
            run = self._runs.get(hashes[at : at + HASH_BYTES])
            if run is None:
                self._begin(hashes[at:])
                break
            shared = run.hashes
            if not hashes.startswith(shared, at):
                shared = shared[: _leading(shared, hashes[at:])]
                self._begin(shared)
                self._begin(run.hashes[len(shared) :])
            at += len(shared)
            ends.append(at // HASH_BYTES)
        return ends

    def of(self, hashes: bytes) -> tuple[Run, ...]:
        """Returns the runs of a prompt that was added. Prompts that are added later may divide these runs."""
        at, found = 0, []
        while at < len(hashes):
            run = self._runs.get(hashes[at : at + HASH_BYTES])
            if run is None:  # the hashes of this trace stand for single blocks
                run = self._begin(hashes[at:])
            found.append(run)
            at += len(run.hashes)
        return tuple(found)

    def _begin(self, hashes: bytes) -> Run:
        run = self._runs[hashes[:HASH_BYTES]] = Run(hashes)
        return run


def runs_of(prompts: Sequence[bytes]) -> list[tuple[Run, ...]]:
    """Returns the runs of each prompt."""
    runs = Runs()
    for prompt in prompts:
        runs.add(prompt)
    return [runs.of(prompt) for prompt in prompts]


def leading(runs: Sequence[Run], blocks: int) -> list[Run]:
    """Returns the runs of a given number of first blocks, whose end must be the end of a run or of the prompt."""
    found = []
    for run in runs:
        if blocks <= 0:
            break
        found.append(run)
        blocks -= run.blocks
    return found


def _leading(one: bytes, other: bytes) -> int:
    """Returns how many leading bytes are the hashes of equal blocks. A binary search finds the last one."""
    low, high = 0, min(len(one), len(other)) // HASH_BYTES
    while low < high:
        middle = (low + high) // 2
        block = slice(middle * HASH_BYTES, (middle + 1) * HASH_BYTES)
        if one[block] == other[block]:
            low = middle + 1
        else:
            high = middle
    return low * HASH_BYTES
