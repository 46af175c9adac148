"""Says in one line how a configuration compares with the recorded one: how the mean time to the first token changes, and whether chance
explains the change.

The requests that both configurations answered are cut into blocks in the order of arrival. A bootstrap draws blocks with replacement and
computes the change of the mean for each draw; 95 % of the changes are within the interval. Blocks keep neighbours together, because
requests that come at the same time meet the same queues (Künsch, 1989: the block bootstrap).
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from loadtest.replay.run import Run

BLOCKS: Final = 24
DRAWS: Final = 1000
INTERVAL: Final = (2.5, 97.5)  # percent
SEED: Final = 1


class Change(NamedTuple):
    """The share by which the mean time to the first token is longer (above 0) or shorter; between `low` and `high` with 95 % confidence."""

    share: float
    low: float
    high: float


def change(base: Sequence[Run], other: Sequence[Run]) -> Change | None:
    """Compares the runs of two configurations over the same requests, run by run. Returns None if no request has an answer in both."""
    size = len(base[0].first_s)
    blocks = np.minimum(np.arange(size) * BLOCKS // max(size, 1), BLOCKS - 1)
    sums = np.zeros((2, BLOCKS))
    for one, two in zip(base, other, strict=True):
        both = ~(np.isnan(one.first_s) | np.isnan(two.first_s))
        for row, run in enumerate((one, two)):
            sums[row] += np.bincount(blocks[both], run.first_s[both], BLOCKS)
    if not sums[0].sum():
        return None
    drawn = sums[:, np.random.default_rng(SEED).integers(BLOCKS, size=(DRAWS, BLOCKS))].sum(axis=2)
    before, after = drawn[:, drawn[0] > 0]
    low, high = np.percentile(after / before - 1, INTERVAL).tolist()
    return Change(float(sums[1].sum() / sums[0].sum() - 1), low, high)


def verdict(name: str, found: Change | None) -> str:
    """Returns the line about a configuration."""
    if found is None:
        return f"{name}: no request was answered under both configurations"
    interval = f"95 % interval: {_said(found.low)} to {_said(found.high)}"
    if found.low <= 0 <= found.high:
        return f"{name}: the times to the first token differ no more than by chance ({interval})"
    return f"{name}: first tokens {_said(found.share)} on average ({interval})"


def _said(share: float) -> str:
    return f"{abs(share):.1%} {'later' if share > 0 else 'sooner'}"
